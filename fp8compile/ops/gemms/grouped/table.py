"""The table of grouped GEMMs, in the order in which they are tried for a product."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE
from fp8compile.ops.gemms.grouped.interface import REGISTERED_GROUPED, GroupedGemm, Multiply
from fp8compile.ops.gemms.grouped.mx import MX
from fp8compile.ops.gemms.grouped.nvfp4 import NVFP4
from fp8compile.ops.gemms.grouped.rowwise import ROWWISE
from fp8compile.ops.gemms.grouped.triton_gemms import BLOCKWISE, ROWWISE_TRITON
from fp8compile.ops.gemms.interface import GemmProblem
from fp8compile.ops.gemms.registration import new_grouped_gemm
from fp8compile.ops.gemms.table import first_running
from fp8compile.quantizers import GemmConfig, Quantizer
from fp8compile.target import Target, target_of

__all__ = ["grouped_calls", "register_grouped_gemm", "selected_grouped_gemm"]

NATIVE = (ROWWISE, ROWWISE_TRITON, MX, BLOCKWISE, NVFP4)
BEFORE_OURS: set[str] = set()  # names of registered GEMMs that are tried first


def _tiers() -> tuple[tuple[GroupedGemm, ...], ...]:
    """All grouped GEMMs, in the order in which they are tried."""
    first = tuple(gemm for name, gemm in REGISTERED_GROUPED.items() if name in BEFORE_OURS)
    last = tuple(gemm for name, gemm in REGISTERED_GROUPED.items() if name not in BEFORE_OURS)
    return first, NATIVE, last, (ONE_BY_ONE,)


def grouped_calls() -> frozenset[str]:
    """Names of the operators that multiply groups of codes, such as ``"_scaled_grouped_mm"``."""
    return frozenset(call for tier in _tiers() for gemm in tier for call in gemm.calls)


@lru_cache(maxsize=256)  # every eager call selects its GEMM
def _selected(a: Quantizer, b: Quantizer, target: Target, out_dtype: torch.dtype, config: GemmConfig) -> GroupedGemm:
    problem = GemmProblem(a=a, b=b, target=target, out_dtype=out_dtype, config=config)
    return first_running("scaled_grouped_mm", problem, _tiers(), REGISTERED_GROUPED)


def selected_grouped_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig
) -> GroupedGemm:
    """The grouped GEMM that multiplies operands of these quantizers on a device.

    Args:
        a: Quantizer of the left operand, over (m, k) of one group.
        b: Quantizer of the right operand, over (k, n).
        device: Device of the codes.
        out_dtype: Dtype of the product.
        config: Options of the GEMM, such as emulation.

    Raises:
        RuntimeError: No grouped GEMM takes these operands on this device.
    """
    return _selected(a, b, target_of(device), out_dtype, config)


def register_grouped_gemm(
    name: str,
    *,
    takes: Callable[[Quantizer, Quantizer], bool] | None = None,
    lacks: Callable[[GemmProblem], str | None] | None = None,
    rows: Multiply | None = None,
    outer: Multiply | None = None,
    detail: str = "",
    calls: tuple[str, ...] = (),
    is_opaque: bool = False,
    before_ours: bool = False,
) -> GroupedGemm:
    """Add a grouped GEMM, such as another library's, for layers of experts.

    Call this function in the module that defines the GEMM, when that module is imported. A graph that was compiled
    before the call keeps the GEMM that it has.

    Args:
        name: ``package::name``; ``fp8compile doctor`` and ``fp8compile explain`` show this name.
        takes: ``(a, b) -> bool``, as for `register_gemm`. Takes two quantizers, over (m, k) and (k, n) of one group.
        lacks: ``(problem) -> str | None``, as for `register_gemm`.
        rows: ``(a, b, offsets, out_dtype, config) -> Tensor``. Multiplies each row of a, (R, K), by the matrix of its
            group in b, (E, N, K). Returns (R, N), zeros in rows after the last group. `Quantized` documents the
            layout of codes and scales.
        outer: ``(a, b, offsets, out_dtype, config) -> Tensor``. Multiplies a, (N, C), and b, (K, C), and sums over the
            tokens of each group. Returns (E, N, K), zeros for a group without tokens.
        detail: How the GEMM runs, in a few words.
        calls: Names of the operators that multiply codes; reports count them.
        is_opaque: Whether the GEMM reads the data of ``offsets`` on the host. Compiled code can't do that, so the op
            then stays one call.
        before_ours: Whether this GEMM is tried before those of fp8compile, and so replaces one of them on a device
            where it runs. If False, it is tried after them, and changes no product that has a GEMM already.

    Returns:
        The registered GEMM.

    Raises:
        ValueError: The name has no package or is taken.
        TypeError: A function is missing, is not a function or takes other arguments; or ``detail`` or ``calls`` is
            not text.
    """
    parts: dict[str, Any] = {"takes": takes, "lacks": lacks, "rows": rows, "outer": outer}
    gemm = new_grouped_gemm(name, **parts, detail=detail, calls=calls, is_opaque=is_opaque)
    REGISTERED_GROUPED[name] = gemm
    if before_ours:
        BEFORE_OURS.add(name)
    _selected.cache_clear()
    return gemm
