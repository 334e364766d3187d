"""Graphs as Dynamo traces them: their calls, and their code printed."""

from __future__ import annotations

import re

from torch import fx

__all__ = ["calls", "layer_op", "printed"]

RECIPE = re.compile(r"fp8compile_quantizers_recipe_Recipe\.from_graph\(.*\)(?=\))")
SALT = re.compile(r"from_graph\('[0-9a-f]{8}'")


def calls(graph: fx.GraphModule, name: str) -> list[fx.Node]:
    """The nodes that call an operator, by its name in graphs."""
    return [node for node in graph.graph.nodes if str(node.target) == name]


def layer_op(recipe: str, op: str = "linear") -> str:
    """How an op of a layer with a ready recipe is called in graphs: "fp8compile.linear.default"."""
    return f"fp8compile.{'delayed_' if (recipe, op) == ('delayed', 'linear') else ''}{op}.default"


def printed(graph: fx.GraphModule, *, recipes: bool = False) -> str:
    """The graph's code without what changes from day to day: the salt of constants, and placeholders' full names.

    A recipe is a long expression; it is printed as ``<recipe>`` unless asked for, and full tensors as ``UNSHARDED``.
    """
    body = graph.code.strip().splitlines()[1:]
    text = "\n".join(line.strip().partition(";  ")[0] for line in body if not re.match(r"\s*l_\w+ = L_\w+$", line))
    text = re.sub(r"l_self_modules_(\w+?)_parameters_weight_", r"\1", text)
    text = re.sub(r"l_(x|input)_", "x", text)
    text = re.sub(r"\w+_LayerSharding\.from_graph\('\w+'\)", "UNSHARDED", text)
    return SALT.sub("from_graph('xxxxxxxx'", text) if recipes else RECIPE.sub("<recipe>", text)
