"""What `mode="reduce-overhead"` asks of generated code, as far as a machine without a GPU can tell.

Inductor replays a graph as a CUDA graph unless something in it is on a CPU, can't be recorded, or writes to an
argument that moves. That the replay is right only a GPU shows: tests/package/test_gpu.py.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from eight_bits import EIGHT_BITS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from fp8compile.testing import gpu_kernels

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
]


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_every_recipe_can_be_a_cuda_graph(recipe):
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers = nn.Linear(128, 256, dtype=torch.bfloat16), nn.ReLU(), nn.Linear(256, 128, dtype=torch.bfloat16)
        model = f8.convert(nn.Sequential(*layers), f8.recipes.by_name(recipe))
        x = torch.empty(512, 128, dtype=torch.bfloat16, requires_grad=True)
        forward, backward = gpu_kernels(model, x, arch="b200" if recipe == "mxfp8" else "h200")
    assert forward.no_cuda_graph is backward.no_cuda_graph is None
    assert forward.mutated_inputs == ()
    # the state of two layers, a history and multipliers each: buffers, which stay where they are
    assert len(backward.mutated_inputs) == (4 if recipe == "delayed" else 0)
