"""Every format, read by the arithmetic of vLLM and SGLang, has the values of training; planted faults are found."""

from __future__ import annotations

import numpy as np
import pytest
import serving_models as models
import serving_readers as readers
import torch
from test_check import change, one_layer, swap_nibbles, transpose

import fp8compile as f8
from fp8compile.export.format_table import FORMATS
from fp8compile.export.scheme import kind_of

RECIPES = {
    "block": f8.recipes.blockwise(),
    "block_ue8m0": f8.recipes.blockwise(scale="pow2"),
    "tensor": f8.recipes.tensorwise(),
    "static_tensor": f8.recipes.delayed(history=4),
    "channel": f8.recipes.rowwise(),
    "mx": f8.recipes.mxfp8(),
    "nvfp4": f8.recipes.nvfp4(),
}
ONLY_TRANSFORMERS = [("fine_grained_fp8", kind) for kind in ("tensor", "static_tensor")]  # weight_scale_inv there
CELLS = [(form.name, scheme.kind) for form in FORMATS.values() for scheme in form.schemes]


def test_a_recipe_stands_for_each_kind():
    assert [kind_of(recipe.weight) for recipe in RECIPES.values()] == list(RECIPES)


def wanted(model, name):
    layer = model[name]
    if layer.recipe.history():
        multiplier = layer.multiplier[1].view(1, 1)
        codes = layer.recipe.weight.cast(layer.weight.detach(), multiplier)
        return layer.recipe.weight.dequantize(codes, layer.recipe.weight.scale_of(multiplier)).numpy()
    return f8.quantize(layer.weight.detach(), layer.recipe.weight).dequantize(torch.float32).numpy()


@pytest.mark.parametrize(("form", "kind"), CELLS)
def test_servers_compute_with_the_values_of_training(form, kind):
    model = one_layer(RECIPES[kind], sizes=(256, 384))
    if kind == "static_tensor":
        model["q_proj"].multiplier.fill_(3.0)
    stored = readers.as_arrays(dict(f8.export.tensors(model, form)))
    own = wanted(model, "q_proj")
    assert np.array_equal(readers.read(form, kind, stored, "q_proj"), own)
    if kind == "nvfp4":  # the emulation rounds scale x outer scale, and the product again
        emulated = readers.read(form, kind, stored, "q_proj", nvfp4=readers.two_levels)
        assert np.abs(emulated - own).max() <= np.abs(own).max() * 2.0**-23
        rounded = (torch.from_numpy(each).bfloat16() for each in (emulated, own))
        assert torch.equal(*rounded)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_layers_that_a_server_multiplies_as_one_keep_their_values(form):
    names = ("q_proj", "k_proj", "v_proj")
    for shares in (True, False):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 64, bias=False) for name in names}).bfloat16()
        for index, name in enumerate(names):
            torch.nn.init.normal_(model[name].weight, std=0.02 * (index + 1))
        f8.convert(model, RECIPES["nvfp4"], filter="*", share_outer_scale=[names] if shares else False)
        stored = readers.as_arrays(dict(f8.export.tensors(model, form)))
        suffix = "weight_scale_2" if form == "modelopt" else "weight_global_scale"
        together = np.array([stored[f"{name}.{suffix}"].reshape(()) for name in names])  # a server fuses them
        alone = [readers.read(form, "nvfp4", stored, name) for name in names]
        fused = [readers.read(form, "nvfp4", stored | {f"{name}.{suffix}": together}, name) for name in names]
        assert all(map(np.array_equal, fused, alone)) == shares


def test_one_scale_for_each_tensor_survives_a_server_that_quantizes_anew():
    """vLLM dequantizes to float16 on the way, which rounds by less than half a step of e4m3 here."""
    names = ("gate_proj", "up_proj")
    for shares in (True, False):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(256, 64, bias=False) for name in names}).bfloat16()
        torch.nn.init.normal_(model["up_proj"].weight, std=0.1)
        f8.convert(model, RECIPES["tensor"], filter="*", share_outer_scale=[names] if shares else False)
        stored = readers.as_arrays(dict(f8.export.tensors(model, "compressed-tensors")))
        codes = [stored[f"{name}.weight"] for name in names]
        anew = readers.requantized(codes, [stored[f"{name}.weight_scale"] for name in names])
        assert all(map(np.array_equal, codes, anew)) == shares


@pytest.mark.parametrize("recipe", ["channel", "nvfp4", "mx", "tensor"])
@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
def test_transposed_experts_are_linears_by_projection(kind, recipe):
    model = models.converted(models.make(kind), RECIPES[recipe])
    stored = readers.as_arrays(dict(f8.export.tensors(model, "compressed-tensors")))
    path = "model.layers.0.mlp.experts" if kind == "gpt_oss" else "model.layers.0.feed_forward.experts"
    values = models.wanted(model)
    gate_up, down = (values[f"{path}.{name}"].mT.numpy() for name in ("gate_up_proj", "down_proj"))
    half = gate_up.shape[1] // 2
    parts = (slice(0, None, 2), slice(1, None, 2)) if kind == "gpt_oss" else (slice(0, half), slice(half, None))
    for expert in range(gate_up.shape[0]):
        for name, rows in zip(("gate_proj", "up_proj"), parts, strict=True):
            found = readers.read("compressed-tensors", recipe, stored, f"{path}.{expert}.{name}")
            assert np.array_equal(found, gate_up[expert, rows])
            if kind == "gpt_oss":
                bias = model.get_parameter(f"{path}.gate_up_proj_bias").detach().float()[expert, rows].numpy()
                assert np.array_equal(stored[f"{path}.{expert}.{name}.bias"], bias)
        found = readers.read("compressed-tensors", recipe, stored, f"{path}.{expert}.down_proj")
        assert np.array_equal(found, down[expert])


# ---------------------------------------------------------------------------------- planted faults


def inverted(name):
    """A scale that was written as its reciprocal."""

    def edit(stored):
        scale = stored[name]
        is_e8m0 = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        other = 254 - scale.view(torch.uint8) if is_e8m0 else (1 / scale.float()).to(scale.dtype)
        stored[name] = other.view(scale.dtype)

    return edit


@pytest.mark.parametrize(("form", "kind"), CELLS)
def test_planted_faults_are_found(form, kind, tmp_path):
    model = one_layer(RECIPES[kind])
    if kind == "static_tensor":
        model["q_proj"].multiplier.fill_(3.0)
    scheme = FORMATS[form].scheme(kind)
    codes, *scales = (f"q_proj{suffix}" for suffix in scheme.suffixes)
    faults = {f"inverted {name}": inverted(name) for name in scales}
    if kind == "nvfp4":
        faults["nibbles"] = swap_nibbles(codes)
        faults["scales of other rows"] = lambda stored: stored.update({scales[0]: stored[scales[0]].flip(0)})
    else:
        faults["transposed"] = transpose(codes)
    server = "transformers" if (form, kind) in ONLY_TRANSFORMERS else None
    for fault, edit in faults.items():
        folder = tmp_path / fault
        f8.export.save_pretrained(model, folder, form)
        assert f8.export.check(folder, server=server).layers == 1
        change(folder, edit)
        with pytest.raises(ValueError, match="a server reads"):
            f8.export.check(folder, server=server)
