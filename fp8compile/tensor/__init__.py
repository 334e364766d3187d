"""QuantizedTensor: codes and scales that stand for a tensor.

    arguments.py    what callers hand over, checked
    quantized.py    the class, and what torch.compile asks of it
    views.py        the ops that keep what it stands for
    layer.py        as the weight of a layer
    pair.py         QuantizedPair: a weight as codes for the output and others for grad_input
    stack.py        QuantizedStack: many matrices, as the weight of experts
    grouped_layer.py  such a stack as the weight of a grouped layer
    quantize.py     making one
    product.py      multiplying two
    parameter.py    one that is trained
    stack_parameter.py, pair_parameter.py  a stack that is trained, and a pair
    gathers.py, gathered_pair.py  what FSDP2 gathers of a pair, and what the layer sees of it
    update.py       new values for many of them
    scale_without_values.py  scales of codes that stand for no values yet
    saved.py        what a file has of one
    fsdp.py         what FSDP2 asks of a sharded one
    agreement.py    whether ranks say the same sizes
    refusals.py     operators that raise
    attributes.py   what others hang on a parameter

An op that none of them gives a meaning raises.
"""

from fp8compile.tensor import views as views  # fills the table that the class looks ops up in
from fp8compile.tensor.agreement import check_agreement
from fp8compile.tensor.arguments import SOURCE_DTYPES, checked_sizes, not_dense, own_sizes, shown
from fp8compile.tensor.attributes import attributes_of_others, in_place_of, moved
from fp8compile.tensor.fsdp import as_it_travels, as_pair_travels, sharded_dims, sharding_of, share_scale_of_part
from fp8compile.tensor.gathered_pair import (
    Meaning,
    OwnCodes,
    OwnScale,
    as_sent,
    fill,
    made_of,
    room_for,
    sent_of,
    without_codes,
)
from fp8compile.tensor.gathers import BOTH, GATHERED, OWN, PLAIN, Gathers
from fp8compile.tensor.layer import check_serves, is_stack, unserved
from fp8compile.tensor.pair import QuantizedPair, Turns, has_codes
from fp8compile.tensor.pair_parameter import QuantizedPairParameter, is_quantized_parameter
from fp8compile.tensor.parameter import QuantizedParameter
from fp8compile.tensor.product import scaled_mm
from fp8compile.tensor.quantize import quantize
from fp8compile.tensor.quantized import QuantizedTensor
from fp8compile.tensor.stack import QuantizedStack
from fp8compile.tensor.stack_parameter import QuantizedStackParameter
from fp8compile.tensor.update import assign, count_write, stand_for

__all__ = [
    "BOTH",
    "GATHERED",
    "Gathers",
    "Meaning",
    "OWN",
    "OwnCodes",
    "OwnScale",
    "PLAIN",
    "as_it_travels",
    "as_pair_travels",
    "as_sent",
    "fill",
    "made_of",
    "room_for",
    "sent_of",
    "SOURCE_DTYPES",
    "QuantizedPair",
    "QuantizedPairParameter",
    "QuantizedParameter",
    "QuantizedStack",
    "QuantizedStackParameter",
    "QuantizedTensor",
    "Turns",
    "assign",
    "attributes_of_others",
    "check_agreement",
    "check_serves",
    "checked_sizes",
    "count_write",
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
    "without_codes",
]
