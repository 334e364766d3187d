"""A repeated block compiled once: `torch.compiler.nested_compile_region` around blocks of FP8 layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import fp8compile as f8
from benchmarks.mlp import Mlp

BLOCKS = 3


class Region(Mlp):
    """The block as a region."""

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return super().forward(x)


def trained(cls, recipe, backend):
    """Output and gradients of a model of such blocks."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = f8.convert(nn.Sequential(*(cls(32, 48) for _ in range(BLOCKS))), f8.recipes.by_name(recipe))
    x = torch.randn(24, 32, dtype=torch.bfloat16, requires_grad=True)
    y = torch.compile(model, fullgraph=True, backend=backend)(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("recipe", f8.recipes.names())
def test_blocks_that_are_regions_are_traced_once_and_have_the_same_bits(recipe):
    graphs, aot_eager = [], lookup_backend("aot_eager")
    found = trained(Region, recipe, lambda graph, inputs: graphs.append(graph) or aot_eager(graph, inputs))
    for actual, right in zip(found, trained(Mlp, recipe, "aot_eager"), strict=True):
        assert torch.equal(actual, right)
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    bodies = {node.args[0].target for node in calls}
    assert (len(calls), len(bodies)) == (BLOCKS, 1), graph.print_readable(print_output=False)
    (body,) = (getattr(graph, name) for name in bodies)
    layers = [node for node in body.graph.nodes if str(node.target).startswith("fp8compile.")]
    assert len(layers) == 3, body.print_readable(print_output=False)
