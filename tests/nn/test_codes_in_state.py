"""State dicts with codes: they load where codes mean the same, and raise where they mean something else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch_files import through_a_file

import fp8compile as f8


def tensorwise(weight):
    """Scales of tensors, with a format of its own for the weight."""
    codes = f8.CurrentScaling(format=weight)
    return replace(f8.recipes.tensorwise(grad_format="e4m3"), weight=codes, weight_for_grad_input=codes)


def in_blocks(length):
    return f8.recipes.of_quantizer(f8.CurrentScaling(block=(1, length)))


def model_of(recipe, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    return f8.convert(model, recipe, filter="*", weight_lifetime="parameter")


def test_codes_of_another_format_raise_and_change_nothing(assert_bits_equal):
    model, state = model_of(tensorwise("e5m2")), model_of(tensorwise("e4m3"), seed=1).state_dict()
    before = model[0].weight.codes.clone()
    for each in (state, through_a_file(state)):
        with pytest.raises(
            RuntimeError,
            match=r"0\.weight was quantized as e4m3 .*, but the recipe of this model "
            r"has e5m2 .* dequantized",
        ):
            model.load_state_dict(each)
    assert_bits_equal(model[0].weight.codes, before)


def test_codes_of_other_blocks_raise_where_shapes_are_equal():
    state = model_of(in_blocks(32)).state_dict()
    with pytest.raises(RuntimeError, match=r"e4m3 in blocks of 1 x 32.*e4m3 in blocks of 1 x 48"):
        model_of(in_blocks(48)).load_state_dict(state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f8.recipes.rowwise(), f8.recipes.rowwise(scale="pow2", grad_format="e5m2")),
        (f8.recipes.rowwise(), in_blocks(128)),
        (f8.recipes.nvfp4(), f8.recipes.nvfp4(scale="torchao")),
    ],
    ids=["scale", "block", "two levels"],
)
def test_codes_of_a_recipe_that_reads_them_alike_load(one, other, assert_bits_equal):
    model, back = model_of(one, seed=1), model_of(other)
    back.load_state_dict(through_a_file(model.state_dict()))
    assert_bits_equal(back[0].weight.dequantize(), model[0].weight.dequantize())


def test_a_state_that_does_not_say_what_its_codes_mean_loads(assert_bits_equal):
    model, back = model_of(tensorwise("e4m3"), seed=1), model_of(tensorwise("e4m3"))
    back.load_state_dict(dict(model.state_dict()))
    assert_bits_equal(back[1].weight.codes, model[1].weight.codes)


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4"])
def test_a_scale_of_another_shape_raises_and_leaves_the_weight_as_it_was(recipe, assert_bits_equal):
    recipe = f8.recipes.by_name(recipe)
    model, state = model_of(recipe), model_of(recipe, seed=1).state_dict()
    before = {key: each.clone() for key, each in model[0].state_dict().items() if key.startswith("weight")}
    last = next(reversed(before))
    state[f"0.{last}"] = torch.ones(3, 5, 7)
    with pytest.raises(RuntimeError, match=rf"0\.{last} has shape \(3, 5, 7\)"):
        model.load_state_dict(state)
    for key, each in before.items():
        assert_bits_equal(model[0].state_dict()[key], each, key)
