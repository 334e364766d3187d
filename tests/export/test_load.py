"""load_quantized: a checkpoint in a serving format becomes codes that train, without values in between."""

from __future__ import annotations

import json

import pytest
import serving_models as models
import torch
from safetensors.torch import load_file, save_file
from test_check import change, drop, one_layer, transpose
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fp8compile as f8

FILE = "model.safetensors"
FORMATS = {
    "fine_grained_fp8 block": f8.recipes.blockwise(),
    "fine_grained_fp8 ue8m0": f8.recipes.blockwise(scale="pow2"),
    "compressed-tensors tensor": f8.recipes.tensorwise(),
    "compressed-tensors channel": f8.recipes.rowwise(),
    "compressed-tensors nvfp4": f8.recipes.nvfp4(),
    "modelopt mxfp8": f8.recipes.mxfp8(),
    "modelopt mxfp8 squares": f8.recipes.mxfp8(weight_block=(32, 32)),
    "modelopt nvfp4 rows": f8.recipes.nvfp4(weight_block=(1, 16)),
    "torchao channel": f8.recipes.rowwise(),
}


def saved(kind, case, folder):
    model = models.converted(models.make(kind), FORMATS[case])
    f8.export.save_pretrained(model, folder, case.partition(" ")[0])
    return model


def other(kind, case, **options):
    """The same model with other values."""
    torch.manual_seed(5)
    model = models.make(kind)
    for each in model.parameters():
        each.data.normal_()
    return models.converted(model, FORMATS[case], **options)


@pytest.mark.parametrize("case", FORMATS)
def test_logits_are_those_of_the_model_that_was_saved(case, tmp_path, assert_bits_equal):
    model = saved("qwen3_moe", case, tmp_path / "x")
    back = other("qwen3_moe", case)
    report = f8.load_quantized(back, tmp_path / "x")
    assert len(report.codes) == 6  # two stacks of experts among them
    assert all(isinstance(back.get_parameter(name), f8.QuantizedTensor) for name in report.codes)
    assert_bits_equal(models.logits(back), models.logits(model))
    assert len(str(report).splitlines()) == 1


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
@pytest.mark.parametrize("case", ["compressed-tensors tensor", "modelopt nvfp4 rows", "modelopt mxfp8"])
def test_transposed_experts_come_back(kind, case, tmp_path, assert_bits_equal):
    model = saved(kind, case, tmp_path / "x")
    back = other(kind, case)
    assert "model.layers.0.self_attn.q_proj.weight" in f8.load_quantized(back, tmp_path / "x").codes
    assert_bits_equal(models.logits(back), models.logits(model))
    codes = other(kind, case, quantized_parameters=True)  # lie in memory as those that convert makes
    f8.load_quantized(codes, tmp_path / "x")
    for name, each in codes.named_parameters():
        if isinstance(each, f8.QuantizedTensor):
            own = models.converted(models.make(kind), FORMATS[case], quantized_parameters=True).get_parameter(name)
            assert [a.quantizer for a in each.sets()] == [b.quantizer for b in own.sets()]


@pytest.mark.parametrize("case", ["fine_grained_fp8 block", "compressed-tensors nvfp4"])
def test_the_stream_of_a_loaded_model_is_its_file(case, tmp_path, assert_bits_equal):
    saved("deepseek_v3", case, tmp_path / "x")
    back = other("deepseek_v3", case)
    f8.load_quantized(back, tmp_path / "x")
    stored = load_file(tmp_path / "x" / FILE)
    found = dict(f8.export.tensors(back, case.partition(" ")[0]))
    assert sorted(found) == sorted(stored)
    for name, each in stored.items():
        bits = torch.uint8 if each.element_size() == 1 else each.dtype
        assert_bits_equal(found[name].view(bits), each.view(bits), name)


def test_parameters_that_are_codes_already_take_the_folders(tmp_path, assert_bits_equal):
    model = saved("llama", "modelopt mxfp8", tmp_path / "x")
    back = other("llama", "modelopt mxfp8", quantized_parameters=True)
    f8.load_quantized(back, tmp_path / "x")
    assert_bits_equal(models.logits(back), models.logits(model))


def loss(model):
    return model(input_ids=models.IDS, labels=models.IDS).loss


def test_codes_are_trained_by_master_weights_or_frozen(tmp_path):
    case = "fine_grained_fp8 block"
    saved("qwen3_moe", case, tmp_path / "x")
    back = other("qwen3_moe", case)
    frozen = back.model.layers[0].self_attn.q_proj.weight.requires_grad_(requires_grad=False)
    f8.load_quantized(back, tmp_path / "x")
    weight = back.model.layers[0].self_attn.q_proj.weight
    assert weight is not frozen
    assert not weight.requires_grad
    optimizer = f8.MasterWeights(
        torch.optim.AdamW, [each for each in back.parameters() if each.requires_grad], lr=1e-2
    )
    before, codes = loss(back), weight.codes.clone()
    experts = back.model.layers[0].mlp.experts.gate_up_proj.codes.clone()
    for _ in range(4):
        optimizer.zero_grad()
        loss(back).backward()
        optimizer.step()
    assert loss(back) < before - 0.1
    assert torch.equal(weight.codes, codes)
    assert not torch.equal(back.model.layers[0].mlp.experts.gate_up_proj.codes, experts)


