"""The product of two quantized matrices: it selects a GEMM and calls it.

The GEMMs are values in the table of `fp8compile.ops.gemms`. Nothing here falls back on its own: a pair without a GEMM
on a GPU raises and says which GPU has one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.float8 import ALIGNMENT
from fp8compile.ops.gemms.kernel import GemmKernel, GemmProblem
from fp8compile.ops.gemms.registration import new_gemm
from fp8compile.ops.gemms.table import gemm_for
from fp8compile.quantizers import GemmConfig, Quantizer, gemm_kind
from fp8compile.target import Target, target_of

__all__ = ["ALIGNMENT", "PADDED_TO", "Quantized", "multiply", "register_gemm", "select_gemm", "selected_gemm"]

PADDED_TO = 32  # no GEMM pads sides that are multiples of this
NO_EMULATION = GemmConfig()


@lru_cache(maxsize=256)  # each eager call asks
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
    """The GEMM that multiplies operands of these quantizers on a device.

    Args:
        a: Quantizer of the left operand, over (m, k).
        b: Quantizer of the right operand, over (k, n).
        device: Device of the codes.
        out_dtype: Dtype of the product.
        config: What the GEMM is allowed; None for no emulation on a GPU.

    Raises:
        ValueError: No GEMM multiplies such blocks anywhere.
        RuntimeError: This device has none.
    """
    return _selected(a, b, target_of(device), out_dtype, config or NO_EMULATION)


def select_gemm(
    a: Quantizer, b: Quantizer, device: torch.device, out_dtype: torch.dtype, config: GemmConfig | None = None
) -> str:
    """The name of the GEMM that `selected_gemm` returns.

    Returns:
        ``"tensorwise"``, ``"rowwise"``, ``"scaled_after"``, ``"blockwise"``, ``"mx"``, ``"nvfp4"``, ``"emulated"``,
        or the name of one that was registered.
    """
    return selected_gemm(a, b, device, out_dtype, config).name


def multiply(a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
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
    """Add a GEMM for operands that no other GEMM takes, such as those of a quantizer with codes of its own.

    It is asked after ours and before emulation, so it changes no product that has a GEMM. Register it in the module
    that defines it, when that is imported: a graph that was compiled before keeps the GEMM which it has.

    Args:
        name: ``package::name``; `select_gemm`, ``fp8compile doctor`` and ``fp8compile explain`` call it so.
        takes: ``(a, b) -> bool``, of the two quantizers: whether the GEMM reads their codes and scales, whatever the
            device. ``type(a) is type(b) is YourQuantizer`` says that the codes are your own; blocks are looked at
            here, too. Its answer is remembered.
        lacks: ``(problem) -> str | None``, asked where it takes the operands: None where it runs; otherwise the
            reason and what to do, as the rest of a sentence about the operands. Its answer is remembered.
        multiply: ``(a, b, out_dtype, config) -> Tensor``: the product of operands (m, k) and (k, n) without an empty
            side, in ``out_dtype``, contiguous. Plain PyTorch: eager mode runs it and Inductor traces it. It agrees
            with the product of what ``dequantize`` gives, up to float32 roundings.
        detail: How it runs, in a few words.
        calls: Names of the PyTorch operators that multiply, such as ``("_int_mm",)``, by which reports count them;
            only those that multiply nothing but codes.

    Returns:
        The GEMM.

    Raises:
        ValueError: The name has no package or is taken.
        TypeError: A function is left out, is none or takes other arguments; ``detail`` or ``calls`` is no text.
    """
    given: dict[str, Any] = {"takes": takes, "lacks": lacks, "multiply": multiply}
    gemm = new_gemm(name, **given, detail=detail, calls=calls)
    _selected.cache_clear()
    return gemm
