"""How long FP8 weights live is one option: by the recipe, by `convert`, and the same on every layer that has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fp8compile as f8

LIFETIMES = "call", "pass", "step", "parameter"


def model_of(*recipes, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).bfloat16()
    each = dict(zip("01", recipes, strict=True)) if len(recipes) > 1 else recipes[0]
    return f8.convert(model, each, filter="*", **options)


def lifetimes(model):
    return [layer.recipe.weight_lifetime for layer in model]


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_the_option_of_convert_and_of_a_recipe_are_one(lifetime, assert_bits_equal):
    x = torch.randn(32, 64).bfloat16()
    asked = model_of(f8.recipes.tensorwise(), weight_lifetime=lifetime)
    chosen = model_of(f8.recipes.tensorwise(weight_lifetime=lifetime))
    other = model_of(f8.recipes.tensorwise(weight_lifetime="step"), weight_lifetime=lifetime)
    plain = model_of(f8.recipes.tensorwise())
    for model in (asked, chosen, other):
        assert model[0].recipe is model[1].recipe  # graphs have guards on its identity
        assert lifetimes(model) == [lifetime] * 2
        assert [layer.is_quantized() for layer in model] == [lifetime == "parameter"] * 2
        assert_bits_equal(model(x), plain(x))


def test_each_layer_can_have_its_own():
    model = model_of(f8.recipes.rowwise(weight_lifetime="parameter"), f8.recipes.rowwise(weight_lifetime="step"))
    assert [layer.is_quantized() for layer in model] == [True, False]
    assert [row.quantized_weight for row in f8.conversion_report(model).rows] == [True, False]


def test_a_converted_model_keeps_its_lifetime():
    model = model_of(f8.recipes.rowwise(), weight_lifetime="parameter")
    for recipe in (f8.recipes.rowwise(), f8.recipes.rowwise(weight_lifetime="parameter")):
        assert lifetimes(f8.convert(model, recipe, filter="*")) == ["parameter"] * 2
    for options in ({"weight_lifetime": "call"}, {"weight_lifetime": "step"}):
        with pytest.raises(ValueError, match="already converted, with another recipe"):
            f8.convert(model, f8.recipes.rowwise(), filter="*", **options)
        with pytest.raises(ValueError, match="already converted, with another recipe"):
            f8.convert(model, f8.recipes.rowwise(weight_lifetime="step"), filter="*")
    with pytest.raises(ValueError, match="already converted, with another recipe"):
        f8.convert(model_of(f8.recipes.rowwise()), f8.recipes.rowwise(weight_lifetime="parameter"), filter="*")


def test_what_makes_fp8_parameters_says_so_in_the_recipe():
    assert lifetimes(f8.freeze_weights(model_of(f8.recipes.rowwise(weight_lifetime="step")))) == ["parameter"] * 2
    assert lifetimes(f8.freeze_weights(model_of(f8.recipes.delayed()))) == ["parameter"] * 2


def test_a_layer_changes_only_between_lifetimes_of_values():
    layer = model_of(f8.recipes.tensorwise())[0]
    for lifetime in ("step", "pass", "call"):
        layer.recipe = replace(layer.recipe, weight_lifetime=lifetime)
        assert lifetimes([layer]) == [lifetime]
    with pytest.raises(
        ValueError, match="weight_lifetime is 'parameter', but the layer has weights in high precision"
    ):
        layer.recipe = f8.recipes.tensorwise(weight_lifetime="parameter")
    frozen = model_of(f8.recipes.tensorwise(), weight_lifetime="parameter")[0]
    with pytest.raises(ValueError, match="weight_lifetime is 'call', but the layer has FP8 parameters"):
        frozen.recipe = f8.recipes.tensorwise()
    with pytest.raises(
        ValueError, match=r"Linear: a recipe with weight_lifetime='parameter' needs fp8compile\.convert"
    ):
        f8.Linear(64, 64, recipe=f8.recipes.tensorwise(weight_lifetime="parameter"))
    with pytest.raises(
        ValueError, match=r"Linear: a recipe with weight_lifetime='parameter' needs fp8compile\.convert"
    ):
        f8.Linear.from_linear(nn.Linear(64, 64), f8.recipes.tensorwise(weight_lifetime="parameter"))


def test_fp8_parameters_share_no_global_scale_whoever_asks_for_them():
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q_proj", "k_proj")})
    recipe = f8.recipes.tensorwise(weight_lifetime="parameter")
    with pytest.raises(ValueError, match="share_outer_scale can't be combined with weight_lifetime='parameter'"):
        f8.convert(model, recipe, filter="*", share_outer_scale=[("q_proj", "k_proj")])


@pytest.mark.parametrize(
    "call",
    [
        lambda: f8.recipes.rowwise(cache_weights=True),
        lambda: f8.Recipe(cache_weights=True),
        lambda: f8.recipes.by_name("nvfp4", cache_weights=True),
    ],
)
def test_a_flag_of_no_release_raises_with_the_new_spelling(call):
    with pytest.raises(TypeError, match=r"cache_weights=True was replaced by .* Pass weight_lifetime='step'"):
        call()


def test_flags_of_earlier_versions_warn_with_the_new_spelling():
    with pytest.warns(FutureWarning, match="keep_weight_codes=False was replaced.* weight_lifetime='call'"):
        assert f8.recipes.by_name("delayed(keep_weight_codes=False)").weight_lifetime == "call"
    with pytest.warns(FutureWarning, match="quantized_parameters=True was replaced.* weight_lifetime='parameter'"):
        assert lifetimes(model_of(f8.recipes.rowwise(), quantized_parameters=True)) == ["parameter"] * 2
    with pytest.warns(FutureWarning, match=r"quantized_parameters=False was replaced.* Omit it\."):
        assert lifetimes(model_of(f8.recipes.delayed(), quantized_parameters=False)) == ["pass"] * 2


def test_flags_that_mean_nothing_and_contradictions_say_so():
    with pytest.raises(TypeError, match=r"cache_weights=False was replaced .* Omit it\."):
        f8.recipes.rowwise(cache_weights=False)
    for options in ({"keep_weight_codes": True, "weight_lifetime": "call"}, {"keep_weight_codes": "yes"}):
        with pytest.raises(TypeError, match=r"`keep_weight_codes` was replaced by `weight_lifetime`"):
            f8.recipes.nvfp4(**options)
    with pytest.raises(TypeError, match=r"`keep_weight_codes` was replaced by `weight_lifetime`"):
        replace(f8.recipes.nvfp4(), keep_weight_codes=False)


def test_a_function_of_earlier_versions_warns_with_its_new_name():
    with pytest.warns(FutureWarning, match=r"renamed to fp8compile\.invalidate_weight_cache"):
        assert f8.renew_weight_codes is f8.invalidate_weight_cache


def test_weights_that_were_replaced_are_what_counts():
    model = model_of(f8.recipes.rowwise(), weight_lifetime="parameter")
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.dequantize())
        layer.recipe = replace(layer.recipe, emulate=True)  # as the layer's own lifetime stays
    f8.convert(model, replace(f8.recipes.rowwise(), emulate=True), filter="*")
    with pytest.raises(ValueError, match="already converted, with another recipe"):
        f8.convert(model, replace(f8.recipes.rowwise(), emulate=True), filter="*", weight_lifetime="parameter")


def test_layers_of_values_share_a_scale_beside_fp8_parameters():
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q", "k", "z")})
    recipes = {"z": f8.recipes.tensorwise(weight_lifetime="parameter"), "*": f8.recipes.tensorwise()}
    f8.convert(model, recipes, filter="*", share_outer_scale=[("q", "k")])
    assert set(model["q"].scale_group) == {model["q"], model["k"]}
    f8.convert(model, recipes, filter="*", share_outer_scale=[("q", "k")])


def test_values_that_are_none_of_the_four_raise():
    for call in (
        lambda: f8.recipes.rowwise(weight_lifetime="forever"),
        lambda: model_of(f8.recipes.rowwise(), weight_lifetime=""),
    ):
        with pytest.raises(ValueError, match="must be 'call', 'pass', 'step', 'parameter'"):
            call()
    with pytest.raises(ValueError, match="weight_lifetime='pass' requires the same quantizer"):
        model_of(f8.recipes.rowwise(), weight_lifetime="pass")


@pytest.mark.parametrize("name", f8.recipes.names())
def test_describe_and_by_name_know_it(name):
    for lifetime in LIFETIMES:
        try:
            recipe = f8.recipes.by_name(name, weight_lifetime=lifetime)
        except ValueError:
            assert lifetime == "pass"
            continue
        assert f8.recipes.by_name(f8.recipes.describe(recipe)) == recipe
    assert f8.recipes.describe(f8.recipes.by_name(name)) == name
