"""Extensions of Inductor: lowerings, marks for the partitioner, and kernels that also compute their input."""

from fp8compile.inductor.fusion import is_fusible, is_made_by_rows, is_result_of
from fp8compile.inductor.noted_blocks import block_noted, noted_block
from fp8compile.inductor.partitioner_marks import (
    is_left_in_backward,
    is_repeated_in_backward,
    left_in_backward,
    left_in_forward,
    make_in_backward,
    never_recompute,
    recomputed,
    repeat_in_backward,
)
from fp8compile.inductor.partitioners import min_cut_then, traced_function
from fp8compile.inductor.prologues import register_tile_kernel
from fp8compile.inductor.registration import register_decomposition, register_fallback, register_lowering
from fp8compile.inductor.row_counts import lower_counts_of_rows
from fp8compile.inductor.row_groups import lower_largest_of_sums
from fp8compile.inductor.shared_by_forward_and_backward import constant, once_a_graph, once_with_more
from fp8compile.inductor.tile_kernels import TileKernel, TileLaunch, with_counts

__all__ = [
    "TileKernel",
    "TileLaunch",
    "block_noted",
    "constant",
    "is_fusible",
    "is_left_in_backward",
    "is_made_by_rows",
    "is_repeated_in_backward",
    "is_result_of",
    "left_in_backward",
    "left_in_forward",
    "lower_counts_of_rows",
    "lower_largest_of_sums",
    "make_in_backward",
    "min_cut_then",
    "never_recompute",
    "noted_block",
    "once_a_graph",
    "once_with_more",
    "recomputed",
    "register_decomposition",
    "register_fallback",
    "register_lowering",
    "register_tile_kernel",
    "repeat_in_backward",
    "traced_function",
    "with_counts",
]
