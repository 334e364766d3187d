"""Distributed training: tensor, sequence and expert parallelism, and FSDP.

A converted model also works with PyTorch's own DTensor plans. The plans here communicate fewer bytes. Code that stores
each rank's shard in plain tensors can call the functions that accept a process group.
"""

from fp8compile.nn.experts.spread_over_ranks import spread_experts
from fp8compile.nn.layer.expert_routes import Routes, expert_routes
from fp8compile.parallel.broadcast_parameters import broadcast_parameters
from fp8compile.parallel.clip_grad_norm import clip_grad_norm_
from fp8compile.parallel.expert_gradients import average_expert_gradients, expert_parameters
from fp8compile.parallel.expert_parallel import ExpertParallel, overflowed_rows
from fp8compile.parallel.fsdp2.fsdp_float8_all_gather import fsdp_float8_all_gather
from fp8compile.parallel.fsdp2.share_scales import share_scales
from fp8compile.parallel.graph_fsdp.graph_fsdp import graph_fsdp
from fp8compile.parallel.tensor_parallel_grouped import column_parallel_grouped_linear, row_parallel_grouped_linear
from fp8compile.parallel.tensor_parallel_linear import column_parallel_linear, row_parallel_linear
from fp8compile.parallel.tensor_parallel_styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "Routes",
    "RowwiseParallel",
    "average_expert_gradients",
    "broadcast_parameters",
    "clip_grad_norm_",
    "column_parallel_grouped_linear",
    "column_parallel_linear",
    "expert_parameters",
    "expert_routes",
    "fsdp_float8_all_gather",
    "graph_fsdp",
    "overflowed_rows",
    "row_parallel_grouped_linear",
    "row_parallel_linear",
    "share_scales",
    "spread_experts",
]
