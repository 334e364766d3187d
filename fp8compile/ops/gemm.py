"""Which code multiplies two quantized matrices on a device, and that code.

    tensorwise   torch._scaled_mm with two numbers                          GPUs from compute capability 8.9
    rowwise      torch._scaled_mm with a scale a row and a column           GPUs from 9.0 (bf16 out); CPU, for both
    scaled_after torch._scaled_mm without scales, float32 out, then both    rowwise on GPUs otherwise
    blockwise    torch._scaled_mm with a scale for 128 values of the sum    GPUs of 9.0
    mx           torch._scaled_mm with a power of two for 32 of them        GPUs from 10.0
    emulated     float64 product of the exact values                        CPU where it has no kernel; a GPU if asked

A CPU gets a tensorwise scale as one a row: for e4m3 by e4m3 with two numbers oneDNN has a reference loop only, much
slower and with the same bits (`benchmarks/cpu_gemm.py`). Before PyTorch 2.13 that loop is all there is, so the CPU
emulates.

Nothing here falls back on its own: a pair without a GEMM on a GPU raises and says which GPU has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat
from fp8compile.formats import E5M2
from fp8compile.ops.realize import realize
from fp8compile.ops.returned import shape_said
from fp8compile.ops.scale_layouts import down_the_rows, rows_of_fours, swizzled
from fp8compile.quantizers import GemmConfig, Quantizer, gemm_kind
from fp8compile.target import Target, target_of

__all__ = ["PADDED_TO", "Operand", "multiply", "select_gemm"]

ALIGNMENT = 16  # cuBLASLt: rows of codes are multiples of 16 bytes; Inductor's CPU code: for M = 1 as well
BLOCK = 128  # of Hopper's blockwise GEMM
MX_BLOCK = 32
PADDED_TO = 32  # no GEMM pads sides that are multiples of this


@lru_cache(maxsize=256)  # each eager call asks, and a new value is checked field by field
def _transposed(quantizer: Quantizer) -> Quantizer:
    return quantizer.transposed()


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of a product: codes and scales of a matrix, and the quantizer that made them of it.

    Attributes:
        codes: uint8, 2-D, ``quantizer.codes_shape`` of the matrix.
        scale: Grid of the quantizer's blocks over ``codes``, 2-D.
        quantizer: In the coordinates of ``codes``.
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the matrix that the codes stand for; packed codes are fewer."""
        return shape_said(self.quantizer, "values_shape", self.codes.shape)

    def t(self) -> Operand:
        """The transposed matrix; no data moves."""
        return Operand(codes=self.codes.t(), scale=self.scale.t(), quantizer=_transposed(self.quantizer))

    def scale_values(self) -> Tensor:
        """The scales as float32 numbers."""
        return self.quantizer.scale_values(self.scale)


def select_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig | None = None
) -> str:
    """The code that multiplies operands of these quantizers on a device.

    Args:
        a: Of the left operand, over (m, k).
        b: Of the right operand, over (k, n).
        device: Where the codes are.
        out_dtype: Of the product.
        config: What the GEMM is allowed; None for no emulation on a GPU.

    Returns:
        ``"tensorwise"``, ``"rowwise"``, ``"scaled_after"``, ``"blockwise"``, ``"mx"`` or ``"emulated"``.

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
    float8 = a.gemm_format() is not None and b.gemm_format() is not None
    target = target_of(device)
    if target.type == "cpu":
        native = float8 and kind != "blockwise" and _compat.cpu_has_rowwise_gemm()
        return "rowwise" if native else "emulated"
    if target.type != "cuda":
        raise RuntimeError(f"scaled_mm: no FP8 GEMM on device {target.type!r}; it runs on 'cuda' and 'cpu'.")
    if (lacking := _lacks(kind, a, b, target)) is None:
        return _cuda_gemm(kind, a, target, out_dtype)
    if config is not None and config.emulate:
        return "emulated"
    raise RuntimeError(
        f"scaled_mm: {_codes_of(a)} with block {a.block} by {_codes_of(b)} with block {b.block} {lacking} This GPU "
        f"has compute capability {target.capability[0]}.{target.capability[1]}."
    )


def _codes_of(quantizer: Quantizer) -> str:
    stored = quantizer.gemm_format()
    return f"codes of {type(quantizer).__name__}" if stored is None else stored.name


def _cuda_gemm(kind: str, a: Quantizer, target: Target, out_dtype: torch.dtype) -> str:
    if kind == "blockwise":
        return "mx" if a.block[1] == MX_BLOCK else "blockwise"
    if kind == "rowwise" and (out_dtype != torch.bfloat16 or target.capability < (9, 0)):
        return "scaled_after"
    return kind


def _lacks(kind: str, a: Quantizer, b: Quantizer, target: Target) -> str | None:
    """Why a GPU has no GEMM for these, as the rest of a sentence and what to do; None if it has one."""
    if target.capability < (8, 9):
        return (
            "needs a GPU with FP8 tensor cores, compute capability 8.9 or more (L4, RTX 40, H100, B200). Leave the "
            "model in bfloat16 here."
        )
    asked = "Take a recipe that this GPU has, or ask for emulation in float64 (emulate=True), right and slow."
    if a.gemm_format() is None or b.gemm_format() is None:
        return (
            "has no GEMM: a GPU multiplies float8 codes, and only the quantizer's own dequantize knows what these "
            f"mean. {asked} If they are float8 numbers times the scale of their block, say so by gemm_format()."
        )
    if a.gemm_format() == b.gemm_format() == E5M2:
        return "has no GEMM: tensor cores multiply e4m3 by e4m3 or by e5m2. Make one of them e4m3."
    if kind != "blockwise":
        return None
    if _is_mx(a) and _is_mx(b):
        return None if target.capability >= (10, 0) else f"is MX, which needs compute capability 10.0 (B200). {asked}"
    if a.block[1] != BLOCK or a.block[0] == b.block[1] == BLOCK:
        return (
            f"has no GEMM on any GPU: they multiply (1, {BLOCK}) by ({BLOCK}, 1) or ({BLOCK}, {BLOCK}), the reverse, "
            f"and (1, {MX_BLOCK}) by ({MX_BLOCK}, 1) with E8M0 scales. {asked}"
        )
    # cuBLASLt has these on Hopper alone
    return None if target.capability[0] == 9 else f"needs a GPU of compute capability 9.0 (H100, H200). {asked}"


def _is_mx(quantizer: Quantizer) -> bool:
    return sorted(quantizer.block) == [1, MX_BLOCK] and quantizer.stores_e8m0()


def _padded_codes(kind: str, a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """Float8 codes in the layout of `_scaled_mm`: a row-major, b column-major, sides as multiples of 16.

    Zeros are appended along the sum, and on a GPU along n; where each row has scales of its own, along m as well.
    """
    (m, k), n = a.codes.shape, b.codes.shape[1]
    on_gpu = target_of(a.codes.device).type == "cuda"
    extra_k = -k % (MX_BLOCK if kind == "mx" else ALIGNMENT)
    extra_n = -n % ALIGNMENT if on_gpu else 0
    extra_m = -m % ALIGNMENT if kind in ("blockwise", "mx") else 0
    if _compat.is_unbacked(m):
        extra_m = 2  # rows of zeros: PyTorch asks `_scaled_mm` whether it has one row, and of two more it can tell
    # statically: a guard on M % 16 would compile the backward twice, for its sum runs over tokens
    rows = _padded(a.codes, extra_m, extra_k)
    columns = _padded(b.codes.t(), extra_n, extra_k)
    a_float8, b_float8 = a.quantizer.gemm_format().dtype, b.quantizer.gemm_format().dtype
    return rows.contiguous().view(a_float8), columns.contiguous().view(b_float8).t()


def _padded(x: Tensor, rows: int, columns: int, *, value: float = 0.0) -> Tensor:
    if _compat.statically_true(rows == 0) and _compat.statically_true(columns == 0):
        return x
    return pad(x, (0, columns, 0, rows), value=value)


def _row_scales(operand: Operand, rows: int) -> Tensor:
    """A scale a row, (rows, 1), from one for all or one each; rows beyond the operand's have 1."""
    m, scale = operand.codes.shape[0], operand.scale_values()
    if operand.quantizer.block[0] != 1:
        scale = scale.expand(m, 1)
    elif not all(_compat.statically_true(stride == 1) for stride in scale.stride()):
        scale = scale.reshape(-1).unsqueeze(1)  # a (1, m) scale that was turned, whose strides would not do
    return _padded(scale, rows - m, 0, value=1.0).contiguous()


