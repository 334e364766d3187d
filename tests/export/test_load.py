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
from fp8compile.export.scheme import numbers_of

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
    codes = other(kind, case, weight_lifetime="parameter")  # lie in memory as those that convert makes
    f8.load_quantized(codes, tmp_path / "x")
    for name, each in codes.named_parameters():
        if isinstance(each, f8.QuantizedTensor):
            own = models.converted(models.make(kind), FORMATS[case], weight_lifetime="parameter").get_parameter(name)
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
    back = other("llama", "modelopt mxfp8", weight_lifetime="parameter")
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
    "missing scale": (drop("q_proj.weight_scale_inv"), r"has dtype F8_E4M3 and no scale; .* torch.bfloat16 values"),
    "missing tensor": (drop("q_proj.weight"), r"q_proj\.weight is missing"),
    "a smaller matrix": (cut("q_proj.weight"), r"q_proj\.weight has shape \(128, 256\)"),
    "another matrix": (transpose("q_proj.weight"), r"q_proj\.weight has shape \(256, 384\)"),
    "a tensor too many": (add("k_proj.weight"), r"k_proj\.weight is not in the model"),
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


def to(name, dtype):
    """Convert a tensor, or take its bytes for another dtype of the same size."""

    def edit(stored):
        is_as_large = stored[name].element_size() == torch.empty(0, dtype=dtype).element_size()
        stored[name] = stored[name].view(dtype) if is_as_large else stored[name].to(dtype)

    return edit


def put(name, value):
    return lambda stored: stored[name].view(-1).narrow(0, 0, 1).fill_(value)


def put_byte(name, value):
    return lambda stored: stored[name].view(torch.uint8).view(-1).narrow(0, 0, 1).fill_(value)


CODES, INVERSE, SCALE = "q_proj.weight", "q_proj.weight_scale_inv", "q_proj.weight_scale"
WRONG_DATA = {
    "int8": ("compressed-tensors channel", to(CODES, torch.int8), "weight has dtype I8; .* it must be F8_E4M3"),
    "e5m2": ("compressed-tensors channel", to(CODES, torch.float8_e5m2), "weight has dtype F8_E5M2"),
    "e4m3fnuz": ("fine_grained_fp8 block", to(CODES, torch.float8_e4m3fnuz), "weight has dtype F8_E4M3FNUZ"),
    "bytes": ("modelopt mxfp8", to(CODES, torch.uint8), "weight has dtype U8"),
    "four bits as int8": ("modelopt nvfp4 rows", to(CODES, torch.int8), "weight has dtype I8; .* it must be U8"),
    "int32 scales": ("fine_grained_fp8 block", to(INVERSE, torch.int32), "scale_inv has dtype I32"),
    "uint8 scales of channels": ("compressed-tensors channel", to(SCALE, torch.uint8), "scale has dtype U8"),
    "float32 E8M0 scales": (
        "modelopt mxfp8",
        to(SCALE, torch.float32),
        "scale has dtype F32; .* it must be U8 or F8_E8M0",
    ),
    "e5m2 scales": (
        "modelopt nvfp4 rows",
        to(SCALE, torch.float8_e5m2),
        "scale has dtype F8_E5M2; .* it must be F8_E4M3",
    ),
    "int64 global scale": ("modelopt nvfp4 rows", to(f"{SCALE}_2", torch.int64), "scale_2 has dtype I64"),
    "infinite scale": (
        "fine_grained_fp8 block",
        put(INVERSE, torch.inf),
        "scale_inv contains a negative, infinite or NaN",
    ),
    "NaN scale": ("compressed-tensors tensor", put(SCALE, torch.nan), "scale contains a negative, infinite or NaN"),
    "negative scale": ("compressed-tensors channel", put(SCALE, -0.5), "scale contains a negative, infinite or NaN"),
    "E8M0 255": ("modelopt mxfp8", put(SCALE, 255), "scale contains a negative, infinite or NaN"),
    "E8M0 255 of a block": (
        "fine_grained_fp8 ue8m0",
        put_byte(INVERSE, 255),
        "scale_inv contains a negative, infinite or NaN",
    ),
    "negative e4m3 scale": (
        "modelopt nvfp4 rows",
        put_byte(SCALE, 0x81),
        "scale contains a negative, infinite or NaN",
    ),
    "NaN e4m3 scale": (
        "compressed-tensors nvfp4",
        put_byte(SCALE, 0x7F),
        "scale contains a negative, infinite or NaN",
    ),
    "negative global scale": (
        "modelopt nvfp4 rows",
        put(f"{SCALE}_2", -1),
        r"scale_2 is -1\.0; a global scale must be finite",
    ),
    "divisor 0": ("compressed-tensors nvfp4", put("q_proj.weight_global_scale", 0), r"global_scale is 0\.0; a global"),
    "no powers of two": (
        "fine_grained_fp8 ue8m0",
        lambda stored: stored.update({INVERSE: stored[INVERSE].float() * 0.75}),
        "scale_inv contains a scale that is not a power of two",
    ),
}


