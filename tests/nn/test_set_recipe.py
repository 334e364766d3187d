"""The end of a model in another recipe, and the end of a training with another forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

import fp8compile as f8

FOUR, EIGHT = f8.recipes.nvfp4(), f8.recipes.mxfp8()
BY_MX = replace(f8.recipes.rowwise(), by_mx=True)
OF_TOKENS = f8.Recipe(input=f8.CurrentScaling(block=(32, 32)), weight=f8.CurrentScaling(block=(32, 32)))


def stack(blocks=7):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()) for _ in range(blocks)]
    return torch.nn.ModuleDict({"blocks": torch.nn.Sequential(*layers), "head": torch.nn.Linear(32, 32)}).bfloat16()


def recipes_of(model):
    return [module.recipe for module in model.modules() if isinstance(module, f8.Linear)]


@pytest.mark.parametrize(("tail", "last"), [(0.15, 2), (1 / 7, 1), (0.0, 0), (1.0, 7)])
def test_the_last_share_of_blocks_and_what_is_behind_them_have_another_recipe(tail, last):
    model = f8.convert(stack(), FOUR, filter=lambda *_: True, tail=tail, tail_recipe=EIGHT if tail else None)
    expected = [FOUR] * 8 if not tail else [FOUR] * (7 - last) + [EIGHT] * (last + 1)
    assert recipes_of(model) == expected


@pytest.mark.parametrize(
    ("tail", "blocks", "last"),
    [(0.07, 100, 7), (0.28, 25, 7), (5 / 9, 9, 5), (0.071, 100, 8), (1e-12, 4, 1)],
)
def test_a_share_of_blocks_is_rounded_up_from_what_was_meant_and_not_from_a_float(tail, blocks, last):
    model = stack(blocks)["blocks"]
    f8.convert(model, FOUR, filter=lambda *_: True, tail=tail, tail_recipe=EIGHT)
    assert recipes_of(model).count(EIGHT) == last


def test_each_name_of_a_shared_layer_is_found_with_a_tail_too():
    model = stack(4)
    model["alias"] = torch.nn.ModuleDict({"first": model["blocks"][0][0]})
    recipes = {"alias.*": EIGHT, "*": FOUR}
    f8.convert(model, recipes, filter=lambda *_: True, tail=0.25)
    assert model["blocks"][0][0].recipe == EIGHT
    assert model["blocks"][1][0].recipe == FOUR


def test_a_tail_without_a_recipe_stays_in_high_precision_and_keeps_patterns():
    model = f8.convert(stack(), {"blocks.0.*": EIGHT, "*": FOUR}, filter=lambda *_: True, tail=0.5)
    assert recipes_of(model) == [EIGHT, FOUR, FOUR]
    assert type(model["head"]) is torch.nn.Linear


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tail": 1.5}, r"`tail` is 1\.5; it must be"),
        ({"tail": True}, "`tail` is True; it must be"),
        ({"tail_recipe": EIGHT}, "`tail_recipe` requires the fraction of blocks"),
    ],
    ids=str,
)
def test_a_wrong_tail_says_what_is_allowed(arguments, says):
    with pytest.raises(ValueError, match=says):
        f8.convert(stack(), FOUR, **arguments)


class Mixture(torch.nn.Module):
    """A linear, and experts as torchtitan writes them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts = torch.nn.Linear(32, 32), Experts()

    def forward(self, rows, offsets):
        return self.experts(self.first(rows), offsets)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(3, 48, 32) / 6)

    def _grouped_mm(self, *, A, B_t, offs):
        raise AssertionError("experts were not converted")

    def forward(self, rows, offsets):
        return self._grouped_mm(A=rows, B_t=self.up.transpose(-2, -1), offs=offsets)


def test_experts_take_another_forward_too(assert_bits_equal):
    before = f8.recipes.rowwise()
    model = f8.convert(Mixture().bfloat16(), before, filter=lambda *_: True)
    experts, rows = model.experts, torch.randn(20, 32).bfloat16()
    offsets = torch.tensor([7, 7, 20], dtype=torch.int32)

    def run_experts():
        y = experts(rows, offsets)
        return y.detach(), *torch.autograd.grad(y.sum(), experts.up)

    in_fp8, gradient = run_experts()
    f8.set_recipe(model, forward=None)
    plain, same_gradient = run_experts()
    parts = rows.split([7, 0, 13])
    assert_bits_equal(plain, torch.cat([part @ up.t() for part, up in zip(parts, experts.up, strict=True)]).detach())
    assert_bits_equal(same_gradient, gradient)
    assert not torch.equal(plain, in_fp8)
    with pytest.raises(ValueError, match=r"set_recipe: the forward of experts can't be changed: .*input has block"):
        f8.set_recipe(model, forward=OF_TOKENS)
    assert model.first.recipe == experts.recipe, "a refusal changed a layer"
    f8.set_recipe(model, forward=before)
    assert_bits_equal(run_experts()[0], in_fp8)