def _block_scales(operand: Operand, rows: int) -> Tensor:
    """Scales of blocks along the sum, as Hopper's GEMM wants them."""
    values = operand.scale_values()
    if operand.quantizer.block[0] == BLOCK:
        return rows_of_fours(values)
    return down_the_rows(_padded(values, rows - values.shape[0], 0, value=1.0))


def _scales(kind: str, a: Operand, b: Operand, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Scales of a product (m, n), padding included, in the layout of its GEMM."""
    if kind == "tensorwise":
        return a.scale_values().reshape(()), b.scale_values().reshape(())
    if kind == "rowwise":
        return _row_scales(a, m), _row_scales(b.t(), n).t()
    if kind == "blockwise":
        return _block_scales(a, m), _block_scales(b.t(), n).t()
    if kind == "mx":
        return swizzled(a.scale), swizzled(b.scale.t())
    one = torch.ones((), device=a.codes.device)
    return one, one


def _native(kind: str, a: Operand, b: Operand, out_dtype: torch.dtype, *, fast_accumulation: bool) -> Tensor:
    rows, columns = _padded_codes(kind, a, b)
    (m, _), n = a.codes.shape, b.codes.shape[1]
    a_scale, b_scale = _scales(kind, a, b, rows.shape[0], columns.shape[1])
    fast = fast_accumulation and kind not in ("blockwise", "mx")
    product = torch._scaled_mm(rows, columns, a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=fast)
    if _compat.statically_true(product.shape[0] == m) and _compat.statically_true(product.shape[1] == n):
        return product
    return product[:m, :n].contiguous()


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    """The product of two quantized matrices.

    Args:
        a: (m, k).
        b: (k, n).
        out_dtype: float32, bfloat16 or float16.
        config: What the GEMM is allowed.

    Returns:
        (m, n), ``out_dtype``, contiguous. An empty sum gives zeros.
    """
    (m, k), (_, n) = a.shape, b.shape
    kind = select_gemm(a.quantizer, b.quantizer, a.codes.device, out_dtype, config)
    if any(_compat.guard_or_false(size == 0) for size in (m, k, n)):
        return a.codes.new_zeros((m, n), dtype=out_dtype)
    if kind == "emulated":
        return (_exact(a) @ _exact(b)).to(out_dtype)
    fast = config.fast_accumulation
    if kind == "scaled_after":
        product = _native(kind, a, b, torch.float32, fast_accumulation=fast)
        return (product * a.scale_values() * b.scale_values()).to(out_dtype)
    return _native(kind, a, b, out_dtype, fast_accumulation=fast)


def _exact(operand: Operand) -> Tensor:
    # realized: PyTorch 2.11 drops the float32 rounding of a scale that float64 code reads next
    return operand.quantizer.dequantize(operand.codes, realize(operand.scale), torch.float64)
