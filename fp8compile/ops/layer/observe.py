"""Ops that look at the operands of a layer's products, beside the layer's own ops.

    y = linear(x, weight, bias, recipe)                       the plain op, as ever
    y, sums, maxima = observe(y, x, weight, ..., recipe)      y again; totals of input and weight
        its backward: observe_gradient(grad_output)           totals of grad_output; then all of them into the buffer

They ask `Operands` for the same codes that the products ask for. In a graph both make the same nodes, so codes are
made once, and what is counted of them fuses with the cast. In eager mode codes are made a second time.

The buffer is written in the backward, as the state of delayed scaling is: once, whatever checkpointing repeats.
Without a backward nothing is written.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.ops.inductor_hints import after
from fp8compile.ops.layer.elements import elements_of, elements_of_codes, total
from fp8compile.ops.layer.layer import operands_of, part_of_tokens
from fp8compile.ops.layer.one_read import ALONG_ROWS
from fp8compile.ops.layer.operands import GRAD_INPUT, OUTPUT, Operands, Phase
from fp8compile.ops.layer.placements import Placement
from fp8compile.ops.layer.statistics import FIRST_SUMS, columns_of
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import TENSORS, Recipe
from fp8compile.quantizers.recipe import SLOTS

__all__ = ["OBSERVE_OPS", "Observe", "ObserveOp", "Observer", "Seen", "register_observe", "returned", "totals"]

FORWARD_TENSORS = ("input", "weight")
BACKWARD_TENSORS = ("grad_output",)


class Observer(NamedTuple):
    """Where the totals of one product's operands go.

    Attributes:
        sums: (slots, sums, E) float64, a row for each of the recipe's fields: `FIRST_SUMS`, then the totals that are
            added.
        maxima: (slots, maxima, E) float32.
        totals: Names of the totals, joined by commas.
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
        return Observer(self.sums, self.maxima, self.totals, first, self.recipe)

    def reset(self) -> None:
        """Forget all elements."""
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)


Totals = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Seen:
    """One tensor of a layer, as this rank sees it.

    Attributes:
        part: This rank's part of the values; None if they are not known.
        counts: Whether this rank adds its elements to sums. It does not if another rank adds the same.
        codes: Codes that are known already, by the recipe's field.
    """

    part: Plain | None
    counts: bool = True
    codes: Mapping[str, Quantized] = field(default_factory=dict)


def totals(tensors: dict[str, Seen], operands: Operands, names: str, matrices: int) -> Totals:
    """The totals of tensors of a layer, for each slot of the recipe.

    Args:
        tensors: The tensors, by their keys in ``TENSORS``.
        operands: Makes the codes that are not known.
        names: Names of the totals, joined by commas.
        matrices: Number of matrices, or of groups; 1 without.

    Returns:
        (slots, sums, E) float64 and (slots, maxima, E) float32.
    """
    rows: list[Totals] = []
    device = next(each.device for seen in tensors.values() for each in _tensors_of(seen))
    sums, maxima = columns_of(names)
    nothing = (
        torch.zeros((len(FIRST_SUMS) + len(sums), matrices), dtype=torch.float64, device=device),
        torch.full((len(maxima), matrices), -torch.inf, dtype=torch.float32, device=device),
    )
    for tensor, seen in tensors.items():
        known: dict[Any, Totals] = {}
        for slot in TENSORS[tensor]:
            quantizer = getattr(operands.recipe, slot)
            if quantizer is None or (seen.part is None and slot not in seen.codes):
                rows.append(nothing)
                continue
            key = quantizer if seen.part is not None else slot
            if key not in known:
                known[key] = _of_slot(seen, slot, operands, names)
            rows.append(known[key])
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def _tensors_of(seen: Seen) -> list[Tensor]:
    return (
        []
        if seen.part is None and not seen.codes
        else [*([] if seen.part is None else [seen.part.local]), *(each.codes for each in seen.codes.values())]
    )


def _of_slot(seen: Seen, slot: str, operands: Operands, names: str) -> Totals:
    if seen.part is None:
        found = seen.codes[slot]
        layout, elements = found.layout, elements_of_codes(found)
    else:
        own, found = operands.own(seen.part, slot)
        shape, along_tokens = seen.part.local.shape, slot in ALONG_ROWS
        layout, elements = own.layout, elements_of(own, found, shape, along_tokens=along_tokens)
    sums, maxima = columns_of(names)
    first = torch.stack(
        (
            elements.numel,
            elements.numel if elements.has_values else torch.zeros_like(elements.numel),
            torch.full_like(elements.numel, _part_of_all(layout)),
        )
    )
    columns = torch.cat((first, total(elements, [each.compute(elements) for each in sums], "sum")))
    most = total(elements, [each.compute(elements) for each in maxima], "max")
    return columns if seen.counts else torch.zeros_like(columns), most


