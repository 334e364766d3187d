"""scaled_mm: the product of two QuantizedTensors.

Codes and scales have no gradient. A second op, ``with_product_gradient``, therefore returns the product unchanged,
with the derivative of ``a @ b`` for the dequantized matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.layout.quantized import WHOLE, Quantized
from fp8compile.ops.gemms.scaled_mm import multiply_operands
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding_rules import Cut, Split
from fp8compile.quantizers import CurrentScaling, GemmConfig, Quantizer
from fp8compile.tensor.check_arguments import SOURCE_DTYPES
from fp8compile.tensor.quantized_tensor import LAYERS, QuantizedTensor, cuts_blocks

__all__ = ["scaled_mm", "with_product_gradient"]


def _values(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.dequantize(dtype) if isinstance(x, QuantizedTensor) else x.to(dtype)


def _kernel(product: Tensor, a: Tensor, b: Tensor, quantizer: Quantizer) -> Tensor:
    return product.clone()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, a, b, _ = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    grad_a = grad_b = None
    if ctx.needs_input_grad[1]:
        grad_a = (grad @ _values(b, grad.dtype).t()).to(a.dtype)
    if ctx.needs_input_grad[2]:
        grad_b = (_values(a, grad.dtype).t() @ grad).to(b.dtype)
    return None, grad_a, grad_b, None


def _samples() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for m, k, n in ((5, 24, 7), (1, 8, 3), (0, 8, 4)):
        a, b = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator).t()
        yield (a @ b).round(), a, b, CurrentScaling()
        yield (a @ b).round(), a.bfloat16(), b.bfloat16(), CurrentScaling()


with_product_gradient: OpOverload = register_op(
    "fp8compile::with_product_gradient",
    _kernel,
    fake=lambda product, a, b, quantizer: torch.empty_like(product),
    backward=_backward,
    decompose=_kernel,
    sharding=lambda product, a, b, quantizer: [
        Split((Cut(0), Cut(0), None, None), (0,)),
        Split((Cut(1), None, Cut(1), None), (1,)),
    ],
    samples=_samples,
    setup_context=_setup_context,
)
# for QuantizedTensors nothing is computed: the result is the given product, not a copy
LAYERS[with_product_gradient] = lambda func, product, *operands: product.detach()


def _operand(x: QuantizedTensor) -> Quantized:
    # layout= is given because Dynamo traces this, and can guard a global but not a default value
    return Quantized(codes=x.codes, scale=x.scale, quantizer=x.quantizer, outer_scale=x.outer_scale, layout=WHOLE)


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor, *, out_dtype: torch.dtype, emulate: bool = False) -> Tensor:
    """Multiply two quantized matrices, with accumulation in float32 or higher precision.

    Gradients of both operands are computed in ``out_dtype`` with the dequantized matrices. To compute gradients in
    FP8, use ``fp8compile.linear``.

    Args:
        a: (m, k).
        b: (k, n). Usually ``.t()`` of a tensor that was quantized as (n, k); the transpose is a view.
        out_dtype: bfloat16, float16 or float32.
        emulate: Whether a GPU without such a GEMM multiplies the exact values in float64, slowly, instead of raising
            an error.

    Returns:
        (m, n), a plain tensor of ``out_dtype``.

    Raises:
        TypeError: An operand is not a QuantizedTensor, or ``out_dtype`` is not one of the three.
        ValueError: Shapes or devices do not match, a shard boundary divides blocks, or no GEMM supports these blocks.
        RuntimeError: This device has no GEMM for these operands.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, QuantizedTensor):
            raise TypeError(
                f"scaled_mm: `{name}` is a {type(operand).__name__}; it must be a QuantizedTensor, created by "
                "fp8compile.quantize."
            )
        if cuts_blocks(operand):
            raise ValueError(
                f"scaled_mm: `{name}` is a shard of sizes {operand.sizes} along dim {operand.shard_dim}, which "
                f"splits blocks {operand.quantizer.block}. Call .all_gather({operand.shard_dim}) first."
            )
    if out_dtype not in SOURCE_DTYPES:
        raise TypeError(f"scaled_mm: `out_dtype` is {out_dtype}; it must be bfloat16, float16 or float32.")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"scaled_mm: shapes must be (m, k) and (k, n), got {tuple(a.shape)} and {tuple(b.shape)}.")
    if a.device != b.device:
        raise ValueError(f"scaled_mm: a is on {a.device}, but b is on {b.device}. Move them to one device.")
    config = GemmConfig(emulate=emulate)
    left, right = (_operand(each) for each in (a, b))
    product = multiply_operands(left, right, out_dtype, config)
    return with_product_gradient(product, a, b, a.quantizer)
