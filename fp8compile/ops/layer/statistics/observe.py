"""Ops that look at the operands of a layer's products, beside the layer's own ops.

    y = linear(x, weight, bias, recipe)                          the plain op, as ever
    y, totals = observe(y, x, weight, ..., recipe)               y again; totals of input and weight
        its backward: observe_gradient(grad_output, x, weight)   totals of grad_output, and of the codes of input and
                                                                 weight that the backward makes; then all of them into
                                                                 the buffer

They ask `Operands` for the same codes that the products ask for. In a graph both make the same nodes, so codes are
made once, and what is counted of them fuses with the cast. In eager mode codes are made a second time.

A graph counts where it casts, or else it would read the tensor once more. What Inductor casts for gradients, it casts
in the backward. In eager mode the forward counts everything, so that the backward needs neither input nor weight.

The buffer is written in the backward, as the state of delayed scaling is: once, whatever checkpointing repeats.
Without a backward nothing is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import inductor
from fp8compile._compat import is_traced
from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.ops.groups.group_cast import group_cast, group_cast_counted
from fp8compile.ops.inductor_hints import after
from fp8compile.ops.layer.flat_arguments import flat
from fp8compile.ops.layer.operands import GRAD_INPUT, OUTPUT, Phase
from fp8compile.ops.layer.output_and_gradients import operands_of, part_of_tokens
from fp8compile.ops.layer.placements import Placement
from fp8compile.ops.layer.statistics.add_pieces import FIRST_SUMS, Pieces, rows_of
from fp8compile.ops.layer.statistics.definitions import columns_of
from fp8compile.ops.layer.statistics.pieces import FOR_GRADIENTS, Seen, counted
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import TENSORS, Recipe
from fp8compile.quantizers.recipe import SLOTS

__all__ = ["OBSERVE_OPS", "Observe", "ObserveOp", "Observer", "register_observe"]

FORWARD_SLOTS = (*TENSORS["input"], *TENSORS["weight"])


class Observer(NamedTuple):
    """Where the totals of one product's operands go.

    Attributes:
        sums: (slots, sums, E) float64, a row for each of the recipe's fields: `FIRST_SUMS`, then the totals that are
            added.
        maxima: (slots, maxima, E) float32.
        totals: Names of the totals, as `totals_of` returns them.
        first: Index of this rank's first matrix among the E.
        recipe: The recipe whose quantizers are observed; None for the layer's.
    """

    sums: Tensor
    maxima: Tensor
    totals: str
    first: int = 0
    recipe: Recipe | None = None

    @classmethod
    def empty(cls, totals: str, matrices: int, device: torch.device, recipe: Recipe | None = None) -> Observer:
        """A buffer without elements."""
        sums, maxima = columns_of(totals)
        shape = len(SLOTS), len(FIRST_SUMS) + len(sums), matrices
        return cls(
            torch.zeros(shape, dtype=torch.float64, device=device),
            torch.full((len(SLOTS), len(maxima), matrices), -torch.inf, device=device),
            totals,
            recipe=recipe,
        )

    def placed(self, first: int) -> Observer:
        """The same buffer, for a rank whose first matrix has this index."""
        return self._replace(first=first)

    def reset(self) -> None:
        """Forget all elements."""
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)


# ---------------------------------------------------------------------------------- ops


@dataclass(frozen=True, kw_only=True)
class ObserveOp:
    """An op that observes a layer's tensors.

    Attributes:
        names: Names of the tensor arguments before the placement.
        placement: Class of the placement, whose fields follow.
        ends: Whether rows are in groups.
        gradient: Whether it is the backward's: it observes grad_output, and input and weight if it is given them.
    """

    names: tuple[str, ...]
    placement: type[Placement]
    ends: bool
    gradient: bool

    def parameters(self) -> list[inspect.Parameter]:
        """The op's parameters, from which its schema is inferred."""
        hints = get_type_hints(self.placement)
        fields: tuple[str, ...] = self.placement.__match_args__
        found: dict[str, Any] = dict.fromkeys(self.names, Tensor)
        if self.gradient:
            found |= dict.fromkeys(("x", "weight"), Tensor | None)
        found |= {name: hints[name] for name in fields}
        found |= {"first": int, "later": bool, "totals": str, "recipe": Recipe}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [inspect.Parameter(name, kind, annotation=hint) for name, hint in found.items()]

    def split(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], Placement, int, bool, str, Recipe]:
        """Split flat arguments.

        Returns:
            Tensors by name, the placement, the first matrix, whether the backward counts the codes that it makes of
            input and weight, names of totals, the recipe.
        """
        count = len(self.names)
        return dict(zip(self.names, args[:count], strict=True)), self.placement(*args[count:-4]), *args[-4:]

    def is_here(self, slot: str, found: Quantized | None, *, later: bool) -> bool:
        """Whether this op counts the codes of a field, and not the other op of the same layer.

        Args:
            slot: The field.
            found: Its codes; None if they are not made yet.
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
        """Run the op.

        Args:
            phase: The kind of code in which the op runs.
            args: The op's arguments.
            weight: The weight, if it is kept as codes.
        """
        given, place, _, later, names, recipe = self.split(args)
        ends = given.get("offsets")
        operands = operands_of(recipe, phase, ends, place.given())
        is_here = partial(self.is_here, later=later)
        tokens: Tensor = given["grad_output" if self.gradient else "x"]
        layouts = place.layouts(tokens.ndim, ends)
        seen: dict[str, Seen] = {}
        if self.gradient:
            seen["grad_output"] = Seen(part_of_tokens(tokens, layouts.output), place.counts(layouts.output))
        if (x := given["x"]) is not None:
            seen["input"] = Seen(part_of_tokens(x, layouts.input), place.counts(layouts.input))
        if weight is None and (values := given["weight"]) is not None:
            weight = Seen(Plain(place.cast(values, tokens.dtype), layouts.weight), place.counts(layouts.weight))
        found = counted(seen, operands, names, is_here)
        if weight is not None:
            found |= counted({"weight": weight}, operands, names, is_here, place.first_matrix())
        return self.results(args, args[0], found, phase)

    def results(self, args: tuple[Any, ...], y: Tensor, found: Mapping[str, Pieces | None], phase: Phase) -> Any:
        """The op's results, made of what is counted; ``y`` is what this rank has of the first argument."""
        given, *_, names, _ = self.split(args)
        ends = given.get("offsets")
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
        """Results without values, for tracing."""
        return self.results(args, args[0], {}, Phase.EAGER)


