"""GPUs that would be harmed, or misread, by a product are refused before it is called, in a sentence."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.cli import checks, doctor, main
from fp8compile.ops.support import recipe_support
from fp8compile.quantizers import GEMMS
from fp8compile.target import Target, pretend_target, target_of
from fp8compile.testing.explain.gpu import missing_gemm
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs

CUDA = torch.device("cuda")
AMD = {"MI300X": (9, 4), "MI355X": (9, 5), "RX 9070": (12, 0), "MI200": (9, 0)}
TENSORWISE = f8.recipes.tensorwise(grad_format="e4m3")
TRAPS = "PyTorch has for compute capability 9.0 alone"
OFFSETS = torch.tensor([16, 32], dtype=torch.int32)


def kinds(recipe, target, *, grouped=False):
    with pretend_target(target):
        return recipe_support(recipe, CUDA, grouped=grouped)


@pytest.mark.parametrize("grouped", [False, True], ids=["linears", "experts"])
@pytest.mark.parametrize("name", f8.recipes.names())
@pytest.mark.parametrize("capability", AMD.values(), ids=AMD)
def test_no_product_runs_on_an_amd_gpu_by_a_capability_like_nvidias(capability, name, grouped):
    recipe = f8.recipes.by_name(name)
    found = kinds(recipe, Target("cuda", capability, hip="7.0"), grouped=grouped)
    for gemm, each in zip(GEMMS, found, strict=True):
        if recipe.quantizers(gemm) is not None:
            assert each.kind == "none"
            if not (grouped and "delayed scaling" in each.detail):
                assert "has no FP8 or FP4 GEMM on AMD GPUs" in each.detail
                assert each.detail.endswith("This is ROCm 7.0.")


def test_emulation_runs_on_an_amd_gpu():
    found = kinds(f8.recipes.mxfp8(emulate=True), Target("cuda", (9, 4), hip="7.0"))
    assert {each.kind for each in found} == {"emulated"}


def test_the_target_of_a_rocm_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert target_of(CUDA) == Target("cuda", (9, 4), hip=torch.version.hip)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert target_of(CUDA) == Target("cuda", (9, 4), hip="7.0")
    assert target_of(torch.device("cpu")) == Target("cpu")


def test_doctor_names_rocm_and_refuses(monkeypatch, capsys):
    monkeypatch.setattr(checks, "run_checks", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert doctor._devices()[1] == {"device": "cuda:0", "name": "MI300X", "capability": "9.4", "rocm": "7.0"}
    rowwise = next(each for each in found["recipes"] if (each["device"], each["recipe"]) == ("cuda:0", "rowwise"))
    assert all("AMD" in gemm["detail"] for gemm in (*rowwise["gemms"], *rowwise["experts"]))


# ---------------------------------------------------------------------------------- rowwise groups on 10.x


@pytest.mark.parametrize("recipe", [f8.recipes.rowwise(), TENSORWISE], ids=["rowwise", "tensorwise"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (8, 9)], ids=str)
def test_groups_by_scales_of_rows_run_on_9_alone(recipe, capability):
    found = kinds(recipe, Target("cuda", capability), grouped=True)
    assert {each.kind for each in found} == {"none"}
    expected = TRAPS if capability[0] == 10 else "needs a grouped GEMM"
    assert all(expected in each.detail and "experts" in each.detail for each in found)
    assert {each.kind for each in kinds(recipe, Target("cuda", (9, 0)), grouped=True)} == {"rowwise"}


def grouped(recipe):
    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(2, 32, 64).bfloat16()
    return lambda x, weight: f8.grouped_linear(x, weight, OFFSETS, recipe=recipe), (x, weight)


def test_eager_for_a_b200_raises():
    layer, args = grouped(f8.recipes.rowwise())
    with pretend_target(GPUS["b200"].target), pytest.raises(RuntimeError, match=TRAPS):
        layer(*args)


@pytest.mark.parametrize("recipe", [f8.recipes.rowwise(), TENSORWISE], ids=["rowwise", "tensorwise"])
def test_code_for_a_b200_is_not_made(recipe):
    layer, args = grouped(recipe)
    with pytest.raises(Exception, match=TRAPS):
        gpu_graphs(layer, args, GPUS["b200"])


@pytest.mark.parametrize("name", ["rowwise", "nvfp4"])
def test_code_for_an_amd_gpu_is_not_made(name):
    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    recipe = f8.recipes.by_name(name)
    compiled = torch.compile(lambda x, w: f8.linear(x, w, recipe=recipe), backend="aot_eager_decomp_partition")
    torch._dynamo.reset()
    with pretend_target(Target("cuda", (9, 4), hip="7.0")), pytest.raises(Exception, match="AMD GPUs"):
        compiled(x, weight)


class Experts(nn.Module):
    """As torchtitan writes them."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 32, 64).bfloat16())

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)

    def forward(self, x, offsets):
        return self._grouped_mm(A=x, B_t=self.w1.transpose(-2, -1), offs=offsets)


def test_explain_says_which_layer_a_b200_has_no_gemm_for():
    model = f8.convert(nn.ModuleDict({"experts": Experts()}), f8.recipes.rowwise(), filter=lambda *_: True)
    assert missing_gemm(model, GPUS["h200"]) == ""
    missing = missing_gemm(model, GPUS["b200"])
    assert missing.startswith("experts, output")
    assert "Take fp8compile.recipes.mxfp8() or nvfp4() for experts here" in missing
