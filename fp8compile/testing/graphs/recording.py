"""Backend for torch.compile that records the graphs of Dynamo and of AOTAutograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile.testing.graphs.compiler_log import FRAME, TORCH

__all__ = ["BACKENDS", "KeptGraph", "Recording", "node_value", "op_name", "user_place"]

BACKENDS = ("aot_eager", "inductor")


@dataclass
class KeptGraph:
    """One compiled graph as Dynamo traced it and as AOTAutograd split it.

    Attributes:
        compile_id: PyTorch's id of the compilation: the function's number and, after a slash, the number of its
            compilation; both restart at 0 after a reset.
        dynamo: The graph that Dynamo traced.
        forward: The forward graph after AOTAutograd; decomposed if Inductor is the backend.
        backward: The backward graph after AOTAutograd; None if no gradient is needed.
    """

    compile_id: str
    dynamo: fx.GraphModule
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    _compilation: Any = field(default=None, repr=False)


class Recording:
    """Backend that records graphs: call ``torch.compile(model, backend=Recording())`` and run the model.

    Args:
        backend: "aot_eager" runs the graphs as they are, "inductor" compiles them.

    Attributes:
        graphs: The graphs in the order of compilation.
    """

    def __init__(self, backend: str = "aot_eager") -> None:
        if backend not in BACKENDS:
            raise ValueError(f"`backend` is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
        self.backend = backend
        self.graphs: list[KeptGraph] = []

    @property
    def traced(self) -> list[fx.GraphModule]:
        """All forward and backward graphs of AOTAutograd; each forward is followed by its backward."""
        return [graph for kept in self.graphs for graph in (kept.forward, kept.backward) if graph is not None]

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Record and compile a graph from Dynamo; torch.compile calls this for each graph."""
        compilation = torch._guards.CompileContext.try_get()
        kept = KeptGraph(str(compilation and compilation.compile_id), graph, _compilation=compilation)
        # a compilation that restarts passes its graph again, and the earlier graph never runs; compile_id can't
        # identify the compilation, because numbers are used again after a reset
        over = [other for other in self.graphs if compilation is None or other._compilation is not compilation]
        self.graphs = [*over, kept]
        return (_compile_by_inductor if self.backend == "inductor" else _run_as_is)(kept, graph, inputs)


def _run_as_is(kept: KeptGraph, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def keep(which: str, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        setattr(kept, which, graph)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=functools.partial(keep, "forward"),
        bw_compiler=functools.partial(keep, "backward"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return backend(graph, inputs)


def _compile_by_inductor(kept: KeptGraph, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def keep(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        setattr(kept, "backward" if options.get("is_backward") else "forward", graph)
        return compile_fx_inner(graph, inputs, **options)

    compiled: Any = compile_fx(graph, list(inputs), inner_compile=keep)  # its other return types are ahead of time
    return compiled


def user_place(node: fx.Node) -> tuple[str, int]:
    """File and line of the user code that a node comes from; ("", 0) if unknown."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    file, line, _ = next((frame for frame in reversed(frames) if not frame[0].startswith(TORCH)), ("", "0", ""))
    return file, int(line)


def op_name(target: Any) -> str:
    """``namespace::name`` of an operator, without the overload; for another function, its own name."""
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    return str(getattr(packet, "_qualified_op_name", None) or getattr(packet, "__name__", str(packet)))


def node_value(node: fx.Node) -> Any:
    """The value of a node: a fake tensor, a number, or None for an attribute of the graph.

    Raises:
        ValueError: The node has no value, because the graph is one of Dynamo's.
    """
    if "val" not in node.meta and node.op != "get_attr":
        raise ValueError(
            f"node {node.name} has no meta['val'], so its shape is unknown. Pass the graphs that AOTAutograd passes "
            "to a backend, not Dynamo's."
        )
    return node.meta.get("val")
