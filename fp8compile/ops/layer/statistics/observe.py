"""Ops that collect statistics of the operands of a layer's GEMMs, beside the layer's own ops.

    y = linear(x, weight, bias, recipe)                          the layer's op, unchanged
    y, totals = observe(y, x, weight, ..., recipe)               y again; totals of input and weight
        its backward: observe_gradient(grad_output, x, weight)   totals of grad_output and of the codes made in the
                                                                 backward; then adds all totals to buffers

In a graph, these ops ask for the codes that the GEMMs read; equal nodes are merged, and counting fuses with the cast.
Of forward and backward, the one that casts also counts; the other would read the tensor again. In eager mode, codes
are made a second time. The backward writes the buffers once, even if checkpointing repeats the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import inductor
from fp8compile._compat import is_traced
from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.ops.groups.group_cast import group_cast, group_cast_counted
from fp8compile.ops.inductor_hints import after
from fp8compile.ops.layer.operands import GRAD_INPUT, OUTPUT, Phase
from fp8compile.ops.layer.output_and_gradients import operands_of, part_of_tokens
from fp8compile.ops.layer.placed_op import PlacedDerivative, PlacedOp, fields_of, given, register_placed
from fp8compile.ops.layer.placements import Placement
from fp8compile.ops.layer.statistics.add_pieces import FIRST_SUMS, Pieces, rows_of
from fp8compile.ops.layer.statistics.definitions import columns_of
from fp8compile.ops.layer.statistics.pieces import FOR_GRADIENTS, Seen, counted
from fp8compile.quantizers import TENSORS, Recipe
from fp8compile.quantizers.recipe import SLOTS

__all__ = ["OBSERVE_OPS", "Observe", "ObserveOp", "Observer", "register_observe"]

FORWARD_SLOTS = (*TENSORS["input"], *TENSORS["weight"])


class Observer(NamedTuple):
    """The buffers that accumulate the totals of one layer's operands; a slot is a field of the recipe.

    Attributes:
        sums: (slots, sums, E) float64, with `FIRST_SUMS` before the totals that are sums; E is the number of matrices
            or groups.
        maxima: (slots, maxima, E) float32.
        totals: Names of the totals, such as ``"amax,underflow"`` (`totals_of`).
        first: Index of this rank's first matrix among the E matrices.
        recipe: The recipe whose quantizers are observed; None for the layer's recipe.
    """

    sums: Tensor
    maxima: Tensor
    totals: str
    first: int = 0
    recipe: Recipe | None = None

    @classmethod
    def empty(cls, totals: str, matrices: int, device: torch.device, recipe: Recipe | None = None) -> Observer:
        """Make buffers for totals before anything is observed: sums are 0, maxima are -inf.

        ``totals`` has names, such as ``"amax,underflow"`` (`totals_of`); ``matrices`` is the number of matrices or
        groups. ``recipe`` is the recipe to observe; None for the layer's recipe.
        """
        sums, maxima = columns_of(totals)
        shape = len(SLOTS), len(FIRST_SUMS) + len(sums), matrices
        return cls(
            torch.zeros(shape, dtype=torch.float64, device=device),
            torch.full((len(SLOTS), len(maxima), matrices), -torch.inf, device=device),
            totals,
            recipe=recipe,
        )

    def placed(self, first: int) -> Observer:
        """Return a copy with the same buffers, for a rank whose first matrix has the index ``first``."""
        return self._replace(first=first)

    def reset(self) -> None:
        """Reset sums to 0 and maxima to -inf, in place."""
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)


# ---------------------------------------------------------------------------------- ops


@dataclass(frozen=True, kw_only=True)
class ObserveOp(PlacedOp):
    """An op that observes a layer's tensors: its arguments, and how it computes its results.

    Its constants are the index of this rank's first matrix, whether the backward counts the codes that it makes of
    input and weight, the names of the totals, and the recipe.

    Attributes:
        gradient: Whether this is the backward's op, which observes grad_output, and also input and weight if given.
    """

    num_constants: ClassVar[int] = 4

    gradient: bool

    def tensors(self) -> dict[str, Any]:
        """Return names and annotations of the tensor arguments in the op's schema, in order."""
        return super().tensors() | (dict.fromkeys(("x", "weight"), Tensor | None) if self.gradient else {})

    def constants(self) -> dict[str, Any]:
        """Return names and types of the constants at the end of the op's schema, in order."""
        return {"first": int, "later": bool, "totals": str, "recipe": Recipe}

    def is_here(self, slot: str, found: Quantized | None, *, later: bool) -> bool:
        """Whether this op, and not the layer's other op that observes, counts the codes of a field of the recipe.

        Args:
            slot: The field, such as ``"weight"``.
            found: Codes of the field; None if they are not made yet.
            later: Whether the backward counts the codes that it makes of input and weight.
        """
        if slot not in FOR_GRADIENTS:
            return self.gradient is (slot not in FORWARD_SLOTS)
        if found is None:
            return later or not self.gradient
        if not later or not is_traced(found.codes):
            return self.gradient is later
        return self.gradient is (inductor.is_fusible(found.codes) or _is_made_in_backward(found.codes))

    def run(self, phase: Phase, args: tuple[Any, ...], weight: Seen | None = None) -> Any:
        """Compute the op's results from its flat arguments.

        Args:
            phase: Whether the op runs in eager mode, or in which kind of graph.
            args: The op's arguments.
            weight: The weight, if it is kept as codes.
        """
        return self.observed(phase, *self.split(args), weight=weight)

    def observed(
        self,
        phase: Phase,
        tensors: Sequence[Any],
        ends: Tensor | None,
        place: Placement,
        *constants: Any,
        weight: Seen | None = None,
    ) -> Any:
        """Compute the op's results from what `split` returns.

        ``weight`` is a weight that is kept as codes, or None.
        """
        tokens, x, values, *_ = tensors
        (_, later, names, recipe), y = constants, tokens
        operands = operands_of(recipe, phase, ends, place.given())
        is_here = partial(self.is_here, later=later)
        tokens = tokens if self.gradient else x
        layouts = place.layouts(tokens.ndim, ends)
        seen: dict[str, Seen] = {}
        if self.gradient:
            seen["grad_output"] = Seen(part_of_tokens(tokens, layouts.output), place.counts(layouts.output))
        if x is not None:
            seen["input"] = Seen(part_of_tokens(x, layouts.input), place.counts(layouts.input))
        if weight is None and values is not None:
            weight = Seen(Plain(place.cast(values, tokens.dtype), layouts.weight), place.counts(layouts.weight))
        found = counted(seen, operands, names, is_here)
        if weight is not None:
            found |= counted({"weight": weight}, operands, names, is_here, place.first_matrix())
        return self.results(ends, names, y, found, phase)

    def results(
        self, ends: Tensor | None, names: str, y: Tensor, found: Mapping[str, Pieces | None], phase: Phase
    ) -> Any:
        """Combine partial counts to totals; the forward's op returns ``y`` and the totals, the backward's only totals.

        ``found`` has partial counts by field, ``names`` the names of the totals, ``ends`` the ends of groups or None.
        """
        sums, maxima = columns_of(names)
        slots, matrices = SLOTS if self.gradient else FORWARD_SLOTS, 1 if ends is None else ends.shape[0]
        rows = rows_of(found, slots, (len(sums), len(maxima)), matrices, y)
        if self.gradient:
            return rows
        if phase is Phase.EAGER:
            return y.clone(), rows
        # Only the backward reads the totals. Unless the forward needs them, the partitioner computes them there.
        # With groups y is a product whose last rows are masked, which the backward does better again than to read it.
        with nullcontext() if ends is None else inductor.recomputed():
            return after(y, rows), rows

    def empty(self, args: tuple[Any, ...]) -> Any:
        """Make the op's results as if nothing had been counted, for its fake kernel."""
        _, ends, *_, names, _ = self.split(args)
        return self.results(ends, names, args[0], {}, Phase.EAGER)


