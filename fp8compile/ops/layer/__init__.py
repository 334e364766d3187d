"""The ops of linear layers: one op per GEMM (WHICH GEMM), with three more questions as arguments.

layer_args.py              the arguments that all ops share, WHICH tokens (offs), and which combinations are refused
check_recipe_of_groups.py  which recipes `offs` supports
known.py                   WHAT is known of the weight: nothing, amaxes, FP8 data
layer_sharding.py          WHERE the weight is stored: full, sharded over a group, rows of FSDP
layer_ops.py               registers linear, grad_input, grad_weight, and says what they save for the backward
delayed_linear.py, delayed_scaling_state.py   the op with the state of delayed scaling
gemm_ops.py                the ops that a policy of activation checkpointing names
output_and_gradients.py    the three GEMMs
sharded_gemm.py            what ranks gather before a GEMM of sharded operands, and what they sum after it
operands.py                codes and scales of a GEMM's operands
quantize_over_ranks.py     amax, scale and cast of a shard of a matrix or of stacked matrices
quantize_groups.py         amax, scale and cast of rows that are sorted by group
make_weight_codes.py       quantizes a weight once for several calls, as `known` takes it
one_read.py                kernels that read a tensor once for two GEMMs
gather_operands.py         gathers the shards of a tensor, or narrows a tensor to a shard
fsdp_rows.py, fsdp_*.py    which rows FSDP's ranks have; amaxes, gathers and gradients of these rows
observer.py                the hook through which `fp8compile.monitor` observes layers
flop_formulas.py           answers for PyTorch's FLOP counter
"""

from fp8compile.ops.layer.gemm_ops import GEMM_OPS, LAYER_OPS

__all__ = ["GEMM_OPS", "LAYER_OPS"]
