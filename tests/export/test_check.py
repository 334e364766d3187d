"""check finds what a server would read differently, and save_pretrained leaves no half behind."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import serving_models as models
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fp8compile as f8
from fp8compile.export import write_folder as folders

FILE = "model.safetensors"


def one_layer(recipe, sizes=(256, 256), names=("q_proj",), dtype=torch.bfloat16):
    torch.manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name in names})
    for each in model.parameters():
        nn.init.normal_(each)  # the largest values of two uniform blocks may be the same
    return f8.convert(model.to(dtype), recipe)


def written(folder, recipe, form, **options):
    f8.export.save_pretrained(one_layer(recipe, **options), folder, form)
    return folder


def change(folder, edit):
    """Change the tensors of a folder by a function of their dict."""
    stored = {name: each.clone() for name, each in load_file(folder / FILE).items()}
    edit(stored)
    save_file(stored, folder / FILE, metadata={"format": "pt"})


def invert(name):
    def edit(stored):
        stored[name] = (1 / stored[name].float()).to(stored[name].dtype)

    return edit


def transpose(name):
    def edit(stored):
        stored[name] = stored[name].t().contiguous()

    return edit


def swap_nibbles(name):
    def edit(stored):
        stored[name] = (stored[name] >> 4) | (stored[name] << 4)

    return edit


def drop(name):
    return lambda stored: stored.pop(name)


NVFP4 = f8.recipes.nvfp4()
E5M2 = replace(f8.recipes.tensorwise(), weight=f8.CurrentScaling(format="e5m2"))
PLANTED = {
    "inverted": (f8.recipes.blockwise(), "fine_grained_fp8", invert("q_proj.weight_scale_inv"), "a server reads"),
    "transposed": (f8.recipes.blockwise(), "fine_grained_fp8", transpose("q_proj.weight"), "a server reads"),
    "scale transposed": (
        f8.recipes.blockwise(),
        "fine_grained_fp8",
        transpose("q_proj.weight_scale_inv"),
        "a server reads",
    ),
    "divisor for multiplier": (NVFP4, "compressed-tensors", invert("q_proj.weight_global_scale"), "a server reads"),
    "multiplier for divisor": (NVFP4, "modelopt", invert("q_proj.weight_scale_2"), "a server reads"),
    "nibbles": (NVFP4, "compressed-tensors", swap_nibbles("q_proj.weight_packed"), "a server reads"),
    "rowwise inverted": (f8.recipes.rowwise(), "compressed-tensors", invert("q_proj.weight_scale"), "a server reads"),
    "missing scale": (
        f8.recipes.blockwise(),
        "fine_grained_fp8",
        drop("q_proj.weight_scale_inv"),
        "q_proj.weight_scale_inv is missing",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found(planted, tmp_path):
    recipe, form, edit, words = PLANTED[planted]
    written(tmp_path / "x", recipe, form)
    assert f8.export.check(tmp_path / "x").layers == 1
    change(tmp_path / "x", edit)
    with pytest.raises(ValueError, match=words):
        f8.export.check(tmp_path / "x")


def test_a_truncated_file_is_found(tmp_path):
    path = written(tmp_path / "x", f8.recipes.blockwise(), "fine_grained_fp8") / FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read"):
        f8.export.check(tmp_path / "x")


def test_a_wrong_configuration_is_found(tmp_path):
    path = written(tmp_path / "x", f8.recipes.blockwise(), "fine_grained_fp8") / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["q_proj"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="lists q_proj as not quantized"):
        f8.export.check(tmp_path / "x")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        f8.export.check(tmp_path / "x")


@pytest.mark.parametrize("field", ["format", "kinds", "values"])
@pytest.mark.parametrize("content", [None, [], 3, {"block": 3}, "torch"], ids=str)
def test_a_damaged_record_is_named(field, content, tmp_path):
    path = written(tmp_path / "x", f8.recipes.blockwise(), "fine_grained_fp8") / "fp8compile_export.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: content}))
    with pytest.raises(ValueError, match=r"fp8compile_export\.json differs from what save_pretrained wrote"):
        f8.export.check(tmp_path / "x")


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        f8.export.check(tmp_path)


@pytest.mark.parametrize(("form", "recipe"), [("modelopt", NVFP4), ("compressed-tensors", f8.recipes.tensorwise())])
def test_layers_that_a_server_fuses_are_told_if_their_outer_scales_differ(form, recipe, tmp_path):
    model = one_layer(recipe, names=("q_proj", "k_proj", "v_proj", "o_proj"))
    f8.export.save_pretrained(model, tmp_path / "x", form)
    (note,) = f8.export.check(tmp_path / "x").notes
    assert "1 groups" in note
    assert "q_proj, k_proj, v_proj" in note
    with torch.no_grad():
        for each in model.values():
            each.weight.copy_(model["q_proj"].weight)
    f8.export.save_pretrained(model, tmp_path / "x", form, overwrite=True)
    assert not f8.export.check(tmp_path / "x").notes


# ---------------------------------------------------------------------------------- what a format can't hold


@pytest.mark.parametrize("form", ["fine_grained_fp8", "compressed-tensors"])
@pytest.mark.parametrize("sizes", [(192, 256), (256, 192), (256, 200)])
def test_sizes_that_readers_would_take_for_other_blocks_are_refused(form, sizes, tmp_path):
    model = one_layer(f8.recipes.blockwise(), sizes=sizes)
    with pytest.raises(ValueError, match="must be multiples of 128 x 128") as raised:
        f8.export.tensors(model, form)
    assert f"{sizes[1]} x {sizes[0]}" in str(raised.value)
    with pytest.raises(ValueError, match="must be multiples"):
        f8.export.save_pretrained(model, tmp_path / "x", form)
    assert not list(tmp_path.iterdir())


def test_rows_of_deepseek_are_written_and_told(tmp_path):
    """576 rows are 5 blocks, by which nobody divides 576."""
    model = one_layer(f8.recipes.blockwise(), sizes=(128, 576))
    report = f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8")
    assert "transformers does not dequantize" in report.notes[0]
    assert load_file(tmp_path / "x" / FILE)["q_proj.weight_scale_inv"].shape == (5, 1)
    assert f8.export.check(tmp_path / "x").layers == 1


def test_what_does_not_fit_is_written_in_high_precision_if_asked(tmp_path, assert_bits_equal):
    model = nn.ModuleDict({"a": nn.Linear(256, 256), "b": nn.Linear(256, 192), "c": nn.Linear(128, 1)}).bfloat16()
    f8.convert(model, f8.recipes.blockwise(), filter=["a", "b"])
    report = f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8", unfit="values")
    assert report.quantized == {"blocks of 128 x 128": ("a",)}
    assert report.ignored == ("b", "c")
    assert "b.weight is 192 x 256" in str(report)
    assert_bits_equal(load_file(tmp_path / "x" / FILE)["b.weight"], model["b"].weight.detach())


@pytest.mark.parametrize(
    ("form", "recipe", "words"),
    [
        ("fine_grained_fp8", f8.recipes.rowwise(), "use 'compressed-tensors'"),
        ("fine_grained_fp8", NVFP4, "does not support this quantization"),
        ("modelopt", f8.recipes.tensorwise(), "requires a static input scale"),
        ("modelopt", f8.recipes.blockwise(), "Take 'fine_grained_fp8'"),
        ("fine_grained_fp8", E5M2, "does not support this quantization"),
        (
            "gguf",
            f8.recipes.blockwise(),
            "`format` is 'gguf'; it must be one of 'fine_grained_fp8', 'compressed-tensors'",
        ),
    ],
)
def test_a_format_without_such_codes_is_refused(form, recipe, words):
    with pytest.raises(ValueError, match=words):
        f8.export.tensors(one_layer(recipe), form)


def test_kinds_are_mixed_where_the_format_has_groups(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(256, 256), "b": nn.Linear(256, 256)}).bfloat16()
    f8.convert(model, {"a": f8.recipes.rowwise(), "b": f8.recipes.mxfp8()})
    with pytest.raises(ValueError, match="quantized in several ways"):
        f8.export.tensors(model, "modelopt")
    f8.export.save_pretrained(model, tmp_path / "x", "compressed-tensors")
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [each["targets"] for each in config["config_groups"].values()] == [["a"], ["b"]]
    assert f8.export.check(tmp_path / "x").layers == 2


def test_a_model_without_fp8_is_refused():
    with pytest.raises(ValueError, match="has no FP8 layers"):
        f8.export.tensors(nn.Linear(128, 128), "modelopt")


def test_blocks_of_rows_that_interleave_two_matrices_are_refused():
    model = models.converted(models.make("gpt_oss"), f8.recipes.blockwise())
    with pytest.raises(ValueError, match=r"gate_up_proj interleaves gate and up"):
        f8.export.tensors(model, "fine_grained_fp8")


def test_transposed_linears_are_refused():
    import transformers as t

    config = t.GPT2Config(n_layer=1, n_embd=128, n_head=2, vocab_size=64)
    model = models.converted(t.GPT2LMHeadModel(config).bfloat16(), f8.recipes.blockwise())
    with pytest.raises(ValueError, match=r"is stored as \(in_features, out_features\)"):
        f8.export.tensors(model, "fine_grained_fp8")


def test_a_weight_tied_to_an_embedding_stays_in_high_precision(tmp_path):
    model = f8.convert(models.make("tied"), f8.recipes.blockwise(), filter=["*"])
    report = f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8", max_shard_size="1GB")
    assert report.ignored == ("lm_head",)
    assert "lm_head.weight is tied to model.embed_tokens.weight" in report.notes[0]
    stored = load_file(tmp_path / "x" / FILE)
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert not [name for name in stored if name.startswith("lm_head")]


def test_values_are_cast_as_the_forward_casts_them(assert_bits_equal):
    model = one_layer(f8.recipes.blockwise(), dtype=torch.float32)
    (weight,) = model.parameters()
    found = dict(f8.export.tensors(model, "fine_grained_fp8", forward_dtype=torch.bfloat16))
    own = f8.quantize(weight.detach().bfloat16(), model["q_proj"].recipe.weight)
    assert_bits_equal(found["q_proj.weight"].view(torch.uint8), own.codes)
    assert not torch.equal(f8.quantize(weight.detach(), model["q_proj"].recipe.weight).codes, own.codes)


# ---------------------------------------------------------------------------------- folders


def test_a_folder_is_not_overwritten_unless_asked(tmp_path):
    model, path = one_layer(f8.recipes.blockwise()), tmp_path / "x"
    f8.export.save_pretrained(model, path, "fine_grained_fp8")
    (path / "tokenizer.json").write_text("own")
    before = (path / FILE).read_bytes()
    with torch.no_grad():
        model["q_proj"].weight.mul_(3)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        f8.export.save_pretrained(model, path, "fine_grained_fp8")
    assert (path / FILE).read_bytes() == before
    f8.export.save_pretrained(model, path, "fine_grained_fp8", overwrite=True, max_shard_size=1000)
    assert (path / "tokenizer.json").read_text() == "own"
    assert sorted(each.name for each in path.glob("model*")) == [FILE]
    assert f8.export.check(path).layers == 1
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.fixture
def almost_full_disk():
    """Files of this process have 100 kB at most, and the next byte fails as on a full disk."""
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, own[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, own)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there(overwrite, tmp_path, almost_full_disk):
    model, path = one_layer(f8.recipes.blockwise(), sizes=(512, 512)), tmp_path / "x"
    if overwrite:
        f8.export.save_pretrained(model, path, "fine_grained_fp8")
    before = {each.name: each.read_bytes() for each in path.glob("*")}
    almost_full_disk()
    with pytest.raises(OSError, match="can't be written, the previous files are kept"):
        f8.export.save_pretrained(model, path, "fine_grained_fp8", overwrite=overwrite)
    assert {each.name: each.read_bytes() for each in path.glob("*")} == before
    assert [each.name for each in tmp_path.iterdir()] == ["x"] * overwrite


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="a folder that not even root can write to")
def test_a_file_system_that_can_not_be_written_to_is_told():
    with pytest.raises(OSError, match="/sys/fp8"):
        f8.export.save_pretrained(one_layer(f8.recipes.blockwise()), "/sys/fp8", "fine_grained_fp8")


def test_a_read_only_folder_is_told_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="is not writable"):
        f8.export.save_pretrained(one_layer(f8.recipes.blockwise()), tmp_path / "x", "fine_grained_fp8")
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "x").write_text("")
    model = one_layer(f8.recipes.blockwise())
    with pytest.raises(FileExistsError, match="is a file"):
        f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8", overwrite=True)


@pytest.mark.parametrize("what", ["writing", "before"])
def test_the_leftover_of_a_save_that_was_killed_blocks_no_later_one(what, tmp_path):
    model, left = one_layer(f8.recipes.blockwise()), tmp_path / f"x.{what}-{os.getpid()}"  # as in a container
    left.mkdir()
    (left / "model-00001.safetensors").write_bytes(b"")
    for _ in range(2):
        f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8", overwrite=True)
    assert {each.name for each in tmp_path.iterdir()} == {"x", left.name}
    assert f8.export.check(tmp_path / "x").layers == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_a_symbolic_link_stays_and_the_folder_that_it_names_is_written(is_there, tmp_path):
    model, link = one_layer(f8.recipes.blockwise()), tmp_path / "latest"
    if is_there:
        f8.export.save_pretrained(model, tmp_path / "step-100", "fine_grained_fp8")
    link.symlink_to("step-100")
    with torch.no_grad():
        model["q_proj"].weight.mul_(3)
    report = f8.export.save_pretrained(model, link, "fine_grained_fp8", overwrite=is_there)
    assert report.folder == link
    assert link.is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"latest", "step-100"}
    expected = dict(f8.export.tensors(model, "fine_grained_fp8"))
    assert torch.equal(
        load_file(tmp_path / "step-100" / FILE)["q_proj.weight_scale_inv"], expected["q_proj.weight_scale_inv"]
    )


def test_links_in_the_folder_stay_links(tmp_path):
    model, path = one_layer(f8.recipes.blockwise()), tmp_path / "x"
    f8.export.save_pretrained(model, path, "fine_grained_fp8")
    (path / "own").mkdir()
    links = {"nothing": "nowhere", "tokenizer.json": "../blob", "folder": "own", "own/inner": "nowhere"}
    (tmp_path / "blob").write_text("own")
    for name, target in links.items():
        (path / name).symlink_to(target)
    f8.export.save_pretrained(model, path, "fine_grained_fp8", overwrite=True)
    assert {name: os.readlink(path / name) for name in links} == links
    assert (path / "tokenizer.json").read_text() == "own"


def test_a_mounted_folder_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(OSError, match=r"root of a file system.*Pass a folder in it"):
        f8.export.save_pretrained(one_layer(f8.recipes.blockwise()), tmp_path, "fine_grained_fp8")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_can_not_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    model, path, rename = one_layer(f8.recipes.blockwise()), tmp_path / "x", Path.rename
    f8.export.save_pretrained(model, path, "fine_grained_fp8")
    before = (path / FILE).read_bytes()

    def interrupted(self, target):
        if self.name.startswith("x.writing"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with torch.no_grad():
        model["q_proj"].weight.mul_(3)
    with pytest.raises(KeyboardInterrupt):
        f8.export.save_pretrained(model, path, "fine_grained_fp8", overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert (path / FILE).read_bytes() == before


@pytest.mark.parametrize("size", ["5 apples", 0, "-1GB", None, True])
def test_sizes_of_files_that_mean_nothing_are_refused(size, tmp_path):
    with pytest.raises(ValueError, match="max_shard_size"):
        f8.export.save_pretrained(
            one_layer(f8.recipes.blockwise()), tmp_path / "x", "fine_grained_fp8", max_shard_size=size
        )


def test_sizes_of_files_in_words():
    assert [folders.bytes_of(size) for size in ("5GB", "1.5 MiB", "10kb", 7)] == [5 * 10**9, 3 * 2**19, 10**4, 7]


def test_the_report_reads_well(tmp_path):
    report = f8.export.save_pretrained(one_layer(NVFP4), tmp_path / "x", "modelopt")
    first, *notes = str(report).replace(str(tmp_path), "").splitlines()
    assert first == f"/x: modelopt, 1 as W4A16_NVFP4; 0 in high precision; {report.bytes} bytes"
    assert len(notes) == 2
    assert str(f8.export.check(tmp_path / "x")).endswith("modelopt, 1 layers; a server reads the same values")


# ---------------------------------------------------------------------------------- one reason for many layers


def test_layers_with_one_reason_are_one_line_of_an_error():
    model = nn.ModuleDict({name: nn.Linear(256, 192) for name in "abcdefg"} | {"h": nn.Linear(200, 256)}).bfloat16()
    f8.convert(model, f8.recipes.blockwise(), filter="*")
    with pytest.raises(ValueError, match=r"'fine_grained_fp8' does not support 8 weights") as raised:
        f8.export.tensors(model, "fine_grained_fp8")
    _, first, second, advice = str(raised.value).splitlines()
    assert first.startswith("    a.weight is 192 x 256, but sizes for blocks of 128 x 128 must be multiples")
    assert first.endswith("(and 6 more: b.weight, c.weight, d.weight, ...)")
    assert second.startswith("    h.weight is 256 x 200")
    assert advice.startswith("unfit='values'")
    with pytest.raises(ValueError, match="is quantized by") as raised:
        f8.export.tensors(model, "modelopt")
    assert len(str(raised.value).splitlines()) == 3


def test_layers_with_one_reason_are_one_note_of_a_report(tmp_path):
    model = nn.ModuleDict({name: nn.Linear(256, 192 if name in "abc" else 256) for name in "abcd"}).bfloat16()
    f8.convert(model, f8.recipes.blockwise(), filter="*")
    report = f8.export.save_pretrained(model, tmp_path / "x", "fine_grained_fp8", unfit="values")
    (note,) = report.notes
    assert "(and 2 more: b.weight, c.weight)" in note


def test_tensors_with_one_problem_are_one_line_of_an_error(tmp_path):
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    path = written(tmp_path / "x", f8.recipes.blockwise(), "fine_grained_fp8", names=names)
    change(path, lambda stored: [stored.pop(f"{name}.weight_scale_inv") for name in names])
    for read in (
        f8.export.check,
        lambda folder: f8.load_quantized(one_layer(f8.recipes.blockwise(), names=names), folder),
    ):
        with pytest.raises(ValueError, match=r"q_proj\.weight.*\(and 3 more: k_proj\.weight"):
            read(path)
