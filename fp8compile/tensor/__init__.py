"""QuantizedTensor and QuantizedParameter: codes and scales that stand for a tensor.

The files of this package register handlers of ops for these two classes. An op without a handler raises a TypeError.
"""

from fp8compile.tensor import factory_ops as factory_ops  # these fill tables of the classes
from fp8compile.tensor import saved as saved
from fp8compile.tensor import view_ops as view_ops
from fp8compile.tensor.as_layer_weight import check_serves
from fp8compile.tensor.check_arguments import SOURCE_DTYPES, allow_groups, checked_sizes, not_dense, own_sizes, shown
from fp8compile.tensor.check_sizes_over_ranks import check_agreement
from fp8compile.tensor.fsdp2_gather_policy import BOTH, GATHERED, PLAIN, GatherPolicy
from fp8compile.tensor.fsdp2_hooks import FullyShardHooks
from fp8compile.tensor.fsdp2_messages import SetToGather
from fp8compile.tensor.optimizer_steps import mark_replaced
from fp8compile.tensor.parameter_attributes import attributes_of_others, in_place_of
from fp8compile.tensor.quantize import quantize
from fp8compile.tensor.quantized_parameter import QuantizedParameter, is_quantized_parameter
from fp8compile.tensor.quantized_tensor import QuantizedTensor, has_codes
from fp8compile.tensor.requantize import assign, count_write, stand_for
from fp8compile.tensor.scaled_mm import scaled_mm
from fp8compile.tensor.shards import cut_dim, sharded_dims, sharding_of, share_scale_of_part
from fp8compile.tensor.write_ops import written_arguments

__all__ = [
    "BOTH",
    "FullyShardHooks",
    "GATHERED",
    "GatherPolicy",
    "PLAIN",
    "QuantizedParameter",
    "QuantizedTensor",
    "SOURCE_DTYPES",
    "SetToGather",
    "allow_groups",
    "assign",
    "attributes_of_others",
    "check_agreement",
    "check_serves",
    "checked_sizes",
    "count_write",
    "cut_dim",
    "has_codes",
    "in_place_of",
    "is_quantized_parameter",
    "mark_replaced",
    "not_dense",
    "own_sizes",
    "quantize",
    "scaled_mm",
    "share_scale_of_part",
    "sharded_dims",
    "sharding_of",
    "shown",
    "stand_for",
    "written_arguments",
]
