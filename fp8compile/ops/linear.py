"""fp8compile::linear: a linear layer with FP8 GEMMs, as one differentiable op; its gradients are two more.

    linear       y_MN  = x_MK  @ w_NK^T + b_N
    grad_input   dx_MK = dy_MN @ w_NK
    grad_weight  dw_NK = dy_MN^T @ x_MK

Each is taken apart into amax, scale, cast and scaled_mm: by its kernel in eager mode, by its decomposition under
Inductor, and wherever else someone needs to look inside. Saved for backward are x and w as they came, and only if a
gradient needs them: which codes the backward wants depends on the recipe, and under Inductor the two casts of one
tensor become one read of it. The bias is added in the dtype of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops import samples
from fp8compile.ops.after import after
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast, cast_apart
from fp8compile.ops.gemm import PADDED_TO, Operand, multiply
from fp8compile.ops.quantize_both import is_pair, quantize_both
from fp8compile.ops.quantize_weight import is_weight_pair, quantize_weight
from fp8compile.ops.registry import OPS, register_op
from fp8compile.ops.rounding import rounded
from fp8compile.ops.scale import scale
from fp8compile.ops.scaled_mm import multiply_operands
from fp8compile.ops.sharding import Cut, Split, grid_cuts
from fp8compile.ops.store import store
from fp8compile.quantizers import GEMMS, DelayedScaling, Gemm, GemmConfig, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.target import target_of

__all__ = ["Quantize", "grad_input", "grad_weight", "linear", "linear_samples"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


Quantize = Callable[[Tensor, Quantizer, str], Operand]
Multiply = Callable[[Operand, Operand, torch.dtype, GemmConfig], Tensor]


def quantize_by_amax(x: Tensor, quantizer: Quantizer, slot: str) -> Operand:
    """Codes and scales of a matrix by its own amax; the slot of the recipe that it fills makes no difference."""
    multiplier, x_scale = scale(amax(x, quantizer), quantizer)
    return Operand(codes=cast(x, multiplier, quantizer), scale=x_scale, quantizer=quantizer)


# A kernel takes the steps themselves: nobody hears an op that is called below the dispatcher, and each costs 10 us.
_amax, _scale, _cast = (OPS[op.name()].impl for op in (amax, scale, cast))


def _quantize_in_kernel(x: Tensor, quantizer: Quantizer, slot: str) -> Operand:
    multiplier, x_scale = _scale(_amax(x, quantizer), quantizer)
    return Operand(codes=_cast(x, multiplier, quantizer), scale=x_scale, quantizer=quantizer)


def quantize_first(recipe: Recipe) -> Quantize:
    """What quantizes the operands of the output in compiled code.

    On a GPU the codes of an input are there once for all layers that read it, and one read of a weight makes its codes
    and the amaxes that the backward wants, where a kernel does that.
    """

    def quantize(x: Tensor, quantizer: Quantizer, slot: str) -> Operand:
        if target_of(x.device).type == "cuda":
            if slot == OUTPUT.b and torch.is_grad_enabled():
                return _quantize_weight_first(x, quantizer, recipe)
            if slot == OUTPUT.a:
                operand = quantize_by_amax(x, quantizer, slot)
                return replace(operand, codes=store(operand.codes)) if _is_aligned(operand.codes) else operand
        return quantize_by_amax(x, quantizer, slot)

    return quantize


def _quantize_weight_first(weight: Tensor, quantizer: Quantizer, recipe: Recipe) -> Operand:
    """On a GPU: codes of a weight for the output, by a kernel that finds the amaxes for grad_input too."""
    if not _has_weight_kernel(weight, recipe):
        return quantize_by_amax(weight, quantizer, OUTPUT.b)
    codes, own_scale, _ = quantize_weight(weight, quantizer, recipe.weight_for_grad_input)
    return Operand(codes=codes, scale=own_scale, quantizer=quantizer)


def keeps_codes(recipe: Recipe, weight: Tensor) -> bool:
    """Whether codes of this weight for grad_input are made in the forward and kept, as the recipe wants it."""
    return recipe.keep_weight_codes and target_of(weight.device).type == "cuda" and _is_aligned(weight)


def kept_for_grad_input(operand: Operand) -> Operand:
    """A weight of the forward, its codes laid down as grad_input reads them. Said twice, compilers make it once."""
    turned = store(operand.codes.t().contiguous())
    _compat.never_recompute(turned)
    return replace(operand, codes=turned.t())


def keeping_weights(quantize: Quantize, recipe: Recipe) -> Quantize:
    """What quantizes the operands of the output, and makes the codes that are kept."""

    def and_keep(x: Tensor, quantizer: Quantizer, slot: str) -> Operand:
        operand = quantize(x, quantizer, slot)
        if slot != OUTPUT.b or not keeps_codes(recipe, x):
            return operand
        return replace(operand, scale=after(operand.scale, kept_for_grad_input(operand).codes))

    return and_keep


def quantize_again(x: Tensor, quantizer: Quantizer, slot: str, recipe: Recipe) -> Operand:
    """In compiled code of the backward: the forward's amax, and codes of its own."""
    on_gpu = target_of(x.device).type == "cuda"
    if slot == GRAD_INPUT.b and keeps_codes(recipe, x):
        return kept_for_grad_input(_quantize_weight_first(x, quantizer, recipe))
    if on_gpu and slot == GRAD_INPUT.b and _has_weight_kernel(x, recipe):
        _, _, x_amax = quantize_weight(x, recipe.weight, quantizer)  # of the forward: compilers make one call of it
    else:
        x_amax = amax(x, quantizer)
    multiplier, x_scale = scale(x_amax, quantizer)
    codes = cast_apart(x, multiplier, quantizer)
    if on_gpu and slot == GRAD_WEIGHT.b and _is_aligned(codes):
        codes = store(codes.t().contiguous()).t()  # turned as the GEMM wants it
    return Operand(codes=codes, scale=x_scale, quantizer=quantizer)


