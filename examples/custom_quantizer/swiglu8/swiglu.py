"""Two ops: SwiGLU whose result is quantized at once, and SwiGLU with the FP8 product behind it, which can be trained.

    swiglu8::swiglu_quantize   gate, up --silu(gate) * up--> y, of their dtype --amax, scale, cast--> codes, scale
    swiglu8::swiglu_linear     the same, and then y @ weight^T

Both are made of fp8compile's ops. Inductor sees through those too, so that amax and cast are part of the kernel that
computes the SwiGLU. The sigmoid is taken in float64: float32 ones of different backends differ in their last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fp8compile as f8
from fp8compile.library import Cut, Quantizer, Recipe, Split, grid_cuts, register_op, rounded
from swiglu8.ceil8 import Ceil8

__all__ = ["quantized_swiglu", "swiglu_linear", "swiglu_quantize"]


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float64, rounded to float32."""
    return (gate.double() * gate.double().sigmoid() * up.double()).float()


def _values() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for shape, dtype in (((9, 130), torch.bfloat16), ((4, 3, 64), torch.float32), ((0, 64), torch.bfloat16)):
        yield tuple(torch.randn((2, *shape), generator=generator).to(dtype))
    yield tuple(torch.randn((2, 64, 10), generator=generator).half().transpose(1, 2))


# ---------------------------------------------------------------------------------- SwiGLU, quantized


def _quantize(y: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    multiplier, scale = f8.ops.scale(f8.ops.amax(y, quantizer), quantizer)
    return f8.ops.cast(y, multiplier, quantizer), scale


def _quantize_kernel(gate: Tensor, up: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return _quantize(_swiglu(gate, up).to(gate.dtype), quantizer)


def _quantize_decompose(gate: Tensor, up: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return _quantize(_swiglu(rounded(gate), rounded(up)).to(gate.dtype), quantizer)


def _quantize_fake(gate: Tensor, up: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    codes = gate.new_empty(quantizer.codes_shape(gate.shape), dtype=torch.uint8)
    return codes, gate.new_empty(quantizer.scale_shape(gate.shape), dtype=quantizer.scale_dtype())


def _quantize_sharding(gate: Tensor, up: Tensor, quantizer: Quantizer) -> list[Split]:
    cuts = [(cut, grid) for cut, grid in grid_cuts(gate.shape, quantizer.block) if grid is not None]
    return [Split((cut, cut, None), (cut.dim, grid.dim)) for cut, grid in cuts]


def _quantize_samples() -> Iterator[tuple]:
    for gate, up in _values():
        yield gate, up, Ceil8()
        yield gate, up, f8.CurrentScaling(block=(1, -1))


swiglu_quantize = register_op(
    "swiglu8::swiglu_quantize",
    _quantize_kernel,
    fake=_quantize_fake,
    backward=None,
    decompose=_quantize_decompose,
    sharding=_quantize_sharding,
    samples=_quantize_samples,
)


def quantized_swiglu(gate: Tensor, up: Tensor, quantizer: Quantizer) -> f8.QuantizedTensor:
    """``silu(gate) * up``, quantized: gate and up of one shape and dtype. A constant to autograd."""
    codes, scale = swiglu_quantize(gate.detach(), up.detach(), quantizer)
    return f8.QuantizedTensor(codes, scale, quantizer, gate.dtype)


# ---------------------------------------------------------------------------------- SwiGLU and a linear layer

FULL_TENSORS = None, [], [], f8.ops.UNSHARDED  # no groups, nothing known of the weight, no sharding


def _linear_kernel(gate: Tensor, up: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return f8.ops.linear(_swiglu(gate, up).to(gate.dtype), weight, None, *FULL_TENSORS, recipe)


def _linear_decompose(gate: Tensor, up: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return f8.ops.linear(_swiglu(rounded(gate), rounded(up)).to(gate.dtype), weight, None, *FULL_TENSORS, recipe)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.recipe = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, weight = ctx.saved_tensors
    y = _swiglu(gate, up).to(gate.dtype)
    grad_y = f8.ops.grad_input(grad, weight, *FULL_TENSORS, ctx.recipe).double()
    g, s = gate.double(), gate.double().sigmoid()
    grad_gate = (grad_y * up.double() * s * (1 + g * (1 - s))).to(gate.dtype)
    grad_weight = f8.ops.grad_weight(grad, y, weight.dtype, *FULL_TENSORS, ctx.recipe)
    return grad_gate, (grad_y * g * s).to(up.dtype), grad_weight, None


def _linear_sharding(gate: Tensor, up: Tensor, weight: Tensor, recipe: Recipe) -> list[Split]:
    """By tokens, where the input's blocks are rows or parts of rows; a product's sums may be ordered otherwise."""
    if recipe.input is None or recipe.input.block[0] != 1:
        return []
    cuts = [Cut(dim) for dim in range(gate.ndim - 1)]
    return [Split((cut, cut, None, None), (cut.dim,), exact=False) for cut in cuts]


def _linear_samples() -> Iterator[tuple]:
    for gate, up in _values():
        weight = torch.linspace(-1, 1, 48 * gate.shape[-1]).view(48, gate.shape[-1]).to(gate.dtype)
        yield gate, up, weight, f8.library.recipe(Ceil8())


swiglu_linear = register_op(
    "swiglu8::swiglu_linear",
    _linear_kernel,
    fake=None,  # the kernel, run without data
    backward=_backward,
    setup_context=_setup_context,
    decompose=_linear_decompose,
    sharding=_linear_sharding,
    samples=_linear_samples,
)
