"""GemmConfig: options of a GEMM beside its operands."""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile.quantizers.constant import Constant

__all__ = ["GemmConfig"]


@dataclass(frozen=True, kw_only=True, repr=False)
class GemmConfig(Constant):
    """Options that a GEMM may use.

    Attributes:
        fast_accumulation: Whether it may accumulate in the tensor core's fewer bits. Off, partial sums are promoted to
            float32 (a "split accumulator"). A GEMM without such a mode (blockwise, MX, on a CPU) has none to use.
        emulate: Whether a GPU that has no such GEMM multiplies the exact values in float64 instead of raising: right,
            and slow.

    Raises:
        TypeError: A field is no bool.
    """

    fast_accumulation: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fast_accumulation", "emulate"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"GemmConfig: {name} is {getattr(self, name)!r}; it is True or False.")
