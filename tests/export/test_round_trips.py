"""What f8.export writes, read by the packages that read it: the values of the codes of training, to the bit."""

from __future__ import annotations

import json
import logging
import warnings
from importlib.metadata import PackageNotFoundError, version

import pytest
import serving_models as models
import torch
from safetensors import safe_open

import fp8compile as f8
from fp8compile.export.checkpoint_names import in_checkpoint

RECIPES = {
    **models.RECIPES,
    "mx_square": f8.recipes.mxfp8(weight_block=(32, 32)),
    "nvfp4": f8.recipes.nvfp4(),
    "nvfp4_line": f8.recipes.nvfp4(weight_block=(1, 16)),
}


def needs(package, wanted):
    """Skip unless this version of a package is there; it is in the extra ``serving``."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if found != wanted:
        pytest.skip(f"reads what {package} {wanted} reads, and {found} is installed: pip install fp8compile[serving]")


def stored_in(folder):
    """All tensors of a folder by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # a file is no dict, and can't be iterated
            found.update((name, file.get_tensor(name)) for name in names)
    return found


def loaded(folder, dtype):
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def trained(kind, recipe, **options):
    """A model after a step, so that its weights are no longer those of a seed."""
    model = models.converted(models.make(kind), recipe, **options)
    if not options:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=models.IDS, labels=models.IDS).loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*((kind, "block") for kind in models.MODELS), ("qwen3_moe", "block_ue8m0"), ("llama", "tensor")],
)
def test_transformers_reads_the_codes_that_trained(kind, recipe, tmp_path, assert_bits_equal):
    model = trained(kind, RECIPES[recipe])
    report = f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8", max_shard_size="100KB")
    assert (tmp_path / "x" / "model.safetensors.index.json").exists()
    assert f8.export.check(tmp_path / "x").layers == sum(map(len, report.quantized.values()))
    for dtype in (torch.float32, torch.bfloat16):
        back = loaded(tmp_path / "x", dtype)
        own = dict(back.named_parameters())
        values = models.wanted(model, dtype)
        assert values
        for name, each in values.items():
            assert_bits_equal(own[name].detach(), each, name)
        others = {name: each for name, each in model.state_dict().items() if name not in values}
        for name, each in others.items():
            assert_bits_equal(back.state_dict()[name], each.to(back.state_dict()[name].dtype), name)
    again = models.converted(back, RECIPES[recipe])  # in bfloat16: codes of dequantized values are the same codes
    assert_bits_equal(models.logits(again), models.logits(model), "logits")


@pytest.mark.parametrize(
    ("kind", "recipe", "form"),
    [
        ("qwen3_moe", RECIPES["block"], "fine_grained_fp8"),
        ("gpt_oss", f8.recipes.nvfp4(), "compressed-tensors"),  # transposed: codes share bytes along the other side
        ("llama4", f8.recipes.nvfp4(), "modelopt"),
    ],
    ids=["qwen3_moe", "gpt_oss", "llama4"],
)
def test_parameters_that_are_codes_are_written_as_they_are(kind, recipe, form, assert_bits_equal):
    values = models.converted(models.make(kind), recipe)
    codes = models.converted(models.make(kind), recipe, weight_lifetime="parameter")
    of_values = dict(f8.export.tensors(values, form))
    of_codes = dict(f8.export.tensors(codes, form))
    assert list(of_values) == list(of_codes)
    for name, each in of_values.items():
        assert_bits_equal(of_codes[name], each, name)


def test_static_scales_are_those_of_delayed_scaling(assert_bits_equal):
    model = trained("llama", f8.recipes.delayed(history=4))
    found = dict(f8.export.tensors(model, "fine_grained_fp8"))
    layer = model.model.layers[0].mlp.up_proj
    name = "model.layers.0.mlp.up_proj"
    multiplier = layer.multiplier[1]
    assert multiplier != 1
    codes = layer.recipe.weight.cast(layer.weight.detach(), multiplier.view(1, 1))
    assert_bits_equal(found[f"{name}.weight"].view(torch.uint8), codes)
    assert_bits_equal(found[f"{name}.weight_scale_inv"], layer.recipe.weight.scale_of(multiplier))
    assert_bits_equal(found[f"{name}.activation_scale"], layer.recipe.input.scale_of(layer.multiplier[0]))
    of_modelopt = dict(f8.export.tensors(model, "modelopt"))
    assert_bits_equal(of_modelopt[f"{name}.input_scale"], found[f"{name}.activation_scale"])


# ---------------------------------------------------------------------------------- other packages


def one_layer(recipe):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 384, bias=False)).bfloat16()
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[5, 7] = 40.0, 2.0**-20
    return f8.convert(model, recipe)


@pytest.mark.parametrize("recipe", ["tensor", "channel", "block", "mx", "mx_square", "nvfp4", "nvfp4_line"])
def test_compressed_tensors_decompresses_to_the_values_of_training(recipe, tmp_path, assert_bits_equal):
    needs("compressed-tensors", "0.20.0")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = one_layer(RECIPES[recipe])
    f8.export.save_pretrained(model, tmp_path / "x", "compressed-tensors")
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    stored = {name.removeprefix("0."): each for name, each in stored_in(tmp_path / "x").items()}
    found = BaseCompressor.get_value_from_registry(scheme.format).decompress(stored, scheme)["weight"]
    # the package decompresses four bits in bfloat16
    dtype = torch.bfloat16 if recipe.startswith("nvfp4") else torch.float32
    assert_bits_equal(found.to(dtype), models.wanted(model, dtype)["0.weight"])


