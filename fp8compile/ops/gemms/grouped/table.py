"""The table of grouped GEMMs, in the order in which a product asks them."""

from __future__ import annotations

from functools import lru_cache

import torch

from fp8compile.ops.gemms.grouped.blockwise import BLOCKWISE
from fp8compile.ops.gemms.grouped.kernel import GroupedGemm
from fp8compile.ops.gemms.grouped.mx import MX
from fp8compile.ops.gemms.grouped.one_by_one import ONE_BY_ONE
from fp8compile.ops.gemms.grouped.rowwise import ROWWISE
from fp8compile.ops.gemms.kernel import GemmProblem
from fp8compile.ops.gemms.table import refused
from fp8compile.quantizers import GemmConfig, Quantizer
from fp8compile.target import Target, target_of

__all__ = ["GROUPED_GEMMS", "grouped_calls", "selected_grouped_gemm"]

GROUPED_GEMMS = (ROWWISE, MX, BLOCKWISE, ONE_BY_ONE)


def grouped_calls() -> frozenset[str]:
    """Names of the operators that multiply groups of codes, such as ``"_scaled_grouped_mm"``."""
    return frozenset(call for gemm in GROUPED_GEMMS for call in gemm.calls)


@lru_cache(maxsize=256)  # each eager call asks
def _selected(a: Quantizer, b: Quantizer, target: Target, out_dtype: torch.dtype, config: GemmConfig) -> GroupedGemm:
    problem = GemmProblem(a=a, b=b, target=target, out_dtype=out_dtype, config=config)
    reasons = {gemm.name: gemm.lacks(problem) for gemm in GROUPED_GEMMS if gemm.takes(a, b)}
    running = [gemm for gemm in GROUPED_GEMMS if reasons.get(gemm.name, "") is None]
    if not running:
        raise refused("scaled_grouped_mm", problem, next(iter(reasons.values())))
    return running[0]


def selected_grouped_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig
) -> GroupedGemm:
    """The grouped GEMM that multiplies operands of these quantizers on a device.

    Args:
        a: Of the left operand, over (m, k) of one group.
        b: Of the right operand, over (k, n).
        device: Where the codes are.
        out_dtype: Of the product.
        config: What the GEMM is allowed.

    Raises:
        RuntimeError: This device has none.
    """
    return _selected(a, b, target_of(device), out_dtype, config)
