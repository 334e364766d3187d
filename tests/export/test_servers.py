"""The table of what servers load, and exports of models that it is compared with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import serving_models as models
import torch
from safetensors.torch import load_file, save_file
from test_check import FILE, one_layer
from torch import nn

import fp8compile as f8
from fp8compile.export.format_table import FORMATS
from fp8compile.export.scheme import KINDS
from fp8compile.export.servers import MODULES, SERVERS, TABLE, missing_parameters, module_of, row_of

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
EXPORTS = [
    ("fine_grained_fp8", "block"),
    ("compressed-tensors", "tensor"),
    ("compressed-tensors", "channel"),
    ("compressed-tensors", "block"),
    ("compressed-tensors", "mx"),
    ("compressed-tensors", "nvfp4"),
    ("modelopt", "mx"),
    ("modelopt", "nvfp4"),
]
RECIPES = models.RECIPES | {"nvfp4": f8.recipes.nvfp4()}


def exported(family, kind, form, folder):
    """Export a model whose head is converted, in a folder without any part in high precision that FP8 can hold."""
    model = f8.convert(models.make(family), RECIPES[kind])
    return f8.export.save_pretrained(model, folder, form, unfit="values" if family == "gpt_oss" else "raise")


@pytest.mark.parametrize(("form", "kind"), EXPORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_servers_have_all_parameters_of_an_export_with_a_converted_head(family, form, kind, tmp_path):
    report = exported(family, kind, form, tmp_path / "x")
    names = {name for found in report.quantized.values() for name in found}
    stored = load_file(tmp_path / "x" / FILE)
    assert stored["lm_head.weight"].dtype == torch.bfloat16
    assert "lm_head" in report.ignored
    assert any("lm_head.weight is written in high precision" in note for note in report.notes)
    assert {module_of(name) for name in names} <= {"linear", "experts"}
    assert {each for each in report.ignored if module_of(each) == "router"} == {
        name.removesuffix(".weight") for name in stored if re.search(r"mlp\.(gate|router)\.weight$", name)
    }
    has_experts = any(module_of(name) == "experts" for name in names)
    if family == "gpt_oss" and has_experts:
        with pytest.raises(ValueError, match=r"vLLM 0\.33\.0 does not load experts modules as") as raised:
            f8.export.check(tmp_path / "x")
        assert "SGLang 0.5.23 does not load experts modules as" in str(raised.value)
        return
    found = f8.export.check(tmp_path / "x", server="vllm")
    assert found.layers == len(names)
    if (family, form) == ("llama", "fine_grained_fp8") or (form, kind) == ("compressed-tensors", "mx"):
        with pytest.raises(ValueError, match=r"SGLang 0\.5\.23 does not load linear modules as"):
            f8.export.check(tmp_path / "x", server="sglang")
    else:
        f8.export.check(tmp_path / "x", server="sglang")


def test_check_finds_an_fp8_head(tmp_path):
    """As an earlier version wrote it: codes and a scale that no loader has a parameter for."""
    path = tmp_path / "x"
    f8.export.save_pretrained(one_layer(f8.recipes.blockwise(), names=("q_proj", "o_proj")), path, "fine_grained_fp8")
    renamed = {name.replace("o_proj", "lm_head"): each for name, each in load_file(path / FILE).items()}
    save_file(renamed, path / FILE, metadata={"format": "pt"})
    record = path / "fp8compile_export.json"
    record.write_text(record.read_text().replace("o_proj", "lm_head"))
    for server in (None, "vllm", "sglang"):
        with pytest.raises(ValueError, match=r"does not load head modules as blocks of 128 x 128 \(1 layer"):
            f8.export.check(path, server=server)
    assert f8.export.check(path, server="transformers").layers == 2


@pytest.mark.parametrize("suffix", [".weight", ".weight_scale"])
def test_check_finds_what_another_tool_added(suffix, tmp_path):
    """A head that the record has in high precision: neither an FP8 weight nor a scale alone passes."""
    path = tmp_path / "x"
    f8.export.save_pretrained(one_layer(f8.recipes.rowwise(), names=("q_proj", "lm_head")), path, "compressed-tensors")
    f8.export.check(path)
    stored = load_file(path / FILE)
    added = {".weight": stored["q_proj.weight"].clone(), ".weight_scale": torch.ones(256, 1)}[suffix]
    save_file(stored | {f"lm_head{suffix}": added}, path / FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"lm_head{suffix} has dtype F\w+, and .* lists lm_head in high precision"):
        f8.export.check(path)


def test_scales_under_a_name_that_only_transformers_has_are_told(tmp_path):
    path = tmp_path / "x"
    report = f8.export.save_pretrained(one_layer(f8.recipes.tensorwise()), path, "fine_grained_fp8")
    words = r"vLLM 0\.33\.0 does not read \.weight_scale_inv for a linear; it reads \.weight, \.weight_scale"
    assert re.search(words, str(report))
    with pytest.raises(ValueError, match=words) as raised:
        f8.export.check(path)
    assert "check(folder, server='transformers')" in str(raised.value)
    assert not f8.export.check(path, server="transformers").notes


def test_one_server_that_loads_all_is_enough_and_the_other_is_told(tmp_path):
    f8.export.save_pretrained(one_layer(f8.recipes.mxfp8()), tmp_path / "x", "compressed-tensors")
    (note,) = f8.export.check(tmp_path / "x").notes
    assert note.startswith("SGLang 0.5.23 does not load linear modules as mxfp8-quantized")
    with pytest.raises(ValueError, match="SGLang"):
        f8.export.check(tmp_path / "x", server="sglang")
    with pytest.raises(ValueError, match="`server` is 'tgi'; it must be one of 'vllm', 'sglang', 'transformers'"):
        f8.export.check(tmp_path / "x", server="tgi")


@pytest.mark.parametrize("names", [("q_proj", "k_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")])
def test_layers_that_servers_load_as_one_are_quantized_alike_or_check_raises(names, tmp_path):
    model = nn.ModuleDict({name: nn.Linear(256, 256, bias=False) for name in names}).bfloat16()
    f8.convert(model, f8.recipes.blockwise(), filter=names[0])
    f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8")
    with pytest.raises(ValueError, match=f"load these layers as one.*{names[0]} as block"):
        f8.export.check(tmp_path / "x")


def test_experts_of_one_layer_are_quantized_alike_or_check_raises(tmp_path):
    model = nn.Module()
    model.experts = nn.ModuleList(nn.ModuleDict({"down_proj": nn.Linear(256, 256)}) for _ in range(2)).bfloat16()
    mlp = nn.ModuleDict({"mlp": model})
    f8.convert(mlp, f8.recipes.blockwise(), filter="mlp.experts.0.*")
    f8.export.save_pretrained(mlp, tmp_path / "x", "fine_grained_fp8")
    with pytest.raises(ValueError, match=r"mlp\.experts\.0\.down_proj as block"):
        f8.export.check(tmp_path / "x")


def test_a_folder_with_an_fp8_head_of_another_tool_is_loaded(tmp_path, assert_bits_equal):
    """Such as ModelOpt's, whose heads both servers load."""
    model = one_layer(f8.recipes.rowwise(), names=("q_proj", "k_proj"))
    f8.export.save_pretrained(model, tmp_path / "x", "compressed-tensors")
    renamed = {name.replace("k_proj", "lm_head"): each for name, each in load_file(tmp_path / "x" / FILE).items()}
    save_file(renamed, tmp_path / "x" / FILE, metadata={"format": "pt"})
    other = one_layer(f8.recipes.rowwise(), names=("q_proj", "lm_head"))
    report = f8.load_quantized(other, tmp_path / "x")
    assert report.codes == ("q_proj.weight", "lm_head.weight")
    expected = f8.quantize(model["k_proj"].weight.detach(), f8.recipes.rowwise().weight)
    assert_bits_equal(other["lm_head"].weight.sets()[0].codes, expected.codes)


