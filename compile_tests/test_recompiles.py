"""How many graphs a program costs: one for all M >= 2, none for what was seen before."""

from __future__ import annotations

import random

import pytest
import torch
from compiles import Compiles
from eight_bits import EIGHT_BITS
from torch import nn

import fp8compile as f8
from benchmarks.mlp import Mlp


def model_of(recipe="rowwise"):
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)).to(torch.bfloat16)
    return f8.convert(model, f8.recipes.by_name(recipe))


def batch(*shape):
    return torch.randn(*shape, 32, dtype=torch.bfloat16, requires_grad=True)


def step(compiled, *shape):
    compiled(batch(*shape)).float().sum().backward()


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_any_number_of_batch_sizes_costs_two_graphs(recipe):
    compiles = Compiles()
    compiled = torch.compile(model_of(recipe), fullgraph=True, backend="aot_eager")
    step(compiled, 24)
    compiles.assert_new(1, "the first size")
    step(compiled, 40)
    compiles.assert_new(1, "the second size, with M dynamic")
    sizes = random.Random(0).sample(range(2, 201), 30)
    for m in [*sizes, 16, 32, 128, 2, 3]:  # those that need padding, and those that don't
        step(compiled, m)
        compiles.assert_new(0, f"M = {m}")
    for m in (0, 1):  # PyTorch specialises on both
        step(compiled, m)
        compiles.assert_at_most(1, f"M = {m}")
    for m in (0, 1, 24, 40, 77):
        step(compiled, m)
        compiles.assert_new(0, f"M = {m} again")


def test_a_size_that_is_known_to_be_dynamic_costs_one_graph():
    compiles = Compiles()
    compiled = torch.compile(model_of(), fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (24, 7, 16, 200):
        step(compiled, m)
    compiles.assert_new(1, "M marked as dynamic from the start")


def test_batch_and_sequence_may_change_on_their_own():
    compiles = Compiles()
    compiled = torch.compile(model_of(), fullgraph=True, backend="aot_eager")
    for shape in ((4, 8), (6, 8), (6, 12)):
        step(compiled, *shape)
    compiles.assert_at_most(3, "first static, then batch, then sequence")
    for shape in ((2, 2), (3, 16), (9, 5), (16, 128)):
        step(compiled, *shape)
        compiles.assert_new(0, f"(batch, sequence) = {shape}")


def test_inductor_takes_every_size_with_one_graph():
    compiles = Compiles()
    compiled = torch.compile(f8.convert(nn.Sequential(nn.Linear(32, 48)), f8.recipes.rowwise()), dynamic=True)
    for m in (24, 7, 16):
        compiled(torch.randn(m, 32)).sum().backward()
    compiles.assert_new(1, "M marked as dynamic from the start")


def test_a_partial_batch_and_eval_each_compile_once():
    compiles = Compiles()
    model = model_of()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def evaluate(m):
        model.eval()
        with torch.no_grad():
            compiled(batch(m))
        model.train()

    step(compiled, 32)
    compiles.assert_new(1, "training")
    step(compiled, 32)
    compiles.assert_new(0, "a second, identical step")
    step(compiled, 20)
    compiles.assert_new(1, "a partial batch")
    evaluate(32)
    compiles.assert_new(1, "evaluation")
    for _ in range(2):
        step(compiled, 32)
        step(compiled, 20)
        evaluate(32)
        evaluate(20)
    compiles.assert_at_most(1, "all of them again (evaluation may become dynamic once)")
    step(compiled, 32)
    evaluate(20)
    compiles.assert_new(0, "and once more")


def test_an_equal_recipe_compiles_nothing_and_another_one_once():
    compiles = Compiles()
    layer = f8.Linear(32, 16, recipe=f8.recipes.rowwise(), dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    step(compiled, 8)
    compiles.assert_new(1, "the first recipe")
    layer.recipe = f8.recipes.rowwise()
    step(compiled, 8)
    compiles.assert_new(0, "an equal recipe")
    layer.recipe = f8.recipes.rowwise(eps=1e-12)
    step(compiled, 8)
    compiles.assert_new(1, "a recipe that differs in eps")
    layer.recipe = f8.recipes.rowwise()
    step(compiled, 8)
    compiles.assert_new(0, "the first recipe again")


@pytest.mark.parametrize("frozen", [False, True])
def test_an_equal_recipe_compiles_no_experts_anew(frozen):
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2, 64, 32, dtype=torch.bfloat16, requires_grad=not frozen)
    compiles = Compiles()
    compiled = torch.compile(f8.grouped_linear, fullgraph=True, backend="aot_eager")
    compiled(x, weight, offsets, recipe=f8.recipes.rowwise()).sum().backward()
    compiles.assert_new(1, "the first recipe")
    compiled(x, weight, offsets, recipe=f8.recipes.rowwise()).sum().backward()
    compiles.assert_new(0, "an equal recipe")


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_of_one_shape_and_recipe_share_one_graph(shared):
    compiles = Compiles()
    one = f8.recipes.rowwise()
    blocks = [f8.convert(Mlp(32, 64), one if shared else f8.recipes.rowwise()) for _ in range(8)]
    x = batch(4)
    for block in blocks:
        x = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    x.float().sum().backward()
    compiles.assert_new(1, "8 blocks, compiled one by one")


def test_two_recipes_in_one_model_cost_a_graph_each():
    compiles = Compiles()
    blocks = [f8.convert(Mlp(32, 64), f8.recipes.by_name(name)) for name in ("rowwise", "tensorwise") * 3]
    x = batch(4)
    for block in blocks:
        x = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    compiles.assert_new(2, "6 blocks with two recipes")


def test_the_failing_guard_is_named():
    compiles = Compiles()
    compiled = torch.compile(model_of(), fullgraph=True, backend="aot_eager", dynamic=False)
    step(compiled, 8)
    step(compiled, 9)
    with pytest.raises(AssertionError, match=r"(?s)2 graphs compiled, expected 1.*size mismatch at index 0"):
        compiles.assert_new(1, "two static sizes")
