"""Extensions of Inductor: lowerings, node marks for the partitioner, kernels that Inductor launches."""

from fp8compile._compat import constant, once_a_graph
from fp8compile.inductor.block_annotation import annotate_block, annotated_block
from fp8compile.inductor.inlining import inlined, traced
from fp8compile.inductor.is_fusible import (
    behind_reshapes,
    is_fusible,
    is_made_by_rows,
    is_pointwise,
    is_result_of,
    leaves_of,
)
from fp8compile.inductor.launches import register_launch
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
from fp8compile.inductor.partitioners import PARTITIONERS, min_cut_then
from fp8compile.inductor.registration import (
    register_decomposition,
    register_fallback,
    register_lowering,
)

__all__ = [
    "PARTITIONERS",
    "behind_reshapes",
    "annotate_block",
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
    "make_in_backward",
    "min_cut_then",
    "never_recompute",
    "annotated_block",
    "once_a_graph",
    "recomputed",
    "register_decomposition",
    "register_fallback",
    "register_launch",
    "register_lowering",
    "repeat_in_backward",
    "traced",
]
