"""QuantizedTensor: codes and scales that stand for a tensor.

    arguments.py    checks of callers' arguments
    quantized_tensor.py  the class, with the methods that torch.compile calls
    views.py        views, copies and moves between devices
    layer.py        QuantizedTensor as the weight of a layer
    quantize.py     makes a QuantizedTensor from a tensor
    product.py      multiplies two QuantizedTensors
    quantized_parameter.py  QuantizedParameter, which optimizers train
    parameter_makers.py  ops that make new tensors like a parameter
    write_ops.py    ops that write to a parameter
    optimizer_steps.py  a parameter is rounded once in each optimizer step
    update.py       writes new values to many parameters at once
    fsdp2_hooks.py  the hooks that FSDP2 calls around an all-gather
    fsdp2_messages.py  the messages of an FSDP2 all-gather
    gather_policy.py   which codes each FSDP2 all-gather sends
    pass_in_memory.py  which codes are in the gathered memory now
    shards.py       how ranks cut a weight
    scale_without_values.py  scales for codes that have no values yet
    saved.py        functions that pickles call
    agreement.py    checks that all ranks pass the same sizes
    refusals.py     operators that raise
    attributes.py   keeps attributes that other libraries set on a parameter

An op that no file implements raises a TypeError.
"""

from fp8compile.tensor import parameter_makers as parameter_makers  # these fill tables of the classes
from fp8compile.tensor import saved as saved
from fp8compile.tensor import views as views
from fp8compile.tensor.agreement import check_agreement
from fp8compile.tensor.arguments import SOURCE_DTYPES, checked_sizes, not_dense, own_sizes, shown
from fp8compile.tensor.attributes import attributes_of_others, in_place_of, moved
from fp8compile.tensor.fsdp2_hooks import FullyShardHooks
from fp8compile.tensor.fsdp2_messages import SetToGather
from fp8compile.tensor.gather_policy import BOTH, GATHERED, PLAIN, GatherPolicy
from fp8compile.tensor.layer import check_serves, is_stack, unserved
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
    "written_arguments",
]
