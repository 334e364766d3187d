"""Select the GEMM for two quantized matrices, and multiply them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.table import gemm_for
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT
from fp8compile.quantizers import GemmConfig, Quantizer, gemm_kind
from fp8compile.target import Target, target_of

__all__ = ["ALIGNMENT", "PADDED_TO", "Quantized", "forget_selected", "multiply", "select_gemm", "selected_gemm"]

PADDED_TO = 32  # no GEMM pads sides that are multiples of this
NO_EMULATION = GemmConfig()


@lru_cache(maxsize=256)  # every eager call selects its GEMM
def _selected(a: Quantizer, b: Quantizer, target: Target, out_dtype: torch.dtype, config: GemmConfig) -> GemmKernel:
    if gemm_kind(a.block, b.block) is None:
        raise ValueError(
            f"scaled_mm: operand a has block {a.block} over (m, k) and operand b has block {b.block} over (k, n), but "
            "no GEMM supports such scales. Tensorwise is (-1, -1) by (-1, -1), rowwise (1, -1) by (-1, 1), blockwise "
            "(1, n) or (n, n) by (n, 1) or (n, n). Choose quantizers as the recipes in fp8compile.recipes do."
        )
    return gemm_for(GemmProblem(a=a, b=b, target=target, out_dtype=out_dtype, config=config))


def selected_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig | None = None
) -> GemmKernel:
    """Return the GEMM that multiplies operands (m, k) and (k, n) of two quantizers on a device.

    Without ``config``, a GPU never emulates.

    Raises:
        ValueError: No GEMM on any device multiplies operands with these blocks.
        RuntimeError: This device has no GEMM for these operands.
    """
    return _selected(a, b, target_of(device), out_dtype, config or NO_EMULATION)


def select_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig | None = None
) -> str:
    """Return the name of the GEMM that multiplies operands (m, k) and (k, n) of two quantizers on a device.

    The name is ``"tensorwise"``, ``"rowwise"``, ``"scaled_after"``, ``"scaled_by_mx"``, ``"blockwise"``,
    ``"blockwise_by_mx"``, ``"mx"``, ``"nvfp4"``, ``"emulated"``, or the name of a GEMM that another package
    registered. Without ``config``, a GPU never emulates.

    Raises:
        ValueError: No GEMM on any device multiplies operands with these blocks.
        RuntimeError: This device has no GEMM for these operands.
    """
    return selected_gemm(a, b, device, out_dtype, config).name


def multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    """Multiply quantized matrices (m, k) and (k, n) to a contiguous product in ``out_dtype``, of zeros if k is 0."""
    (m, k), (_, n) = a.shape, b.shape
    gemm = selected_gemm(a.quantizer, b.quantizer, a.codes.device, out_dtype, config)
    if _compat.any_is_zero((m, k, n)):
        return _compat.without_elements(a.codes.new_zeros((m, n), dtype=out_dtype), *a.parts(), *b.parts())
    return gemm.multiply(a, b, out_dtype, config)


def forget_selected() -> None:
    """Clear the cache of selected GEMMs; call this after a change of the table of GEMMs."""
    _selected.cache_clear()
