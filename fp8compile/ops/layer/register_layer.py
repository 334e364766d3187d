"""Register a linear layer for one placement of its tensors: one op for each of its products.

Each op has a kernel, which computes in Phase.EAGER, and a decomposition for compiled code. The arguments are:

    output                  (x, weight, [offsets], bias, ...placement, recipe)
    grad_input              (grad_output, weight, [offsets], ...placement, recipe)
    grad_weight             (grad_output, x, [offsets], ...placement, recipe)
    kept_input              (x, [offsets], ...placement, quantizer)
    grad_weight_of_codes    (grad_output, codes, scale, outer_scale, [offsets], ...placement, recipe)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.layer import layer
from fp8compile.ops.layer.flat_arguments import flat
from fp8compile.ops.layer.kept_input import features_of, fits, keeps_codes
from fp8compile.ops.layer.observe import Observe, register_observe
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Phase
from fp8compile.ops.layer.placements import Placement
from fp8compile.ops.registry import Samples, register_op
from fp8compile.quantizers import Gemm, Quantizer, Recipe, TwoLevelScaling

__all__ = ["LAYER_OPS", "OPS_OF_LAYERS", "Layer", "LayerOp", "register_layer"]

# names of the tensors that an op takes before its placement; only ops with groups take offsets
TENSORS: dict[str, tuple[str, ...]] = {
    "output": ("x", "weight", "offsets", "bias"),
    "grad_input": ("grad_output", "weight", "offsets"),
    "grad_weight": ("grad_output", "x", "offsets"),
    "kept_input": ("x", "offsets"),
    "grad_weight_of_codes": ("grad_output", "codes", "scale", "outer_scale", "offsets"),
}


@dataclass(frozen=True, kw_only=True)
class LayerOp:
    """One op of a layer: turns the op's flat arguments into a call of a function of `fp8compile.ops.layer.layer`.

    Attributes:
        kind: Which op it is, a key of ``TENSORS``.
        placement: Class of the placement. Its fields are the op's arguments between the tensors and the recipe.
        ends: Whether rows are in groups.
        names: Names of the tensor arguments before the placement.
        has_fields: Whether the placement has arguments.
    """

    kind: str
    placement: type[Placement]
    ends: bool
    names: tuple[str, ...] = field(init=False)
    has_fields: bool = field(init=False)

    def __post_init__(self) -> None:
        names = tuple(name for name in TENSORS[self.kind] if self.ends or name != "offsets")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "has_fields", bool(self.placement.__match_args__))

    def parameters(self) -> list[inspect.Parameter]:
        """The op's parameters, from which its schema is inferred."""
        hints = get_type_hints(self.placement)
        found: dict[str, Any] = {
            self.placement.weight_name if name == "weight" else name: Tensor for name in self.names
        }
        if "bias" in found:
            found["bias"] = Tensor | None
        fields: tuple[str, ...] = self.placement.__match_args__
        found |= {name: hints[name] for name in fields}
        found |= {"quantizer": Quantizer} if self.kind == "kept_input" else {"recipe": Recipe}
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [inspect.Parameter(name, kind, annotation=hint) for name, hint in found.items()]

    def split(self, args: tuple[Any, ...]) -> tuple[list[Any], Tensor | None, Placement, Any]:
        """Split flat arguments; returns the tensors, the offsets or None, the placement, the recipe or quantizer."""
        count = len(self.names)
        place = self.placement(*args[count:-1]) if self.has_fields else self.placement()
        tensors = list(args[:count])
        ends = tensors.pop(self.names.index("offsets")) if self.ends else None
        return tensors, ends, place, args[-1]

    def run(self, phase: Phase, args: tuple[Any, ...], codes: dict[str, Any] | None = None) -> Any:
        """Run the op's computation.

        ``codes`` are keyword arguments of `Operands` for a weight that is quantized already.
        """
        tensors, ends, place, last = self.split(args)
        if self.kind == "output":
            x, weight, bias = tensors
            return layer.output(phase, x, weight, ends, bias, place, last, codes)
        if self.kind == "grad_input":
            grad_output, weight = tensors
            return layer.grad_input(phase, grad_output, weight, ends, place, last, codes)
        if self.kind == "grad_weight":
            grad_output, x = tensors
            return layer.grad_weight(phase, grad_output, x, ends, place, last)
        if self.kind == "kept_input":
            (x,) = tensors
            return layer.keep(phase, x, ends, place, last)
        grad_output, *kept = tensors
        return layer.grad_weight_of_codes(phase, grad_output, tuple(kept), ends, place, last)

    def empty(self, args: tuple[Any, ...]) -> Any:
        """Results without values, for tracing."""
        tensors, ends, place, last = self.split(args)
        if self.kind == "output":
            x, weight, _ = tensors
            layer.check(x, ends, place, last)
            y = place.empty_output(x, weight, ends)
            stateful: Any = place
            return (y, *stateful.empty_beside()) if place.has_state else y
        if self.kind == "grad_input":
            return place.empty_grad_input(*tensors)
        if self.kind == "grad_weight":
            return place.empty_grad_weight(tensors[0], tensors[1].shape[-1], ends)
        if self.kind == "kept_input":
            (x,) = tensors
            return layer.keep(Phase.FORWARD, x, ends, place, last)
        layout = place.layouts(tensors[0].ndim, ends).input
        features = features_of(tensors[1].shape, last.quantizer_read(GRAD_WEIGHT.b), layout)
        return place.empty_grad_weight(tensors[0], features, ends)


