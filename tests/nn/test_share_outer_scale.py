"""Layers that share an outer scale multiply as one layer whose weight is all of theirs, as a server does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fp8compile as f8

GROUP = ("q_proj", "k_proj", "v_proj")
RECIPES = {
    "tensorwise": f8.recipes.tensorwise(),
    "nvfp4": f8.recipes.nvfp4(outer="reciprocal"),
    "nvfp4 rows": f8.recipes.nvfp4(weight_block=(1, 16)),
}


class Attention(nn.Module):
    """Three layers that read one input; the last has the largest weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for index, name in enumerate((*GROUP, "o_proj")):
            layer = nn.Linear(64, 32 + 16 * index, bias=False)
            nn.init.normal_(layer.weight, std=0.02 * (index + 1))
            setattr(self, name, layer)

    def forward(self, x):
        return torch.cat([self.get_submodule(name)(x) for name in GROUP], -1)


def shared(recipe, **options):
    return f8.convert(Attention().bfloat16(), recipe, filter="*", share_outer_scale=[GROUP], **options)


def tokens():
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()


def results(model, x):
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_are_parts_of_one_layer(recipe, assert_bits_equal):
    recipe = RECIPES[recipe]
    model, x = shared(recipe), tokens()
    whole = nn.Parameter(torch.cat([model.get_submodule(name).weight.detach() for name in GROUP]))
    y = model(x)
    assert_bits_equal(y, f8.linear(x, whole, recipe=recipe))
    alone = f8.convert(Attention().bfloat16(), recipe, filter="*")
    assert not torch.equal(alone(x)[:, :32], y[:, :32])
    if recipe.shares_weight_codes():  # the gradient of q's input multiplies the same codes
        grad, other = torch.randn(48, 32, generator=torch.Generator().manual_seed(2)).bfloat16(), tokens()
        model.q_proj(x).backward(grad)
        f8.linear(other, f8.quantize(whole.detach(), recipe.weight)[:32], recipe=recipe).backward(grad)
        assert_bits_equal(x.grad, other.grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_have_the_bits_of_eager_ones(recipe, assert_bits_equal):
    model = shared(RECIPES[recipe])
    step = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for found, wanted in zip(results(step, tokens()), results(model, tokens()), strict=True):
        assert_bits_equal(found, wanted)
    weight = step.get_submodule("v_proj").weight
    assert weight is step.get_submodule("q_proj").scale_group[2].weight  # a copy shares with copies


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_the_export_has_the_scale_that_the_forward_has(recipe, tmp_path, assert_bits_equal):
    model, form = shared(RECIPES[recipe]), "compressed-tensors"
    found = dict(f8.export.tensors(model, form))
    whole = torch.cat([model.get_submodule(name).weight.detach() for name in GROUP])
    q = f8.quantize(whole, RECIPES[recipe].weight)
    suffix = "weight" if recipe == "tensorwise" else "weight_packed"
    codes = torch.cat([found[f"{name}.{suffix}"].view(torch.uint8) for name in GROUP])
    assert_bits_equal(codes, q.codes)
    f8.export.save_pretrained(model, tmp_path / "x", form)
    assert not f8.export.check(tmp_path / "x").notes  # a server that takes the largest scale takes this one


def test_groups_are_found_by_the_names_of_transformers():
    import serving_models as models

    model = models.converted(models.make("llama"), f8.recipes.nvfp4(), share_outer_scale=True)
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    assert attention.q_proj.scale_group == (attention.q_proj, attention.k_proj, attention.v_proj)
    assert mlp.up_proj.scale_group == (mlp.gate_proj, mlp.up_proj)
    assert not mlp.down_proj.scale_group
    assert not [name for name, _ in model.named_parameters() if "scale_group" in name]
    f8.revert(model)
    assert "scale_group" not in vars(attention.q_proj)


def test_scales_of_blocks_are_not_shared(assert_bits_equal):
    recipe = f8.recipes.blockwise()
    assert not shared(recipe).q_proj.scale_group
    assert_bits_equal(shared(recipe)(tokens()), f8.convert(Attention().bfloat16(), recipe, filter="*")(tokens()))


REFUSED = {
    "delayed": ({"recipe": f8.recipes.delayed()}, "keeps one scale per layer"),
    "codes": ({"recipe": f8.recipes.tensorwise(), "weight_lifetime": "parameter"}, "weight_lifetime='parameter'"),
    "recipes": ({"recipe": {"q_proj": f8.recipes.nvfp4(), "*": f8.recipes.tensorwise()}}, "have different recipes"),
    "left out": ({"recipe": f8.recipes.nvfp4(), "filter": ["*", "!k_proj"]}, "k_proj of the model stays"),
    "names": (
        {"recipe": f8.recipes.nvfp4(), "share_outer_scale": [("wq", "wk")]},
        r"no module has two .*\('wq', 'wk'\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_share_is_refused_before_anything_changes(case):
    options, words = REFUSED[case]
    model = Attention().bfloat16()
    with pytest.raises(ValueError, match=words):
        f8.convert(model, **{"filter": "*", "share_outer_scale": [GROUP], **options})
    assert type(model.q_proj) is nn.Linear


def test_convert_again_with_the_same_groups_does_nothing_and_with_others_raises():
    recipe = f8.recipes.tensorwise()
    model = shared(recipe)
    group = model.q_proj.scale_group
    assert f8.convert(model, recipe, filter="*", share_outer_scale=[GROUP[::-1]]).q_proj.scale_group is group
    for others in (("q_proj", "k_proj"), (*GROUP, "o_proj")):
        with pytest.raises(
            ValueError, match=r"q_proj is already converted, and does not share its global scale with exactly"
        ):
            f8.convert(model, recipe, filter="*", share_outer_scale=[others])
    apart = f8.convert(Attention(), recipe, filter=["q_proj", "k_proj"])
    with pytest.raises(ValueError, match="q_proj is already converted"):
        f8.convert(apart, recipe, filter="*", share_outer_scale=[GROUP])
    assert type(apart.v_proj) is nn.Linear


@pytest.mark.parametrize("given", ["q_proj", [("q_proj",)], [1], 3])
def test_groups_that_are_no_names_are_refused(given):
    with pytest.raises(TypeError, match="`share_outer_scale` is"):
        f8.convert(Attention(), f8.recipes.nvfp4(), share_outer_scale=given)


def test_a_forward_of_another_recipe_is_refused():
    with pytest.raises(ValueError, match="shares a global scale"):
        f8.set_recipe(shared(f8.recipes.nvfp4()), forward=None)


@pytest.mark.parametrize("amax", [torch.ones(()), torch.ones(1).bfloat16()])
def test_an_amax_of_another_shape_is_refused(amax):
    layer, x = shared(f8.recipes.nvfp4()).q_proj, tokens()
    with pytest.raises(ValueError, match="`outer_amax` must be"):
        f8.linear(x, layer.weight, recipe=layer.recipe, outer_amax=amax)
    codes = f8.quantize(layer.weight.detach(), layer.recipe.weight)
    with pytest.raises(ValueError, match="a quantized weight"):
        f8.linear(x, codes, recipe=layer.recipe, outer_amax=torch.ones(1))


def test_reciprocal_outer_scales_survive_two_reciprocals():
    bits = torch.arange(1, 2**15, dtype=torch.int32).to(torch.int16)
    amax = bits.view(torch.bfloat16).float()
    amax = amax[amax.isfinite()]
    with np.errstate(all="raise"):
        scale = f8.TwoLevelScaling(scale="reciprocal").outer_scale(amax).numpy()
        assert (1 / (1 / scale) == scale).all()
    same = f8.TwoLevelScaling().outer_scale(amax).numpy() == scale
    assert same[
        amax.numpy() >= 2688 / 2.0**126
    ].all()  # TransformerEngine's scale already survives, except the tiniest
    assert not same.all()


@pytest.mark.parametrize("options", [{"outer": "inverse"}, {"outer": "reciprocal", "scale": "torchao"}])
def test_other_rules_of_the_outer_scale_are_refused(options):
    with pytest.raises(ValueError, match="nvfp4: `outer` is"):
        f8.recipes.nvfp4(**options)
