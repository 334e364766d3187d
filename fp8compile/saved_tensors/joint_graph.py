"""Saved tensors as codes in a joint forward-backward graph whose nodes are tagged save or recompute.

    node --pack--> codes (tagged: save)   codes --unpack--> values (tagged: recompute)

The backward reads the values in place of the node. Forward nodes that are tagged recompute and computed from the node
are copied; the copies are computed from the values, are tagged recompute too, and are what the backward reads.
The tags are PyTorch's (`torch.utils.checkpoint.CheckpointPolicy`, in ``node.meta["recompute"]``). A later pass, such
as that of torchtitan's GraphTrainer, moves nodes tagged to be recomputed into the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from fp8compile.inductor import inlined
from fp8compile.saved_tensors.choice import SavedAsCodes
from fp8compile.saved_tensors.graph_walks import source_of
from fp8compile.saved_tensors.packing import Packing
from fp8compile.saved_tensors.partitioner import packing_graph, packing_of, unpacking_graph

__all__ = ["pack_in_joint_graph"]

IsBackward = Callable[[fx.Node], bool]


def pack_in_joint_graph(module: fx.GraphModule, saved: SavedAsCodes, is_backward: IsBackward) -> list[str]:
    """Make the backward of a joint graph read codes of forward tensors; changes the graph in place.

    Args:
        module: The graph. A saved node is a forward node that the backward or a recomputed node reads, and that is not
            tagged for recomputation.
        saved: Which tensors become codes, and how.
        is_backward: Whether a node belongs to the backward.

    Returns:
        Names of the nodes that are saved as codes.
    """
    graph = module.graph
    again = _made_again(graph, is_backward)
    readers = {node for node in graph.nodes if node.op != "output" and is_backward(node)} | again
    kept = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node not in readers and any(user in readers for user in node.users)
    ]
    chosen = _chosen(graph, kept, readers, saved, is_backward)
    _compress(graph, chosen, again, is_backward)
    graph.lint()
    module.recompile()
    return [node.name for node in chosen]


def _made_again(graph: fx.Graph, is_backward: IsBackward) -> set[fx.Node]:
    """Return the forward nodes tagged for recomputation that the backward reads, directly or through others."""
    from torch.utils.checkpoint import CheckpointPolicy

    again = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
    ends = [node for node in graph.nodes if node.op != "output" and is_backward(node)]
    pending = [each for node in ends for each in node.all_input_nodes]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        is_again = node.op == "call_function" and not is_backward(node) and node.meta.get("recompute") in again
        if is_again and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _chosen(
    graph: fx.Graph, kept: list[fx.Node], readers: set[fx.Node], saved: SavedAsCodes, is_backward: IsBackward
) -> dict[fx.Node, Packing]:
    """Return a `Packing` for each node of ``kept`` that becomes codes.

    ``readers`` are the nodes that run in the backward. A node is left out if another node that is saved or returned
    without codes keeps its memory alive.
    """
    forward = _copied(graph, [node for node in graph.nodes if not is_backward(node)])
    backward = _copied(graph, [node for node in graph.nodes if node in readers])
    results = {node for output in graph.find_nodes(op="output") for node in output.all_input_nodes}
    found: dict[fx.Node, Packing] = {}
    stays = {source_of(node) for node in results if node not in readers}
    for node in kept:
        if (packing := packing_of(forward[node], backward[node], saved)) is None:
            stays.add(source_of(node))
        else:
            found[node] = packing
    return {node: packing for node, packing in found.items() if source_of(node) not in stays}


def _copied(graph: fx.Graph, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    copy = fx.Graph(owning_module=graph.owning_module)
    env: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op == "output":
            continue
        for each in node.all_input_nodes:
            if each not in env:
                env[each] = copy.placeholder(each.name)
                env[each].meta = dict(each.meta)
        env[node] = copy.node_copy(node, env.__getitem__)
    return env


def _compress(graph: fx.Graph, chosen: dict[fx.Node, Packing], again: set[fx.Node], is_backward: IsBackward) -> None:
    """Insert the packing after each node of ``chosen``, and make the backward read dequantized values.

    Nodes of ``again``, which the backward recomputes, are copied; the copies read dequantized values too.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    save, recompute = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
    given: dict[fx.Node, fx.Node] = {}  # what the backward reads in place of a node
    for node in list(graph.nodes):
        if node in chosen:
            place, packing = node.next, chosen[node]
            parts = _inserted(place, packing_graph(packing, node), [node], save)
            (given[node],) = _inserted(place, unpacking_graph(packing, parts), parts, recompute)
        elif node in again and any(each in given for each in node.all_input_nodes):
            with graph.inserting_before(node.next):
                given[node] = graph.node_copy(node, lambda each: given.get(each, each))
            given[node].meta = {**node.meta, "recompute": recompute}
    for node, other in given.items():
        for user in [each for each in node.users if each.op != "output" and is_backward(each)]:
            user.replace_input_with(node, other)


def _inserted(place: fx.Node, body: fx.GraphModule, inputs: Sequence[fx.Node], tag: object) -> list[fx.Node]:
    """Insert the graph ``body``, called with ``inputs``, before the node ``place``; return its results.

    New nodes get ``tag`` in ``meta["recompute"]``.
    """
    before = place.prev
    with place.graph.inserting_before(place):
        results = inlined(place.graph, body, inputs)
    node = before.next
    while node is not place:
        node.meta["recompute"] = tag
        if (custom := inputs[0].meta.get("custom")) is not None:
            node.meta["custom"] = dict(custom)
        node = node.next
    return results