# ---------------------------------------------------------------------------------- the derivative


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The ops of a linear layer for one placement.

    Attributes:
        placement: Class of the placement.
        output: The differentiable op that computes the output.
        grad_input: Computes the gradient of the input.
        grad_weight: Computes the gradient of the weight from the input.
        keep: Makes the codes that eager mode keeps in place of an input.
        grad_weight_of_codes: Computes the gradient of the weight from the codes that ``keep`` made.
        observe: Looks at the operands of the three products, for `fp8compile.Monitor`.
    """

    placement: type[Placement]
    observe: Observe
    output: torch._ops.OpOverload
    grad_input: torch._ops.OpOverload
    grad_weight: torch._ops.OpOverload
    keep: torch._ops.OpOverload
    grad_weight_of_codes: torch._ops.OpOverload


@dataclass(frozen=True, kw_only=True)
class _Derivative:
    """The derivative of a layer's output op: which tensors it saves, and which gradient ops it calls."""

    op: LayerOp
    grad_input: torch._ops.OpOverload
    grad_weight: torch._ops.OpOverload
    keep: torch._ops.OpOverload
    grad_weight_of_codes: torch._ops.OpOverload

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        (x, weight, bias), ends, place, recipe = self.op.split(inputs)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.placements = _compat.placement_of(x)
        ctx.recipe, ctx.dtype, ctx.has_bias, used = recipe, weight.dtype, bias is not None, None
        if place.has_state:
            stateful: Any = place
            used = stateful.keep_used(ctx, output)
        kept: tuple[Tensor, ...] = (x,) if needs_weight else ()
        if needs_weight and keeps_codes(x, recipe):
            quantizer = recipe.quantizer_read(GRAD_WEIGHT.b)
            if fits(x, place.layouts(x.ndim, ends).input, quantizer):
                kept = self.keep(x, *_given(ends), *_fields_of(place.for_keep()), quantizer)
        ctx.place, of_place = place.saved()
        ctx.num_kept = len(kept)
        of_place = of_place if needs_x else (None,) * len(of_place)
        ctx.save_for_backward(*kept, weight if needs_x else None, ends, used, *of_place)

    def backward(self, ctx: Any, grad_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        count, saved = ctx.num_kept, ctx.saved_tensors
        kept, (weight, ends, repeated, *of_place) = saved[:count], saved[count:]
        place, offsets, used, recipe = ctx.place.restored(of_place), _given(ends), None, ctx.recipe
        fields_of_place: tuple[Tensor | None, ...] = (None,) * len(place.__match_args__)
        if place.has_state:
            used, fields_of_place = place.end(ctx, grad_output, repeated)
        recipe = layer.for_gradients_of(recipe, x=weight is not None, weight=bool(kept))
        grad_x = grad_weight = grad_bias = None
        if weight is not None:
            own = _fields_of(place.for_grad_input(used))
            grad_x = self.grad_input(grad_output, weight, *offsets, *own, recipe)
        if kept:
            by_input = self.grad_weight if count == 1 else self.grad_weight_of_codes
            own = _fields_of(place.for_grad_weight(ctx.dtype, used))
            grad_weight = by_input(grad_output, *kept, *offsets, *own, recipe)
        if ctx.needs_input_grad[2 + len(offsets)]:
            grad_bias = place.grad_bias(grad_output, ends, recipe)
        grad_x = _compat.scattered_like(grad_x, ctx.placements)
        return grad_x, grad_weight, *(None for _ in offsets), grad_bias, *fields_of_place, None


def _given(ends: Tensor | None) -> tuple[Tensor, ...]:
    return () if ends is None else (ends,)


def _fields_of(place: Placement) -> list[Any]:
    fields: tuple[str, ...] = place.__match_args__
    return [getattr(place, name) for name in fields]


# ---------------------------------------------------------------------------------- registration

# each op takes the operands of its GEMM first, as the layer holds them, and the recipe last
LAYER_OPS: dict[torch._ops.OpOverload, Gemm] = {}
OPS_OF_LAYERS: dict[torch._ops.OpOverload, LayerOp] = {}


def _register(name: str, op: LayerOp, gemm: Gemm | None, samples: Samples, **derivative: Any) -> Any:
    returns: Any = Tensor
    if op.kind == "kept_input":
        returns = tuple[Tensor, Tensor, Tensor]
    elif op.kind == "output" and op.placement.has_state:
        returns = tuple[Tensor, Tensor, Tensor, Tensor]

    def decompose(args: tuple[Any, ...]) -> Any:
        return op.run(Phase.FORWARD if gemm is None else Phase.compiled(gemm), args)

    found = register_op(
        f"fp8compile::{name}",
        flat(op.parameters(), partial(op.run, Phase.EAGER), returns),
        fake=flat(op.parameters(), op.empty, returns),
        decompose=flat(op.parameters(), decompose, returns),
        sharding=None,  # `fp8compile.parallel.dtensor_layer` handles DTensors
        samples=samples,
        **{"backward": None, **derivative},
    )
    OPS_OF_LAYERS[found] = op
    if gemm is not None:
        LAYER_OPS[found] = gemm
    return found


def register_layer(
    prefix: str,
    placement: type[Placement],
    samples: Callable[[], Iterable[tuple[Any, ...]]],
    *,
    for_grad_input: type[Placement] | None = None,
    for_grad_weight: type[Placement] | None = None,
    ends: bool = False,
    gradients: Layer | None = None,
    keep: torch._ops.OpOverload | None = None,
    observe: Observe | None = None,
) -> Layer:
    """Register the ops of a linear layer for one placement, whose fields are arguments of the output op.

    Args:
        prefix: Prefix of the ops' names, such as ``"sharded_"``.
        placement: Class of the placement.
        samples: Yields sample arguments of the output op. Samples of the other ops are made from them.
        for_grad_input: Class that `Placement.for_grad_input` returns, if it is not ``placement``.
        for_grad_weight: Class that `Placement.for_grad_weight` returns, if it is not ``placement``.
        ends: Whether rows are in groups.
        gradients: A layer whose gradient ops are used in place of new ones.
        keep: The op that keeps codes of the input, if another layer has registered it.
        observe: The ops that look at the operands, if another layer has registered them.
    """
    op = LayerOp(kind="output", placement=placement, ends=ends)
    if gradients is None:
        in_input = LayerOp(kind="grad_input", placement=for_grad_input or placement, ends=ends)
        in_weight, of_codes = (
            LayerOp(kind=kind, placement=for_grad_weight or placement, ends=ends)
            for kind in ("grad_weight", "grad_weight_of_codes")
        )
        examples = _Samples(op, samples)
        keep = keep or _register(
            f"{prefix}kept_input", LayerOp(kind="kept_input", placement=placement, ends=ends), None, examples.of_keep
        )
        grads = {
            "grad_input": _register(f"{prefix}grad_input", in_input, GRAD_INPUT, examples.of_grad_input),
            "grad_weight": _register(f"{prefix}grad_weight", in_weight, GRAD_WEIGHT, examples.of_grad_weight),
            "grad_weight_of_codes": _register(
                f"{prefix}grad_weight_of_codes", of_codes, GRAD_WEIGHT, examples.of_grad_weight_of_codes
            ),
        }
        observe = observe or register_observe(prefix, in_input.placement, ends=ends, samples=examples.of_observe)
    else:
        keep, observe = gradients.keep, gradients.observe
        grads = {name: getattr(gradients, name) for name in ("grad_input", "grad_weight", "grad_weight_of_codes")}
    derivative = _Derivative(op=op, keep=keep, **grads)
    output = _register(
        f"{prefix}linear",
        op,
        OUTPUT,
        samples,
        setup_context=derivative.setup_context,
        backward=derivative.backward,
        prepare=_prepare(placement, ends=ends),
        updates=placement.updates,
    )
    return Layer(placement=placement, observe=observe, output=output, keep=keep, **grads)


def _prepare(placement: type[Placement], *, ends: bool) -> Callable[..., Sequence[Any]] | None:
    """The ``prepare`` of a layer's output op, or None."""
    steps: list[Callable[..., Sequence[Any]]] = []
    if placement.has_codes:
        steps.append(layer.for_unwritten_weight)
    if ends:  # layers without groups make these codes in the backward
        steps.append(layer.for_trained_weight)

    def every(needs_input_grad: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
        for step in steps:
            args = step(needs_input_grad, args)
        return args

    return every if len(steps) > 1 else next(iter(steps), None)


@dataclass(frozen=True)
class _Samples:
    """Makes sample arguments of a layer's other ops from those of its output op."""

    op: LayerOp
    samples: Callable[[], Iterable[tuple[Any, ...]]]

    def _each(self) -> Iterator[tuple[Any, ...]]:
        for args in self.samples():
            (x, weight, _), ends, place, recipe = self.op.split(args)
            stateful: Any = place
            used = stateful.multiplier if place.has_state else None
            generator = torch.Generator().manual_seed(1)
            tokens = place.tokens_of_output(x.shape[:-1])
            grad = torch.randn((place.out_features(weight.shape, ends), *tokens), generator=generator)
            yield grad.to(x.dtype).movedim(0, -1), x, weight, _given(ends), place, recipe, used  # not contiguous

    def of_grad_input(self) -> Iterator[tuple[Any, ...]]:
        """Sample arguments of the op for grad_input."""
        for grad, _, weight, offsets, place, recipe, used in self._each():
            yield grad, weight, *offsets, *_fields_of(place.for_grad_input(used)), recipe

    def of_grad_weight(self) -> Iterator[tuple[Any, ...]]:
        """Sample arguments of the op for grad_weight."""
        for grad, x, weight, offsets, place, recipe, used in self._each():
            yield grad, x, *offsets, *_fields_of(place.for_grad_weight(weight.dtype, used)), recipe

    def of_observe(self) -> Iterator[tuple[Any, ...]]:
        """Sample layers for the ops that observe: grad_output, x, weight, offsets or None, placement, recipe.

        These are the first one, and the first one without elements.
        """
        seen = set()
        for grad, x, weight, offsets, place, recipe, used in self._each():
            if (is_empty := x.numel() == 0) in seen:
                continue
            seen.add(is_empty)
            yield grad, x, weight, *(offsets or (None,)), place.for_grad_input(used), recipe

    def of_keep(self) -> Iterator[tuple[Any, ...]]:
        """Sample arguments of the op that keeps codes."""
        for _, x, offsets, place, quantizer in self._kept():
            yield x, *offsets, *_fields_of(place.for_keep()), quantizer

    def of_grad_weight_of_codes(self) -> Iterator[tuple[Any, ...]]:
        """Sample arguments of the op for grad_weight from kept codes."""
        for grad, x, offsets, place, quantizer in self._kept():
            recipe = Recipe(grad_output_for_grad_weight=quantizer, input_for_grad_weight=quantizer)
            ends = offsets[0] if offsets else None
            kept = layer.keep(Phase.EAGER, x, ends, place, quantizer)
            yield grad, *kept, *offsets, *_fields_of(place.for_grad_weight(x.dtype, None)), recipe

    def _kept(self) -> Iterator[tuple[Any, ...]]:
        seen = set()
        for grad, x, _, offsets, place, _, _ in self._each():
            if (key := (x.shape, x.stride())) in seen:
                continue
            seen.add(key)
            plain = TwoLevelScaling(block=(16, 1), packed="columns")
            for quantizer in (plain, replace(plain, scale="torchao", hadamard=(1, -1) * 8)):
                yield grad, x, offsets, place, quantizer
