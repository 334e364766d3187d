"""The linear layer: its ops in graphs, for whole tensors and for shards, and what they are made of.

shards           how a tensor over ranks lies among the blocks that share a scale
local_shards     what a rank has of a tensor, in its dtype or as codes
quantize_shard   amax, scale and cast of a shard
stacks           the same of a stack of matrices, such as the weights of experts
operands         codes and scales of a product's operands, wherever the scale comes from: one provider for all ops
products         what a product of shards gathers and sums: one table for all ops
register         one computation as an op's kernel and its decomposition
linear, delayed, sharded_linear, fsdp_linear, fsdp_delayed   the ops, by what they are given
grouped_linear, fsdp_grouped, sharded_grouped                of experts, whose operands are in grouped_operands
"""

from fp8compile.ops.layer.layer_ops import GEMM_OPS, LAYER_OPS

__all__ = ["GEMM_OPS", "LAYER_OPS"]