def _has_weight_kernel(weight: Tensor, recipe: Recipe) -> bool:
    """Whether one kernel does it, and would read nothing that could have stayed in the kernel that makes it."""
    pair = is_weight_pair(recipe.weight, recipe.weight_for_grad_input, weight.shape[1])
    return pair and not _compat.is_fusible(weight)


def _is_aligned(codes: Tensor) -> bool:
    """Whether a GEMM reads these codes as they are, whatever their sizes turn out to be: else it pads a copy."""
    return all(_compat.statically_true(size % PADDED_TO == 0) for size in codes.shape)


def product(
    a: Tensor,
    b: Tensor,
    gemm: Gemm,
    recipe: Recipe,
    quantize: Quantize = quantize_by_amax,
    multiply: Multiply = multiply_operands,
) -> Tensor:
    """One GEMM of the layer, from its operands as the layer holds them, in the dtype of ``a``."""
    quantizers = recipe.quantizers(gemm)
    if quantizers is None:
        left, right = gemm.oriented(a, b)
        return left @ right
    left, right = gemm.oriented(quantize(a, quantizers[0], gemm.a), quantize(b, quantizers[1], gemm.b))
    return multiply(left, right, a.dtype, recipe.gemm_config(gemm))


def quantize_for_gradients(recipe: Recipe, device: torch.device) -> Quantize:
    """What quantizes the operands of grad_input and grad_weight in compiled code.

    On a GPU a grad_output that is in memory is quantized along rows and along columns from one read, where a kernel
    does that: both gradients ask for the same call, which the compiler makes once. One that Inductor makes, such as
    that of an activation, is quantized by the kernel that makes it.
    """
    rows, columns = recipe.grad_output, recipe.grad_output_for_grad_weight
    has_kernel = target_of(device).type != "cpu" and is_pair(rows, columns)

    def quantize(x: Tensor, quantizer: Quantizer, slot: str) -> Operand:
        if not has_kernel or slot not in (GRAD_INPUT.a, GRAD_WEIGHT.a) or _compat.is_fusible(x):
            return quantize_again(x, quantizer, slot, recipe)
        codes, row_scale, column_codes, column_scale = quantize_both(x, rows, columns)
        if slot == GRAD_INPUT.a:
            return Operand(codes=codes, scale=row_scale, quantizer=rows)
        return Operand(codes=column_codes, scale=column_scale, quantizer=columns)

    return quantize


# ---------------------------------------------------------------------------------- sharding
# By what isn't summed over, and only between blocks whose scale one rank knows alone. A tensorwise operand, or one
# that is cut along the sum, is for who takes the layer apart: amax then is an op that reduces over ranks.