def most_held(model, folder):
    """The most bytes that are allocated while a folder is loaded, and what is left of them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        f8.load_quantized(model, folder)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most, held


def deep(recipe, device):
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(16)))
    return f8.convert(model, recipe, filter="*")


@pytest.mark.parametrize("case", ["fine_grained_fp8 block", "modelopt mxfp8", "compressed-tensors nvfp4"])
def test_nothing_is_whole_in_high_precision_in_between(case, tmp_path, assert_bits_equal):
    """16 matrices have 16 MiB in float32; beside the codes one matrix's temporaries are allocated."""
    recipe = FORMATS[case]
    model = deep(recipe, "cpu")
    f8.export.save_pretrained(model, tmp_path / "x", case.partition(" ")[0])
    back = deep(recipe, "meta")
    most, held = most_held(back, tmp_path / "x")
    sets = 1 if recipe.shares_weight_codes() else 2
    codes = sets * 16 * 2**18 // (2 if "nvfp4" in case else 1)
    assert codes <= held < codes * 1.2
    mapped = (tmp_path / "x" / FILE).stat().st_size  # counts as allocated, and is no memory of the process
    assert most < held + mapped + 4 * 2**20  # float32 values of one matrix are 1 MiB
    x = torch.randn(64, 512).bfloat16()
    assert_bits_equal(back(x), model(x))


def test_a_model_of_transformers_on_the_meta_device(tmp_path, assert_bits_equal):
    accelerate = pytest.importorskip("accelerate")
    model = saved("qwen3_moe", "fine_grained_fp8 block", tmp_path / "x")
    with accelerate.init_empty_weights(include_buffers=False):
        back = models.make("qwen3_moe")
    models.converted(back, FORMATS["fine_grained_fp8 block"])
    f8.load_quantized(back, tmp_path / "x")
    assert_bits_equal(models.logits(back), models.logits(model))


def test_weights_that_the_folder_has_as_values_stay_values(tmp_path, assert_bits_equal):
    model = nn.ModuleDict({"a": nn.Linear(256, 256), "b": nn.Linear(256, 192)}).bfloat16()
    f8.convert(model, f8.recipes.blockwise(), filter="*")
    f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8", unfit="values")
    back = nn.ModuleDict({"a": nn.Linear(256, 256), "b": nn.Linear(256, 192)}).bfloat16()
    report = f8.load_quantized(f8.convert(back, f8.recipes.blockwise(), filter="*"), tmp_path / "x")
    assert report.codes == ("a.weight",)
    assert_bits_equal(back["b"].weight.detach(), model["b"].weight.detach())


# ---------------------------------------------------------------------------------- bad input


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add(name):
    return lambda stored: stored.update({name: torch.zeros(2, 2)})


def cut(name):
    def edit(stored):
        stored[name] = stored[name][:128].contiguous()

    return edit


