"""`explain_mesh` judges each layer by its own weight, however often the graphs multiply it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.explain import explain_mesh
from fp8compile.testing.explain.mesh import Product
from fp8compile.testing.explain.roofline import PEAKS

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"ranks need PyTorch 2.12, this is {torch.__version__}"
)
BFLOAT16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, checkpointed=False, twice=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))
        self.checkpointed, self.twice = checkpointed, twice

    def forward(self, x):
        for block in [*self.blocks, *([self.blocks[1]] if self.twice else [])]:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def problem_of(model, *, change=lambda model: None, requires_grad=True, recipe=None, gpu="h200"):
    def build(_):
        f8.convert(model.bfloat16(), recipe or f8.recipes.rowwise(), filter=lambda *_: True)
        change(model)
        return model, (torch.randn(64, 64, dtype=BFLOAT16, requires_grad=requires_grad),)

    return explain_mesh(build, {"fsdp": 2}, gpu=gpu).problem


def fall_back(layer):
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)


def fall_back_in_the_first_block(model):
    fall_back(model.blocks[0].down)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_repeats_of_a_layer_stand_for_no_other_one_and_make_no_problem(checkpointed, twice):
    make = {"checkpointed": checkpointed, "twice": twice}
    assert problem_of(Model(**make)) == ""
    assert problem_of(Model(**make), change=fall_back_in_the_first_block) == (
        "blocks.0.down: output fell back to bfloat16, grad_input fell back to bfloat16, "
        "grad_weight fell back to bfloat16"
    )


def test_a_second_call_that_falls_back_is_a_problem_of_its_layer():
    def call_again_in_bfloat16(model):
        down = model.down
        down.forward = lambda x: type(down).forward(down, x) + nn.functional.linear(x, down.weight)

    assert problem_of(Block(64), change=call_again_in_bfloat16).startswith("down: output fell back to bfloat16")


def test_a_layer_that_is_not_called_is_named():
    class Idle(Block):
        def __init__(self):
            super().__init__(64)
            self.idle = nn.Linear(64, 64)

    assert problem_of(Idle()) == "idle: it is not called"


def test_what_needs_no_gradient_is_no_problem():
    def freeze(model):
        model.up.weight.requires_grad_(requires_grad=False)
        model.down.weight.requires_grad_(requires_grad=False)

    assert problem_of(Block(64), requires_grad=False) == ""
    assert problem_of(Block(64), change=freeze) == ""


def test_only_the_first_three_layers_are_named():
    def fall_back_everywhere(model):
        for block in model.blocks[:2]:
            fall_back(block.up)
            fall_back(block.down)

    problem = problem_of(Model(), change=fall_back_everywhere)
    assert [part.partition(":")[0] for part in problem.split("; ")] == [
        "blocks.0.up", "blocks.0.down", "blocks.1.up", "and 1 more layers",
    ]  # fmt: skip


RECIPES = {
    "tensorwise": "h200", "blockwise": "h200", "delayed": "h200", "rowwise_bf16_wgrad": "h200", "mxfp8": "b200",
    "nvfp4": "b200",
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_makes_a_problem_of_layers_that_follow_it(name):
    def build(mesh):
        model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)).bfloat16()
        f8.convert(model, f8.recipes.by_name(name), filter=lambda *_: True)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model, (torch.randn(64, 64, dtype=BFLOAT16, requires_grad=True),)

    found = explain_mesh(build, {"tp": 2}, gpu=RECIPES[name])
    assert found.problem == ""
    assert {each.by_mx for each in found.products if each.fp8 and each.code_bits == 8} <= {name == "mxfp8"}


def test_the_least_time_of_a_product_by_mx_has_the_rate_of_mx():
    product = {"op": "aten::_scaled_mm", "fp8": True, "flops": 838 * 10**12, "bytes": 0, "backward": False}
    assert Product(**product, by_mx=True).seconds(PEAKS["rtx5090"]) == 1.0
    assert Product(**product).seconds(PEAKS["rtx5090"]) == 2.0
