"""GemmConfig: the options of a GEMM, apart from its operands."""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile.quantizers.constant import Constant

__all__ = ["GemmConfig"]


@dataclass(frozen=True, kw_only=True, repr=False)
class GemmConfig(Constant):
    """The options of a GEMM, apart from its operands.

    Attributes:
        fast_accumulation: Whether the GEMM may accumulate in the tensor core's reduced precision. If False, partial
            sums are promoted to float32 (a "split accumulator"). GEMMs without such a mode (blockwise, MX, on a CPU)
            ignore this option.
        emulate: Whether a GPU that has no GEMM for the operands multiplies the exact values in float64, slowly,
            instead of raising an error.
        by_mx: Whether a GPU of compute capability 12.0 runs tensorwise and rowwise GEMMs with its MX GEMM.

    Raises:
        TypeError: A field is not a bool.
    """

    fast_accumulation: bool = False
    emulate: bool = False
    by_mx: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fast_accumulation", "emulate", "by_mx"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"GemmConfig: `{name}` is {getattr(self, name)!r}; it must be True or False.")
