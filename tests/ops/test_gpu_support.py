"""GPUs that would be harmed, or misread, by a product are refused before it is called, in a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.cli import doctor, doctor_checks, main
from fp8compile.ops.gemms.selection import select_gemm
from fp8compile.quantizers import GEMMS
from fp8compile.target import Build, Target, pretend_target, target_of
from fp8compile.testing.explain.gpu_code import missing_gemm
from fp8compile.testing.explain.recipe_support import recipe_support
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs

CUDA = torch.device("cuda")
AMD = {"MI300X": ((9, 4), "gfx942"), "MI200": ((9, 0), "gfx90a"), "not named": ((9, 5), "")}  # without OCP formats
TENSORWISE = f8.recipes.tensorwise(grad_format="e4m3")
NO_MX_GROUPS = "is MX in groups, which needs compute capability 10.0"
OFFSETS = torch.tensor([16, 32], dtype=torch.int32)


def kinds(recipe, target, *, grouped=False):
    with pretend_target(target):
        return recipe_support(recipe, CUDA, grouped=grouped)


@pytest.mark.parametrize("grouped", [False, True], ids=["linears", "experts"])
@pytest.mark.parametrize("name", f8.recipes.names())
@pytest.mark.parametrize(("capability", "gcn"), AMD.values(), ids=AMD)
def test_no_product_runs_on_an_amd_gpu_by_a_capability_like_nvidias(capability, gcn, name, grouped):
    recipe = f8.recipes.by_name(name)
    found = kinds(recipe, Target("cuda", capability, hip="7.0", gcn=gcn), grouped=grouped)
    for gemm, each in zip(GEMMS, found, strict=True):
        if recipe.quantizers(gemm) is not None:
            assert each.kind == "none"
            if not (grouped and "delayed scaling" in each.detail):
                assert "has no FP8 or FP4 GEMM on AMD GPUs" in each.detail
                assert each.detail.endswith(f"This is {gcn}, ROCm 7.0." if gcn else "This is ROCm 7.0.")
                assert ("e4m3fnuz" in each.detail) == (gcn == "gfx942")


def test_emulation_runs_on_an_amd_gpu():
    found = kinds(f8.recipes.mxfp8(emulate=True), Target("cuda", (9, 4), hip="7.0"))
    assert {each.kind for each in found} == {"emulated"}


OCP = {name: GPUS[name].target for name in ("mi355x", "rx9070")}


@pytest.mark.parametrize("target", OCP.values(), ids=OCP)
def test_an_amd_gpu_with_ocp_formats_runs_tensorwise_and_rowwise_products_and_no_others(target):
    for name in f8.recipes.names():
        recipe = f8.recipes.by_name(name)
        wanted = "tensorwise" if name == "delayed" else name.removesuffix("_bf16_wgrad")
        runs = wanted in ("tensorwise", "rowwise")
        found = [each for each in kinds(recipe, target) if each.kind != "high_precision"]
        assert {each.kind for each in found} == {wanted if runs else "none"}
        if not runs:
            assert all("has no GEMM here on AMD GPUs" in each.detail for each in found)
            assert all("recipe that this GPU supports (tensorwise, rowwise)" in each.detail for each in found)
        experts = [each for each in kinds(recipe, target, grouped=True) if each.kind != "high_precision"]
        assert {each.kind for each in experts} == {"none"}
        assert all("Leave the experts in bfloat16." in e.detail or "delayed scaling" in e.detail for e in experts)


def test_hipblaslt_multiplies_rows_to_bfloat16_by_e4m3_and_by_a_rocm_that_has_them():
    e4m3, e5m2 = (f8.CurrentScaling(format=name, block=(1, -1)) for name in ("e4m3", "e5m2"))
    target = OCP["mi355x"]
    with pretend_target(target):
        assert select_gemm(e5m2, e4m3.transposed(), CUDA, BF16) == "rowwise"
        assert select_gemm(e4m3, e5m2.transposed(), CUDA, BF16) == "scaled_after"
        assert select_gemm(e4m3, e4m3.transposed(), CUDA, FP32) == "scaled_after"
    old = replace(target, hip="6.2", build=Build(cuda=None, rocm=(6, 2)))
    for name in ("tensorwise", "rowwise"):
        assert "needs PyTorch built with ROCm 6.5 or later; this has 6.2. Leave" in (
            kinds(f8.recipes.by_name(name), old)[0].detail
        )


def test_the_target_of_a_rocm_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 5))
    properties = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    assert target_of(CUDA) == Target("cuda", (9, 5), None, Build.here())
    monkeypatch.setattr(torch.version, "hip", "7.0.51831-a3e329ad8")
    Build.here.cache_clear()
    try:
        found = target_of(CUDA)
        assert (found.hip, found.gcn, found.architecture) == ("7.0.51831-a3e329ad8", "gfx950", "gfx950")
        assert found.build.rocm == (7, 0)
        assert select_gemm(f8.CurrentScaling(), f8.CurrentScaling(), CUDA, BF16) == "tensorwise"
    finally:
        Build.here.cache_clear()
    assert target_of(torch.device("cpu")) == Target("cpu")


def test_doctor_names_rocm_and_refuses(monkeypatch, capsys):
    monkeypatch.setattr(doctor_checks, "run_checks", list)
    monkeypatch.setattr(doctor, "_products", lambda devices: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    named = {"device": "cuda:0", "name": "MI300X", "capability": "9.4", "architecture": "gfx942", "rocm": "7.0"}
    assert doctor._devices()[1] == named
    rowwise = next(each for each in found["recipes"] if (each["device"], each["recipe"]) == ("cuda:0", "rowwise"))
    assert all("AMD" in gemm["detail"] for gemm in (*rowwise["gemms"], *rowwise["experts"]))


# ---------------------------------------------------------------------------------- rowwise groups on 10.x


@pytest.mark.parametrize("recipe", [f8.recipes.rowwise(), TENSORWISE], ids=["rowwise", "tensorwise"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (8, 9)], ids=str)
def test_pytorchs_groups_by_scales_of_rows_run_on_9_with_fast_accumulation_alone(recipe, capability):
    assert {each.kind for each in kinds(recipe, Target("cuda", capability), grouped=True)} == {"rowwise_triton"}
    # with float32 sums, PyTorch's kernel spills
    of_hopper = [each.kind for each in kinds(recipe, Target("cuda", (9, 0)), grouped=True)]
    assert of_hopper == ["rowwise", "rowwise_triton", "rowwise_triton"]


def test_groups_of_e5m2_gradients_are_multiplied_by_ours_on_9_too():
    found = kinds(f8.recipes.tensorwise(), Target("cuda", (9, 0)), grouped=True)
    assert [each.kind for each in found] == ["rowwise", "rowwise_triton", "rowwise_triton"]


def grouped(recipe):
    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(2, 32, 64).bfloat16()
    return lambda x, weight: f8.grouped_linear(x, weight, OFFSETS, recipe=recipe), (x, weight)


def test_eager_for_a_gpu_without_the_product_raises():
    layer, args = grouped(f8.recipes.mxfp8())
    with pretend_target(GPUS["rtx5090"].target), pytest.raises(RuntimeError, match=NO_MX_GROUPS):
        layer(*args)


def test_code_for_a_gpu_without_the_product_is_not_made():
    layer, args = grouped(f8.recipes.mxfp8())
    with pytest.raises(Exception, match=NO_MX_GROUPS):
        gpu_graphs(layer, args, GPUS["rtx5090"])


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


def test_explain_says_which_layer_a_gpu_has_no_gemm_for():
    model = f8.convert(nn.ModuleDict({"experts": Experts()}), f8.recipes.mxfp8(), filter=lambda *_: True)
    assert missing_gemm(model, GPUS["b200"]) == ""
    missing = missing_gemm(model, GPUS["rtx5090"])
    assert missing.startswith("experts, output")
    assert (
        "Use a recipe that this GPU supports for experts (rowwise, blockwise), or leave them in bfloat16." in missing
    )


def test_a_refusal_names_the_recipes_that_the_gpu_has():
    found = [kinds(f8.recipes.mxfp8(), Target("cuda", each))[0].detail for each in ((8, 9), (9, 0))]
    assert "(tensorwise, rowwise), or slow emulation" in found[0]
    assert "(tensorwise, rowwise, blockwise), or slow emulation" in found[1]
    assert "(none), or slow emulation" in kinds(f8.recipes.nvfp4(), Target("cuda", (8, 0)))[0].detail


# ---------------------------------------------------------------------------------- the table

CU126, CU130 = (12, 6), (13, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = f8.recipes.rowwise()
ALL_FAST = replace(ROWS, fast_accumulation_grad_input=True, fast_accumulation_grad_weight=True)
PRODUCT_OF = {
    "tensorwise": (TENSORWISE, False),
    "rowwise": (ROWS, False),
    "blockwise": (f8.recipes.blockwise(), False),
    "blockwise_by_mx": (f8.recipes.blockwise(scale="pow2"), False),
    "scaled_by_mx": (f8.recipes.rowwise(by_mx=True), False),
    "mx": (f8.recipes.mxfp8(), False),
    "nvfp4": (f8.recipes.nvfp4(), False),
    "rowwise groups": (ALL_FAST, True),
    "blockwise groups": (f8.recipes.blockwise(), True),
    "mx groups": (f8.recipes.mxfp8(), True),
    "nvfp4 groups": (f8.recipes.nvfp4(), True),
}
# What PyTorch's sources refuse, or run wrongly: (product, capabilities, builds, dtypes of the result).
ANY = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
BUILDS = [Build(version, cuda) for version in ((2, 11), (2, 13), (2, 15)) for cuda in (CU126, CU130)]
OLD_CUDA = [build for build in BUILDS if build.cuda == CU126]
BEFORE_215 = [build for build in BUILDS if build.torch < (2, 15)]
NOT_HOPPER = tuple(each for each in ANY if each != (9, 0))
BEFORE_BLACKWELL = ANY[:4]
REFUSED = [
    *((product, ((8, 0), (8, 6)), BUILDS, (BF16, FP16, FP32)) for product in PRODUCT_OF),
    ("rowwise", ANY[2:], [build for build in BEFORE_215 if build.cuda == CU126], (FP16, FP32)),
    ("rowwise", tuple(each for each in ANY[2:] if each != (9, 0)), BEFORE_215, (FP16, FP32)),
    ("rowwise", ANY[2:], [Build((2, 13), CU126, is_windows=True)], (BF16, FP16, FP32)),
    ("rowwise groups", ((9, 0),), [Build((2, 13), CU130, is_windows=True)], (BF16,)),
    ("blockwise", NOT_HOPPER, BUILDS, (BF16, FP32)),
    ("blockwise", ((9, 0),), OLD_CUDA, (BF16, FP32)),
    *((product, BEFORE_BLACKWELL, BUILDS, (BF16, FP32)) for product in ("mx", "blockwise_by_mx", "scaled_by_mx")),
    *((product, ANY, [Build((2, 11), (12, 6))], (BF16,)) for product in ("mx", "nvfp4", "blockwise_by_mx")),
    ("scaled_by_mx", ANY, [Build((2, 11), (12, 6))], (BF16,)),
    ("nvfp4", BEFORE_BLACKWELL, BUILDS, (BF16,)),
    ("rowwise groups", NOT_HOPPER, BUILDS, (BF16, FP16, FP32)),
    ("rowwise groups", ((9, 0),), BUILDS, (FP16, FP32)),
    *((f"{name} groups", (*BEFORE_BLACKWELL, (11, 0), (12, 0), (12, 1)), BUILDS, (BF16,)) for name in ("mx", "nvfp4")),
    *((f"{name} groups", ((10, 0),), [Build((2, 13), CU130, has_mslk=False)], (BF16,)) for name in ("mx", "nvfp4")),
]
RUNS = [
    ("tensorwise", ANY[2:], BUILDS, (BF16, FP16, FP32)),
    ("rowwise", ANY[2:], BUILDS, (BF16,)),
    ("rowwise", ((9, 0),), [Build((2, 11), CU130), Build((2, 13), CU130)], (FP16, FP32)),
    ("rowwise", ANY[2:], [Build((2, 15), CU130)], (FP16, FP32)),
    ("blockwise", ((9, 0),), [Build((2, 13), CU130)], (BF16, FP32)),
    *((product, ANY[4:], [Build((2, 13), CU130)], (BF16, FP16, FP32)) for product in ("mx", "blockwise_by_mx")),
    ("scaled_by_mx", ((12, 0),), [Build((2, 13), CU130), Build((2, 11), (12, 8))], (BF16, FP16, FP32)),
    ("nvfp4", ANY[4:], [Build((2, 13), CU130)], (BF16,)),
    ("rowwise groups", ((9, 0),), BUILDS, (BF16,)),
    ("mx groups", ((10, 0), (10, 3)), [Build((2, 13), CU130)], (BF16,)),
    ("nvfp4 groups", ((10, 0), (10, 3)), [Build((2, 13), CU130)], (BF16,)),
    ("blockwise groups", ANY[2:], BUILDS, (BF16, FP16, FP32)),
]


def outcomes(rows):
    for product, capabilities, builds, dtypes in rows:
        recipe, is_grouped = PRODUCT_OF[product]
        for capability in capabilities:
            for build in builds:
                for dtype in dtypes:
                    with pretend_target(Target("cuda", capability, None, build)):
                        found = recipe_support(recipe, CUDA, dtype, grouped=is_grouped)
                    yield (product, capability, build, dtype), [(each.kind, each.detail) for each in found]


def test_no_gate_admits_what_pytorch_refuses_or_computes_wrongly():
    seen = list(outcomes(REFUSED))
    assert len(seen) > 300
    wrong = [what for what, found in seen if any(kind == what[0].split()[0] for kind, _ in found)]
    assert wrong == []
    silent = [what for what, found in seen if any(kind == "none" and "compute" not in text for kind, text in found)]
    assert silent == []  # a refusal names the GPU that it was asked of


def test_what_pytorch_runs_is_not_refused():
    seen = list(outcomes(RUNS))
    assert [what for what, found in seen if {kind for kind, _ in found} != {what[0].split()[0]}] == []


def test_the_left_operand_of_rows_may_be_e5m2_and_the_right_one_only_by_cublas():
    e4m3, e5m2 = (f8.CurrentScaling(format=name, block=(1, -1)) for name in ("e4m3", "e5m2"))
    for capability, right in (((9, 0), "rowwise"), ((10, 0), "scaled_after"), ((12, 0), "scaled_after")):
        with pretend_target(Target("cuda", capability, None, Build((2, 13), CU130))):
            assert select_gemm(e5m2, e4m3.transposed(), CUDA, BF16) == "rowwise"
            assert select_gemm(e4m3, e5m2.transposed(), CUDA, BF16) == right


def test_the_build_of_this_process_is_asked(monkeypatch):
    here = Build.here()
    assert here.torch == tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    assert here.cuda == (torch.version.cuda and tuple(map(int, torch.version.cuda.split("."))))
    assert not here.is_windows
