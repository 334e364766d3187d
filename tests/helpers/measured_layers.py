"""What a layer keeps, computes and costs: eager bits, bytes kept for the backward, nodes of the graph for a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._inductor.compile_fx import select_decomp_table

from fp8compile import _compat
from fp8compile.target import pretend_target
from fp8compile.testing.gpu.gpus import GPUS

__all__ = ["Measured", "alone", "kept_bytes", "measured"]

Call = Callable[..., Tensor]


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process alone, for DTensors."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Measured:
    """What a call of a layer and its backward are.

    Attributes:
        bits: The output, and the gradient of each leaf that requires one.
        kept: Bytes that eager mode keeps for the backward.
        nodes: Calls by op of the joint graph for a GPU; empty unless asked for.
    """

    bits: list[Tensor]
    kept: int
    nodes: Counter = field(default_factory=Counter)

    def quantizing(self) -> Counter:
        """Of the nodes those that quantize, or read a tensor for it."""
        return Counter({op: count for op, count in self.nodes.items() if "quantize" in op or "amax" in op})


def measured(call: Call, leaves: Sequence[Tensor], grad_output: Tensor, gpu: str | None = None) -> Measured:
    """Run a layer.

    Args:
        call: Of the leaves.
        leaves: The input and the weight, then what has no gradient.
        grad_output: Of what it returns.
        gpu: Which one a graph is made for; None: none is made.
    """
    y = call(*leaves)
    wanted = [each for each in leaves if each.requires_grad]
    bits = [y.detach(), *torch.autograd.grad(y, wanted, grad_output)]
    return Measured(bits, kept_bytes(call, leaves), Counter() if gpu is None else _nodes(call, leaves, gpu))


def kept_bytes(call: Call, leaves: Sequence[Tensor]) -> int:
    """Bytes of the storages that autograd keeps in eager mode; all leaves but the input are there anyway."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not hasattr(own := _compat.local_itself(tensor), "sets"):
            kept[own.untyped_storage()._cdata] = own.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(*leaves)
    for own in map(_compat.local_itself, leaves[1:]):
        if not hasattr(own, "sets"):
            kept.pop(own.untyped_storage()._cdata, None)
    del y
    return sum(storage.nbytes() for storage in kept.values())


def _nodes(call: Call, leaves: Sequence[Tensor], gpu: str) -> Counter:
    nodes: Counter = Counter()

    def partition(joint, inputs, **kwargs):
        joint.graph.eliminate_dead_code()
        nodes.update(str(node.target) for node in joint.graph.nodes if node.op == "call_function")
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def compiler(graph, inputs):
        (outputs,) = graph.graph.find_nodes(op="output")[0].args
        return make_boxed_func(lambda *_: [node if node is None else node.meta["val"] for node in outputs])

    run = aot_function(call, compiler, partition_fn=partition, decompositions=select_decomp_table())
    with pretend_target(GPUS[gpu].target):
        run(*leaves)
    return nodes
