"""convert and revert: what changes in a model, what stays, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp8compile as f8

RECIPE = f8.recipes.rowwise()
OTHER = f8.recipes.tensorwise()


class Tied(nn.Module):
    """A language model's two ends: the output layer has the embedding's weight."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(64, 32, dtype=dtype)
        self.body = nn.Linear(32, 32, dtype=dtype)
        self.lm_head = nn.Linear(32, 64, bias=False, dtype=dtype)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.lm_head(self.body(self.embedding(tokens)))


def mlp(dtype=torch.float32):
    return nn.Sequential(nn.Linear(32, 48, dtype=dtype), nn.ReLU(), nn.Linear(48, 32, dtype=dtype))


def kinds(model):
    return {fqn: type(module) for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}


# ---------------------------------------------------------------------------------- what changes, what stays


def test_convert_swaps_linears_in_place_and_nothing_else():
    model = mlp()
    relu, parameters, state = model[1], dict(model.named_parameters()), list(model.state_dict())
    assert f8.convert(model, RECIPE) is model
    assert kinds(model) == {"0": f8.Linear, "2": f8.Linear}
    assert model[0].recipe is model[2].recipe is RECIPE
    assert model[1] is relu
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == state


def test_optimizer_made_before_convert_trains_the_converted_model():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    f8.convert(model, RECIPE)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(8, 32)).square().sum().backward()
    optimizer.step()
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


def test_root_linear_is_converted_in_place():
    linear = nn.Linear(32, 48)
    assert f8.convert(linear, RECIPE) is linear
    assert type(linear) is f8.Linear
    assert f8.revert(linear) is linear
    assert type(linear) is nn.Linear
    assert not hasattr(linear, "recipe")


def test_one_linear_in_two_places_stays_one():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU()), "c": nn.Linear(32, 32)})
    f8.convert(model, RECIPE)
    assert type(model["a"]) is f8.Linear
    assert model["a"] is model["b"][0]
    assert model["a"] is not model["c"]
    f8.revert(model)
    assert type(model["a"]) is nn.Linear
    assert model["a"] is model["b"][0]


def test_a_slot_that_holds_none_stays():
    model = mlp()
    model.register_module("missing", None)
    f8.convert(model, RECIPE)
    assert model.missing is None


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_tied_weights_stay_tied_through_convert_step_and_revert(backend):
    model = f8.convert(Tied(), RECIPE)
    assert model.lm_head.weight is model.embedding.weight
    assert len(list(model.parameters())) == 3
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.embedding.weight.detach().clone()
    run(torch.arange(16)).logsumexp(-1).sum().backward()
    optimizer.step()
    assert model.lm_head.weight is model.embedding.weight
    assert not torch.equal(model.embedding.weight, before)
    f8.revert(model)
    assert model.lm_head.weight is model.embedding.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", [RECIPE, OTHER], ids=["rowwise", "tensorwise"])
def test_bias_is_added_to_the_rounded_product_in_the_models_dtype(recipe, dtype, assert_bits_equal):
    linear = nn.Linear(32, 48, dtype=dtype)
    x = torch.randn(5, 32).to(dtype)
    a, b = f8.quantize(x, recipe.input), f8.quantize(linear.weight, recipe.weight)
    product = f8.scaled_mm(a, b.t(), out_dtype=dtype)
    assert_bits_equal(f8.convert(linear, recipe)(x), product + linear.bias)


def test_mode_and_frozen_parameters_stay():
    model = mlp().eval()
    model[0].weight.requires_grad_(requires_grad=False)
    f8.convert(model, RECIPE)
    assert not model[0].training
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    x = torch.randn(4, 32, requires_grad=True)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    assert x.grad is not None


def test_deepcopy_of_a_converted_model_is_converted_and_its_own(assert_bits_equal):
    model = f8.convert(mlp(), RECIPE)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 32)
    assert kinds(twin) == kinds(model)
    assert twin[0].weight is not model[0].weight
    assert_bits_equal(twin(x), model(x))


# ---------------------------------------------------------------------------------- again, and back


def test_convert_again_with_an_equal_recipe_does_nothing():
    model = f8.convert(mlp(), RECIPE)
    modules = list(model.modules())
    assert f8.convert(model, f8.recipes.rowwise()) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


def test_convert_again_with_another_recipe_raises_and_changes_nothing():
    model = f8.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), RECIPE, filter="1")
    before = list(model.modules())
    with pytest.raises(ValueError, match="another recipe") as caught:
        f8.convert(model, OTHER)
    assert str(caught.value) == (
        "convert: 1 is already converted, with another recipe. Call fp8compile.revert(model) first, or exclude it "
        "with the filter."
    )
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    assert kinds(model) == {"0": nn.Linear, "1": f8.Linear}


