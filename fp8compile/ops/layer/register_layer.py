"""Register a linear layer for one placement of its tensors: one op for each of its GEMMs.

Each op has an eager kernel and a decomposition for compiled code. The arguments are:

    output                  (x, weight, [offsets], bias, ...placement, recipe)
    grad_input              (grad_output, weight, [offsets], ...placement, recipe)
    grad_weight             (grad_output, x, [offsets], ...placement, recipe)
    kept_input              (x, [offsets], ...placement, quantizer)
    grad_weight_of_codes    (grad_output, codes, scale, outer_scale, [offsets], ...placement, recipe)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops.layer import output_and_gradients
from fp8compile.ops.layer.kept_input import features_of, fits, keeps_codes
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Phase
from fp8compile.ops.layer.placed_op import PlacedDerivative, PlacedOp, fields_of, given, register_placed
from fp8compile.ops.layer.placements import Placement
from fp8compile.ops.layer.statistics.observe import Observe, register_observe
from fp8compile.ops.registry import Samples
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

# what computes each op from the phase, its tensors, the ends of groups, the placement and the constant
COMPUTE: dict[str, Callable[..., Any]] = {
    "output": output_and_gradients.output,
    "grad_input": output_and_gradients.grad_input,
    "grad_weight": output_and_gradients.grad_weight,
    "kept_input": output_and_gradients.keep,
    "grad_weight_of_codes": output_and_gradients.grad_weight_of_codes,
}


@dataclass(frozen=True, kw_only=True)
class LayerOp(PlacedOp):
    """One op of a layer: its arguments, and the function of `output_and_gradients` that computes it.

    Attributes:
        kind: Which op this is, a key of ``TENSORS``, such as ``"output"``, ``"grad_input"`` or ``"grad_weight"``.
    """

    kind: str

    @classmethod
    def of(cls, kind: str, placement: type[Placement], *, ends: bool) -> LayerOp:
        """Return the op ``kind``, a key of ``TENSORS``, for one placement; with ``ends``, rows are in groups."""
        names = tuple(name for name in TENSORS[kind] if ends or name != "offsets")
        return cls(kind=kind, names=names, placement=placement, ends=ends)

    def tensors(self) -> dict[str, Any]:
        """Return names and annotations of the tensor arguments in the op's schema, in order."""
        own = self.placement.weight_name
        found = {own if name == "weight" else name: hint for name, hint in super().tensors().items()}
        return found | ({"bias": Tensor | None} if "bias" in found else {})

    def constants(self) -> dict[str, Any]:
        """Return name and annotation of the op's last argument: the recipe, or the quantizer of the kept codes."""
        return {"quantizer": Quantizer} if self.kind == "kept_input" else {"recipe": Recipe}

    def run(self, phase: Phase, args: tuple[Any, ...], codes: dict[str, Any] | None = None) -> Any:
        """Compute the op's results from its flat arguments, in eager mode or in the kind of graph ``phase``.

        ``codes`` are keyword arguments of `Operands` for a weight that is quantized already.
        """
        return COMPUTE[self.kind](phase, *self.split(args), *(() if codes is None else (codes,)))

    def empty(self, args: tuple[Any, ...]) -> Any:
        """Make uninitialized tensors with the shapes and dtypes of the op's results, for its fake kernel."""
        tensors, ends, place, last = self.split(args)
        if self.kind == "output":
            x, weight, _ = tensors
            if not _compat.is_stand_in(last):
                output_and_gradients.check(x, ends, place, last)
            y = place.empty_output(x, weight, ends)
            stateful: Any = place
            return (y, *stateful.empty_beside()) if place.has_state else y
        if self.kind == "grad_input":
            return place.empty_grad_input(*tensors)
        if self.kind == "grad_weight":
            return place.empty_grad_weight(tensors[0], tensors[1].shape[-1], ends)
        if self.kind == "kept_input":
            return output_and_gradients.keep(Phase.FORWARD, tensors, ends, place, last)
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
        observe: The ops that collect statistics of the operands, for `fp8compile.Monitor`.
    """

    placement: type[Placement]
    observe: Observe
    output: torch._ops.OpOverload
    grad_input: torch._ops.OpOverload
    grad_weight: torch._ops.OpOverload
    keep: torch._ops.OpOverload
    grad_weight_of_codes: torch._ops.OpOverload


@dataclass(frozen=True, kw_only=True)
class _Derivative(PlacedDerivative):
    """The derivative of a layer's output op: which tensors it saves, and which gradient ops it calls."""

    grad_input: torch._ops.OpOverload
    grad_weight: torch._ops.OpOverload
    keep: torch._ops.OpOverload
    grad_weight_of_codes: torch._ops.OpOverload

    def kept(
        self, ctx: Any, tensors: list[Any], ends: Tensor | None, place: Placement, output: Any
    ) -> tuple[Tensor | None, ...]:
        x, weight, bias = tensors
        (recipe,) = (ctx.recipe,) = ctx.constants
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.placements = _compat.placement_of(x)
        ctx.dtype, ctx.has_bias, used = weight.dtype, bias is not None, None
        if place.has_state:
            stateful: Any = place
            used = stateful.keep_used(ctx, output)
        kept: tuple[Tensor, ...] = (x,) if needs_weight else ()
        if needs_weight and keeps_codes(x, recipe):
            quantizer = recipe.quantizer_read(GRAD_WEIGHT.b)
            if fits(x, place.layouts(x.ndim, ends).input, quantizer):
                kept = self.keep(x, *given(ends), *fields_of(place.for_keep()), quantizer)
        return *kept, weight if needs_x else None, used

    def reads_placement(self, ctx: Any) -> bool:
        return bool(ctx.needs_input_grad[0])

    def backward(self, ctx: Any, grad_output: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        (*kept, weight, repeated), ends, place = self.restored(ctx)
        recipe, offsets, used = ctx.recipe, given(ends), None
        fields_of_place: tuple[Tensor | None, ...] = (None,) * len(place.__match_args__)
        if place.has_state:
            stateful: Any = place
            used, fields_of_place = stateful.end(ctx, grad_output, repeated)
        recipe = output_and_gradients.for_gradients_of(recipe, x=weight is not None, weight=bool(kept))
        grad_x = grad_weight = grad_bias = None
        if weight is not None:
            own = fields_of(place.for_grad_input(used))
            grad_x = self.grad_input(grad_output, weight, *offsets, *own, recipe)
        if kept:
            by_input = self.grad_weight if len(kept) == 1 else self.grad_weight_of_codes
            own = fields_of(place.for_grad_weight(ctx.dtype, used))
            grad_weight = by_input(grad_output, *kept, *offsets, *own, recipe)
        if ctx.needs_input_grad[2 + len(offsets)]:
            grad_bias = place.grad_bias(grad_output, ends, recipe)
        grad_x = _compat.scattered_like(grad_x, ctx.placements)
        return grad_x, grad_weight, *(None for _ in offsets), grad_bias, *fields_of_place, None


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
    found = register_placed(name, op, COMPUTE[op.kind], gemm, returns, samples, **derivative)
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
        gradients: A registered layer whose gradient ops this layer uses instead of new ones.
        keep: The op that keeps codes of the input, if another layer has registered it.
        observe: The ops that collect statistics of the operands, if another layer has registered them.
    """
    op = LayerOp.of("output", placement, ends=ends)
    if gradients is None:
        in_input = LayerOp.of("grad_input", for_grad_input or placement, ends=ends)
        in_weight, of_codes = (
            LayerOp.of(kind, for_grad_weight or placement, ends=ends)
            for kind in ("grad_weight", "grad_weight_of_codes")
        )
        examples = _Samples(op, samples)
        keep = keep or _register(
            f"{prefix}kept_input", LayerOp.of("kept_input", placement, ends=ends), None, examples.of_keep
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
    """Return a function that the output op's arguments go through before a call; None if there is nothing to do.

    The function raises if weight codes are out of date. With ``ends``, it drops a frozen weight's quantizers for
    grad_weight.
    """
    steps: list[Callable[..., Sequence[Any]]] = []
    if placement.has_codes:
        steps.append(output_and_gradients.for_unwritten_weight)
    if ends:  # layers without groups make these codes in the backward
        steps.append(output_and_gradients.for_trained_weight)

    def every(needs_input_grad: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
        for step in steps:
            args = step(needs_input_grad, args)
        return args

    return every if len(steps) > 1 else next(iter(steps), None)


@dataclass(frozen=True)
class _Samples:
    """Sample arguments of a layer's other ops, made from ``samples`` of its output op."""

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
            yield grad.to(x.dtype).movedim(0, -1), x, weight, given(ends), place, recipe, used  # not contiguous

    def of_grad_input(self) -> Iterator[tuple[Any, ...]]:
        for grad, _, weight, offsets, place, recipe, used in self._each():
            yield grad, weight, *offsets, *fields_of(place.for_grad_input(used)), recipe

    def of_grad_weight(self) -> Iterator[tuple[Any, ...]]:
        for grad, x, weight, offsets, place, recipe, used in self._each():
            yield grad, x, *offsets, *fields_of(place.for_grad_weight(weight.dtype, used)), recipe

    def of_observe(self) -> Iterator[tuple[Any, ...]]:
        seen = set()
        for grad, x, weight, offsets, place, recipe, used in self._each():
            if (is_empty := x.numel() == 0) in seen:
                continue
            seen.add(is_empty)
            yield grad, x, weight, *(offsets or (None,)), place.for_grad_input(used), recipe

    def of_keep(self) -> Iterator[tuple[Any, ...]]:
        for _, x, offsets, place, quantizer in self._kept():
            yield x, *offsets, *fields_of(place.for_keep()), quantizer

    def of_grad_weight_of_codes(self) -> Iterator[tuple[Any, ...]]:
        for grad, x, offsets, place, quantizer in self._kept():
            recipe = Recipe(grad_output_for_grad_weight=quantizer, input_for_grad_weight=quantizer)
            ends = offsets[0] if offsets else None
            kept = output_and_gradients.keep(Phase.EAGER, [x], ends, place, quantizer)
            yield grad, *kept, *offsets, *fields_of(place.for_grad_weight(x.dtype, None)), recipe

    def _kept(self) -> Iterator[tuple[Any, ...]]:
        seen = set()
        for grad, x, _, offsets, place, _, _ in self._each():
            if (key := (x.shape, x.stride())) in seen:
                continue
            seen.add(key)
            plain = TwoLevelScaling(block=(16, 1), packed="columns")
            for quantizer in (plain, replace(plain, scale="torchao", hadamard=(1, -1) * 8)):
                yield grad, x, offsets, place, quantizer
