"""The table of grouped GEMMs, in the order in which they are tried for a product."""

from __future__ import annotations

from functools import lru_cache

import torch

from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE
from fp8compile.ops.gemms.grouped.interface import REGISTERED_GROUPED, GroupedGemm
from fp8compile.ops.gemms.grouped.mx import MX
from fp8compile.ops.gemms.grouped.nvfp4 import NVFP4
from fp8compile.ops.gemms.grouped.rowwise import ROWWISE
from fp8compile.ops.gemms.grouped.triton_gemms import BLOCKWISE, ROWWISE_TRITON
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.ops.gemms.table import first_running
from fp8compile.quantizers import GemmConfig, Quantizer
from fp8compile.target import Target, target_of

__all__ = ["BEFORE_OURS", "forget_selected", "grouped_calls", "selected_grouped_gemm"]

NATIVE = (ROWWISE, ROWWISE_TRITON, MX, BLOCKWISE, NVFP4)
BEFORE_OURS: set[str] = set()  # names of registered GEMMs that are tried first


def _tiers() -> tuple[tuple[GroupedGemm, ...], ...]:
    first = tuple(gemm for name, gemm in REGISTERED_GROUPED.items() if name in BEFORE_OURS)
    last = tuple(gemm for name, gemm in REGISTERED_GROUPED.items() if name not in BEFORE_OURS)
    return first, NATIVE, last, (ONE_BY_ONE,)


def grouped_calls() -> frozenset[str]:
    """Return the names of the operators that multiply groups of codes, such as ``"_scaled_grouped_mm"``."""
    return frozenset(call for tier in _tiers() for gemm in tier for call in gemm.calls)


@lru_cache(maxsize=256)  # every eager call selects its GEMM
def _selected(a: Quantizer, b: Quantizer, target: Target, out_dtype: torch.dtype, config: GemmConfig) -> GroupedGemm:
    problem = GemmProblem(a=a, b=b, target=target, out_dtype=out_dtype, config=config)
    return first_running("scaled_grouped_mm", problem, _tiers(), REGISTERED_GROUPED)


def selected_grouped_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig
) -> GroupedGemm:
    """Return the grouped GEMM for quantizers ``a``, over (m, k) of one group, and ``b``, over (k, n).

    Raises:
        RuntimeError: No grouped GEMM takes these operands on this device.
    """
    return _selected(a, b, target_of(device), out_dtype, config)


def forget_selected() -> None:
    """Clear the cache of selected grouped GEMMs, after the table has changed."""
    _selected.cache_clear()