def outer_cuts(shape: Sequence[int], quantizer: Quantizer | None, dims: Iterable[int]) -> list[Cut]:
    """Cuts of an operand along these dims that leave its codes and scales as they are; none of one in high precision.

    What order a high-precision product sums in may depend on the sizes that it's given.
    """
    if quantizer is None or not quantizer.is_local():
        return []
    known = isinstance(quantizer, DelayedScaling)  # a scale that was known before the tensor holds for any part of it
    return [cut for cut, grid in grid_cuts(shape, quantizer.block) if (known or grid is not None) and cut.dim in dims]


# ---------------------------------------------------------------------------------- gradients


def sample_grad(x: Tensor, weight: Tensor) -> Tensor:
    """A grad_output for a layer's sample, not contiguous."""
    grad = torch.randn((weight.shape[0], *x.shape[:-1]), generator=torch.Generator().manual_seed(1))
    return grad.to(x.dtype).movedim(0, -1)


def layer_grad_input(
    grad_output: Tensor, weight: Tensor, recipe: Recipe, quantize: Quantize, multiply: Multiply = multiply_operands
) -> Tensor:
    """What `grad_input` computes, its operands quantized and multiplied in a given way."""
    grad_MK = product(as_matrix(grad_output), weight, GRAD_INPUT, recipe, quantize, multiply)
    return grad_MK.view(*grad_output.shape[:-1], weight.shape[1])


