"""Small products that ``fp8compile doctor`` runs on a GPU and compares bit for bit with exact results.

There are cases for each entry of `gpu_support.PRODUCTS`. The operands come from `self_test_operands`, with which all
correct GEMMs return the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from fp8compile.cli import self_test_operands as exact
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms import table
from fp8compile.ops.gemms.grouped import table as grouped
from fp8compile.ops.gemms.grouped.interface import GroupedGemm
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.groups.padding import spans
from fp8compile.quantizers import CurrentScaling, GemmConfig, Quantizer, TwoLevelScaling, transposed
from fp8compile.target import Target, pretend_target

__all__ = ["ProductCase", "product_cases"]

FORMATS = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# each pair of formats to bfloat16, and e4m3 by e4m3 to each dtype: a GPU compiles our Triton kernels for each
FORMATS_TO = (*((formats, DTYPES[0]) for formats in FORMATS), *((FORMATS[0], dtype) for dtype in DTYPES[1:]))
BY_MX = "scaled by MX"  # the product that a recipe asks for by `by_mx=True`
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Blocks = tuple[tuple[int, int], tuple[int, int]]


def _shown(block: tuple[int, int]) -> str:
    return "x".join("all" if size == -1 else str(size) for size in block)


@dataclass(frozen=True, kw_only=True)
class ProductCase:
    """A test case of a GEMM: its quantizers, options and dtype.

    Attributes:
        product: The key in `gpu_support.PRODUCTS`.
        gemm: The GEMM that computes the product, for two matrices or for groups.
        a: Quantizer of the left operand, over (m, k); over (tokens, m) if ``over_tokens``.
        b: Quantizer of the right operand, over (n, k); over (tokens, n) if ``over_tokens``.
        fast_accumulation: Whether partial sums may stay in the tensor core, which has fewer bits than float32.
        over_tokens: Whether a grouped product sums over the tokens of each group, as for grad_weight.
    """

    product: str
    gemm: GemmKernel | GroupedGemm
    a: Quantizer
    b: Quantizer
    out_dtype: torch.dtype
    fast_accumulation: bool = False
    over_tokens: bool = False

    def __str__(self) -> str:
        sides = (f"{each.format} {_shown(each.block)}" for each in self._sides())
        options = (", fast accumulation" if self.fast_accumulation else "") + (
            ", over tokens" if self.over_tokens else ""
        )
        return f"{' by '.join(sides)} to {SHORT[self.out_dtype]}{options}"

    def _sides(self) -> tuple[Quantizer, Quantizer]:
        """Return the quantizers of the GEMM's operands (m, k) and (k, n): ``a`` or ``b`` is transposed for this."""
        return (transposed(self.a), self.b) if self.over_tokens else (self.a, transposed(self.b))

    @property
    def config(self) -> GemmConfig:
        """Return the options of the GEMM."""
        return GemmConfig(fast_accumulation=self.fast_accumulation, by_mx=self.product == BY_MX)

    def refusal(self, target: Target) -> str | None:
        """Return why the GEMM can't run on a target, or None if it can."""
        a, b = self._sides()
        problem = GemmProblem(a=a, b=b, target=target, out_dtype=self.out_dtype, config=self.config)
        return self.gemm.lacks(problem)

    def expected(self) -> Tensor:
        """Compute the correct result on a CPU: the product of the exact values, rounded once to ``out_dtype``."""
        a, b = (side.values for side in _operands(self))
        if isinstance(self.gemm, GemmKernel):
            return (a @ b.t()).to(self.out_dtype)
        groups = [(group, rows) for group, (rows, _) in enumerate(spans(exact.offsets(), 1))]
        if self.over_tokens:
            return torch.stack([a[rows].t() @ b[rows] for _, rows in groups]).to(self.out_dtype)
        result = torch.zeros(a.shape[0], b.shape[1], dtype=self.out_dtype)
        for group, rows in groups:
            result[rows] = (a[rows] @ b[group].t()).to(self.out_dtype)
        return result

    def result(self, device: torch.device) -> Tensor:
        """Run the GEMM on a device; returns its result, moved to the CPU."""
        a, b = (exact.on(side.operand, device) for side in _operands(self))
        return self._multiplied(a, b, device).cpu()

    def _multiplied(self, a: Quantized, b: Quantized, device: torch.device) -> Tensor:
        if isinstance(self.gemm, GemmKernel):
            return self.gemm.multiply(a, b.t(), self.out_dtype, self.config)
        run = self.gemm.outer if self.over_tokens else self.gemm.rows
        return run(a, b, exact.offsets().to(device), self.out_dtype, self.config)


@lru_cache(maxsize=128)
def _made(quantizer: Quantizer, kind: str, seed: int) -> exact.Exact:
    with pretend_target(Target("cpu")):  # a GPU may be pretended for the product, and operands are made on the CPU
        return _made_on_cpu(quantizer, kind, seed)


