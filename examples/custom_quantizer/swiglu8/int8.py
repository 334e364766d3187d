"""Int8: codes from -127 to 127 with a scale a row, and the GEMM that multiplies them by `torch._int_mm`.

    sum_MN int32, exact --> float32 --times the row's scale--> float32 --times the column's--> float32 --> dtype

Four roundings, of which the first does nothing below 2**24: sums over up to 1040 products of codes. The scale of a
block that isn't finite is NaN, and the product's row or column with it; its codes are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.library import (
    GemmConfig,
    GemmProblem,
    Operand,
    Quantizer,
    as_matrix,
    exact_quotient,
    expand_blocks,
    register_gemm,
)

__all__ = ["Int8", "int8_rowwise"]

ROWS, COLUMNS = (1, -1), (-1, 1)
LONGEST = (2**31 - 1) // 127**2  # sum that int32 holds, whatever the codes


def _cpu_multiplies_int8() -> bool:
    """Whether `torch._int_mm` of this CPU is exact: without VNNI instructions it clamps sums of two to 16 bits."""
    largest = torch.full((16, 16), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == 16 * 127**2).all())


CPU_IS_EXACT = _cpu_multiplies_int8()


@dataclass(frozen=True, repr=False)
class Int8(Quantizer):
    """Symmetric int8, a scale a row: amax is 127."""

    block: tuple[int, int] = ROWS

    def multiplier(self, amax: Tensor) -> Tensor:
        """127 / amax, at most the largest float32; 1 for a block of zeros, NaN for one that isn't finite."""
        quotient = exact_quotient(127.0, amax).clamp(max=torch.finfo(torch.float32).max)
        multiplier = torch.where(amax <= 0, 1.0, quotient)
        return torch.where(amax.isfinite(), multiplier, torch.nan)

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        """The nearest integers of the products, ties to even, as bytes."""
        scaled = as_matrix(x).float() * expand_blocks(multiplier, x.shape, self.block)
        codes = torch.where(scaled.isnan(), 0.0, scaled.round().clamp(-127, 127))
        return codes.to(torch.int8).view(torch.uint8).reshape(x.shape)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Integers times scales."""
        numbers = as_matrix(codes.view(torch.int8).to(dtype))
        return (numbers * expand_blocks(scale.to(dtype), codes.shape, self.block)).reshape(codes.shape)


def _takes(a: Quantizer, b: Quantizer) -> bool:
    # by the class itself: one that derives from it may mean something else by its codes
    return type(a) is type(b) is Int8 and (a.block, b.block) == (ROWS, COLUMNS)


def _lacks(problem: GemmProblem) -> str | None:
    if problem.target.type == "cpu":
        return None
    if problem.target.type == "cuda" and problem.target.capability >= (7, 5):
        return None
    return "needs a CPU, or a GPU of compute capability 7.5 or more, for torch._int_mm. Leave the model in bfloat16."


def _padded(codes: Tensor, least_rows: int) -> Tensor:
    """Codes with rows and columns of zeros, as a GPU wants them: more than 16 rows, all sides multiples of 8."""
    rows, columns = codes.shape
    more = torch.sym_max(least_rows - rows, 0) + (-torch.sym_max(rows, least_rows)) % 8
    return torch.nn.functional.pad(codes, (0, -columns % 8, 0, more)).contiguous()


def _multiply(a: Operand, b: Operand, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    (m, k), (_, n) = a.shape, b.shape
    torch._check_value(k <= LONGEST, lambda: f"int8_rowwise: the sum is over {k} products; int32 holds {LONGEST}.")
    # both with the sum along their rows, the right one turned: what cuBLASLt multiplies without a copy
    rows, columns = _padded(a.codes.view(torch.int8), 24), _padded(b.codes.view(torch.int8).t(), 8)
    if rows.device.type == "cpu" and not CPU_IS_EXACT:
        total = (rows.double() @ columns.t().double())[:m, :n]
    else:
        total = torch._int_mm(rows, columns.t())[:m, :n]
    return (total.float() * a.scale * b.scale).to(out_dtype)


int8_rowwise = register_gemm(
    "swiglu8::int8_rowwise",
    takes=_takes,
    lacks=_lacks,
    multiply=_multiply,
    detail="native, torch._int_mm with both scales after it (swiglu8)",
    calls=("_int_mm",),
)