@pytest.mark.parametrize("case", WRONG_DATA)
def test_data_that_the_recipe_does_not_mean_changes_nothing(case, tmp_path):
    form, edit, words = WRONG_DATA[case]
    names = ("a_proj", "q_proj")  # the first one fits
    f8.export.save_pretrained(one_layer(FORMATS[form], names=names), tmp_path / "x", form.partition(" ")[0])
    change(tmp_path / "x", edit)
    model = one_layer(FORMATS[form], names=names)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match=words):
        f8.load_quantized(model, tmp_path / "x")
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())


@pytest.mark.parametrize("case", FORMATS)
def test_weights_of_zeros_come_back(case, tmp_path):
    model = one_layer(FORMATS[case])
    nn.init.zeros_(model["q_proj"].weight)
    f8.export.save_pretrained(model, tmp_path / "x", case.partition(" ")[0])
    f8.load_quantized(model, tmp_path / "x")
    assert not model["q_proj"].weight.dequantize().any()


@pytest.mark.parametrize(
    ("form", "name", "dtype"),
    [
        ("fine_grained_fp8 block", INVERSE, torch.bfloat16),
        ("compressed-tensors channel", SCALE, torch.bfloat16),  # as llm-compressor writes them
        ("modelopt mxfp8", SCALE, torch.float8_e8m0fnu),
        ("fine_grained_fp8 ue8m0", INVERSE, torch.float32),
    ],
)
def test_scales_of_other_dtypes_with_the_same_values_load(form, name, dtype, tmp_path, assert_bits_equal):
    model, back = one_layer(FORMATS[form]), one_layer(FORMATS[form])
    f8.export.save_pretrained(model, tmp_path / "x", form.partition(" ")[0])
    values = []

    def edit(stored):
        stored[name] = stored[name].view(dtype) if stored[name].dtype == torch.uint8 else stored[name].to(dtype)
        values.append(stored[name].float())

    change(tmp_path / "x", edit)
    f8.load_quantized(back, tmp_path / "x")
    assert_bits_equal(numbers_of(back["q_proj"].weight_scale).view(-1), values[0].view(-1))


WRONG_FIELDS = {
    "fmt": ("fine_grained_fp8 block", {"fmt": "e5m2"}, "fmt 'e5m2'; for this recipe it must be 'e4m3'"),
    "blocks": ("fine_grained_fp8 block", {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
    "algorithm": ("modelopt mxfp8", {"quant_algo": "INT8_SQ"}, "quant_algo 'INT8_SQ'"),
    "type": (
        "compressed-tensors channel",
        {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}}}},
        "type of the weights of group_0 'int'; for this recipe it must be 'float'",
    ),
    "bits": (
        "compressed-tensors channel",
        {"config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4, "symmetric": False}}}},
        "(?s)num_bits of the weights of group_0 4; .* must be 8.*symmetric of the weights of group_0 False",
    ),
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_a_configuration_of_other_data_is_said_beside_other_problems(case, tmp_path):
    form, fields, words = WRONG_FIELDS[case]
    model = one_layer(FORMATS[form])
    f8.export.save_pretrained(model, tmp_path / "x", form.partition(" ")[0])
    own = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "x", quantization_config={**own, **fields})
    change(tmp_path / "x", add("k_proj.weight"))
    with pytest.raises(ValueError, match=words) as error:
        f8.load_quantized(model, tmp_path / "x")
    assert "k_proj.weight is not in the model" in str(error.value)