@dataclass(frozen=True, kw_only=True)
class Observe:
    """The ops that observe the layers of one placement.

    Attributes:
        output: Takes and returns the layer's output.
        gradient: Observes grad_output.
        op: What ``output`` does.
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
        """Observe one call of a layer; returns its output.

        Args:
            y: The output.
            x: The input.
            weight: The weight.
            offsets_and_fields: The ends of groups if there are any, and the fields of the placement.
            observer: Where totals go.
            recipe: Recipe of the layer.
        """
        ends, fields = offsets_and_fields[: self.op.ends], offsets_and_fields[self.op.ends :]
        tensors = y, x.detach(), weight.detach(), *ends, observer.sums, observer.maxima
        recipe = recipe if observer.recipe is None else observer.recipe
        later = torch.compiler.is_compiling()
        return self.output(*tensors, *fields, observer.first, later, observer.totals, recipe)[0]


def _is_made_in_backward(codes: Tensor) -> bool:
    """Whether traced codes that a call has made are a backward's: the forward makes none with the same call."""
    return inductor.is_left_in_backward(codes) or inductor.is_result_of(codes, (group_cast, group_cast_counted))


OBSERVE_OPS: dict[torch._ops.OpOverload, ObserveOp] = {}


def _largest(of_forward: Tensor, of_backward: Tensor, place: Sequence[int]) -> Tensor:
    placed = (pad(of_forward, place, value=-torch.inf), pad(of_backward, place[:2], value=-torch.inf))
    return torch.maximum(*placed)


