"""Collectives in a graph: number of ranks, bytes that each rank sends, and least time on the ranks' links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils import _pytree as pytree

from fp8compile.testing.explain.roofline import Peaks
from fp8compile.testing.gpu.graphs import GpuGraph

__all__ = ["NODE", "Message", "messages", "seconds"]

NODE = 8  # GPUs that NVLink connects

# How often a rank sends the larger of a message's input and result, times (n - 1) / n for n ranks, if no byte is sent
# twice. An all-reduce is a reduce-scatter followed by an all-gather. Source: Thakur, Rabenseifner, Gropp,
# "Optimization of Collective Communication Operations in MPICH", 2005, section 3.
PASSES = {
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
    "all_reduce": 2,
}


@dataclass(frozen=True, kw_only=True)
class Message:
    """A collective between ranks.

    Attributes:
        op: "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single" or "all_reduce".
        dtype: Dtype of the tensor that is sent.
        ranks: Number of ranks that take part.
        bytes: Least number of bytes that one rank has to send to other ranks.
        in_node: Whether all of the collective's ranks are GPUs of one node (of 8).
        backward: Whether the message is in the backward.
    """

    op: str
    dtype: str
    ranks: int
    bytes: int
    in_node: bool
    backward: bool


def _tensors(nodes: object) -> list[Tensor]:
    values = pytree.tree_map(lambda each: each.meta.get("val") if isinstance(each, fx.Node) else None, nodes)
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def messages(graph: GpuGraph, *, backward: bool) -> Iterator[Message]:
    """Yield the collectives of a graph with decomposed ops, in the graph's order.

    Args:
        graph: The graph. The process groups of its collectives have to exist still.
        backward: Whether the graph is the backward.

    Raises:
        ValueError: A collective isn't known here.
    """
    for node in graph.graph.graph.nodes:
        if getattr(node.target, "namespace", "") != "_c10d_functional" or "wait" in str(node.target):
            continue
        op = node.target._opname
        if op not in PASSES:
            raise ValueError(
                f"the graph has the collective {node.target}, whose bytes can't be counted; supported collectives are "
                f"{', '.join(PASSES)}. Use one of these, or leave the part with {op} out of the measured model."
            )
        ranks = dist.get_process_group_ranks(_resolve_process_group(node.args[-1]))
        given, made = _tensors(node.args), _tensors(node)
        largest = max(_bytes(given), _bytes(made))
        yield Message(
            op=op,
            dtype=str(made[0].dtype).removeprefix("torch."),
            ranks=len(ranks),
            bytes=PASSES[op] * largest * (len(ranks) - 1) // len(ranks),
            in_node=len({rank // NODE for rank in ranks}) == 1,
            backward=backward,
        )


def seconds(found: list[Message], peaks: Peaks) -> float:
    """Least time in seconds of consecutive messages, by the published rates of a GPU's links.

    If the ranks of a message are on several nodes, all of its bytes count as sent over the network.
    """
    return sum(each.bytes / (peaks.nvlink if each.in_node else peaks.network) for each in found)
