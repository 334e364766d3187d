"""Traces the graphs that Inductor would get for a GPU, on the CPU.

fn, args on the CPU --Dynamo, AOTAutograd with Inductor's decompositions, min-cut partitioner--> forward, backward

While graphs are traced, this package's ops make the same choices as on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile._compat import forget_graphs, is_unbacked
from fp8compile.target import pretend_target
from fp8compile.testing.gpu.flex_attention import pretend_flex_attention
from fp8compile.testing.gpu.gpus import Gpu, pretend_triton
from fp8compile.testing.graphs.kept_state import kept_state

__all__ = [
    "GpuGraph",
    "all_outputs",
    "change_joint",
    "check_has_no_region",
    "gpu_graphs",
    "kept_bytes",
    "kept_nodes",
    "partition",
    "returned_outputs",
]


@dataclass(frozen=True)
class GpuGraph:
    """A graph of decomposed operators, and example arguments.

    Attributes:
        graph: The graph, with tensors on the CPU.
        inputs: The arguments that the graph was traced with.
        returned: Positions of the outputs that go to the caller; Inductor keeps their strides. Inductor may pad the
            strides of other outputs, which are saved for backward.
        called_with: The tensors that a forward was called with, before subclasses are unwrapped; parameters are
            identified by ``id``. Empty for a backward.
        donated: For a backward, positions of the arguments whose memory Inductor may reuse, because nobody else reads
            them. None for a forward.
    """

    graph: fx.GraphModule
    inputs: list[Any]
    returned: tuple[int, ...]
    called_with: tuple[Any, ...] = ()
    donated: tuple[int, ...] | None = None


def all_outputs(graph: fx.GraphModule) -> tuple[int, ...]:
    """Positions of all outputs of a graph."""
    (outputs,) = graph.graph.find_nodes(op="output")[0].args
    return tuple(range(len(outputs)))


def returned_outputs() -> tuple[int, ...]:
    """Positions of the outputs that a forward returns to its caller; valid while AOTAutograd compiles."""
    meta = torch._guards.TracingContext.get().fw_metadata
    assert meta is not None, "AOTAutograd compiles a graph"
    first = meta.num_mutated_inp_runtime_indices
    return tuple(range(first, first + meta.num_outputs))


def _donated() -> tuple[int, ...]:
    meta = torch._guards.TracingContext.get().fw_metadata
    return tuple(getattr(meta, "bw_donated_idxs", None) or ())


def _empty_outputs(graph: fx.GraphModule) -> list[Any]:
    (outputs,) = graph.graph.find_nodes(op="output")[0].args
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
    if any(is_unbacked(size) for value in values if isinstance(value, Tensor) for size in value.shape):
        raise ValueError(
            "sizes in this graph depend on data, such as the number of rows that other ranks send, and are known "
            "only at run time. Set a capacity for experts: ExpertParallel(capacity=...) or expert_routes(..., "
            "capacity=...)."
        )
    return [
        torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=v.device) if isinstance(v, Tensor) else v
        for v in values
    ]


def change_joint(graph: fx.GraphModule, inputs: Any) -> None:
    """Run Inductor's passes on a joint graph before it is partitioned, or on a graph without a backward.

    ``inputs`` are the graph's fake arguments.
    """
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):  # the pass that replaces random numbers needs it
        joint_graph_passes(graph)


def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph into forward and backward as Inductor does.

    ``inputs`` are the graph's fake arguments; ``kwargs`` are passed on to the partitioner.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor import config

    change_joint(joint, inputs)
    return (config.custom_partitioner_fn or min_cut_rematerialization_partition)(joint, inputs, **kwargs)


def gpu_graphs(fn: Callable[..., Any], args: Sequence[Any], gpu: Gpu | None) -> list[GpuGraph]:
    """Trace ``fn(*args)`` with ``fullgraph=True``, without computing; drops earlier compiled graphs.

    Args:
        fn: A module or function.
        args: The arguments of ``fn``, on the CPU.
        gpu: The GPU that ``fn`` is traced for; None for this machine's CPU.

    Returns:
        The graphs of the forward and, if an output requires grad, of the backward.

    Raises:
        ValueError: A size in a graph depends on data.
        NotImplementedError: A block of the model is compiled as a region (`torch.compiler.nested_compile_region`).
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import compile_fx

    forwards: list[GpuGraph] = []
    backwards: list[GpuGraph] = []

    def inference_compiler(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        change_joint(graph, inputs)
        return keep_forward(graph, inputs, all_outputs(graph))

    def forward_compiler(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        backwards[-1] = replace(backwards[-1], donated=_donated())  # AOTAutograd has cut the joint graph before
        return keep_forward(graph, inputs, returned_outputs())

    def keep_forward(graph: fx.GraphModule, inputs: list[Any], returned: tuple[int, ...]) -> Callable[..., Any]:
        forwards.append(GpuGraph(graph, inputs, returned))
        return make_boxed_func(lambda *_: _empty_outputs(graph))

    def keep_backward(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition(joint, inputs, **kwargs)
        placeholders = backward.graph.find_nodes(op="placeholder")
        values = [node.meta["val"] for node in placeholders]
        backwards.append(GpuGraph(backward, values, all_outputs(backward)))
        return forward, backward

    backend = aot_autograd(
        fw_compiler=forward_compiler, inference_compiler=inference_compiler,
        decompositions=compile_fx.select_decomp_table(), partition_fn=keep_backward,
    )  # fmt: skip

    def watched(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = backend(graph, inputs)

        def call(*given: Any) -> Any:
            forwards[-1] = replace(forwards[-1], called_with=given)
            return run(*given)

        return call

    torch._dynamo.reset()
    # kept_state restores buffers, because values that are written to them are not computed here either
    target = nullcontext() if gpu is None else pretend_target(gpu.target)
    triton = nullcontext() if gpu is None or not find_spec("triton") else pretend_triton(gpu)
    with kept_state(fn, args), target, triton, pretend_flex_attention():
        torch.compile(fn, fullgraph=True, backend=watched)(*args)
    forget_graphs()
    for each in forwards + backwards:
        check_has_no_region(each.graph)
    return forwards + backwards


def kept_nodes(forward: GpuGraph) -> Iterator[fx.Node]:
    """Yield what a forward saves for its backward, one node per storage, except arguments and results."""
    nodes = forward.graph.graph.find_nodes(op="placeholder")
    seen = {node.meta["val"].untyped_storage()._cdata for node in nodes if isinstance(node.meta["val"], Tensor)}
    (outputs,) = forward.graph.graph.find_nodes(op="output")[0].args
    for place, node in enumerate(outputs):
        value = getattr(node, "meta", {}).get("val")
        if isinstance(value, Tensor) and value.untyped_storage()._cdata not in seen:
            seen.add(value.untyped_storage()._cdata)
            if place not in forward.returned:
                yield node


def kept_bytes(forward: GpuGraph) -> int:
    """Bytes of the storages that a forward saves for its backward, except those of its arguments and results."""
    return sum(node.meta["val"].untyped_storage().nbytes() for node in kept_nodes(forward))


def check_has_no_region(graph: fx.GraphModule) -> None:
    """Raise a NotImplementedError if a graph calls ``invoke_subgraph``: reports would miss the subgraph."""
    if any(node.target is torch.ops.higher_order.invoke_subgraph for node in graph.graph.nodes):
        raise NotImplementedError(
            "the code of regions (fp8compile.compile, torch.compiler.nested_compile_region) is not supported. To "
            "generate code for a GPU, pass a single block, or a model whose blocks are not regions."
        )
