"""One kernel computes the gradients of gate and up and the activation, and makes the codes of all three."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu

import fp8compile as f8
from fp8compile.testing import eager_run, gpu_kernels, run_gpu_program
from fp8compile.testing.explain.launched_kernels import launched_kernels
from fp8compile.testing.gpu import graphs
from fp8compile.testing.gpu.cubin import assembled, kernel_resources
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.schedule import schedule

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),  # Triton 3.9, once a process
]
DIM, HIDDEN = 96, 160
COUNTED = ("amax", "saturation", "underflow")


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


def kernels_of_several(model, x, arch="h200", **how):
    """Names of the kernels that make codes of several matrices, and the backward's code."""
    *_, backward = gpu_kernels(model, x, arch=arch, **how)
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
    of_weights = [each for each in backward.launches if each.name == "fp8compile.quantize_columns.default"]
    assert [each.bytes_read for each in of_weights] == [2 * DIM * HIDDEN] * 3
    assert [each.bytes_written for each in of_weights] == [DIM * HIDDEN * 33 // 32] * 3
    assert not any("quantize_columns" in each.name for each in forward.launches)


# ---------------------------------------------------------------------------------- counts of a monitor


@pytest.mark.parametrize(
    ("recipe", "arch", "how"),
    [("blockwise", "h200", {}), ("mxfp8", "b200", {}), ("blockwise", "h200", {"bias": True})],
    ids=["blockwise", "mxfp8", "blockwise with a bias: nothing is fused"],
)
def test_a_reading_is_that_of_eager_mode(recipe, arch, how):
    (model, x), (eager, _) = (model_and_input(recipe, size=(130,), **how) for _ in range(2))
    monitor, expected = (f8.Monitor(each, COUNTED) for each in (model, eager))
    run = run_gpu_program(model, x, arch=arch, precision_casts=True)
    assert not run.differences, str(run.differences)
    eager_run(eager, x)
    found = monitor.read()
    assert found == expected.read()
    assert "weight_for_grad_input" in found["up"]


def test_a_reading_counts_where_the_codes_are_made():
    model, x = model_and_input("mxfp8", size=(128,))
    f8.Monitor(model, COUNTED)
    (name,), backward = kernels_of_several(model, x, arch="b200")
    assert "counts_ptr_2" in backward.kernel(name)
    elements = 128 * HIDDEN
    (launch,) = [each for each in backward.launches if each.name == name]
    assert launch.bytes_read == 3 * 2 * elements


# ---------------------------------------------------------------------------------- what may not be one kernel


def assert_gradients_of_eager_mode(model, x):
    """Compare with eager mode: a program has the bits of its graph also where a pass changed the graph's meaning."""
    run = run_gpu_program(model, x, precision_casts=True)
    assert not run.differences, str(run.differences)
    expected = eager_run(model, x).gradients
    assert run.gradients.keys() == expected.keys()
    assert all(torch.equal(run.gradients[name], expected[name]) for name in expected)


class TwoReaders(nn.Module):
    """Two layers that read one product, so that both get the same gradient, through pointwise code."""

    def __init__(self, recipes):
        super().__init__()
        self.layers = nn.ModuleList(
            f8.Linear(DIM, HIDDEN, bias=False, recipe=recipe, dtype=torch.bfloat16) for recipe in recipes
        )

    def forward(self, x):
        first, second = (layer(x) for layer in self.layers)
        return silu(first + second)


def test_layers_that_cast_one_gradient_by_two_recipes_get_codes_of_their_own():
    one = f8.recipes.blockwise()
    e5m2 = f8.CurrentScaling(block=(1, 128), format="e5m2")
    other = replace(one, grad_output=e5m2, grad_output_for_grad_weight=e5m2.transposed())
    x = torch.randn(48, DIM, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    found, _ = kernels_of_several(TwoReaders((one, other)), x)
    assert not found
    assert_gradients_of_eager_mode(TwoReaders((one, other)), x)


class Halves(nn.Module):
    """Two layers that read a half each of one activation."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 2 * HIDDEN, bias=False, dtype=torch.bfloat16)
        self.left, self.right = (nn.Linear(HIDDEN, DIM, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        left, right = silu(self.up(x)).chunk(2, -1)
        return self.left(left) * self.right(right)


def test_parts_of_a_matrix_get_codes_of_their_own():
    torch.manual_seed(0)
    model = f8.convert(Halves(), f8.recipes.blockwise(), filter="*")
    assert_gradients_of_eager_mode(model, torch.randn(48, DIM, dtype=torch.bfloat16).requires_grad_())


# ---------------------------------------------------------------------------------- in other compiled code

KEY = """
import sys
from torch._inductor.codecache import FxGraphCache, compiled_fx_graph_hash
from fp8compile.testing.gpu.gpus import gpu_called, pretend_gpu
from fp8compile.testing.gpu.graphs import gpu_graphs

sys.path.insert(0, sys.argv[1])
from test_quantize_several import model_and_input

model, x = model_and_input("blockwise")
gpu = gpu_called("h200")
backward = gpu_graphs(model, (x,), gpu)[-1]
assert "quantize_several" in backward.graph.code
with pretend_gpu(gpu):
    FxGraphCache._check_for_hop(backward.graph)  # raises if there is something that is not cached
    print(compiled_fx_graph_hash(backward.graph, backward.inputs, {}, [])[0])
"""


def test_fresh_processes_have_one_key_for_the_cache_of_graphs():
    def key():
        call = [sys.executable, "-c", KEY, str(Path(__file__).parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(call, check=True, capture_output=True, text=True, env=environment).stdout.split()[-1]

    assert key() == key()


def test_regions_have_the_kernel(monkeypatch):
    seen = []
    monkeypatch.setattr(graphs, "check_has_no_region", lambda graph: seen.extend(map(str, targets(graph))))
    monkeypatch.setattr(FeedForward, "forward", torch.compiler.nested_compile_region(FeedForward.forward))
    model, x = model_and_input("blockwise")
    graphs.gpu_graphs(nn.Sequential(model, model), (x,), GPUS["h200"])
    assert "fp8compile.quantize_several.default" in seen
    assert not any("noted" in each for each in seen)


def targets(graph):
    inside = (module for module in graph.modules() if isinstance(module, torch.fx.GraphModule))
    return [node.target for module in inside for node in module.graph.nodes if node.op == "call_function"]


# ---------------------------------------------------------------------------------- resources


@pytest.mark.parametrize(
    ("recipe", "arch", "how", "most"),
    [
        ("blockwise", "h100", {"is_gated": False}, 255),
        ("mxfp8", "b200", {}, 128),
    ],
    ids=str,
)
def test_no_register_is_spilled(recipe, arch, how, most):
    """SwiGLU in blockwise, at the sizes of a Llama, is a case of test_gpu_resources.py."""
    names, backward = kernels_of_several(*model_and_input(recipe, size=(256,), **how), arch=arch)
    (found,) = [each for each in kernel_resources(backward.source, GPUS[arch]) if each.name in names]
    assert found.spilled_bytes == 0
    assert found.registers <= most


def test_kernels_of_one_matrix_that_count_compile():
    """Triton refuses a function whose returns have two types, and its interpreter doesn't."""
    model, x = model_and_input("mxfp8", size=(128,))
    f8.Monitor(model, COUNTED)
    backward, gpu = graphs.gpu_graphs(model, (x,), GPUS["b200"])[-1], GPUS["b200"]
    found = [each for each in launched_kernels(schedule(backward, gpu), gpu) if each.name == "both_kernel"]
    assert len(found) == 2  # the gradient of y in both directions, weights along columns
    assert all("counts_ptr" in each.arguments for each in found)
    assert all(assembled(each, gpu).registers <= 128 for each in found)  # what a thread of 16 warps may have
