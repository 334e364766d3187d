"""Extensions of Inductor: lowerings, node marks for the partitioner, kernels that fuse their input."""

from fp8compile.inductor.inlining import inlined, traced
from fp8compile.inductor.is_fusible import (
    behind_reshapes,
    is_fusible,
    is_made_by_rows,
    is_pointwise,
    is_result_of,
    leaves_of,
)
from fp8compile.inductor.lower_row_counts import lower_counts_of_rows
from fp8compile.inductor.lower_row_groups import lower_largest_of_sums
from fp8compile.inductor.noted_blocks import block_noted, noted_block
from fp8compile.inductor.once_a_graph import constant, once_a_graph, once_with_more
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
from fp8compile.inductor.partitioners import min_cut_then
from fp8compile.inductor.prologue_fusion import register_tile_kernel
from fp8compile.inductor.registration import (
    register_decomposition,
    register_fallback,
    register_joint_pass,
    register_lowering,
)
from fp8compile.inductor.tile_kernels import COUNTS, TileKernel, TileLaunch, TileMatrix, with_counts

__all__ = [
    "COUNTS",
    "TileKernel",
    "TileLaunch",
    "TileMatrix",
    "behind_reshapes",
    "block_noted",
    "constant",
    "inlined",
    "is_fusible",
    "is_left_in_backward",
    "is_made_by_rows",
    "is_pointwise",
    "is_repeated_in_backward",
    "is_result_of",
    "leaves_of",
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
    "register_joint_pass",
    "register_lowering",
    "register_tile_kernel",
    "repeat_in_backward",
    "traced",
    "with_counts",
]
