"""Stochastic rounding to four-bit codes by the instruction ``cvt.rs`` (compute capability 10.x).

    values a, b, c, d --cvt.rs--> four-bit codes d c b a; a value is rounded up if adding 8 bits of noise carries

Four values share one 32-bit hash as noise: each gets 8 bits instead of 24, so codes differ from those of
`fp8compile.quantizers.stochastic_rounding`. Source: NVIDIA, PTX ISA 8.7, ``cvt`` with ``.rs``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8compile.quantizers import TwoLevelScaling
from fp8compile.target import Target

__all__ = ["BY_HASH", "BY_INSTRUCTION", "NEAREST", "rounding_of"]

# the ways in which kernels round values to codes
NEAREST, BY_HASH, BY_INSTRUCTION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def rounding_of(quantizer: TwoLevelScaling, target: Target) -> int:
    """Return how a kernel for ``target`` rounds this quantizer's values: NEAREST, BY_HASH or BY_INSTRUCTION.

    Compute capability 12.x does not have the instruction ``cvt.rs``: ptxas refuses it for ``sm_120a``.
    """
    if quantizer.rounding == "nearest":
        return NEAREST.value
    by_instruction = quantizer.rounding == "stochastic_hardware" and target.capability[0] == 10 and not target.hip
    return BY_INSTRUCTION.value if by_instruction else BY_HASH.value


@triton.jit
def _four_codes(a, b, c, d, word):
    """Round four values by the noise ``word`` to codes in one int32, ``a`` lowest; NaN becomes the largest number."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 codes; cvt.rs.satfinite.e2m1x4.f32 codes, {$4, $3, $2, $1}, $5; cvt.u32.u16 $0, codes; }",
        "=r,r,r,r,r,r",
        [a, b, c, d, word],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _in_fours(values):
    """Split (R, B, 16) into four (R, B, 4): first, second, third and last of every four neighbours."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], values.shape[1], 4, 2, 2)))
    first, third = tl.split(even)
    second, last = tl.split(odd)
    return first, second, third, last
