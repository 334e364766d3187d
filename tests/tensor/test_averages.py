"""Averages of FP8 parameters (EMA, SWA) raise, because each update would be rounded; those in high precision work."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp8compile as f8


def converted(recipe, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)).bfloat16()
    return f8.convert(model, f8.recipes.by_name(recipe), weight_lifetime="parameter")


EMA = {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)}


@pytest.mark.parametrize("options", [EMA, {}], ids=["EMA", "SWA"])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise", "nvfp4"])
def test_averages_of_models_raise_and_say_what_to_average(recipe, options):
    """Each update of an average would be rounded to FP8."""
    model = converted(recipe)
    average = torch.optim.swa_utils.AveragedModel(model, **options)
    average.update_parameters(model)  # the first copies
    before = average.module[0].weight.dequantize()
    with pytest.raises(
        TypeError, match=r"averages weights|is not supported for a (QuantizedTensor|weight with two sets)"
    ):
        average.update_parameters(converted(recipe, seed=1))
    assert torch.equal(average.module[0].weight.dequantize(), before)


SHADOWS = {
    "clone": lambda weight: weight.detach().clone(),
    "deepcopy": lambda weight: copy.deepcopy(weight).requires_grad_(requires_grad=False),
}


@pytest.mark.parametrize("shadow", SHADOWS)
def test_averages_by_hand_raise(shadow):
    model, other = converted("tensorwise"), converted("tensorwise", seed=1)
    average, weight = SHADOWS[shadow](model[0].weight), other[0].weight.detach()
    for update in (
        lambda: average.sub_(0.1 * weight.dequantize()),
        lambda: average.mul_(0.9).add_(weight, alpha=0.1),
        lambda: average.lerp_(weight, 0.1),
        lambda: torch._foreach_add_([average], [weight], alpha=0.1),
    ):
        with pytest.raises(TypeError, match="averages weights"):
            update()


def test_a_copy_that_an_optimizer_trains_is_no_average():
    model = copy.deepcopy(converted("tensorwise"))
    optimizer, before = torch.optim.SGD(model.parameters(), lr=1.0), model[0].weight.dequantize()
    model(torch.randn(8, 64).bfloat16()).float().square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.dequantize(), before)
    with torch.no_grad():
        model[0].weight.sub_(0.1)


def test_an_average_that_is_plain_takes_values_of_fp8_parameters(assert_bits_equal):
    """One made before `convert`, as the documents show."""
    plain = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    average = torch.optim.swa_utils.AveragedModel(plain, **EMA)
    average.update_parameters(plain)
    expected = plain[0].weight.detach().clone()
    model = f8.convert(plain, f8.recipes.tensorwise(), weight_lifetime="parameter")
    average.update_parameters(model)
    expected.lerp_(model[0].weight.dequantize().detach(), 0.25)
    assert_bits_equal(average.module[0].weight.detach(), expected)
