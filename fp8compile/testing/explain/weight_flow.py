"""Find the values of a graph that are computed from a layer's weight alone (forms of the weight).

    weight --mul g--> weight * g --t--> --+
                                          +--mm--> data, no longer a form of the weight
    x ------------------------------------+

Scaling, slicing, concatenation and multiplication by another parameter give a form of the weight again. A GEMM of
weight and data gives data, and so does an elementwise operator whose data has more elements than the form, as in
y * weight.norm().
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp8compile import ops
from fp8compile.testing.explain.unfolded_graph import SAME, Value

__all__ = ["LAYER_OPS", "PRODUCTS", "Form", "form_of", "is_elementwise", "takes_weight_and_data"]

LAYER_OPS = {op.name(): gemm for op, gemm in ops.LAYER_OPS.items()}
# for each other product, the positions of its operands among its arguments
PRODUCTS: dict[str, tuple[int, int]] = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2),
    "aten::mv": (0, 1), "aten::addmv": (1, 2), "aten::dot": (0, 1), "aten::matmul": (0, 1), "aten::linear": (0, 1),
    "aten::_grouped_mm": (0, 1), "aten::_scaled_grouped_mm": (0, 1), "aten::_scaled_grouped_mm_v2": (0, 1),
    "aten::_scaled_mm": (0, 1), "aten::_scaled_mm_v2": (0, 1), "fp8compile::scaled_mm": (0, 1),
    "aten::_int_mm": (0, 1), "fp8compile::scaled_grouped_mm": (0, 1),
    "fp8compile::grouped_blockwise_mm": (0, 1), "fp8compile::grouped_mm": (0, 1),
    **dict.fromkeys((op.name() for op in ops.FOUR_BIT_PRODUCTS), (0, 1)),
}  # fmt: skip
LOOKUPS = frozenset({"aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"})
JOINS = frozenset({"aten::cat", "aten::stack", "aten::copy", "aten::slice_scatter", "aten::select_scatter"})


@dataclass(frozen=True)
class Form:
    """What a value was computed from.

    Attributes:
        weights: The weights that the value is a form of; each is a tuple of the names of layers that share it.
        is_data: Whether the value also depends on the model's inputs.
    """

    weights: frozenset[tuple[str, ...]] = frozenset()
    is_data: bool = False


DATA = Form(is_data=True)


def is_elementwise(value: Value) -> bool:
    """Whether a value's operator is elementwise."""
    return torch.Tag.pointwise in getattr(value.node.target, "tags", ())


def _is_matrix(value: Value) -> bool:
    return any(sum(size > 1 for size in tensor.shape) > 1 for tensor in value.tensors)


def _of_all(forms: Mapping[Value, Form], values: list[Value]) -> Form:
    given = [forms[value] for value in values]
    return Form(frozenset().union(*(form.weights for form in given)), any(form.is_data for form in given))


def _mixes(value: Value, together: Form) -> bool:
    return together.is_data and len(value.inputs) > 1 and value.op != SAME and value.op not in JOINS


def form_of(value: Value, forms: Mapping[Value, Form]) -> Form:
    """Form of a value: the weights that it is computed from, and whether it also depends on data."""
    together = _of_all(forms, list(value.inputs))
    if value.op in LAYER_OPS:
        return DATA
    if _mixes(value, together):
        if value.op in PRODUCTS or not is_elementwise(value):
            return DATA
        same_size = [each for each in value.inputs if each.numel == value.numel and _is_matrix(each)]
        together = Form(_of_all(forms, same_size).weights, is_data=True)
    # a single number, such as a norm, is no weight
    return together if value.numel > 1 or value.op == SAME else Form(is_data=together.is_data)


def takes_weight_and_data(value: Value, forms: Mapping[Value, Form]) -> bool:
    """Whether an unknown operator that may be a GEMM takes both a form of a weight and data.

    Candidates are operators of other libraries, convolutions, and elementwise operators that combine every row of one
    input with every row of another.
    """
    together = _of_all(forms, list(value.inputs))
    if not together.weights or not _mixes(value, together):
        return False
    if is_elementwise(value):
        return value.numel > max(each.numel for each in value.inputs)
    return value.op not in {*LAYER_OPS, *PRODUCTS, *LOOKUPS}
