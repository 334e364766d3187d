"""Graphs that Dynamo hands to a backend, kept and printed."""

from __future__ import annotations

import re

import torch
from torch import fx
from torch._dynamo.backends.registry import lookup_backend

__all__ = ["Recorder", "calls", "printed"]

RECIPE = re.compile(r"fp8compile_quantizers_recipe_Recipe\.from_graph\(.*\)(?=\))")
SALT = re.compile(r"from_graph\('[0-9a-f]{8}'")


class Recorder:
    """A backend that keeps the graphs it gets and passes them on to another one."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.backend = backend
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[torch.Tensor]):
        self.graphs.append(graph)
        return lookup_backend(self.backend)(graph, inputs)


def calls(graph: fx.GraphModule, name: str) -> list[fx.Node]:
    """The nodes that call an operator, by its name in graphs."""
    return [node for node in graph.graph.nodes if str(node.target) == name]


def printed(graph: fx.GraphModule, *, recipes: bool = False) -> str:
    """The graph's code without what changes from day to day: the salt of constants, and placeholders' full names.

    A recipe is a long expression; it is printed as ``<recipe>`` unless asked for.
    """
    body = graph.code.strip().splitlines()[1:]
    text = "\n".join(line.strip().partition(";  ")[0] for line in body if not re.match(r"\s*l_\w+ = L_\w+$", line))
    text = re.sub(r"l_self_modules_(\w+?)_parameters_weight_", r"\1", text)
    text = re.sub(r"l_(x|input)_", "x", text)
    return SALT.sub("from_graph('xxxxxxxx'", text) if recipes else RECIPE.sub("<recipe>", text)
