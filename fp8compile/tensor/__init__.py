"""QuantizedTensor and QuantizedParameter: codes and scales that stand for a tensor.

The files of ops fill the tables of the classes; an op that no file implements raises a TypeError.
"""

from fp8compile.tensor import parameter_makers as parameter_makers  # these fill tables of the classes
from fp8compile.tensor import saved as saved
from fp8compile.tensor import views as views
from fp8compile.tensor.agreement import check_agreement
from fp8compile.tensor.arguments import SOURCE_DTYPES, checked_sizes, not_dense, own_sizes, shown
from fp8compile.tensor.attributes import attributes_of_others, in_place_of
from fp8compile.tensor.fsdp2_hooks import FullyShardHooks
from fp8compile.tensor.fsdp2_messages import SetToGather
from fp8compile.tensor.gather_policy import BOTH, GATHERED, PLAIN, GatherPolicy
from fp8compile.tensor.layer import check_serves, codes_seen
from fp8compile.tensor.product import scaled_mm
from fp8compile.tensor.quantize import quantize
from fp8compile.tensor.quantized_parameter import QuantizedParameter, is_quantized_parameter
from fp8compile.tensor.quantized_tensor import QuantizedTensor, has_codes
from fp8compile.tensor.shards import cut_dim, sharded_dims, sharding_of, share_scale_of_part
from fp8compile.tensor.update import assign, count_write, stand_for
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
    "assign",
    "attributes_of_others",
    "check_agreement",
    "check_serves",
    "codes_seen",
    "checked_sizes",
    "count_write",
    "cut_dim",
    "has_codes",
    "in_place_of",
    "is_quantized_parameter",
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