def _grad_input_kernel(grad_output: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return layer_grad_input(grad_output, weight, recipe, _quantize_in_kernel, multiply)


def _grad_input_decompose(grad_output: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return layer_grad_input(grad_output, weight, recipe, quantize_for_gradients(recipe, grad_output.device))


def _grad_input_fake(grad_output: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return grad_output.new_empty((*grad_output.shape[:-1], weight.shape[1]))


def _grad_input_sharding(grad_output: Tensor, weight: Tensor, recipe: Recipe) -> list[Split]:
    rows = outer_cuts(grad_output.shape, recipe.grad_output, range(grad_output.ndim - 1))
    columns = outer_cuts(weight.shape, recipe.weight_for_grad_input, [1])
    return [
        *(Split((cut, None, None), (cut.dim,), exact=False) for cut in rows),
        *(Split((None, cut, None), (-1,), exact=False) for cut in columns),
    ]


def _grad_input_samples() -> Iterator[tuple]:
    for x, weight, _, recipe in linear_samples():
        yield sample_grad(x, weight), weight, recipe


grad_input = register_op(
    "fp8compile::grad_input",
    _grad_input_kernel,
    fake=_grad_input_fake,
    backward=None,
    decompose=_grad_input_decompose,
    sharding=_grad_input_sharding,
    samples=lambda: _grad_input_samples(),
)


def _grad_weight_kernel(grad_output: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    return product(as_matrix(grad_output), as_matrix(x), GRAD_WEIGHT, recipe, _quantize_in_kernel, multiply)


def _grad_weight_decompose(grad_output: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    quantize = quantize_for_gradients(recipe, grad_output.device)
    return product(as_matrix(grad_output), as_matrix(x), GRAD_WEIGHT, recipe, quantize)


def _grad_weight_fake(grad_output: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    return grad_output.new_empty((grad_output.shape[-1], x.shape[-1]))


def _grad_weight_sharding(grad_output: Tensor, x: Tensor, recipe: Recipe) -> list[Split]:
    rows = outer_cuts(grad_output.shape, recipe.grad_output_for_grad_weight, [grad_output.ndim - 1])
    columns = outer_cuts(x.shape, recipe.input_for_grad_weight, [x.ndim - 1])
    return [
        *(Split((cut, None, None), (0,), exact=False) for cut in rows),
        *(Split((None, cut, None), (1,), exact=False) for cut in columns),
    ]


def _grad_weight_samples() -> Iterator[tuple]:
    for x, weight, _, recipe in linear_samples():
        yield sample_grad(x, weight), x, recipe


grad_weight = register_op(
    "fp8compile::grad_weight",
    _grad_weight_kernel,
    fake=_grad_weight_fake,
    backward=None,
    decompose=_grad_weight_decompose,
    sharding=_grad_weight_sharding,
    samples=lambda: _grad_weight_samples(),
)

# ---------------------------------------------------------------------------------- the layer


def _check_needs_no_state(recipe: Recipe) -> None:
    # in the op, for PyTorch 2.11 traces no method of a recipe
    if not _compat.is_stand_in(recipe) and recipe.history():
        raise ValueError(
            "linear: the recipe has delayed scaling, whose scales come from the steps before, and no state is given. "
            "Keep one for each layer, fp8compile.DelayedState.initial(recipe), and pass state=; or use "
            "fp8compile.Linear or fp8compile.convert, which keep it in buffers."
        )


def layer_output(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    quantize: Quantize,
    multiply: Multiply = multiply_operands,
) -> Tensor:
    """What `linear` computes, its operands quantized and multiplied in a given way."""
    y_MN = product(as_matrix(x), weight, OUTPUT, recipe, quantize, multiply)
    if bias is not None:
        y_MN = y_MN + bias
    return y_MN.view(*x.shape[:-1], weight.shape[0])


def as_read(bias: Tensor | None) -> Tensor | None:
    """A bias for compiled code, which would else read what it was before it was rounded to its dtype."""
    return None if bias is None else rounded(bias).to(bias.dtype)


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    _check_needs_no_state(recipe)
    return layer_output(x, weight, bias, recipe, _quantize_in_kernel, multiply)


def _decompose(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    _check_needs_no_state(recipe)
    quantize = quantize_first(recipe)
    if torch.is_grad_enabled():
        quantize = keeping_weights(quantize, recipe)
    return layer_output(x, weight, as_read(bias), recipe, quantize)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    _check_needs_no_state(recipe)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _sharding(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> list[Split]:
    rows = outer_cuts(x.shape, recipe.input, range(x.ndim - 1))
    columns = outer_cuts(weight.shape, recipe.weight, [0])
    return [
        *(Split((cut, None, None, None), (cut.dim,), exact=False) for cut in rows),
        *(Split((None, cut, None if bias is None else Cut(0, cut.unit), None), (-1,), exact=False) for cut in columns),
    ]


def sum_of_tokens(grad_output: Tensor) -> Tensor:
    """The gradient of a bias, (N,). Dim by dim: a tensor that is spread over ranks need not be flattened for it."""
    return grad_output.sum(tuple(range(grad_output.ndim - 1))) if grad_output.ndim > 1 else grad_output.clone()


def _for_one_gradient(recipe: Recipe, gemm: Gemm) -> Recipe:
    """The recipe without the other gradient's GEMM, where it would have grad_output quantized for both."""
    if _compat.is_stand_in(recipe) or not is_pair(recipe.grad_output, recipe.grad_output_for_grad_weight):
        return recipe
    other = GRAD_INPUT if gemm is GRAD_WEIGHT else GRAD_WEIGHT
    kept = recipe.keep_weight_codes and gemm is GRAD_INPUT
    return replace(recipe, **{other.a: None, other.b: None}, keep_weight_codes=kept)


def for_gradients_of(recipe: Recipe, *, x: bool, weight: bool) -> Recipe:
    """The recipe for a backward that makes these gradients."""
    return recipe if x and weight else _for_one_gradient(recipe, GRAD_INPUT if x else GRAD_WEIGHT)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, _, recipe = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.recipe = for_gradients_of(recipe, x=needs_x, weight=needs_weight)
    ctx.placements = _compat.placement_of(x)
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_bias = ctx.needs_input_grad[2]
    grad_x = None if weight is None else grad_input(grad_output, weight, ctx.recipe)
    return (
        _compat.scattered_like(grad_x, ctx.placements),
        None if x is None else grad_weight(grad_output, x, ctx.recipe),
        sum_of_tokens(grad_output) if needs_bias else None,
        None,
    )


def linear_samples() -> Iterator[tuple]:
    """Arguments of the op, for tests of it and of its likes."""
    generator = torch.Generator().manual_seed(0)
    for x in samples.matrices():
        for recipe in samples.recipes():
            weight = torch.randn(40, x.shape[-1], generator=generator).to(x.dtype)
            yield x, weight, torch.ones(40, dtype=x.dtype), recipe
    yield x, weight, None, recipe


linear = register_op(
    "fp8compile::linear",
    _kernel,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    decompose=_decompose,
    sharding=_sharding,
    samples=linear_samples,
)