def test_convert_again_that_asks_for_what_a_layer_has_not_raises_and_changes_nothing():
    model = f8.convert(mlp(), RECIPE, filter="0")
    for options in ({}, {"keep_initial": True, "strict": True}):
        with pytest.raises(ValueError, match="0 is already converted, with another recipe"):
            f8.convert(model, RECIPE, weight_lifetime="parameter", **options)
    assert kinds(model) == {"0": f8.Linear, "2": nn.Linear}
    f8.convert(model, RECIPE, weight_lifetime="parameter", filter="2")
    assert [model[0].is_quantized(), model[2].is_quantized()] == [False, True]


def test_convert_again_of_weights_that_are_codes_does_nothing():
    model = f8.convert(mlp(), RECIPE, weight_lifetime="parameter", keep_initial=True)
    weights = [each.weight for each in (model[0], model[2])]
    f8.convert(model, RECIPE, weight_lifetime="parameter", keep_initial=True)
    assert all(each.weight is weight for each, weight in zip((model[0], model[2]), weights, strict=True))


def test_two_recipes_in_one_model_by_filters():
    model = f8.convert(mlp(), RECIPE, filter="0")
    f8.convert(model, OTHER, filter="2")
    assert [model[0].recipe, model[2].recipe] == [RECIPE, OTHER]


def test_revert_gives_back_the_model_as_it_was(assert_bits_equal):
    model, x = mlp(), torch.randn(4, 32)
    handle = model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[0].register_buffer("counter", torch.ones(3))
    expected, parameters, buffer = model(x), list(model.parameters()), model[0].counter
    f8.convert(model, RECIPE)
    assert not torch.equal(model(x), expected)
    assert f8.revert(model) is model
    assert kinds(model) == {"0": nn.Linear, "2": nn.Linear}
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model[0].counter is buffer
    assert_bits_equal(model(x), expected)
    handle.remove()
    assert not torch.equal(model(x), expected)


def test_revert_of_an_unconverted_model_changes_nothing():
    model = mlp()
    before = list(model.modules())
    f8.revert(model)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_reverted_linears_carry_nothing_of_ours():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))
    before = [set(vars(module)) for module in model]
    f8.revert(f8.convert(model, RECIPE))
    assert [set(vars(module)) for module in model] == before


# ---------------------------------------------------------------------------------- refused


def raised(*args, **kwargs):
    with pytest.raises((TypeError, ValueError)) as caught:
        f8.convert(*args, **kwargs)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_recipe_given_as_a_string_raises_naming_by_name():
    assert raised(mlp(), "rowwise") == (
        "TypeError: convert: `recipe` is 'rowwise'; it must be a fp8compile.Recipe, such as "
        "fp8compile.recipes.rowwise() or fp8compile.recipes.by_name('rowwise')."
    )


def test_recipe_function_that_was_not_called_raises():
    assert "TypeError: convert: `recipe` is <function rowwise at" in raised(mlp(), f8.recipes.rowwise)


def test_something_that_is_no_module_raises():
    assert raised([nn.Linear(32, 32)], RECIPE) == (
        "TypeError: convert: `model` is a list; it must be a torch.nn.Module."
    )


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(), nn.Conv2d(32, 32, 1)], ids=lambda m: type(m).__name__)
def test_model_without_a_linear_raises(model):
    name = type(model).__name__
    assert raised(model, RECIPE) == f"ValueError: convert: {name} has no nn.Linear, so there is nothing to convert."


def compiled_whole():
    return torch.compile(mlp(), backend="eager"), "the model"


def compiled_part():
    return nn.Sequential(mlp(), torch.compile(mlp(), backend="eager")), "1"


def compiled_in_place():
    model = nn.Sequential(mlp())
    model.compile(backend="eager")
    return model, "the model"


def compiled_linear_in_place():
    model = mlp()
    model[2].compile(backend="eager")  # its compiled forward is that of nn.Linear, and would go on running
    return model, "2"


@pytest.mark.parametrize("make", [compiled_whole, compiled_part, compiled_in_place, compiled_linear_in_place])
def test_model_that_was_compiled_already_raises_and_changes_nothing(make):
    model, where = make()
    before = kinds(model)
    assert raised(model, RECIPE) == (
        f"ValueError: convert: {where} is already compiled with torch.compile. Call convert first, then compile the "
        "model that it returns."
    )
    assert kinds(model) == before


def test_linear_with_a_forward_of_its_own_is_left_and_never_converted_in_name_only():
    model = mlp()
    model[0].forward = lambda x: torch.zeros(*x.shape[:-1], 48)
    f8.convert(model, RECIPE)
    assert kinds(model) == {"0": nn.Linear, "2": f8.Linear}