@dataclass(frozen=True, kw_only=True)
class Observe:
    """The ops that collect statistics of the layers of one placement.

    Attributes:
        output: Op that returns the layer's output, and the totals of input and weight.
        gradient: Op that returns the totals of grad_output, and of codes of input and weight made in the backward.
        op: Description of the op ``output``.
    """

    output: torch._ops.OpOverload
    gradient: torch._ops.OpOverload
    op: ObserveOp

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        *offsets_and_fields: Any,
        observer: Observer,
        recipe: Recipe,
    ) -> Tensor:
        """Collect statistics of one call of a layer; returns the layer's output.

        Args:
            y: The output.
            x: The input.
            weight: The weight.
            offsets_and_fields: The ends of groups if there are any, and the fields of the placement.
            observer: The buffers that are updated.
            recipe: Recipe of the layer.
        """
        ends, fields = offsets_and_fields[: self.op.ends], offsets_and_fields[self.op.ends :]
        tensors = y, x.detach(), weight.detach(), *ends, observer.sums, observer.maxima
        recipe = recipe if observer.recipe is None else observer.recipe
        later = torch.compiler.is_compiling()
        return self.output(*tensors, *fields, observer.first, later, observer.totals, recipe)[0]


def _is_made_in_backward(codes: Tensor) -> bool:
    return inductor.is_left_in_backward(codes) or inductor.is_result_of(codes, (group_cast, group_cast_counted))