def test_transformers_reads_compressed_tensors(tmp_path, assert_bits_equal):
    needs("compressed-tensors", "0.20.0")
    model = trained("llama", RECIPES["channel"])
    f8.export.save_pretrained(model, tmp_path / "x", "compressed-tensors")
    import transformers

    config = transformers.utils.quantization_config.CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        back = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "x", dtype=torch.bfloat16, quantization_config=config
        )
    for name, each in models.wanted(model, torch.bfloat16).items():
        assert_bits_equal(back.get_parameter(name).detach().to(torch.bfloat16), each, name)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_line"])
def test_modelopt_dequantizes_to_the_values_of_training(recipe):
    needs("nvidia-modelopt", "0.47.0")
    warnings.simplefilter("ignore")  # its own, about versions
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    model = one_layer(RECIPES[recipe])
    found = dict(f8.export.tensors(model, "modelopt"))
    tensor = NVFP4QTensor(torch.Size([384, 256]), torch.bfloat16, found["0.weight"])
    scales = {"scale": found["0.weight_scale"], "double_scale": found["0.weight_scale_2"], "block_sizes": {-1: 16}}
    # In float32 the package multiplies the two scales first. Its table has 0.0 for the code of -0.0: not to the bit.
    assert torch.equal(tensor.dequantize(**scales), models.wanted(model, torch.bfloat16)["0.weight"])


def test_modelopt_dequantizes_mxfp8(assert_bits_equal):
    needs("nvidia-modelopt", "0.47.0")
    warnings.simplefilter("ignore")  # its own, about versions
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    model = one_layer(RECIPES["mx"])
    found = dict(f8.export.tensors(model, "modelopt"))
    tensor = MXFP8QTensor(torch.Size([384, 256]), torch.bfloat16, found["0.weight"])
    values = tensor.dequantize(scale=found["0.weight_scale"])
    assert_bits_equal(values, models.wanted(model, torch.bfloat16)["0.weight"])


def read_by_modelopt(algorithm, stored, name):
    """The values of a weight of a folder by the classes of tensors of modelopt 0.47.

    It has no reader of whole folders: servers are that. e4m3 with float32 scales is read in float32, because the class
    rounds scales to the dtype of the values first.
    """
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    codes, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
    if algorithm == "W4A16_NVFP4":
        tensor = NVFP4QTensor(torch.Size([codes.shape[0], 2 * codes.shape[1]]), torch.bfloat16, codes)
        outer = stored[f"{name}.weight_scale_2"]
        return tensor.dequantize(scale=scale, double_scale=outer, block_sizes={-1: 16})
    if algorithm == "MXFP8":
        return MXFP8QTensor(codes.shape, torch.bfloat16, codes).dequantize(scale=scale)
    return FP8QTensor(codes.shape, torch.bfloat16, codes).dequantize(torch.float32, scale=scale.view(-1, 1))


ALGORITHMS = {
    "FP8": f8.recipes.delayed(history=4),
    "FP8_PER_CHANNEL_PER_TOKEN": RECIPES["channel"],
    "MXFP8": RECIPES["mx"],
    "W4A16_NVFP4": RECIPES["nvfp4"],
}


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [*(("llama", each) for each in ALGORITHMS), *(("qwen3_moe", each) for each in [*ALGORITHMS][1:])],
)
def test_modelopt_reads_all_matrices_of_a_folder_and_its_configuration(kind, algorithm, tmp_path):
    needs("nvidia-modelopt", "0.47.0")
    warnings.simplefilter("ignore")  # its own, about versions
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    recipe = ALGORITHMS[algorithm]
    model = trained(kind, recipe)
    report = f8.export.save_pretrained(model, tmp_path / "x", "modelopt")
    own = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    theirs = convert_hf_quant_config_format(json.loads((tmp_path / "x" / "hf_quant_config.json").read_text()))
    assert {key: own[key] for key in ("quant_method", "quant_algo", "ignore")} == {
        key: theirs[key] for key in ("quant_method", "quant_algo", "ignore")
    }
    stored = stored_in(tmp_path / "x")
    names = [name for found in report.quantized.values() for name in found]
    dtype = torch.float32 if algorithm.startswith("FP8") else torch.bfloat16
    values = {}
    for name, each in of_training(model, recipe, dtype).items():
        values.update(in_checkpoint(model, name, each))
    assert names
    assert {f"{name}.weight" for name in names} == {*values}
    for name in names:  # a value of four bits may be 0.0 where training has -0.0
        assert torch.equal(read_by_modelopt(algorithm, stored, name), values[f"{name}.weight"]), name


def of_training(model, recipe, dtype):
    if not recipe.history():
        return models.wanted(model, dtype)
    found, quantizer = {}, recipe.weight
    for name, layer in model.named_modules():
        if isinstance(layer, f8.Linear):
            multiplier = layer.multiplier[1].view(1, 1)
            codes = quantizer.cast(layer.weight.detach(), multiplier)
            found[f"{name}.weight"] = quantizer.dequantize(codes, quantizer.scale_of(multiplier), dtype)
    return found
