"""QuantizedTensor: codes and scales that stand for a tensor.

    arguments.py    what callers hand over, checked
    codes.py        one set of codes and scales, as plain tensors
    quantized_tensor.py  the class, and what torch.compile asks of it
    views.py        the ops that keep what it stands for
    layer.py        as the weight of a layer
    quantize.py     making one
    product.py      multiplying two
    quantized_parameter.py  one that is trained
    parameter_makers.py  new tensors like it
    write_ops.py    ops that write to it
    optimizer_steps.py  one rounding a step
    update.py       new values for many of them
    fsdp2_hooks.py  what FSDP2 asks of one: hooks
    gather_layout.py, gather_policy.py, pass_in_memory.py  what its gathers send, when they send which codes, and
                    whose are in memory
    shards.py       how ranks cut one
    scale_without_values.py  scales of codes that stand for no values yet
    saved.py        what a file has of one
    agreement.py    whether ranks say the same sizes
    refusals.py     operators that raise
    attributes.py   what others hang on a parameter

An op that none of them gives a meaning raises.
"""

from fp8compile.tensor import parameter_makers as parameter_makers  # these four fill tables of the classes
from fp8compile.tensor import saved as saved
from fp8compile.tensor import views as views
from fp8compile.tensor import write_ops as write_ops
from fp8compile.tensor.agreement import check_agreement
from fp8compile.tensor.arguments import SOURCE_DTYPES, checked_sizes, not_dense, own_sizes, shown
from fp8compile.tensor.attributes import attributes_of_others, in_place_of, moved
from fp8compile.tensor.codes import Codes
from fp8compile.tensor.fsdp2_hooks import FullyShardHooks
from fp8compile.tensor.gather_layout import SetToGather
from fp8compile.tensor.gather_policy import BOTH, GATHERED, PLAIN, GatherPolicy
from fp8compile.tensor.layer import check_serves, is_stack, unserved
from fp8compile.tensor.product import scaled_mm
from fp8compile.tensor.quantize import quantize
from fp8compile.tensor.quantized_parameter import QuantizedParameter, is_quantized_parameter
from fp8compile.tensor.quantized_tensor import QuantizedTensor, has_codes
from fp8compile.tensor.shards import cut_dim, sharded_dims, sharding_of, share_scale_of_part
from fp8compile.tensor.update import assign, count_write, stand_for

__all__ = [
    "BOTH",
    "Codes",
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
    "checked_sizes",
    "count_write",
    "cut_dim",
    "has_codes",
    "in_place_of",
    "is_quantized_parameter",
    "is_stack",
    "moved",
    "not_dense",
    "own_sizes",
    "quantize",
    "scaled_mm",
    "share_scale_of_part",
    "sharded_dims",
    "sharding_of",
    "shown",
    "stand_for",
    "unserved",
]
