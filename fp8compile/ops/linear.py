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

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.ops import samples
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.gemm import Operand
from fp8compile.ops.registry import register_op
from fp8compile.ops.rounding import rounded
from fp8compile.ops.scale import scale
from fp8compile.ops.scaled_mm import scaled_mm
from fp8compile.ops.sharding import Cut, Split, grid_cuts
from fp8compile.quantizers import GEMMS, Gemm, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix

__all__ = ["GEMM_OPS", "grad_input", "grad_weight", "linear"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


def _quantize(x: Tensor, quantizer: Quantizer) -> Operand:
    multiplier, x_scale = scale(amax(x, quantizer), quantizer)
    return Operand(codes=cast(x, multiplier, quantizer), scale=x_scale, quantizer=quantizer)


def _product(a: Tensor, b: Tensor, gemm: Gemm, recipe: Recipe) -> Tensor:
    """One GEMM of the layer, from its operands as the layer holds them, in the dtype of ``a``."""
    quantizers = recipe.quantizers(gemm)
    if quantizers is None:
        return (a.t() if gemm.a_transposed else a) @ (b.t() if gemm.b_transposed else b)
    left, right = _quantize(a, quantizers[0]), _quantize(b, quantizers[1])
    left = left.t() if gemm.a_transposed else left
    right = right.t() if gemm.b_transposed else right
    return scaled_mm(
        left.codes,
        right.codes,
        left.scale,
        right.scale,
        left.quantizer,
        right.quantizer,
        a.dtype,
        recipe.fast_accumulation(gemm),
    )


# ---------------------------------------------------------------------------------- sharding
# By what isn't summed over, and only between blocks whose scale one rank knows alone. A tensorwise operand, or one
# that is cut along the sum, is for who takes the layer apart: amax then is an op that reduces over ranks.


def _outer_cuts(shape: Sequence[int], quantizer: Quantizer | None, dims: Iterable[int]) -> list[Cut]:
    """Cuts of an operand along these dims that leave its codes and scales as they are; none of one in high precision.

    What order a high-precision product sums in may depend on the sizes that it's given.
    """
    if quantizer is None:
        return []
    return [cut for cut, grid in grid_cuts(shape, quantizer.block) if grid is not None and cut.dim in dims]


# ---------------------------------------------------------------------------------- gradients


def _sample_grad(x: Tensor, weight: Tensor) -> Tensor:
    """A grad_output for a layer's sample, not contiguous."""
    grad = torch.randn((weight.shape[0], *x.shape[:-1]), generator=torch.Generator().manual_seed(1))
    return grad.to(x.dtype).movedim(0, -1)


def _grad_input_kernel(grad_output: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    grad_MK = _product(as_matrix(grad_output), weight, GRAD_INPUT, recipe)
    return grad_MK.view(*grad_output.shape[:-1], weight.shape[1])


def _grad_input_fake(grad_output: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return grad_output.new_empty((*grad_output.shape[:-1], weight.shape[1]))


def _grad_input_sharding(grad_output: Tensor, weight: Tensor, recipe: Recipe) -> list[Split]:
    rows = _outer_cuts(grad_output.shape, recipe.grad_output, range(grad_output.ndim - 1))
    columns = _outer_cuts(weight.shape, recipe.weight_for_grad_input, [1])
    return [
        *(Split((cut, None, None), (cut.dim,), exact=False) for cut in rows),
        *(Split((None, cut, None), (-1,), exact=False) for cut in columns),
    ]


def _grad_input_samples() -> Iterator[tuple]:
    for x, weight, _, recipe in _samples():
        yield _sample_grad(x, weight), weight, recipe


grad_input = register_op(
    "fp8compile::grad_input",
    _grad_input_kernel,
    fake=_grad_input_fake,
    backward=None,
    decompose=_grad_input_kernel,
    sharding=_grad_input_sharding,
    samples=lambda: _grad_input_samples(),
)


def _grad_weight_kernel(grad_output: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    return _product(as_matrix(grad_output), as_matrix(x), GRAD_WEIGHT, recipe)


def _grad_weight_fake(grad_output: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    return grad_output.new_empty((grad_output.shape[-1], x.shape[-1]))


def _grad_weight_sharding(grad_output: Tensor, x: Tensor, recipe: Recipe) -> list[Split]:
    rows = _outer_cuts(grad_output.shape, recipe.grad_output_for_grad_weight, [grad_output.ndim - 1])
    columns = _outer_cuts(x.shape, recipe.input_for_grad_weight, [x.ndim - 1])
    return [
        *(Split((cut, None, None), (0,), exact=False) for cut in rows),
        *(Split((None, cut, None), (1,), exact=False) for cut in columns),
    ]


def _grad_weight_samples() -> Iterator[tuple]:
    for x, weight, _, recipe in _samples():
        yield _sample_grad(x, weight), x, recipe


grad_weight = register_op(
    "fp8compile::grad_weight",
    _grad_weight_kernel,
    fake=_grad_weight_fake,
    backward=None,
    decompose=_grad_weight_kernel,
    sharding=_grad_weight_sharding,
    samples=lambda: _grad_weight_samples(),
)

# ---------------------------------------------------------------------------------- the layer


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    y_MN = _product(as_matrix(x), weight, OUTPUT, recipe)
    if bias is not None:
        y_MN = y_MN + bias
    return y_MN.view(*x.shape[:-1], weight.shape[0])


def _decompose(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    return _kernel(x, weight, None if bias is None else rounded(bias).to(bias.dtype), recipe)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _sharding(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> list[Split]:
    rows = _outer_cuts(x.shape, recipe.input, range(x.ndim - 1))
    columns = _outer_cuts(weight.shape, recipe.weight, [0])
    return [
        *(Split((cut, None, None, None), (cut.dim,), exact=False) for cut in rows),
        *(Split((None, cut, None if bias is None else Cut(0, cut.unit), None), (-1,), exact=False) for cut in columns),
    ]


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, _, ctx.recipe = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_bias = ctx.needs_input_grad[2]
    return (
        None if weight is None else grad_input(grad_output, weight, ctx.recipe),
        None if x is None else grad_weight(grad_output, x, ctx.recipe),
        as_matrix(grad_output).sum(0) if needs_bias else None,
        None,
    )


def _samples() -> Iterator[tuple]:
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
    samples=_samples,
)

# What a policy of selective activation checkpointing names to keep the products: where a plain model has aten.mm, a
# converted one has fp8compile::linear, and never aten._scaled_mm.
GEMM_OPS = (linear, scaled_mm)
