"""Register a linear layer's op for one placement: its schema, its kernels, and the tensors that it saves.

The arguments of an op are tensors, the fields of the placement (which shard is on this rank), and constants such as
the recipe.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.layer.placements import Placement
from fp8compile.ops.registry import Samples, register_op
from fp8compile.quantizers import Gemm

__all__ = ["PlacedDerivative", "PlacedOp", "fields_of", "given", "register_placed"]


def given(ends: Tensor | None) -> tuple[Tensor, ...]:
    """Return the ends of groups as a tuple of op arguments: ``(ends,)``, or ``()`` if ``ends`` is None."""
    return () if ends is None else (ends,)


def fields_of(place: Placement) -> list[Any]:
    """Return the fields of a placement, in order, as arguments of an op."""
    fields: tuple[str, ...] = place.__match_args__
    return [getattr(place, name) for name in fields]


@dataclass(frozen=True, kw_only=True)
class PlacedOp:
    """The arguments of an op: tensors, the fields of a placement (which shard is on this rank), and constants.

    Attributes:
        names: Names of the tensor arguments before the placement.
        placement: Class of the placement.
        ends: Whether rows are in groups; the ends of groups are then the tensor argument ``offsets``.
    """

    num_constants: ClassVar[int] = 1  # constants behind the placement

    names: tuple[str, ...]
    placement: type[Placement]
    ends: bool

    def tensors(self) -> dict[str, Any]:
        """Return names and annotations of the tensor arguments in the op's schema, in order."""
        return dict.fromkeys(self.names, Tensor)

    def constants(self) -> dict[str, Any]:
        """Return names and annotations of the constants at the end of the op's schema, such as the recipe."""
        raise NotImplementedError

    def empty(self, args: tuple[Any, ...]) -> Any:
        """Make uninitialized tensors with the shapes and dtypes of the op's results, for its fake kernel."""
        raise NotImplementedError

    def parameters(self) -> list[inspect.Parameter]:
        """Return the op's parameters, from which PyTorch infers the schema."""
        hints = get_type_hints(self.placement)
        fields: tuple[str, ...] = self.placement.__match_args__
        found: dict[str, Any] = self.tensors()
        found |= {name: hints[name] for name in fields}
        found |= self.constants()
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [inspect.Parameter(name, kind, annotation=hint) for name, hint in found.items()]

    def split(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Split an op's flat arguments into tensors (a list), offsets or None, placement, and each constant."""
        tensors, last = list(args[: len(self.names)]), len(args) - self.num_constants
        place = self.placement(*args[len(tensors) : last])
        ends = tensors.pop(self.names.index("offsets")) if self.ends else None
        return tensors, ends, place, *args[last:]


@dataclass(frozen=True, kw_only=True)
class PlacedDerivative:
    """The derivative of an op: what the forward saves, and how the backward restores it."""

    op: PlacedOp

    def kept(
        self, ctx: Any, tensors: list[Any], ends: Tensor | None, place: Placement, output: Any
    ) -> tuple[Tensor | None, ...]:
        """Return the tensors that the backward reads, besides the ends of groups and the placement's tensors."""
        raise NotImplementedError

    def reads_placement(self, ctx: Any) -> bool:
        """Whether the backward reads the placement's tensors; if not, they are not saved."""
        return True

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save in autograd's ``ctx`` what the backward reads: tensors, the ends of groups, and the placement."""
        tensors, ends, place, *ctx.constants = self.op.split(inputs)
        kept = self.kept(ctx, tensors, ends, place, output)
        ctx.num_kept = len(kept)
        ctx.place, of_place = place.saved()
        if not self.reads_placement(ctx):
            of_place = (None,) * len(of_place)
        ctx.save_for_backward(*kept, ends, *of_place)

    def restored(self, ctx: Any) -> tuple[Sequence[Tensor | None], Tensor | None, Placement]:
        """Return what `setup_context` saved: the tensors, the ends of groups or None, and the placement."""
        count, saved = ctx.num_kept, ctx.saved_tensors
        ends, *of_place = saved[count:]
        return saved[:count], ends, ctx.place.restored(of_place)


def _flat(
    parameters: Sequence[inspect.Parameter], function: Callable[[tuple[Any, ...]], Any], returns: Any
) -> Callable[..., Any]:
    """Wrap a function of a tuple to take the entries as arguments, because PyTorch infers schemas from signatures."""

    def wrapped(*args: Any) -> Any:
        return function(args)

    wrapped.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {**{each.name: each.annotation for each in parameters}, "return": returns}
    return wrapped


def register_placed(
    name: str,
    op: PlacedOp,
    compute: Callable[..., Any],
    gemm: Gemm | None,
    returns: Any,
    samples: Samples,
    **derivative: Any,
) -> torch._ops.OpOverload:
    """Register an op for one placement as ``fp8compile::name``.

    Args:
        name: Name of the op without its namespace.
        op: Description of the op's arguments.
        compute: Computes the op's results from the phase and from what ``op.split`` returns.
        gemm: The GEMM that the op computes, which decides the phase in compiled code; None: the phase is FORWARD.
        returns: Annotation of the op's results.
        samples: Yields sample arguments.
        derivative: Further arguments of `register_op`, if the op has a derivative.
    """

    def impl(args: tuple[Any, ...]) -> Any:
        return compute(Phase.EAGER, *op.split(args))

    def decompose(args: tuple[Any, ...]) -> Any:
        return compute(Phase.FORWARD if gemm is None else Phase.compiled(gemm), *op.split(args))

    parameters = op.parameters()
    return register_op(
        f"fp8compile::{name}",
        _flat(parameters, impl, returns),
        fake=_flat(parameters, op.empty, returns),
        decompose=_flat(parameters, decompose, returns),
        sharding=None,  # `fp8compile.parallel.dtensor_layer` handles DTensors
        samples=samples,
        **{"backward": None, **derivative},
    )
