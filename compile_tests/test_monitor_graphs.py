"""A step that a `fp8compile.Monitor` does not read has the generated code of a model without a monitor."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.blocks import SHAPES, block
from benchmarks.experts import Experts, experts_arguments
from benchmarks.experts_bytes import recipe_of_experts
from benchmarks.kernels import arch_for
from benchmarks.monitor import RECIPES
from fp8compile.testing import gpu_kernels

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
]


def made(kind, recipe):
    if kind == "mlp":
        model, x = block("mlp", recipe, 64, SHAPES["tiny"])
        return model, (x,)
    x, gate_up, down, *others = experts_arguments(256, 64, 128, 4)
    return Experts(gate_up, down, recipe_of_experts(recipe)), (x, *others)


def sources(kind, recipe, *, monitored):
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, arguments = made(kind, recipe)
        if monitored:
            monitor = f8.Monitor(model, every=2)
            monitor.step()
            assert not monitor.is_reading
        return [code.source for code in gpu_kernels(model, *arguments, arch=arch_for(recipe))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), [(kind, recipe) for kind, every in RECIPES.items() for recipe in every])
def test_a_step_that_is_not_read_has_the_code_of_a_model_without_a_monitor(kind, recipe):
    plain = sources(kind, recipe, monitored=False)
    assert len(plain) == 2
    assert sources(kind, recipe, monitored=True) == plain