def _part_of_all(layout: TensorLayout) -> float:
    """The part of a matrix's elements that this rank has, or of each matrix's that it has."""
    cuts = [cut for cut in layout.cuts if cut is not None and cut.dim >= layout.batch]
    return math.prod([cut.length / cut.total if cut.total else 0.0 for cut in cuts])


# ---------------------------------------------------------------------------------- ops


@dataclass(frozen=True, kw_only=True)
class ObserveOp:
    """An op that observes a layer's tensors.

    Attributes:
        names: Names of the tensor arguments before the placement.
        placement: Class of the placement, whose fields follow.
        ends: Whether rows are in groups.
        gradient: Whether it observes grad_output.
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
        found |= {name: hints[name] for name in fields} | {"first": int, "totals": str, "recipe": Recipe}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [inspect.Parameter(name, kind, annotation=hint) for name, hint in found.items()]

    def split(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], Placement, int, str, Recipe]:
        """Split flat arguments: tensors by name, the placement, the first matrix, names of totals, the recipe."""
        count = len(self.names)
        return dict(zip(self.names, args[:count], strict=True)), self.placement(*args[count:-3]), *args[-3:]

    def totals(self, phase: Phase, args: tuple[Any, ...], weight: Seen | None = None) -> Totals:
        """The totals of all tensors that the op observes.

        Args:
            phase: The kind of code in which the op runs.
            args: The op's arguments.
            weight: The weight, if it is kept as codes.
        """
        given, place, _, names, recipe = self.split(args)
        ends = given.get("offsets")
        operands = operands_of(recipe, phase, ends, place.given())
        tokens: Tensor = given["grad_output" if self.gradient else "x"]
        layouts, matrices = place.layouts(tokens.ndim, ends), 1 if ends is None else ends.shape[0]
        if self.gradient:
            seen = Seen(part_of_tokens(tokens, layouts.output), place.counts(layouts.output))
            return totals({"grad_output": seen}, operands, names, matrices)
        x = Seen(part_of_tokens(tokens, layouts.input), place.counts(layouts.input))
        if weight is None:
            own = Plain(place.cast(given["weight"], tokens.dtype), layouts.weight)
            weight = Seen(own, place.counts(layouts.weight))
        has = matrices if ends is None or weight.part is None else weight.part.local.shape[0]
        if has == matrices:
            return totals({"input": x, "weight": weight}, operands, names, matrices)
        one, other = totals({"input": x}, operands, names, matrices), totals({"weight": weight}, operands, names, has)
        placed = widened(other, place.first_matrix(), matrices)
        return torch.cat((one[0], placed[0])), torch.cat((one[1], placed[1]))

    def run(self, phase: Phase, args: tuple[Any, ...], weight: Seen | None = None) -> Any:
        """Run the op; arguments as those of `totals`."""
        found = self.totals(phase, args, weight)
        return found if self.gradient else (returned(args[0], found, phase), *found)

    def empty(self, args: tuple[Any, ...]) -> Any:
        """Results without values, for tracing."""
        given, _, _, names, _ = self.split(args)
        sums, maxima = columns_of(names)
        ends, like = given.get("offsets"), args[0]
        rows = sum(len(TENSORS[name]) for name in (BACKWARD_TENSORS if self.gradient else FORWARD_TENSORS))
        matrices = 1 if ends is None else ends.shape[0]
        found = (
            like.new_empty((rows, len(FIRST_SUMS) + len(sums), matrices), dtype=torch.float64),
            like.new_empty((rows, len(maxima), matrices), dtype=torch.float32),
        )
        return found if self.gradient else (torch.empty_like(like), *found)


def returned(y: Tensor, found: Totals, phase: Phase) -> Tensor:
    """The output, as the op that observes it returns it."""
    if phase is Phase.EAGER:
        return y.clone()
    # Only the backward reads the totals. Unless the forward needs them, the partitioner computes them there.
    return after(after(y, found[0]), found[1])


def widened(found: Totals, first: int, matrices: int) -> Totals:
    """Place the totals of some matrices among those of all; the others have no elements."""
    sums, maxima = found
    behind = matrices - first - sums.shape[-1]
    if not first and not behind:
        return found
    return (
        torch.nn.functional.pad(sums, (first, behind)),
        torch.nn.functional.pad(maxima, (first, behind), value=-torch.inf),
    )


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
        buffers = observer.sums, observer.maxima
        recipe = recipe if observer.recipe is None else observer.recipe
        return self.output(
            y, x.detach(), weight.detach(), *ends, *buffers, *fields, observer.first, observer.totals, recipe
        )[0]


OBSERVE_OPS: dict[torch._ops.OpOverload, ObserveOp] = {}


@dataclass(frozen=True, kw_only=True)
class _Derivative:
    op: ObserveOp
    gradient: torch._ops.OpOverload

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given, place, ctx.first, ctx.totals, ctx.recipe = self.op.split(inputs)
        ctx.buffers = given["sums"], given["maxima"]
        _, sums, maxima = output
        ctx.mark_non_differentiable(sums, maxima)
        ctx.set_materialize_grads(False)
        inductor.never_recompute(sums)
        inductor.never_recompute(maxima)
        fields: tuple[str, ...] = place.__match_args__
        values = [getattr(place, name) for name in fields]
        ctx.fields = [None if isinstance(each, Tensor) else each for each in values]
        tensors = [each if isinstance(each, Tensor) else None for each in values]
        ctx.save_for_backward(sums, maxima, given.get("offsets"), *tensors)

    @torch.no_grad()
    def backward(self, ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        sums, maxima, ends, *tensors = ctx.saved_tensors
        others = (None,) * (len(self.op.parameters()) - 1)
        if grad_output is None:
            return None, *others
        fields = [one if two is None else two for one, two in zip(ctx.fields, tensors, strict=True)]
        offsets = () if ends is None else (ends,)
        found = self.gradient(grad_output, *offsets, *fields, ctx.first, ctx.totals, ctx.recipe)
        both = torch.cat((sums, found[0])), torch.cat((maxima, found[1]))
        own_sums, own_maxima = ctx.buffers
        both = widened(both, ctx.first, own_sums.shape[-1])
        own_sums.copy_(own_sums + both[0])
        own_maxima.copy_(torch.maximum(own_maxima, both[1]))
        return grad_output, *others


def _loose(op: ObserveOp, function: Callable[[tuple[Any, ...]], Any], returns: Any) -> Callable[..., Any]:
    def loose(*args: Any) -> Any:
        return function(args)

    parameters = op.parameters()
    loose.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    loose.__annotations__ = {**{each.name: each.annotation for each in parameters}, "return": returns}
    return loose


def register_observe(
    prefix: str, placement: type[Placement], *, ends: bool, samples: Callable[[], Iterable[tuple[Any, ...]]]
) -> Observe:
    """Register the ops that observe the layers of one placement.

    Args:
        prefix: Prefix of the layer's ops.
        placement: Class of the placement of the layer's op for grad_input, which has no state.
        ends: Whether rows are in groups.
        samples: Yields x, the weight, offsets or None, the placement and the recipe.
    """
    groups = ("offsets",) if ends else ()
    of_output = ObserveOp(
        names=("y", "x", "weight", *groups, "sums", "maxima"), placement=placement, ends=ends, gradient=False
    )
    of_gradient = ObserveOp(names=("grad_output", *groups), placement=placement, ends=ends, gradient=True)

    def examples(op: ObserveOp) -> Iterator[tuple[Any, ...]]:
        names = "amax,underflow,square"
        for x, weight, offsets, place, recipe in samples():
            tokens = place.tokens_of_output(x.shape[:-1])
            grad = x.new_ones((*tokens, place.out_features(weight.shape, offsets)))
            given, fields = () if offsets is None else (offsets,), [getattr(place, n) for n in place.__match_args__]
            buffer = Observer.empty(names, 1 if offsets is None else offsets.shape[0], x.device)
            for values in (grad, grad.mT.contiguous().mT):
                if op.gradient:
                    yield values, *given, *fields, 0, names, recipe
                else:
                    yield values, x, weight, *given, buffer.sums, buffer.maxima, *fields, 0, names, recipe

    def register(name: str, op: ObserveOp, gemm: Any, returns: Any, **derivative: Any) -> torch._ops.OpOverload:
        found = register_op(
            f"fp8compile::{name}",
            _loose(op, partial(op.run, Phase.EAGER), returns),
            fake=_loose(op, op.empty, returns),
            decompose=_loose(op, lambda args: op.run(Phase.compiled(gemm), args), returns),
            sharding=None,  # `fp8compile.parallel.dtensor_layer` handles DTensors
            samples=partial(examples, op),
            **{"backward": None, **derivative},
        )
        OBSERVE_OPS[found] = op
        return found

    gradient = register(f"{prefix}observe_gradient", of_gradient, GRAD_INPUT, tuple[Tensor, Tensor])
    derivative = _Derivative(op=of_output, gradient=gradient)
    output = register(
        f"{prefix}observe",
        of_output,
        OUTPUT,
        tuple[Tensor, Tensor, Tensor],
        setup_context=derivative.setup_context,
        backward=derivative.backward,
        updates=("sums", "maxima"),
    )
    return Observe(output=output, gradient=gradient, op=of_output)