@dataclass(frozen=True, kw_only=True)
class _Derivative:
    op: ObserveOp
    gradient: torch._ops.OpOverload

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given, place, ctx.first, ctx.later, ctx.totals, ctx.recipe = self.op.split(inputs)
        ctx.buffers = given["sums"], given["maxima"]
        _, rows = output
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)
        inductor.never_recompute(rows)
        fields: tuple[str, ...] = place.__match_args__
        values = [getattr(place, name) for name in fields]
        ctx.fields = [None if isinstance(each, Tensor) else each for each in values]
        tensors = [each if isinstance(each, Tensor) else None for each in values]
        later = (given["x"], given["weight"]) if ctx.later else (None, None)
        ctx.save_for_backward(rows, given.get("offsets"), *later, *tensors)

    @torch.no_grad()
    def backward(self, ctx: Any, grad_output: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        rows, ends, x, weight, *tensors = ctx.saved_tensors
        others = (None,) * (len(self.op.parameters()) - 1)
        if grad_output is None:
            return None, *others
        fields = [one if two is None else two for one, two in zip(ctx.fields, tensors, strict=True)]
        offsets = () if ends is None else (ends,)
        every = ctx.first, ctx.later, ctx.totals, ctx.recipe
        found = self.gradient(grad_output, x, weight, *offsets, *fields, *every)
        own_sums, own_maxima = ctx.buffers
        behind, columns = own_sums.shape[-1] - ctx.first - rows.shape[-1], own_sums.shape[1]
        place = ctx.first, behind, 0, 0, 0, len(SLOTS) - len(FORWARD_SLOTS)  # of the forward's rows in the buffer
        sums = pad(rows[:, :columns], place) + pad(found[:, :columns], place[:2])
        own_sums.copy_(own_sums + sums)
        own_maxima.copy_(torch.maximum(own_maxima, _largest(rows[:, columns:], found[:, columns:], place).float()))
        return grad_output, *others


def register_observe(
    prefix: str, placement: type[Placement], *, ends: bool, samples: Callable[[], Iterable[tuple[Any, ...]]]
) -> Observe:
    """Register the ops that observe the layers of one placement.

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
            given, fields = () if offsets is None else (offsets,), [getattr(place, n) for n in place.__match_args__]
            # Compilers, and other strides, add in another order. Sums of counts, and of scales in float64, have the
            # same bits in each; sums of float32 values, as those of "square", have not.
            names = "amax,underflow,scale"
            for values in (grad, grad.mT.contiguous().mT):
                buffer = Observer.empty(names, 1 if offsets is None else offsets.shape[0], x.device)
                # a graph counts codes of groups, which calls make, in the forward, and eager mode in the backward
                for later in (False, True) if offsets is None else (False,):
                    if op.gradient:
                        own = (x, weight) if later else (None, None)
                        yield values, *own, *given, *fields, 0, later, names, recipe
                    else:
                        buffers = buffer.sums, buffer.maxima
                        yield values, x, weight, *given, *buffers, *fields, 0, later, names, recipe

    def register(name: str, op: ObserveOp, gemm: Any, returns: Any, **derivative: Any) -> torch._ops.OpOverload:
        found = register_op(
            f"fp8compile::{name}",
            flat(op.parameters(), partial(op.run, Phase.EAGER), returns),
            fake=flat(op.parameters(), op.empty, returns),
            decompose=flat(op.parameters(), lambda args: op.run(Phase.compiled(gemm), args), returns),
            sharding=None,  # `fp8compile.parallel.dtensor_layer` handles DTensors
            samples=partial(examples, op),
            **{"backward": None, **derivative},
        )
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
