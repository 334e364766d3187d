"""Which code multiplies two quantized matrices on a device, and that code.

    tensorwise   torch._scaled_mm with two numbers                          GPUs from compute capability 8.9
    rowwise      torch._scaled_mm with a scale a row and a column           GPUs from 9.0 (bf16 out); CPU, for both
    scaled_after torch._scaled_mm without scales, float32 out, then both    rowwise on GPUs otherwise
    emulated     float64 product of the exact values                        CPU only, where it has no kernel

A CPU gets a tensorwise scale as one a row: for e4m3 by e4m3 with two numbers oneDNN has a reference loop only, much
slower and with the same bits (`benchmarks/cpu_gemm.py`). Before PyTorch 2.13 that loop is all there is, so the CPU
emulates.

Nothing here falls back on its own: a pair without a GEMM on a GPU raises and says which GPU has one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat
from fp8compile.formats import Float8Format
from fp8compile.ops.realize import realize
from fp8compile.quantizers import Quantizer, gemm_kind

__all__ = ["Operand", "multiply", "select_gemm"]

ALIGNMENT = 16  # cuBLASLt: rows of codes are multiples of 16 bytes; Inductor's CPU code: for M = 1 as well


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of a product: codes and scales of a matrix, and the quantizer that made them of it.

    Attributes:
        codes: uint8, 2-D.
        scale: Grid of the quantizer's blocks over ``codes``, 2-D.
        quantizer: In the coordinates of ``codes``.
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer

    def t(self) -> Operand:
        """The transposed matrix; no data moves."""
        return Operand(codes=self.codes.t(), scale=self.scale.t(), quantizer=self.quantizer.transposed())

    def scale_values(self) -> Tensor:
        """The scales as float32 numbers."""
        return self.quantizer.scale_values(self.scale)


def select_gemm(a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype) -> str:
    """The code that multiplies operands of these quantizers on a device.

    Args:
        a: Of the left operand, over (m, k).
        b: Of the right operand, over (k, n).
        device: Where the codes are.
        out_dtype: Of the product.

    Returns:
        ``"tensorwise"``, ``"rowwise"``, ``"scaled_after"`` or ``"emulated"``.

    Raises:
        ValueError: No GEMM multiplies such blocks anywhere.
        RuntimeError: This device has none.
    """
    kind = gemm_kind(a.block, b.block)
    if kind is None:
        raise ValueError(
            f"scaled_mm: operand a has block {a.block} over (m, k), operand b {b.block} over (k, n); no GEMM can undo "
            "such scales. Tensorwise takes (-1, -1) by (-1, -1), rowwise (1, -1) by (-1, 1), blockwise (1, n) or "
            "(n, n) by (n, 1) or (n, n). Choose quantizers as the recipes of fp8compile.recipes do."
        )
    float8 = isinstance(a.element_format(), Float8Format) and isinstance(b.element_format(), Float8Format)
    if device.type == "cpu":
        native = float8 and kind != "blockwise" and _compat.cpu_has_rowwise_gemm()
        return "rowwise" if native else "emulated"
    if device.type != "cuda":
        raise RuntimeError(f"scaled_mm: no FP8 GEMM on device {device.type!r}; it runs on 'cuda' and 'cpu'.")
    return _select_cuda_gemm(kind, a, b, device, out_dtype)


def _select_cuda_gemm(kind: str, a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype) -> str:
    capability = torch.cuda.get_device_capability(device)
    given = f"blocks {a.block} by {b.block}, formats {a.format} by {b.format}"
    here = f"compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 9):
        raise RuntimeError(
            f"scaled_mm: {given} needs a GPU with FP8 tensor cores, compute capability 8.9 or more (L4, RTX 40, H100, "
            f"B200); this one has {here}. Leave the model in bfloat16 here."
        )
    if a.format == b.format == "e5m2":
        raise RuntimeError(f"scaled_mm: {given}: tensor cores multiply e4m3 by e4m3 or by e5m2, not e5m2 by e5m2.")
    if kind == "blockwise":
        raise RuntimeError(f"scaled_mm: {given} has no GPU GEMM in this version of fp8compile (found {here}).")
    if kind == "rowwise" and (out_dtype != torch.bfloat16 or capability < (9, 0)):
        return "scaled_after"
    return kind


def _pad_to_alignment(a: Operand, b: Operand) -> tuple[Tensor, Tensor, int]:
    """Float8 codes in the layout of `_scaled_mm`: a row-major, b column-major, sides as multiples of 16.

    Zeros are appended along the sum, and on a GPU along n; scales are not touched by either.
    """
    (_, k), n = a.codes.shape, b.codes.shape[1]
    extra_k = -k % ALIGNMENT
    extra_n = -n % ALIGNMENT if a.codes.device.type == "cuda" else 0
    rows, columns = a.codes, b.codes.t()
    # statically: a guard on M % 16 would compile the backward twice, for its sum runs over tokens
    if not _compat.statically_true(extra_k == 0):
        rows = pad(rows, (0, extra_k))
    if not (_compat.statically_true(extra_k == 0) and _compat.statically_true(extra_n == 0)):
        columns = pad(columns, (0, extra_k, 0, extra_n))
    a_float8, b_float8 = a.quantizer.element_format().dtype, b.quantizer.element_format().dtype
    return rows.contiguous().view(a_float8), columns.contiguous().view(b_float8).t(), extra_n


def _native(kind: str, a: Operand, b: Operand, out_dtype: torch.dtype, *, fast_accumulation: bool) -> Tensor:
    rows, columns, extra_n = _pad_to_alignment(a, b)
    if kind == "tensorwise":
        a_scale, b_scale = a.scale_values().reshape(()), b.scale_values().reshape(())
    elif kind == "rowwise":
        # through one dim: of a (1, n) scale that came as (n, 1) the strides would not do
        a_scale = a.scale_values().reshape(-1).expand(rows.shape[0]).unsqueeze(1).contiguous()
        b_scale = b.scale_values().reshape(-1).expand(b.codes.shape[1])
        b_scale = (pad(b_scale, (0, extra_n), value=1.0) if extra_n else b_scale).unsqueeze(0).contiguous()
    else:
        a_scale = b_scale = torch.ones((), device=rows.device)
    product = torch._scaled_mm(rows, columns, a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast_accumulation)
    return product[:, : b.codes.shape[1]].contiguous() if extra_n else product


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype, *, fast_accumulation: bool) -> Tensor:
    """The product of two quantized matrices.

    Args:
        a: (m, k).
        b: (k, n).
        out_dtype: float32, bfloat16 or float16.
        fast_accumulation: Whether a GPU may accumulate in fewer bits.

    Returns:
        (m, n), ``out_dtype``, contiguous. An empty sum gives zeros.
    """
    (m, k), n = a.codes.shape, b.codes.shape[1]
    kind = select_gemm(a.quantizer, b.quantizer, a.codes.device, out_dtype)
    if any(_compat.guard_or_false(size == 0) for size in (m, k, n)):
        return a.codes.new_zeros((m, n), dtype=out_dtype)
    if kind == "emulated":
        return (_exact(a) @ _exact(b)).to(out_dtype)
    if kind == "scaled_after":
        product = _native(kind, a, b, torch.float32, fast_accumulation=fast_accumulation)
        return (product * a.scale_values() * b.scale_values()).to(out_dtype)
    return _native(kind, a, b, out_dtype, fast_accumulation=fast_accumulation)


def _exact(operand: Operand) -> Tensor:
    # realized: PyTorch 2.11 drops the float32 rounding of a scale that float64 code reads next
    return operand.quantizer.dequantize(operand.codes, realize(operand.scale), torch.float64)
