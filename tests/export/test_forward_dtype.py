"""Exports and freeze_weights quantize in the dtype of the forward that trained."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import nullcontext

import pytest
import serving_models as models
import torch
from safetensors.torch import load_file
from test_check import FILE
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8compile as f8

NAMES = ("q_proj", "k_proj")
RECIPES = {
    "blockwise": (f8.recipes.blockwise(), "fine_grained_fp8"),
    "tensorwise": (f8.recipes.tensorwise(), "compressed-tensors"),
    "rowwise": (f8.recipes.rowwise(), "compressed-tensors"),
    "mxfp8": (f8.recipes.mxfp8(), "compressed-tensors"),
    "nvfp4": (f8.recipes.nvfp4(), "modelopt"),
    "delayed": (f8.recipes.delayed(history=4), "modelopt"),
}


class Both(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = (nn.Linear(256, 256, dtype=dtype) for _ in NAMES)

    def forward(self, x):
        return self.k_proj(self.q_proj(x))


def model_of(recipe=RECIPES["blockwise"][0], dtype=torch.float32, **options):
    return f8.convert(Both(dtype), recipe, filter="*", **options)


def autocast(dtype=torch.bfloat16):
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def trained(model, dtype=torch.bfloat16, run=None):
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    with autocast(dtype):
        (model if run is None else run)(x).float().square().mean().backward()
    return model


def in_bf16(model):
    """The same model with parameters that are the copies that autocast makes."""
    return copy.deepcopy(model).bfloat16()


def assert_same(found, wanted, assert_bits_equal):
    found, wanted = dict(found), dict(wanted)
    assert list(found) == list(wanted)
    for name, each in wanted.items():
        assert_bits_equal(found[name], each, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_export_has_the_data_of_the_forward_under_autocast(recipe, tmp_path, assert_bits_equal):
    own, form = RECIPES[recipe]
    model = trained(model_of(own))
    wanted = list(f8.export.tensors(in_bf16(model), form))
    assert_same(f8.export.tensors(model, form), wanted, assert_bits_equal)
    f8.export.save_pretrained(model, tmp_path / "x", form)
    assert_same(sorted(load_file(tmp_path / "x" / FILE).items()), sorted(wanted), assert_bits_equal)
    f8.export.check(tmp_path / "x")


def through(how):
    """A function that runs a model: compiled, in blocks, with checkpoints, or as its copy."""
    if how == "compiled":
        return lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    if how == "blocks":  # the second layer may run the graph of the first
        return lambda model: [each.compile(fullgraph=True, backend="aot_eager") for each in model.children()] and model
    run = lambda model: lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731 - a line each
    if how == "checkpoint":
        return run
    return lambda model: torch.compile(run(model), fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("how", ["compiled", "blocks", "checkpoint", "compiled checkpoint"])
def test_the_dtype_is_seen_in_every_way_to_run_a_model(how, assert_bits_equal):
    torch._dynamo.reset()
    model = model_of()
    run = through(how)(model)
    trained(model, run=run)
    wanted = {
        name: f8.quantize(getattr(model, name).weight.detach().bfloat16(), model.q_proj.recipe.weight)
        for name in NAMES
    }
    found = dict(f8.export.tensors(model, "fine_grained_fp8"))
    for name, each in wanted.items():
        assert_bits_equal(found[f"{name}.weight"].view(torch.uint8), each.codes)


def test_recording_costs_no_graph():
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(*(model_of() for _ in range(3)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        trained(model, run=compiled)
        trained(model, None, run=compiled)
    assert counters["stats"]["unique_graphs"] == 2  # one with autocast, one without
    assert not counters["graph_break"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy.copy])
def test_copies_know_the_dtype(copied, assert_bits_equal):
    model = trained(model_of())
    assert_same(
        f8.export.tensors(copied(model), "fine_grained_fp8"),
        f8.export.tensors(model, "fine_grained_fp8"),
        assert_bits_equal,
    )


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4"])
def test_experts_are_written_in_the_dtype_of_autocast(kind, assert_bits_equal):
    model = models.converted(models.make(kind, torch.float32), f8.recipes.rowwise())
    with autocast():
        model(input_ids=models.IDS, labels=models.IDS).loss.backward()
    found = dict(f8.export.tensors(model, "compressed-tensors"))
    wanted = dict(f8.export.tensors(in_bf16(model), "compressed-tensors"))
    for name in found:
        if "_proj.weight" in name:  # norms and embeddings are written in float32
            assert_bits_equal(found[name].to(wanted[name].dtype), wanted[name], name)


def test_layers_outside_of_autocast_keep_their_dtype(assert_bits_equal):
    class Partly(Both):
        def forward(self, x):
            y = self.q_proj(x)
            with torch.autocast("cpu", enabled=False):
                return self.k_proj(y.float())

    model = trained(f8.convert(Partly(), RECIPES["blockwise"][0], filter="*"))
    found = dict(f8.export.tensors(model, "fine_grained_fp8"))
    for name, dtype in {"q_proj": torch.bfloat16, "k_proj": torch.float32}.items():
        layer = getattr(model, name)
        wanted = f8.quantize(layer.weight.detach().to(dtype), layer.recipe.weight)
        assert_bits_equal(found[f"{name}.weight"].view(torch.uint8), wanted.codes, name)
        assert found[f"{name}.bias"].dtype == dtype


def test_a_model_in_bfloat16_needs_no_choice():
    """With and without autocast its weights are quantized in bfloat16."""
    model = model_of(dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, None):
        with autocast(dtype):
            model(torch.randn(8, 256).bfloat16()).float().sum().backward()
    assert dict(f8.export.tensors(model, "fine_grained_fp8"))


def test_two_dtypes_raise_and_the_caller_chooses(assert_bits_equal):
    model = trained(trained(model_of()), None)
    words = "the forward of q_proj quantized its weight in torch.bfloat16 and torch.float32.*Pass the dtype that"
    with pytest.raises(ValueError, match=words):
        f8.export.tensors(model, "fine_grained_fp8")
    with pytest.raises(ValueError, match=words):
        f8.freeze_weights(model)
    assert not model.q_proj.is_quantized()
    assert_same(
        f8.export.tensors(model, "fine_grained_fp8", forward_dtype=torch.bfloat16),
        f8.export.tensors(in_bf16(model), "fine_grained_fp8"),
        assert_bits_equal,
    )


def test_another_dtype_than_the_one_that_was_seen_raises():
    words = "`forward_dtype` is torch.float16, but the forward of q_proj quantized its weight in torch.bfloat16"
    with pytest.raises(ValueError, match=words):
        f8.export.tensors(trained(model_of()), "fine_grained_fp8", forward_dtype=torch.float16)
    with pytest.raises(ValueError, match=words):
        f8.freeze_weights(trained(model_of()), forward_dtype=torch.float16)


def test_evaluations_and_reports_are_not_training(tmp_path):
    model = model_of()
    x = torch.randn(8, 256)
    with torch.no_grad():
        model(x)
    f8.conversion_report(model, forward=lambda: model(x))
    f8.export.save_pretrained(trained(model), tmp_path / "x", "fine_grained_fp8")
    with torch.no_grad():
        model(x)
    assert dict(f8.export.tensors(model, "fine_grained_fp8"))


def test_float32_weights_without_a_forward_are_told(tmp_path):
    report = f8.export.save_pretrained(model_of(), tmp_path / "x", "fine_grained_fp8")
    assert "no forward pass with gradients was seen" in str(report)
    told = f8.export.save_pretrained(trained(model_of(), None), tmp_path / "y", "fine_grained_fp8")
    assert "no forward pass with gradients was seen" not in str(told)


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_give_the_outputs_of_autocast(recipe, assert_bits_equal):
    model = trained(model_of(RECIPES[recipe][0]))
    x = torch.randn(8, 256)
    with torch.no_grad(), autocast():
        before = model(x)
        f8.freeze_weights(model)
        assert_bits_equal(model(x), before)
    assert model.q_proj.weight.dtype == torch.bfloat16


def test_frozen_layers_that_share_a_scale_give_the_outputs_of_autocast(assert_bits_equal):
    model = trained(model_of(f8.recipes.nvfp4(), share_outer_scale=[NAMES]))
    x = torch.randn(8, 256)
    with torch.no_grad(), autocast():
        before = model(x)
        f8.freeze_weights(model)
        assert_bits_equal(model(x), before)


def test_a_folder_says_the_dtype_of_the_forward(tmp_path):
    model = models.converted(models.make("llama", torch.float32), f8.recipes.rowwise())
    with autocast():
        model(input_ids=models.IDS, labels=models.IDS).loss.backward()
    f8.export.save_pretrained(model, tmp_path / "x", "compressed-tensors")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["dtype"] == "bfloat16"
