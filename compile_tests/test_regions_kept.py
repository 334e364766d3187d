"""What blocks keep for the backward as regions: what they keep in the whole graph, for each recipe."""

from __future__ import annotations

import copy

import pytest
import torch
from eight_bits import EIGHT_BITS
from torch import nn

import fp8compile as f8
from benchmarks.memory import saved_bytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(128, 128, bias=False)

    def forward(self, x):
        return x + torch.relu(self.up(x))


# On a CPU nvfp4 keeps codes of weights both ways, a few bytes apart: halves of bytes are other nodes than codes.
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_a_region_keeps_no_codes_of_weights_that_the_whole_graph_does_not_keep(name):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).bfloat16()
    f8.convert(model, f8.recipes.by_name(name), filter=lambda *_: True)
    x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
    kept, gradients = [], []
    for compiled_by in (torch.compile, f8.compile):
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        compiled = compiled_by(own, fullgraph=True, backend="aot_eager_decomp_partition")
        kept.append(saved_bytes(compiled, own, x))
        (gradient,) = torch.autograd.grad(compiled(x).float().square().sum(), x)
        gradients.append(gradient)
    whole, as_regions = kept
    # what one block hands to the next one is kept by the region too, as its input
    assert as_regions <= whole + x.numel() * x.element_size()
    assert torch.equal(*gradients)
