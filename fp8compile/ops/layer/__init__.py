"""The linear layer: its ops in graphs, for every placement of its tensors, and what they are made of.

layers.py           the ops, a line a placement
register_layer.py   a placement becomes ops: kernel, decomposition, fake, derivative
layer.py            the three products, for all of them
placements.py       where tensors lie, and what follows: over a group of ranks, over FSDP
stateful_placements.py, write_state.py   the same with the state of delayed scaling
products.py         what a product of parts gathers and sums: one table
operands.py         codes and scales of a product's operands: one provider
quantize.py         amax, scale and cast of a part, of a matrix or of a stack
quantize_groups.py  the same of rows of groups
one_read.py         kernels that read a tensor once for two purposes
over_ranks.py       parts that ranks put together
kept_input.py       the codes that eager mode keeps of an input
"""

from fp8compile.ops.layer.layers import GEMM_OPS, LAYER_OPS, OPS_OF_LAYERS

__all__ = ["GEMM_OPS", "LAYER_OPS", "OPS_OF_LAYERS"]
