"""Partitioner for Inductor that passes saved tensors from the forward to the backward as codes.

    joint graph --min-cut--> forward, backward --for each chosen tensor--> forward + pack, unpack + backward

AOTAutograd calls the same partitioner for compiled regions, so that tensors inside of regions become codes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import fx

from fp8compile.inductor import PARTITIONERS, inlined, min_cut_then, traced
from fp8compile.saved_tensors.choice import SavedAsCodes
from fp8compile.saved_tensors.graph_walks import source_of
from fp8compile.saved_tensors.kind_from_graphs import block_beside, described
from fp8compile.saved_tensors.packing import Packing

__all__ = ["pack_saved", "packing_graph", "packing_of", "partitioner", "unpacking_graph"]


NAMED: dict[str, Any] = {}  # partitioners by the text of their value


def packing_of(node: fx.Node, place: fx.Node, saved: SavedAsCodes) -> Packing | None:
    """The `Packing` of a tensor that a forward graph saves; None if the tensor is saved as it is.

    Args:
        node: Node of the forward graph that makes the tensor.
        place: Placeholder of the backward graph that receives the tensor.
        saved: Which tensors become codes, and how.
    """
    tensor = described(node, place)
    if tensor is None or not saved.chooses(tensor):
        return None
    return Packing.of(node.meta["val"], saved.quantizer_for(block_beside(node, place)))


def pack_saved(forward: fx.GraphModule, backward: fx.GraphModule, returned: int, saved: SavedAsCodes) -> None:
    """Make the forward save codes of chosen tensors, and the backward read them; changes both graphs.

    Args:
        forward: The forward graph.
        backward: The backward graph; its placeholders have the names of the forward's saved outputs.
        returned: Number of leading forward outputs that go to the caller; the others are saved.
        saved: Which tensors become codes, and how.
    """
    (outputs,) = forward.graph.output_node().args
    places = {place.name: place for place in backward.graph.find_nodes(op="placeholder")}
    all_outputs: Any = outputs
    made = list(all_outputs[:returned])
    chosen = _chosen(all_outputs, returned, places, saved)
    for node in all_outputs[returned:]:
        if (packing := chosen.get(node)) is None:
            made.append(node)
            continue
        made += _packed(forward, backward, node, places[node.name], packing)
    forward.graph.output_node().args = (tuple(made),)
    for each in (forward, backward):
        each.graph.lint()
        each.recompile()


def _chosen(
    outputs: Sequence[Any], returned: int, places: dict[str, fx.Node], saved: SavedAsCodes
) -> dict[fx.Node, Packing]:
    """Return a `Packing` for each saved output that becomes codes; the first ``returned`` outputs are not saved.

    ``places`` are the backward's placeholders by name. An output is left out if an output without codes keeps its
    memory alive.
    """
    found: dict[fx.Node, Packing] = {}
    stays: set[fx.Node] = set()
    for at, node in enumerate(outputs):
        if not isinstance(node, fx.Node):
            continue
        packing = None
        if at >= returned and node.name in places:
            packing = packing_of(node, places[node.name], saved)
        if packing is None:
            stays.add(source_of(node))
        else:
            found[node] = packing
    return {node: packing for node, packing in found.items() if source_of(node) not in stays}


def _packed(
    forward: fx.GraphModule, backward: fx.GraphModule, node: fx.Node, place: fx.Node, packing: Packing
) -> list[fx.Node]:
    """Pack a tensor in the forward and unpack it in the backward; return the saved nodes.

    New placeholders for codes and scales replace the tensor's placeholder, ``place``.
    """
    with forward.graph.inserting_before(forward.graph.output_node()):
        parts = inlined(forward.graph, packing_graph(packing, node), [node])
    names = _unused_names(f"{node.name}_codes", len(parts), (forward.graph, backward.graph))
    with backward.graph.inserting_before(place):
        # a placeholder whose name is that of another node would silently get that node's argument
        inputs = [backward.graph.placeholder(name) for name in names]
    for part, given, name in zip(parts, inputs, names, strict=True):
        part._rename(name)
        if "saved_tensor_with_no_vc_check" in node.meta:  # decides the order of what is saved
            part.meta["saved_tensor_with_no_vc_check"] = node.meta["saved_tensor_with_no_vc_check"]
        given.meta = dict(part.meta)
    first = min(place.users, key=_positions(backward.graph).__getitem__)
    # before its first reader, so that values that a call reads in memory are there only from then on
    with backward.graph.inserting_before(first):
        (unpacked,) = inlined(backward.graph, unpacking_graph(packing, parts), inputs)
    place.replace_all_uses_with(unpacked)
    backward.graph.erase_node(place)
    return parts


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: at for at, node in enumerate(graph.nodes)}


def _unused_names(stem: str, count: int, graphs: Sequence[fx.Graph]) -> list[str]:
    taken = {node.name for graph in graphs for node in graph.nodes} | {str(n.target) for g in graphs for n in g.nodes}
    while any(f"{stem}_{at}" in taken for at in range(count)):
        stem += "_"
    return [f"{stem}_{at}" for at in range(count)]


def packing_graph(packing: Packing, node: fx.Node) -> fx.GraphModule:
    """Trace the packing of a node's tensor to a new graph, which takes the tensor."""
    return traced(lambda x: packing.pack(x), node.meta["val"])


def unpacking_graph(packing: Packing, parts: Sequence[fx.Node]) -> fx.GraphModule:
    """Trace the unpacking to a new graph, which takes codes and scales like those of the nodes ``parts``."""
    return traced(lambda *each: packing.unpack(each), *(each.meta["val"] for each in parts))


@lru_cache
def partitioner(saved: SavedAsCodes) -> Any:
    """Value for Inductor's ``custom_partitioner_fn`` that saves the tensors chosen by ``saved`` as codes.

    The result for equal values of ``saved`` is the same object.
    """

    def change(forward: fx.GraphModule, backward: fx.GraphModule, returned: int) -> None:
        pack_saved(forward, backward, returned, saved)

    def text() -> str:
        found = saved.uuid()
        NAMED[found] = made
        return found

    def reduced() -> tuple[Any, ...]:
        # keys of compile caches pickle it, and a function may have no name to be pickled by
        return (_named, (text(),)) if callable(saved.filter) else (partitioner, (saved,))

    made = min_cut_then(change, uuid=text, reduced=reduced)
    return made


def _named(text: str) -> Any:
    """Return this process's partitioner whose ``uuid()`` is ``text``; called when a cache unpickles it."""
    return NAMED[text]


PARTITIONERS[SavedAsCodes] = partitioner
