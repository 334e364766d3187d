"""explain says how fast FP8 experts can be with the rows that each expert gets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.testing.explain.explanation import explain_in_steps


class Experts(nn.Module):
    def __init__(self, experts, dim, hidden, recipe):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, dim, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden, dtype=torch.bfloat16))
        self.recipe = recipe

    def forward(self, x, offsets):
        h = nn.functional.silu(f8.grouped_linear(x, self.up, offsets, recipe=self.recipe))
        return f8.grouped_linear(h, self.down, offsets, recipe=self.recipe)


def explained(recipe, *, experts, rows, gpu="h200"):
    with torch.device("meta"):
        model = Experts(experts, 2048, 768, recipe)
        x = torch.empty(rows, 2048, dtype=torch.bfloat16, requires_grad=True)
        offsets = torch.empty(experts, dtype=torch.int32)
    found = next(explain_in_steps(model, (x, offsets), gpu=gpu))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("recipe", [f8.recipes.blockwise(), f8.recipes.rowwise_bf16_wgrad()], ids=["three", "two"])
def test_few_rows_an_expert_are_told(recipe):
    few, many = (explained(recipe, experts=count, rows=65536) for count in (128, 16))
    assert few.experts_speed[0] == 512
    assert few.experts_speed[1] < 1 < many.experts_speed[1]
    assert (
        "512 rows each: at most about 0.8 of bf16's speed on an NVIDIA H200 SXM, so leave them in bf16" in few.experts
    )
    assert "4096 rows each" in many.experts
    assert "leave them" not in many.experts
    assert few.to_dict()["experts"] == few.experts


def test_experts_in_high_precision_have_no_estimate():
    assert explained(f8.Recipe(), experts=16, rows=4096).experts == ""
    assert explained(f8.recipes.rowwise(), experts=16, rows=4096, gpu=None).experts == ""
