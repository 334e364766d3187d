"""The linear layer: its ops in graphs, one for each placement of its tensors, and the ops' steps.

layer_ops.py               registers the ops, one line for each placement
placed_op.py               registers one op for one placement: its schema, and what it saves for the backward
register_layer.py          turns a placement into the ops of a layer
output_and_gradients.py    the three products, for every placement
placements.py              where tensors lie and what follows: over a group of ranks, over FSDP
delayed_scaling_placements.py, delayed_scaling_state.py   placements with the state of delayed scaling
multiply_over_ranks.py     what ranks gather and sum for a product of their parts: one table
operands.py                codes and scales of a product's operands
quantize_over_ranks.py     amax, scale and cast of a rank's part of a matrix or of a stack
quantize_groups.py         amax, scale and cast of rows that are sorted by group
one_read.py                kernels that read a tensor once for two purposes
gather_operands.py         gathers the parts of a tensor over ranks, or narrows it to one part
kept_input.py              the codes that eager mode keeps of an input
statistics/                what a Monitor reads of the operands
"""

from fp8compile.ops.layer.layer_ops import GEMM_OPS, LAYER_OPS, OPS_OF_LAYERS

__all__ = ["GEMM_OPS", "LAYER_OPS", "OPS_OF_LAYERS"]
