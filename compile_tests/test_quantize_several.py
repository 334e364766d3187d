"""One kernel computes the gradients of gate and up and the activation, and makes the codes of all three."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

import fp8compile as f8
from fp8compile.testing import gpu_kernels, run_gpu_program

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),  # Triton 3.9, once a process
]
DIM, HIDDEN = 96, 160


class FeedForward(nn.Module):
    """SwiGLU, or GELU between two layers; with ``bias`` the gradient's kernel also has to add up tokens."""

    def __init__(self, *, bias=False, is_gated=True, dtype=torch.bfloat16):
        super().__init__()
        self.gate = nn.Linear(DIM, HIDDEN, bias=bias, dtype=dtype) if is_gated else None
        self.up = nn.Linear(DIM, HIDDEN, bias=bias, dtype=dtype)
        self.down = nn.Linear(HIDDEN, DIM, bias=False, dtype=dtype)

    def forward(self, x):
        up = self.up(x)
        return self.down(gelu(up, approximate="tanh") if self.gate is None else silu(self.gate(x)) * up)


def model_and_input(recipe, *, size=(48,), dtype=torch.bfloat16, **how):
    torch.manual_seed(0)
    chosen = f8.recipes.by_name(recipe) if isinstance(recipe, str) else recipe
    model = f8.convert(FeedForward(dtype=dtype, **how), chosen, filter="*")
    return model, torch.randn(*size, DIM, dtype=dtype).requires_grad_()


def kernels_of_several(model, x, arch="h200"):
    _, backward = gpu_kernels(model, x, arch=arch)
    return [name for name in backward.kernels if "R_RULE_0" in backward.kernel(name)], backward


@pytest.mark.parametrize(
    ("recipe", "arch", "size", "how"),
    [
        ("blockwise", "h200", (48,), {}),
        ("blockwise", "h200", (3, 47), {}),
        ("mxfp8", "b200", (2, 48), {}),
        ("blockwise", "h200", (48,), {"bias": True}),
        ("mxfp8", "b200", (48,), {"is_gated": False}),
        ("blockwise", "h200", (48,), {"dtype": torch.float32}),
        ("blockwise", "h200", (48,), {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_bits_of_the_graph(recipe, arch, size, how):
    run = run_gpu_program(*model_and_input(recipe, size=size, **how), orders=("forwards", "shuffled"), arch=arch)
    assert not run.differences, str(run.differences)


def test_dynamic_tokens():
    model, x = model_and_input("blockwise")
    torch._dynamo.mark_dynamic(x, 0)
    run = run_gpu_program(model, x)
    assert not run.differences, str(run.differences)


@pytest.mark.parametrize(
    ("how", "matrices"),
    [({}, 3), ({"size": (2, 64)}, 3), ({"is_gated": False}, 2), ({"bias": True}, 0)],
    ids=["gated", "batches", "gelu", "bias: a sum reads the gradients too"],
)
def test_which_matrices_are_in_one_kernel(how, matrices):
    found, backward = kernels_of_several(*model_and_input("blockwise", **{"size": (128,), **how}))
    assert len(found) == bool(matrices)
    for name in found:
        text = backward.kernel(name)
        assert f"R_RULE_{matrices - 1}" in text
        assert f"R_RULE_{matrices}" not in text
        assert f"R_RULE_{matrices - 1} : tl.constexpr = None" in text, "the activation has codes along tokens alone"


def test_the_inputs_of_the_kernel_are_read_once_and_nothing_else_is_stored():
    model, x = model_and_input("blockwise", size=(128,))
    (name,), backward = kernels_of_several(model, x)
    (launch,) = [each for each in backward.launches if each.name == name]
    elements = 128 * HIDDEN
    scales = 4 * (2 * 128 * 2 + 3 * HIDDEN)  # two blocks along rows, one along tokens
    assert launch.bytes_read == 3 * 2 * elements
    assert launch.bytes_written == 5 * elements + scales


def test_a_weight_in_blocks_along_columns_is_read_once_in_the_backward():
    model, x = model_and_input("mxfp8", size=(128,))
    forward, backward = gpu_kernels(model, x, arch="b200")
    of_weights = [each for each in backward.launches if each.name == "fp8compile.quantize_several.default"]
    assert [each.bytes_read for each in of_weights] == [2 * DIM * HIDDEN] * 3
    assert [each.bytes_written for each in of_weights] == [DIM * HIDDEN * 33 // 32] * 3
    assert not any("quantize_several" in each.name for each in forward.launches)
