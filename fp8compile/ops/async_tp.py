"""Graph rewrites with which async tensor parallelism can fuse FP8 GEMMs with their collectives.

    gather of float8 -> ... -> reshape -> _scaled_mm -> reshape -> reduce-scatter

Inductor's pass (`torch._inductor.config._micro_pipeline_tp`) accepts reshapes between a GEMM and a collective, but no
views as another dtype. While the pass is on, codes are gathered as float8, and the rewrites move or remove the views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fp8compile import _compat
from fp8compile.formats import Float8Format
from fp8compile.quantizers import Quantizer
from fp8compile.target import target_of

__all__ = ["on_the_wire"]


def on_the_wire(codes: Tensor, quantizer: Quantizer) -> Tensor:
    """View codes as float8 before a gather that async tensor parallelism can fuse; else return them as uint8.

    Inductor's pass ignores gathers of uint8, and takes one scale for a tensor or one for each row of a matrix. Codes
    with other scales, and all codes on a CPU, stay uint8.
    """
    element = quantizer.element_format()
    if not (_compat.async_tp() and isinstance(element, Float8Format) and target_of(codes.device).type == "cuda"):
        return codes
    taken = quantizer.block == (-1, -1) or (quantizer.block == (1, -1) and codes.ndim == 2)
    return codes.view(element.dtype) if taken else codes


def _source(node: Any) -> tuple[fx.Node, list[Any]]:
    """Follow a chain of reshapes back; return the node before the chain, and the reshapes in order."""
    reshapes: list[Any] = []
    while node.target is torch.ops.aten.reshape.default:
        reshapes.insert(0, node)
        node = node.args[0]
    return node, reshapes


def _has_plain_scales(product: fx.Node) -> bool:
    """Whether a node is a `_scaled_mm` with one scale for each operand, or for each row and each column."""
    if product.target is not torch.ops.aten._scaled_mm.default:
        return False
    rows, columns = product.meta["val"].shape
    scales: Any = product.args[2:4]
    scales = [tuple(scale.meta["val"].shape) for scale in scales]
    return scales in ([(), ()], [(rows, 1), (1, columns)])


def _is_of_reshaped_bytes(match: Any) -> bool:
    """Whether the matched node views bytes as float8, and only GEMMs read it, as left operand (see `_straighten`)."""
    node = match.nodes[-1]
    if not _compat.async_tp() or not all(_has_plain_scales(user) and user.args[0] is node for user in node.users):
        return False
    source, reshapes = _source(node.args[0])
    if source.target is not torch.ops.aten.view.dtype:
        return bool(reshapes) and source.meta["val"].dtype == torch.uint8
    given: Any = source.args[0]
    before, between, after = (each.meta["val"].dtype for each in (given, source, node))
    return before == after and before.itemsize == 1 and between == torch.uint8


def _straighten(match: Any, *_: Any) -> None:
    """Reshape float8 instead of bytes: view the bytes before the reshapes, or take the float8 that they were."""
    node = match.nodes[-1]
    found: Any
    source, reshapes = _source(node.args[0])
    dtype = node.meta["val"].dtype
    with match.graph.inserting_before(node):
        if source.target is torch.ops.aten.view.dtype:
            found = source.args[0]
        else:
            found = match.graph.call_function(node.target, (source, dtype))
            found.meta["val"] = source.meta["val"].view(dtype)
        for reshape in reshapes:
            if reshape.meta["val"].shape == found.meta["val"].shape:
                continue
            made = match.graph.call_function(reshape.target, (found, reshape.args[1]))
            made.meta["val"] = reshape.meta["val"].view(dtype)
            found = made
    node.replace_all_uses_with(found)
    match.graph.erase_node(node)


def _is_no_reshape(match: Any) -> bool:
    """Whether the matched node reshapes a GEMM's result to the shape that the result already has."""
    node = match.nodes[-1]
    if not _compat.async_tp() or node.meta["val"].shape != node.args[0].meta["val"].shape:
        return False
    return _has_plain_scales(_source(node)[0])


def _drop(match: Any, *_: Any) -> None:
    """Remove a matched reshape to the same shape; PyTorch's pass would assume that the reshape adds dims."""
    node = match.nodes[-1]
    node.replace_all_uses_with(node.args[0])
    match.graph.erase_node(node)


def _register() -> None:
    from torch._inductor.fx_passes.post_grad import pass_patterns
    from torch._inductor.pattern_matcher import CallFunction, Ignored, register_graph_pattern

    aten = torch.ops.aten
    for target, check, handler in (
        (aten.view.dtype, _is_of_reshaped_bytes, _straighten),
        (aten.reshape.default, _is_no_reshape, _drop),
    ):
        pattern = CallFunction(target, Ignored(), Ignored())
        register_graph_pattern(pattern, extra_check=check, pass_dict=pass_patterns[0])(handler)


_compat.when_imported("torch._inductor.fx_passes.post_grad", _register)
