"""fp8compile::linear: a linear layer with FP8 GEMMs, as one differentiable op; its gradients are two more.

    linear       y_MN  = x_MK  @ w_NK^T + b_N
    grad_input   dx_MK = dy_MN @ w_NK
    grad_weight  dw_NK = dy_MN^T @ x_MK

Each is taken apart into amax, scale, cast and scaled_mm: by its kernel in eager mode, by its decomposition under
Inductor, and wherever else someone needs to look inside. Saved for backward are x and w as they came, and only if a
gradient needs them: which codes the backward wants depends on the recipe, and under Inductor the two casts of one
tensor become one read of it. Of codes of four bits eager mode saves those in place of x (`kept_input`). The bias is
added in the dtype of the output; where the output stays in high precision, by `torch.addmm`, as ``nn.Linear`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.ops import samples
from fp8compile.ops.layer.kept_input import grad_weight_of_codes, keeps_codes, kept_input
from fp8compile.ops.layer.local_shards import LocalShard
from fp8compile.ops.layer.operands import Operands, Phase
from fp8compile.ops.layer.products import multiply_shards
from fp8compile.ops.layer.register_product import register_product
from fp8compile.ops.quantize_both import is_pair
from fp8compile.ops.sharding import Cut, Split, grid_cuts
from fp8compile.quantizers import GEMMS, DelayedScaling, Gemm, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix

__all__ = ["grad_input", "grad_weight", "linear", "linear_samples"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


def product(a: Tensor, b: Tensor, gemm: Gemm, operands: Operands, bias: Tensor | None = None) -> Tensor:
    """One GEMM of the layer on matrices as the layer holds them, in the dtype of ``a``."""
    added = None if bias is None else LocalShard(bias)
    return multiply_shards(gemm, LocalShard(a), LocalShard(b), operands, added).local


# ---------------------------------------------------------------------------------- sharding
# By what isn't summed over, and only between blocks whose scale one rank knows alone. A tensorwise operand, or one
# that is cut along the sum, is for who takes the layer apart: amax then is an op that reduces over ranks.


def outer_cuts(shape: Sequence[int], quantizer: Quantizer | None, dims: Iterable[int]) -> list[Cut]:
    """Cuts of an operand along these dims that leave its codes and scales as they are; none of one in high precision.

    What order a high-precision product sums in may depend on the sizes that it's given.
    """
    if quantizer is None or not quantizer.is_local() or quantizer.has_outer_scale():
        return []
    known = isinstance(quantizer, DelayedScaling)  # a scale that was known before the tensor holds for any part of it
    return [cut for cut, grid in grid_cuts(shape, quantizer.block) if (known or grid is not None) and cut.dim in dims]


# ---------------------------------------------------------------------------------- gradients


def sample_grad(x: Tensor, weight: Tensor) -> Tensor:
    """A grad_output for a layer's sample, not contiguous."""
    grad = torch.randn((weight.shape[0], *x.shape[:-1]), generator=torch.Generator().manual_seed(1))
    return grad.to(x.dtype).movedim(0, -1)


def layer_grad_input(grad_output: Tensor, weight: Tensor, operands: Operands) -> Tensor:
    """What `grad_input` computes, by given operands."""
    grad_MK = product(as_matrix(grad_output), weight, GRAD_INPUT, operands)
    return grad_MK.view(*grad_output.shape[:-1], weight.shape[1])


def _grad_input(phase: Phase, grad_output: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return layer_grad_input(grad_output, weight, Operands(recipe, phase))


def grad_input_fake(grad_output: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """An empty grad_input, for all families of layers."""
    return grad_output.new_empty((*grad_output.shape[:-1], weight.shape[1]))


def grad_input_sharding(grad_output: Tensor, weight: Tensor, *others: Any) -> list[Split]:
    """How grad_input may be cut: whatever it takes behind its operands, the recipe last, stays whole."""
    recipe, whole = others[-1], (None,) * len(others)
    rows = outer_cuts(grad_output.shape, recipe.grad_output, range(grad_output.ndim - 1))
    columns = outer_cuts(weight.shape, recipe.weight_for_grad_input, [1])
    return [
        *(Split((cut, None, *whole), (cut.dim,), exact=False) for cut in rows),
        *(Split((None, cut, *whole), (-1,), exact=False) for cut in columns),
    ]


grad_input = register_product(
    "grad_input",
    GRAD_INPUT,
    _grad_input,
    fake=grad_input_fake,
    sharding=grad_input_sharding,
    samples=lambda: ((sample_grad(x, weight), weight, recipe) for x, weight, _, recipe in linear_samples()),
)


def layer_grad_weight(grad_output: Tensor, x: Tensor, operands: Operands) -> Tensor:
    """What `grad_weight` computes, by given operands."""
    return product(as_matrix(grad_output), as_matrix(x), GRAD_WEIGHT, operands)


def _grad_weight(phase: Phase, grad_output: Tensor, x: Tensor, recipe: Recipe) -> Tensor:
    return layer_grad_weight(grad_output, x, Operands(recipe, phase))


def grad_weight_fake(grad_output: Tensor, x: Tensor, *_: Any) -> Tensor:
    """An empty grad_weight, for all families whose weight isn't cut by FSDP."""
    return grad_output.new_empty((grad_output.shape[-1], x.shape[-1]))


def grad_weight_sharding(grad_output: Tensor, x: Tensor, *others: Any) -> list[Split]:
    """How grad_weight may be cut, as `grad_input_sharding` says it."""
    recipe, whole = others[-1], (None,) * len(others)
    rows = outer_cuts(grad_output.shape, recipe.grad_output_for_grad_weight, [grad_output.ndim - 1])
    columns = outer_cuts(x.shape, recipe.input_for_grad_weight, [x.ndim - 1])
    return [
        *(Split((cut, None, *whole), (0,), exact=False) for cut in rows),
        *(Split((None, cut, *whole), (1,), exact=False) for cut in columns),
    ]


grad_weight = register_product(
    "grad_weight",
    GRAD_WEIGHT,
    _grad_weight,
    fake=grad_weight_fake,
    sharding=grad_weight_sharding,
    samples=lambda: ((sample_grad(x, weight), x, recipe) for x, weight, _, recipe in linear_samples()),
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


def layer_output(x: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands) -> Tensor:
    """What `linear` computes, by given operands."""
    y_MN = product(as_matrix(x), weight, OUTPUT, operands, bias)
    return y_MN.view(*x.shape[:-1], y_MN.shape[1])


def _linear(phase: Phase, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    _check_needs_no_state(recipe)
    return layer_output(x, weight, bias, Operands(recipe, phase))


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
    kept: tuple[Tensor, ...] = (x,) if needs_weight else ()
    if needs_weight and keeps_codes(x, recipe):
        kept = kept_input(x, recipe.quantizer_read(GRAD_WEIGHT.b))
    ctx.save_for_backward(weight if needs_x else None, *kept)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    weight, *kept = ctx.saved_tensors
    needs_bias = ctx.needs_input_grad[2]
    grad_x = None if weight is None else grad_input(grad_output, weight, ctx.recipe)
    by_input = grad_weight if len(kept) == 1 else grad_weight_of_codes
    return (
        _compat.scattered_like(grad_x, ctx.placements),
        by_input(grad_output, *kept, ctx.recipe) if kept else None,
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


linear = register_product(
    "linear",
    OUTPUT,
    _linear,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    sharding=_sharding,
    samples=linear_samples,
)