def run(layer, x):
    y = layer(x)
    y.sum().backward()
    found = y.detach(), layer.weight.grad.clone(), layer.bias.grad.clone()
    layer.weight.grad = layer.bias.grad = None
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 32), (3, 11, 32), (32,)], ids=str)
def test_a_forward_in_high_precision_is_that_of_the_reverted_model(shape, dtype, assert_bits_equal):
    model = f8.convert(stack(3).to(dtype), EIGHT, filter=lambda *_: True)["blocks"]
    with torch.no_grad():
        for block in model:
            block[0].bias.mul_(20)  # a bias that is rounded apart shows
    x = torch.randn(shape).to(dtype)
    y = f8.set_recipe(model, forward=None)(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    expected = f8.revert(model)(x)
    assert_bits_equal(y.detach(), expected.detach())
    assert_bits_equal(compiled.detach(), expected.detach())


def test_another_forward_changes_outputs_alone_and_costs_one_compile(assert_bits_equal):
    layer = f8.Linear.from_linear(torch.nn.Linear(32, 48).bfloat16(), FOUR)
    x, before = torch.randn(16, 32).bfloat16(), layer.recipe
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, weight_grad, _ = run(compiled, x)
    assert counters["stats"]["unique_graphs"] == 1
    assert f8.set_recipe(compiled, forward=None) is compiled
    for _ in range(2):
        plain, again, _ = run(compiled, x)
        assert_bits_equal(plain, layer.to_linear()(x).detach())
        assert_bits_equal(again, weight_grad)
    assert not torch.equal(plain, y)
    assert counters["stats"]["unique_graphs"] == 2
    f8.set_recipe(layer, forward=before)
    assert layer.recipe == before
    assert_bits_equal(run(compiled, x)[0], y)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8", "nvfp4", "dequantized", "slow sums", "by MX"])
def test_the_way_back_from_a_forward_in_high_precision(name, assert_bits_equal):
    """Gradients of codes have none to be of while outputs are in high precision; they are those of codes again."""
    others = {
        "dequantized": f8.recipes.nvfp4(backward="dequantized"),
        "slow sums": replace(f8.recipes.rowwise(), fast_accumulation_output=False),
        "by MX": BY_MX,
    }
    recipe = others[name] if name in others else f8.recipes.by_name(name)
    layer, x = f8.Linear(32, 48, recipe=recipe), torch.randn(16, 32)
    before = run(layer, x)
    f8.set_recipe(f8.set_recipe(layer, forward=None), forward=recipe)
    assert layer.recipe == recipe
    for found, expected in zip(run(layer, x), before, strict=True):
        assert_bits_equal(found, expected)


@pytest.mark.parametrize(("backward", "of_codes"), [("nvfp4", False), ("bf16", True)])
def test_gradients_of_codes_are_of_gradients_in_high_precision(backward, of_codes):
    layer = f8.Linear(32, 48, recipe=f8.recipes.nvfp4(backward=backward))
    f8.set_recipe(layer, forward=f8.recipes.nvfp4(backward="dequantized"))
    assert not layer.recipe.dequantized_gradients, "gradients stay as they were"
    f8.set_recipe(f8.set_recipe(layer, forward=None), forward=f8.recipes.nvfp4(backward="dequantized"))
    assert layer.recipe.dequantized_gradients is of_codes


@pytest.mark.parametrize(
    ("model", "forward", "says"),
    [
        (torch.nn.Linear(2, 2), None, "the model has no FP8 layers"),
        (f8.Linear(16, 16, recipe=f8.recipes.delayed()), None, "can't be changed: delayed scaling"),
        (
            f8.Linear(16, 16, recipe=FOUR),
            "bf16",
            "`forward` must be a fp8compile.Recipe, or None for high precision; got 'bf16'",
        ),
        (f8.Linear(16, 16, recipe=FOUR), f8.recipes.nvfp4(emulate=True), "of convert too"),
        (f8.Linear(16, 16, recipe=EIGHT), BY_MX, "of convert too"),
    ],
    ids=str,
)
def test_who_cannot_take_another_forward_says_why(model, forward, says):
    with pytest.raises((TypeError, ValueError), match=says):
        f8.set_recipe(model, forward=forward)
