"""Code for AMD GPUs, generated and compiled without one: which product, how codes are cast; and what is refused."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.testing import gpu_kernels, run_gpu_program
from fp8compile.testing.gpu.compiled import compiled_kernels
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.ptx_report import ptx_of

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's backend for AMD")
MX_ON_AMD = r"has no GEMM here on AMD GPUs.*recipe that this GPU supports \(tensorwise, rowwise\)"


def layer(recipe):
    model = nn.Sequential(nn.SiLU(), nn.Linear(64, 128, bias=False)).bfloat16()
    return f8.convert(model, recipe, filter=lambda *_: True), torch.randn(32, 64).bfloat16()


@pytest.mark.parametrize("arch", ["mi355x", "rx9070"])
def test_a_layer_by_rows_is_generated_and_compiled_for_an_amd_gpu(arch):
    gpu_kernels(*layer(f8.recipes.rowwise()), arch="h200")  # its properties are not this GPU's
    model, x = layer(f8.recipes.rowwise())
    forward, backward = gpu_kernels(model, x, arch=arch)
    assert (forward.gemms, backward.gemms) == (("_scaled_mm",), ("_scaled_mm",))
    assert "DeviceProperties(type='hip'" in forward.source
    gpu, kernels = GPUS[arch], []
    for code in (forward, backward):
        kernels += compiled_kernels(code.source, GPUS[arch], most=1)
    assert len(kernels) == len(forward.kernels) + len(backward.kernels)
    assert all(each.shared_bytes <= gpu.target.shared_memory for each in kernels)
    assert all(gpu.gcnArchName in each.ptx for each in kernels), "AMD's assembly"
    # gfx950 has the cast; for gfx1201 Triton rounds float32's bits once, to nearest even, by integers
    assert any("v_cvt_scalef32_pk_fp8_f32" in each.ptx for each in kernels) == (arch == "mi355x")


def test_what_an_amd_gpu_has_no_product_for_is_not_generated():
    for recipe, arch, why in (
        (f8.recipes.mxfp8(), "mi355x", MX_ON_AMD),
        (f8.recipes.rowwise(), "mi300x", "which use e4m3fnuz and e5m2fnuz"),
    ):
        model, x = layer(recipe)
        with torch.no_grad(), pytest.raises(Exception, match=why):
            gpu_kernels(model, x, arch=arch)
        with torch.no_grad():
            (forward,) = gpu_kernels(f8.revert(model), x, arch=arch)
        assert forward.gemms == ("mm",)


def test_what_needs_an_nvidia_gpu_says_so():
    model, x = layer(f8.recipes.rowwise())
    for call, name in ((run_gpu_program, "run_gpu_program"), (ptx_of, "ptx_of")):
        with pytest.raises(
            ValueError,
            match=rf"{name} supports only NVIDIA GPUs, but AMD Instinct MI355X \(gfx950\) "
            r"is",
        ):
            call(model, x, arch="mi355x")
    (code,) = gpu_kernels(lambda x: x + 1, torch.zeros(64), arch="rx9070")
    with pytest.raises(ValueError, match=r"resources\(\), by ptxas, supports only NVIDIA GPUs"):
        code.resources()
