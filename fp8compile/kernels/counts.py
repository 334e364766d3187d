"""Counts that a kernel makes of its codes, for `fp8compile.Monitor`: a number for each program.

    amax          largest magnitude, as the bits of a float32, whose order is that of magnitudes
    underflow     elements with code 0 that are not 0
    saturation    elements beyond the largest code by more than half a step

`fp8compile.ops.counting_kernels` makes the same counts in PyTorch. A kernel without counts has none of this code. Kernels of
groups add to the numbers of each group instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_counts", "is_beyond", "is_underflow", "store_counts"]


@triton.jit
def is_underflow(magnitude, codes, MAGNITUDE_OF_CODE: tl.constexpr):
    """Whether each code is 0 and its value is not; magnitudes are bits, and a NaN's code is not 0."""
    return ((codes & MAGNITUDE_OF_CODE) == 0) & (magnitude != 0)


@triton.jit
def is_beyond(magnitude, scale, LIMIT: tl.constexpr):
    """Whether each value is beyond the limit of its block, whose scale is float32."""
    return (magnitude.to(tl.float32, bitcast=True) > scale * LIMIT) & (scale > 0)


@triton.jit
def store_counts(counts_ptr, direction: tl.constexpr, amax, underflow, saturation):
    """Store this program's counts, in (directions, 3, programs)."""
    columns, planes = tl.num_programs(1), tl.num_programs(2)
    program = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * columns + tl.program_id(1)
    programs = tl.num_programs(0) * columns * planes
    at = counts_ptr + 3 * direction * programs + program
    tl.store(at, amax)
    tl.store(at + programs, underflow)
    tl.store(at + 2 * programs, saturation)


@triton.jit
def add_counts(counts_ptr, direction: tl.constexpr, group, E, amax, underflow, saturation, is_group):
    """Add a program's counts to those of groups, in (directions, 3, E) int64."""
    at = counts_ptr + 3 * direction * E + group
    tl.atomic_max(at, amax.to(tl.int64), is_group, sem="relaxed")
    tl.atomic_add(at + E, underflow.to(tl.int64), is_group, sem="relaxed")
    tl.atomic_add(at + 2 * E, saturation.to(tl.int64), is_group, sem="relaxed")
