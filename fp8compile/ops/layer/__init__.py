"""The ops of linear layers, a set for each placement; a placement says which shard of each tensor is on this rank.

layer_ops.py               registers the ops of every placement
placed_op.py               registers one op: its schema, and what it saves for the backward
register_layer.py          registers all ops of one placement
output_and_gradients.py    the three GEMMs, for every placement
placements.py              placements: whole tensors, shards over a group of ranks, FSDP
delayed_scaling_placements.py, delayed_scaling_state.py   placements with the state of delayed scaling
multiply_over_ranks.py     a GEMM of sharded operands: what ranks gather and what they sum
operands.py                codes and scales of a GEMM's operands
quantize_over_ranks.py     amax, scale and cast of a shard of a matrix or of stacked matrices
quantize_groups.py         amax, scale and cast of rows that are sorted by group
one_read.py                kernels that read a tensor once for two GEMMs
gather_operands.py         gathers the shards of a tensor, or narrows a tensor to a shard
kept_input.py              four-bit codes of the input that eager mode keeps for the backward
statistics/                statistics of the operands, for `fp8compile.Monitor`
"""

from fp8compile.ops.layer.layer_ops import GEMM_OPS, LAYER_OPS, OPS_OF_LAYERS

__all__ = ["GEMM_OPS", "LAYER_OPS", "OPS_OF_LAYERS"]