def test_recipes_that_the_folder_does_not_hold_are_refused(tmp_path):
    f8.export.save_pretrained(one_layer(f8.recipes.tensorwise()), tmp_path / "x", "compressed-tensors")
    with pytest.raises(
        ValueError,
        match=r"weight_scale has shape \(1,\); for the recipe's weight.* it must be "
        r"\(256, 1\)",
    ):
        f8.load_quantized(one_layer(f8.recipes.rowwise()), tmp_path / "x")
    with pytest.raises(ValueError, match="uses delayed scaling"):
        f8.load_quantized(one_layer(f8.recipes.delayed()), tmp_path / "x")
    with pytest.raises(ValueError, match="leaves a GEMM of the weight in high precision"):
        f8.load_quantized(one_layer(half()), tmp_path / "x")
    with pytest.raises(ValueError, match="has no FP8 layers"):
        f8.load_quantized(nn.Linear(2, 2), tmp_path / "x")


def test_codes_that_share_a_scale_are_frozen(tmp_path, assert_bits_equal):
    def made():
        names = ("q_proj", "k_proj")
        model = nn.ModuleDict({name: nn.Linear(256, 256, bias=False) for name in names}).bfloat16()
        return f8.convert(model, f8.recipes.nvfp4(), filter="*", share_outer_scale=[names])

    model, back, x = made(), made(), torch.randn(4, 256).bfloat16()
    f8.export.save_pretrained(model, tmp_path / "x", "modelopt")
    with pytest.raises(ValueError, match="shares a global scale with other layers"):
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
    model = other("qwen3_moe", "compressed-tensors tensor")
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="and the other part"):
        f8.load_quantized(model, tmp_path / "x")
    assert all(each is before[name] for name, each in model.named_parameters())


def test_a_folder_of_something_else_is_refused(tmp_path):
    model = one_layer(f8.recipes.blockwise())
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        f8.load_quantized(model, tmp_path)
    f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8")
    path = tmp_path / "x" / FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="can't be read"):
        f8.load_quantized(model, tmp_path / "x")
    save_file({}, path)
    edit_config(tmp_path / "x", quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="quant_method 'awq'; it must be one of 'fp8'"):
        f8.load_quantized(model, tmp_path / "x")


INDEX = "model.safetensors.index.json"
MAPS = ({}, None, [1], {"weight_map": []}, {"weight_map": "x"}, {"weight_map": {"q_proj.weight": 3}})
DAMAGED = [
    *((INDEX, each) for each in (*MAPS, {"weight_map": {"q_proj.weight": "../x/model.safetensors"}})),
    *(("config.json", each) for each in ([], None, {"quantization_config": {"quant_method": ["fp8"]}})),
    ("config.json", {"quantization_config": ["fp8"]}),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED, ids=str)
def test_a_damaged_json_file_is_named(name, content, tmp_path):
    model = one_layer(f8.recipes.blockwise())
    f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8")
    (tmp_path / "x" / name).write_text(json.dumps(content))
    words = "has quant_method" if isinstance(content, dict) and name == "config.json" else name
    with pytest.raises(ValueError, match=words):
        f8.load_quantized(model, tmp_path / "x")


@pytest.mark.parametrize("text", ["{", "[" * 10**5, "\xff"])
def test_a_file_that_is_no_json_is_named(text, tmp_path):
    model = one_layer(f8.recipes.blockwise())
    f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8")
    for name in (INDEX, "config.json"):
        (tmp_path / "x" / name).write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=f"{name} is not valid JSON"):
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
        ValueError, match=rf"{stored.removesuffix('_scale')} is tied to a\.\w+ in the model, but they differ"
    ):
        f8.load_quantized(back, tmp_path / "x")
    assert back.b.weight is before


def test_layers_of_two_recipes_have_no_weight_in_common(tmp_path):
    model = tied("layers", {"a": f8.recipes.rowwise(), "*": f8.recipes.tensorwise()})
    f8.export.save_pretrained(model, tmp_path / "x", "compressed-tensors")
    with pytest.raises(ValueError, match=r"b\.weight is tied to a\.weight in the model, but their recipes"):
        f8.load_quantized(model, tmp_path / "x")
