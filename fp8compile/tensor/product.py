"""scaled_mm: the product of two QuantizedTensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile import ops
from fp8compile.quantizers import GemmConfig
from fp8compile.tensor.arguments import SOURCE_DTYPES
from fp8compile.tensor.quantized import QuantizedTensor, cuts_blocks

__all__ = ["scaled_mm"]


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor, *, out_dtype: torch.dtype, emulate: bool = False) -> Tensor:
    """The product of two quantized matrices; sums in float32 or better.

    Args:
        a: (m, k).
        b: (k, n). Often the ``.t()`` of one quantized as (n, k), which moves no data.
        out_dtype: bfloat16, float16 or float32.
        emulate: Whether a GPU without such a GEMM multiplies the exact values in float64, slowly, instead of raising.

    Returns:
        (m, n), a plain tensor of ``out_dtype``.

    Raises:
        TypeError: An operand is no QuantizedTensor, or ``out_dtype`` none of these.
        ValueError: Shapes or devices do not fit, or no GEMM can undo scales of such blocks.
        RuntimeError: This device has no GEMM for them.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, QuantizedTensor):
            raise TypeError(
                f"scaled_mm: {name} is a {type(operand).__name__}; it is a QuantizedTensor, made by "
                "fp8compile.quantize."
            )
        if cuts_blocks(operand):
            raise ValueError(
                f"scaled_mm: {name} is a shard of sizes {operand.sizes} along dim {operand.shard_dim}, which cuts "
                f"blocks {operand.quantizer.block}. Call .all_gather({operand.shard_dim}) first."
            )
    if out_dtype not in SOURCE_DTYPES:
        raise TypeError(f"scaled_mm: out_dtype is {out_dtype}; it is bfloat16, float16 or float32.")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"scaled_mm: shapes {tuple(a.shape)} and {tuple(b.shape)}; they are (m, k) and (k, n).")
    if a.device != b.device:
        raise ValueError(f"scaled_mm: a is on {a.device} and b on {b.device}; move them to one device.")
    config = GemmConfig(emulate=emulate)
    return ops.scaled_mm(a.codes, b.codes, a.scale, b.scale, a.quantizer, b.quantizer, out_dtype, config)