BAD = {
    "missing scale": (drop("q_proj.weight_scale_inv"), r"has shape|no converted layer has codes"),
    "missing tensor": (drop("q_proj.weight"), r"q_proj\.weight is missing"),
    "a smaller matrix": (cut("q_proj.weight"), r"q_proj\.weight has shape \(128, 256\)"),
    "another matrix": (transpose("q_proj.weight"), r"q_proj\.weight has shape \(256, 384\)"),
    "a tensor too many": (add("k_proj.weight"), r"k_proj\.weight has no place"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_does_not_fit_changes_nothing(case, tmp_path):
    edit, words = BAD[case]
    f8.export.save_pretrained(one_layer(f8.recipes.blockwise(), sizes=(256, 384)), tmp_path / "x", "fine_grained_fp8")
    change(tmp_path / "x", edit)
    model = one_layer(f8.recipes.blockwise(), sizes=(256, 384))
    before = model["q_proj"].weight
    with pytest.raises(ValueError, match=words):
        f8.load_quantized(model, tmp_path / "x")
    assert model["q_proj"].weight is before


def test_recipes_that_the_folder_does_not_hold_are_refused(tmp_path):
    f8.export.save_pretrained(one_layer(f8.recipes.tensorwise()), tmp_path / "x", "compressed-tensors")
    with pytest.raises(ValueError, match=r"weight_scale has shape \(1,\); the recipe's weight.* has \(256, 1\)"):
        f8.load_quantized(one_layer(f8.recipes.rowwise()), tmp_path / "x")
    with pytest.raises(ValueError, match="has delayed scaling"):
        f8.load_quantized(one_layer(f8.recipes.delayed()), tmp_path / "x")
    with pytest.raises(ValueError, match="leaves a product of the weight in high precision"):
        f8.load_quantized(one_layer(half()), tmp_path / "x")
    with pytest.raises(ValueError, match="has no layer in FP8"):
        f8.load_quantized(nn.Linear(2, 2), tmp_path / "x")


def test_codes_that_share_a_scale_are_frozen(tmp_path, assert_bits_equal):
    def made():
        names = ("q_proj", "k_proj")
        model = nn.ModuleDict({name: nn.Linear(256, 256, bias=False) for name in names}).bfloat16()
        return f8.convert(model, f8.recipes.nvfp4(), filter="*", share_outer_scale=[names])

    model, back, x = made(), made(), torch.randn(4, 256).bfloat16()
    f8.export.save_pretrained(model, tmp_path / "x", "modelopt")
    with pytest.raises(ValueError, match="shares an outer scale with other layers"):
        f8.load_quantized(back, tmp_path / "x")
    f8.load_quantized(back.requires_grad_(requires_grad=False), tmp_path / "x")
    assert_bits_equal(back["k_proj"](x), model["k_proj"](x))


def half():
    """A recipe whose gradients stay in high precision."""
    return f8.Recipe(input=f8.CurrentScaling(), weight=f8.CurrentScaling())


def test_scales_of_rows_are_no_scales_of_squares(tmp_path):
    f8.export.save_pretrained(one_layer(f8.recipes.nvfp4(weight_block=(1, 16))), tmp_path / "x", "modelopt")
    model = one_layer(f8.recipes.nvfp4())
    with pytest.raises(ValueError, match=r"weight_block=\(1, 16\)"):
        f8.load_quantized(model, tmp_path / "x")


def test_gate_and_up_with_two_scales_are_no_matrix_with_one(tmp_path):
    saved("qwen3_moe", "compressed-tensors tensor", tmp_path / "x")
    change(tmp_path / "x", lambda stored: stored["model.layers.0.mlp.experts.0.up_proj.weight_scale"].mul_(2))
    with pytest.raises(ValueError, match="has another scale than the other part"):
        f8.load_quantized(other("qwen3_moe", "compressed-tensors tensor"), tmp_path / "x")


def test_a_folder_of_something_else_is_refused(tmp_path):
    model = one_layer(f8.recipes.blockwise())
    with pytest.raises(FileNotFoundError, match=r"config\.json is not there"):
        f8.load_quantized(model, tmp_path)
    f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8")
    path = tmp_path / "x" / FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="can't be read"):
        f8.load_quantized(model, tmp_path / "x")
    save_file({}, path)
    edit_config(tmp_path / "x", quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="quant_method 'awq'; it is one of 'fp8'"):
        f8.load_quantized(model, tmp_path / "x")


# ---------------------------------------------------------------------------------- one parameter, two names


class Tied(nn.Module):
    """Two layers with one weight, or one bias; or a layer and an embedding with one weight."""

    def __init__(self, tie):
        super().__init__()
        self.embedding = nn.Embedding(128, 128)
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)
        self.head = nn.Linear(128, 128)  # converted in any case
        for module, name, of in tie:
            setattr(getattr(self, module), name, getattr(getattr(self, of), name))

    def forward(self, x):
        return self.head(self.b(self.a(x)))


TIES = {
    "layers": [("b", "weight", "a")],
    "biases": [("b", "bias", "a")],
    "with an embedding": [("a", "weight", "embedding")],
}


def tied(how, recipe, device="cpu", **options):
    with torch.device(device):
        model = Tied(TIES[how]).bfloat16()
    return f8.convert(model, recipe, filter="*", **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", TIES)
def test_a_parameter_of_two_modules_stays_one(how, device, tmp_path, assert_bits_equal):
    model, back = tied(how, f8.recipes.rowwise()), tied(how, f8.recipes.rowwise(), device)
    f8.export.save_pretrained(model, tmp_path / "x", "compressed-tensors")
    f8.load_quantized(back, tmp_path / "x")
    ((module, name, of),) = TIES[how]
    assert getattr(getattr(back, module), name) is getattr(getattr(back, of), name)
    assert {*back.state_dict()} >= {"a.weight_codes", "b.weight_codes"} or how == "with an embedding"
    x = torch.randn(32, 128).bfloat16()
    assert_bits_equal(back(x), model(x))


@pytest.mark.parametrize("stored", ["b.weight", "b.weight_scale", "b.bias"])
def test_two_values_of_one_parameter_change_nothing(stored, tmp_path):
    how, recipe = "biases" if stored == "b.bias" else "layers", f8.recipes.tensorwise()
    f8.export.save_pretrained(tied(how, recipe), tmp_path / "x", "compressed-tensors")
    change(tmp_path / "x", lambda tensors: tensors[stored].copy_(torch.ones_like(tensors[stored].float())))
    back = tied(how, recipe)
    before = back.b.weight
    with pytest.raises(
        ValueError, match=rf"{stored.removesuffix('_scale')} is a\.\w+ too in the model, and they differ"
    ):
        f8.load_quantized(back, tmp_path / "x")
    assert back.b.weight is before


def test_layers_of_two_recipes_have_no_weight_in_common(tmp_path):
    model = tied("layers", {"a": f8.recipes.rowwise(), "*": f8.recipes.tensorwise()})
    f8.export.save_pretrained(model, tmp_path / "x", "compressed-tensors")
    with pytest.raises(ValueError, match=r"b\.weight is a\.weight too in the model, and their recipes"):
        f8.load_quantized(model, tmp_path / "x")
