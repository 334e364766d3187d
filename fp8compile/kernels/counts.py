"""Statistics of codes that kernels make, for `fp8compile.Monitor`: three numbers per Triton program or group of rows.

    amax          largest magnitude, as float32 bits, which sort like magnitudes
    underflow     number of elements that are not 0 and have the code 0
    saturation    number of elements beyond the largest code by more than half a step

`fp8compile.ops.counting_kernels` computes the same numbers in PyTorch. A kernel launched without ``counts_ptr`` is
compiled without this code.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_counts", "is_beyond", "is_underflow", "store_counts"]


@triton.jit
def is_underflow(magnitude, codes, MAGNITUDE_OF_CODE: tl.constexpr):
    """Whether each code is 0 while its value's magnitude (int32 bits) is not; MAGNITUDE_OF_CODE masks the sign out."""
    return ((codes & MAGNITUDE_OF_CODE) == 0) & (magnitude != 0)


@triton.jit
def is_beyond(magnitude, scale, LIMIT: tl.constexpr):
    """Whether each magnitude (int32 bits) is above LIMIT times its block's scale; False for a scale of 0 or NaN."""
    return (magnitude.to(tl.float32, bitcast=True) > scale * LIMIT) & (scale > 0)


@triton.jit
def store_counts(counts_ptr, direction: tl.constexpr, amax, underflow, saturation):
    """Store this Triton program's amax, underflows and saturations in ``counts_ptr``, (directions, 3, programs).

    ``direction`` is the index in the first dim.
    """
    columns, planes = tl.num_programs(1), tl.num_programs(2)
    program = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * columns + tl.program_id(1)
    programs = tl.num_programs(0) * columns * planes
    at = counts_ptr + 3 * direction * programs + program
    tl.store(at, amax)
    tl.store(at + programs, underflow)
    tl.store(at + 2 * programs, saturation)


@triton.jit
def add_counts(counts_ptr, direction: tl.constexpr, group, E, amax, underflow, saturation, is_group):
    """Update the amaxes and add to the counts of groups in ``counts_ptr``, (directions, 3, E) int64, atomically.

    ``direction`` is the index in the first dim, and ``group`` the indices in the last dim, masked by ``is_group``.
    """
    at = counts_ptr + 3 * direction * E + group
    tl.atomic_max(at, amax.to(tl.int64), is_group, sem="relaxed")
    tl.atomic_add(at + E, underflow.to(tl.int64), is_group, sem="relaxed")
    tl.atomic_add(at + 2 * E, saturation.to(tl.int64), is_group, sem="relaxed")