def _made_on_cpu(quantizer: Quantizer, kind: str, seed: int) -> exact.Exact:
    m, n, _ = exact.SIZES
    if kind == "matrix":
        return exact.matrix(quantizer, m if seed == 1 else n, seed)
    if kind == "tokens":
        return exact.tokens_of_groups(quantizer, m if seed == 1 else n, seed)
    return exact.rows_of_groups(quantizer, seed) if kind == "rows" else exact.stack(quantizer, seed)


def _operands(case: ProductCase) -> tuple[exact.Exact, exact.Exact]:
    if isinstance(case.gemm, GemmKernel):
        kinds = "matrix", "matrix"
    else:
        kinds = ("tokens", "tokens") if case.over_tokens else ("rows", "stack")
    return _made(case.a, kinds[0], 1), _made(case.b, kinds[1], 2)


# ---------------------------------------------------------------------------------- the cases


def _float8(
    name: str, gemm: GemmKernel | GroupedGemm, blocks: tuple[Blocks, ...], *, scale: str = "fp32",
    fast: tuple[bool, ...] = (False,), over_tokens: bool = False,
) -> Iterator[ProductCase]:  # fmt: skip
    for (a_block, b_block), ((a_format, b_format), out_dtype), is_fast in product(blocks, FORMATS_TO, fast):
        yield ProductCase(
            product=name, gemm=gemm, out_dtype=out_dtype, fast_accumulation=is_fast, over_tokens=over_tokens,
            a=CurrentScaling(format=a_format, block=a_block, scale=scale),
            b=CurrentScaling(format=b_format, block=b_block, scale=scale),
        )  # fmt: skip


def _four_bits(
    name: str, gemm: GemmKernel | GroupedGemm, blocks: tuple[Blocks, ...], packed: str, *, over_tokens: bool = False
) -> Iterator[ProductCase]:
    for a_block, b_block in blocks:
        for dtype in DTYPES:
            a, b = (TwoLevelScaling(block=block, packed=packed) for block in (a_block, b_block))
            yield ProductCase(product=name, gemm=gemm, a=a, b=b, out_dtype=dtype, over_tokens=over_tokens)


TENSOR, ROW, COLUMN = (-1, -1), (1, -1), (-1, 1)
BOTH = (False, True)  # without and with fast accumulation


def _lines_and_tiles(size: int) -> tuple[Blocks, ...]:
    return ((1, size), (1, size)), ((1, size), (size, size))


@lru_cache(maxsize=1)
def product_cases() -> tuple[ProductCase, ...]:
    """Return all cases, in the order of `gpu_support.PRODUCTS`."""
    rows = ((ROW, ROW), (TENSOR, TENSOR))
    tokens = ((COLUMN, COLUMN), (TENSOR, TENSOR))
    return (
        *_float8("tensorwise", table.TENSORWISE, ((TENSOR, TENSOR),), fast=BOTH),
        *_float8("tensorwise", table.SCALED_AFTER, ((ROW, ROW),)),
        *_float8("rowwise", table.ROWWISE, ((ROW, ROW),), fast=BOTH),
        *_float8("blockwise", table.BLOCKWISE, (*_lines_and_tiles(128), ((128, 128), (1, 128)))),
        *_float8(
            "blockwise, powers of two",
            table.BLOCKWISE_BY_MX,
            (*_lines_and_tiles(128), ((128, 128), (1, 128))),
            scale="pow2",
        ),
        *_float8(BY_MX, table.SCALED_BY_MX, rows),
        *_float8("mx", table.MX, _lines_and_tiles(32), scale="e8m0_rceil"),
        *_four_bits("nvfp4", table.NVFP4, _lines_and_tiles(16), "rows"),
        *_float8("rowwise groups", grouped.ROWWISE, rows, fast=BOTH),
        *_float8("rowwise groups", grouped.ROWWISE, tokens, fast=BOTH, over_tokens=True),
        *_float8("rowwise groups, ours", grouped.ROWWISE_TRITON, rows),
        *_float8("rowwise groups, ours", grouped.ROWWISE_TRITON, tokens, over_tokens=True),
        *_float8("blockwise groups", grouped.BLOCKWISE, _lines_and_tiles(128)),
        *_float8("blockwise groups", grouped.BLOCKWISE, (((128, 1), (128, 1)),), over_tokens=True),
        *_float8("mx groups", grouped.MX, _lines_and_tiles(32), scale="e8m0_rceil"),
        *_float8("mx groups", grouped.MX, (((32, 1), (32, 1)),), scale="e8m0_rceil", over_tokens=True),
        *_four_bits("nvfp4 groups", grouped.NVFP4, _lines_and_tiles(16), "rows"),
        *_four_bits("nvfp4 groups", grouped.NVFP4, (((16, 1), (16, 1)),), "columns", over_tokens=True),
    )
