"""A block whose weights are codes on a GPU that isn't there: its generated B200 program, run."""

from __future__ import annotations

import pytest
import torch

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing import run_gpu_program

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="run_gpu_program needs PyTorch 2.13")


@pytest.mark.parametrize("recipe", ["mxfp8", "rowwise", "nvfp4"])
def test_a_block_of_parameters_that_are_codes_runs_on_a_b200_as_its_reference(recipe, assert_bits_equal):
    torch.manual_seed(0)
    layers = torch.nn.RMSNorm(64), torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 64)
    plain = f8.convert(torch.nn.Sequential(*layers).bfloat16(), f8.recipes.by_name(recipe))
    x = torch.randn(48, 64).bfloat16()
    expected = plain(x).detach()
    f8.revert(plain)
    model = f8.convert(plain, f8.recipes.by_name(recipe), weight_lifetime="parameter")
    run = run_gpu_program(model, x.requires_grad_(), arch="b200")
    assert not run.differences, run.differences
    assert_bits_equal(model(x).detach(), expected, "codes of a weight that is no codes")
    assert len(run.products) == 6, run.products  # all three of both layers, in FP8