OBSERVE_OPS: dict[torch._ops.OpOverload, ObserveOp] = {}


def _largest(of_forward: Tensor, of_backward: Tensor, place: Sequence[int]) -> Tensor:
    placed = (pad(of_forward, place, value=-torch.inf), pad(of_backward, place[:2], value=-torch.inf))
    return torch.maximum(*placed)


@dataclass(frozen=True, kw_only=True)
class _Derivative(PlacedDerivative):
    gradient: torch._ops.OpOverload

    def kept(
        self, ctx: Any, tensors: list[Any], ends: Tensor | None, place: Placement, output: Any
    ) -> tuple[Tensor | None, ...]:
        """Return tensors to save: the forward's totals, and input and weight if the backward counts their codes."""
        _, x, weight, *ctx.buffers = tensors
        _, later, *_ = ctx.constants
        _, rows = output
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)
        inductor.never_recompute(rows)
        return rows, *((x, weight) if later else (None, None))

    @torch.no_grad()
    def backward(self, ctx: Any, grad_output: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        others = (None,) * (len(self.op.parameters()) - 1)
        (rows, x, weight), ends, place = self.restored(ctx)
        if grad_output is None or rows is None:
            return None, *others
        found = self.gradient(grad_output, x, weight, *given(ends), *fields_of(place), *ctx.constants)
        first, *_ = ctx.constants
        own_sums, own_maxima = ctx.buffers
        behind, columns = own_sums.shape[-1] - first - rows.shape[-1], own_sums.shape[1]
        within = first, behind, 0, 0, 0, len(SLOTS) - len(FORWARD_SLOTS)  # of the forward's rows in the buffer
        sums = pad(rows[:, :columns], within) + pad(found[:, :columns], within[:2])
        own_sums.copy_(own_sums + sums)
        own_maxima.copy_(torch.maximum(own_maxima, _largest(rows[:, columns:], found[:, columns:], within).float()))
        return grad_output, *others


def register_observe(
    prefix: str, placement: type[Placement], *, ends: bool, samples: Callable[[], Iterable[tuple[Any, ...]]]
) -> Observe:
    """Register the ops that collect statistics of layers with one placement.

    Args:
        prefix: Prefix of the layer's ops.
        placement: Class of the placement of the layer's op for grad_input, which has no state.
        ends: Whether rows are in groups.
        samples: Yields grad_output, x, the weight, offsets or None, the placement and the recipe.
    """
    groups = ("offsets",) if ends else ()
    of_output = ObserveOp(
        names=("y", "x", "weight", *groups, "sums", "maxima"), placement=placement, ends=ends, gradient=False
    )
    of_gradient = ObserveOp(
        names=("grad_output", "x", "weight", *groups), placement=placement, ends=ends, gradient=True
    )

    def examples(op: ObserveOp) -> Iterator[tuple[Any, ...]]:
        for grad, x, weight, offsets, place, recipe in samples():
            ends_given, fields = given(offsets), fields_of(place)
            # Compilers, and other strides, add in another order. Sums of counts, and of scales in float64, have the
            # same bits in each; sums of float32 values, as those of "square", have not.
            names = "amax,underflow,scale"
            for values in (grad, grad.mT.contiguous().mT):
                buffer = Observer.empty(names, 1 if offsets is None else offsets.shape[0], x.device)
                # a graph counts codes of groups, which calls make, in the forward, and eager mode in the backward
                for later in (False, True) if offsets is None else (False,):
                    if op.gradient:
                        own = (x, weight) if later else (None, None)
                        yield values, *own, *ends_given, *fields, 0, later, names, recipe
                    else:
                        buffers = buffer.sums, buffer.maxima
                        yield values, x, weight, *ends_given, *buffers, *fields, 0, later, names, recipe

    def register(name: str, op: ObserveOp, gemm: Any, returns: Any, **derivative: Any) -> torch._ops.OpOverload:
        found = register_placed(name, op, op.observed, gemm, returns, partial(examples, op), **derivative)
        OBSERVE_OPS[found] = op
        return found

    gradient = register(f"{prefix}observe_gradient", of_gradient, GRAD_INPUT, Tensor)
    derivative = _Derivative(op=of_output, gradient=gradient)
    output = register(
        f"{prefix}observe",
        of_output,
        OUTPUT,
        tuple[Tensor, Tensor],
        setup_context=derivative.setup_context,
        backward=derivative.backward,
        updates=("sums", "maxima"),
    )
    return Observe(output=output, gradient=gradient, op=of_output)