def test_a_head_of_codes_is_written_with_the_values_of_its_codes(assert_bits_equal):
    model = one_layer(f8.recipes.rowwise(), names=("q_proj", "lm_head"))
    values = f8.quantize(model["lm_head"].weight.detach(), f8.recipes.rowwise().weight).dequantize()
    f8.freeze_weights(model)
    assert_bits_equal(dict(f8.export.tensors(model, "compressed-tensors"))["lm_head.weight"], values)


# ---------------------------------------------------------------------------------- the table


def test_the_table_names_every_module_of_every_format_for_every_server():
    found = {
        (row.server, form, row.module) for row in TABLE for form in (FORMATS if row.format == "*" else [row.format])
    }
    assert found == {(server, form, module) for server in SERVERS for form in FORMATS for module in MODULES}
    for row in TABLE:
        assert re.search(r"\.py:\d+", row.source), row
        assert row.kinds == ("-",) or all(
            any(re.fullmatch(each.replace("*", ".*"), kind) for kind in KINDS) for each in row.kinds
        )


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize(("form", "kind"), EXPORTS)
def test_no_server_loads_quantized_routers_and_embeddings(server, form, kind):
    for name in ("model.layers.0.mlp.gate", "model.layers.0.mlp.router", "model.embed_tokens"):
        assert missing_parameters(server, FORMATS[form], {name: kind})


RECIPE_OF_KIND = {
    "tensor": "tensorwise",
    "static_tensor": "delayed",
    "channel": "rowwise",
    "block": "blockwise",
    "mx": "mxfp8",
    "nvfp4": "nvfp4",
}


def shown(server, form, module):
    """A cell of the table in docs/serving.md: the recipes, by the names of their scales of weights."""
    found = {}
    for kind, recipe in RECIPE_OF_KIND.items():
        row = row_of(server, form, kind, module)
        if row is not None and FORMATS[form].scheme(kind) is not None:
            scales = ", ".join(f"`{each[1:]}`" for each in row.suffixes if "weight_scale" in each or "global" in each)
            found.setdefault(scales, []).append(recipe)
    return "; ".join(f"{', '.join(recipes)}: {scales}" for scales, recipes in found.items()) or "-"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("module", ["linear", "experts", "head"])
def test_the_docs_show_the_table(form, module):
    line = f"| {form} | {module} | {' | '.join(shown(server, form, module) for server in SERVERS)} |"
    assert line in DOCS.read_text()
    assert all(version in DOCS.read_text() for version in SERVERS.values())
