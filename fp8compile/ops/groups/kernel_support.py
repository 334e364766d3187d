"""Which quantizers the GPU kernels for groups take; on a CPU the same ops take every quantizer."""

from __future__ import annotations

from fp8compile.ops.cast_transpose import LARGEST_BLOCK
from fp8compile.ops.groups.padding import alignment
from fp8compile.quantizers import CurrentScaling, Quantizer

__all__ = ["check_has_kernel", "has_block_kernel", "has_group_kernel"]

PER_GROUP = "(-1, 1), one scale per column of a group, or (-1, -1), one scale per group"
PER_BLOCK = f"(n, 1), where n divides {LARGEST_BLOCK}"


def _is_nearest(quantizer: Quantizer) -> bool:
    return type(quantizer) is CurrentScaling and quantizer.rounding == "nearest"


def has_group_kernel(quantizer: Quantizer) -> bool:
    """Whether `group_amax` and `group_cast` take a quantizer on a GPU."""
    return _is_nearest(quantizer) and quantizer.block in ((-1, 1), (-1, -1))


def has_block_kernel(quantizer: Quantizer) -> bool:
    """Whether `group_quantize` takes a quantizer on a GPU."""
    n, columns = quantizer.block
    return _is_nearest(quantizer) and n > 1 and columns == 1 and LARGEST_BLOCK % alignment(quantizer) == 0


def check_has_kernel(op: str, quantizer: Quantizer) -> None:
    """Raise a ValueError if the GPU kernel of ``op``, such as ``"group_cast"``, does not take a quantizer."""
    is_blocks = op == "group_quantize"
    if not (has_block_kernel if is_blocks else has_group_kernel)(quantizer):
        raise ValueError(
            f"fp8compile::{op}: the quantizer is {quantizer!r}; on a GPU it must be CurrentScaling with "
            f"rounding='nearest' and block {PER_BLOCK if is_blocks else PER_GROUP}. Use such a quantizer in the "
            "recipe, or None to leave the GEMM in high precision."
        )
