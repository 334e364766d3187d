"""The product of two quantized matrices: selects a GEMM and calls it.

If a GPU has no GEMM for two operands, the product raises and says which GPU has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.registration import new_gemm
from fp8compile.ops.gemms.table import gemm_for
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT
from fp8compile.quantizers import GemmConfig, Quantizer, gemm_kind
from fp8compile.target import Target, target_of

__all__ = ["ALIGNMENT", "PADDED_TO", "Quantized", "multiply", "register_gemm", "select_gemm", "selected_gemm"]

PADDED_TO = 32  # no GEMM pads sides that are multiples of this
NO_EMULATION = GemmConfig()


@lru_cache(maxsize=256)  # every eager call selects its GEMM
def _selected(a: Quantizer, b: Quantizer, target: Target, out_dtype: torch.dtype, config: GemmConfig) -> GemmKernel:
    if gemm_kind(a.block, b.block) is None:
        raise ValueError(
            f"scaled_mm: operand a has block {a.block} over (m, k), operand b {b.block} over (k, n); no GEMM can undo "
            "such scales. Tensorwise takes (-1, -1) by (-1, -1), rowwise (1, -1) by (-1, 1), blockwise (1, n) or "
            "(n, n) by (n, 1) or (n, n). Choose quantizers as the recipes of fp8compile.recipes do."
        )
    return gemm_for(GemmProblem(a=a, b=b, target=target, out_dtype=out_dtype, config=config))


def selected_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig | None = None
) -> GemmKernel:
    """The GEMM that multiplies operands (m, k) and (k, n) of these quantizers on a device.

    ``config`` None means no emulation on a GPU.

    Raises:
        ValueError: No GEMM on any device multiplies operands with these blocks.
        RuntimeError: This device has no GEMM for these operands.
    """
    return _selected(a, b, target_of(device), out_dtype, config or NO_EMULATION)


def select_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig | None = None
) -> str:
    """The name of the GEMM that `selected_gemm` returns, registered by another package or one of fp8compile's own.

    Names of fp8compile's own GEMMs are ``"tensorwise"``, ``"rowwise"``, ``"scaled_after"``, ``"scaled_by_mx"``,
    ``"blockwise"``, ``"blockwise_by_mx"``, ``"mx"``, ``"nvfp4"`` and ``"emulated"``.
    """
    return selected_gemm(a, b, device, out_dtype, config).name


def multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    """Multiply two quantized matrices (m, k) and (k, n) to a contiguous product in ``out_dtype``; zeros if k is 0."""
    (m, k), (_, n) = a.shape, b.shape
    gemm = selected_gemm(a.quantizer, b.quantizer, a.codes.device, out_dtype, config)
    if _compat.any_is_zero((m, k, n)):
        return a.codes.new_zeros((m, n), dtype=out_dtype)
    return gemm.multiply(a, b, out_dtype, config)


def register_gemm(
    name: str,
    *,
    takes: Callable[[Quantizer, Quantizer], bool] | None = None,
    lacks: Callable[[GemmProblem], str | None] | None = None,
    multiply: Callable[[Quantized, Quantized, torch.dtype, GemmConfig], Tensor] | None = None,
    detail: str = "",
    calls: tuple[str, ...] = (),
) -> GemmKernel:
    """Add a GEMM for operands that no other GEMM takes, such as operands of your own quantizer with its own codes.

    The new GEMM is tried after the GEMMs of fp8compile and before emulation, so it changes no product that has a GEMM
    already. Call this function in the module that defines the GEMM, when that module is imported. A graph that was
    compiled before the call keeps the GEMM that it has.

    Args:
        name: ``package::name``; `select_gemm`, ``fp8compile doctor`` and ``fp8compile explain`` show this name.
        takes: ``(a, b) -> bool``. Takes the two quantizers and returns whether the GEMM reads their codes and scales,
            whatever the device. ``type(a) is type(b) is YourQuantizer`` tests that the codes are your own. Check the
            quantizers' blocks here too. The answer is cached.
        lacks: ``(problem) -> str | None``. Called only if the GEMM takes the operands. Returns None if the device can
            run the GEMM; otherwise the reason and what to do, as the rest of a sentence about the operands. The
            answer is cached.
        multiply: ``(a, b, out_dtype, config) -> Tensor``. Returns the product of two operands (m, k) and (k, n), none
            of them empty, in ``out_dtype``, contiguous. Plain PyTorch: eager mode runs it and Inductor traces it. It
            must agree with the product of the dequantized operands, up to float32 roundings.
        detail: How the GEMM runs, in a few words.
        calls: Names of the PyTorch operators that multiply, such as ``("_int_mm",)``; reports count them. Name only
            operators that multiply nothing but codes.

    Returns:
        The registered GEMM.

    Raises:
        ValueError: The name has no package or is taken.
        TypeError: A function is missing, is not a function or takes other arguments; or ``detail`` or ``calls`` is
            not text.
    """
    given: dict[str, Any] = {"takes": takes, "lacks": lacks, "multiply": multiply}
    gemm = new_gemm(name, **given, detail=detail, calls=calls)
    _selected.cache_clear()
    return gemm
