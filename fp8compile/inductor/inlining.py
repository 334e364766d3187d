"""Traces a function to a graph of its own, and copies that graph into another graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["inlined", "traced"]


def traced(function: Callable[..., Any], *values: Tensor) -> fx.GraphModule:
    """Trace ``function(*values)`` to a graph, with Inductor's decompositions; ``values`` are fake tensors."""
    from torch._inductor.compile_fx import select_decomp_table
    from torch._subclasses import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    first = values[0]
    assert isinstance(first, FakeTensor), "values of a traced graph are fake"
    with first.fake_mode, preserve_node_meta(enable=False), torch.no_grad():
        return make_fx(function, decomposition_table=select_decomp_table())(*values)


def inlined(graph: fx.Graph, body: fx.GraphModule, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Copy the nodes of ``body`` to the insertion point of ``graph``; return the copies of the results.

    ``inputs`` replace the placeholders of ``body``.
    """
    env: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in body.graph.nodes:
        if node.op == "output":
            results: Any = fx.map_arg(node.args[0], env.__getitem__)
            return list(results) if isinstance(results, (list, tuple)) else [results]
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    raise AssertionError("a graph has an output")
