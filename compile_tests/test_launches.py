"""Launches of our Triton kernels: what they write is declared, candidates have equal bits, Inductor prints them."""

from __future__ import annotations

import importlib.util
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.experts import experts_arguments, feed_forward
from fp8compile._compat import TORCH_VERSION
from fp8compile.ops.registry import OPS
from fp8compile.target import pretend_target
from fp8compile.testing import gpu_kernels, run_gpu_program
from fp8compile.testing.gpu.gpus import GPUS, pretend_gpu
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.lowering import take_code

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
]
RECIPES = [("rowwise", "h200"), ("blockwise", "h200"), ("mxfp8", "b200"), ("nvfp4", "b200")]
LAUNCHED = (
    "group_amax", "group_cast", "group_quantize", "group_cast_transpose", "group_quantize_rows", "group_outer_amaxes",
    "group_quantize_two_levels", "grouped_blockwise_mm", "quantize_weight", "cast_transpose", "quantize_columns",
    "quantize_two_levels", "outer_amaxes",
)  # fmt: skip
SMALL = 1024, 256, 128, 8


def block(recipe):
    return partial(feed_forward, recipe=f8.recipes.by_name(recipe))


# ---------------------------------------------------------------------------------- what a launch writes


def whole(tensor):
    """The bytes of a tensor's storage."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


def written(launch):
    """Names of the tensors that a launch changes, whatever they held before."""
    tensors = {name: whole(each) for name, each in launch.arguments.items() if isinstance(each, torch.Tensor)}
    changed = set()
    for byte in (0x55, 0xAA):
        for name in launch.writes:
            tensors[name].fill_(byte)
        before = {name: each.clone() for name, each in tensors.items()}
        launch.launch()
        changed |= {name for name, each in tensors.items() if not torch.equal(each, before[name])}
    return changed


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launch_writes_what_it_declares(name):
    from fp8compile.kernels.launch import Launch
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic
    from fp8compile.testing.gpu.program.interpreter import Interpreter
    from fp8compile.testing.samples import samples_of

    op, found, declared = OPS[f"fp8compile::{name}"], set(), set()
    samples = list(samples_of(op)())  # on the CPU

    def check(launch):
        changed = written(launch)
        assert changed <= set(launch.writes)
        found.update(changed)
        declared.update(launch.writes)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Launch, "launch", Launch.__call__, create=True))
        stack.enter_context(mock.patch.object(Launch, "__call__", check))
        stack.enter_context(Interpreter(Arithmetic()).active())
        stack.enter_context(pretend_target(GPUS["h200"].target))
        for args in samples:
            try:
                op.impl(*args)
            except ValueError as error:
                assert "on a GPU" in str(error)  # a quantizer without a kernel  # noqa: PT017
    assert found == declared
    assert declared


# ---------------------------------------------------------------------------------- candidates


def small_arguments():
    torch.manual_seed(0)
    shapes = (200, 128), (3, 128, 128), (3, 128, 64), (200, 1)
    x, gate_up, down, weights = ((torch.randn(shape) * 0.3).bfloat16().requires_grad_() for shape in shapes)
    return x, gate_up, down, weights, torch.tensor([70, 70, 180], dtype=torch.int32)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "arch"), RECIPES)
def test_every_candidate_has_the_bits_of_the_first(recipe, arch):
    run = run_gpu_program(block(recipe), *small_arguments(), arch=arch, configurations="all")
    assert not run.differences, str(run.differences)
    ours = [launch for graph in run.graphs for launch in graph.launches if not launch.name.startswith("triton_")]
    assert ours
    assert recipe == "nvfp4" or all(launch.configurations == 2 for launch in ours)


def test_a_fault_of_a_candidate_is_seen():
    """The second one takes the codes of a for e5m2."""
    from triton import Config

    from fp8compile.kernels import grouped_blockwise_mm as kernels

    def multiply(*args, plain=kernels.multiply_rows, **kwargs):
        launch = plain(*args, **kwargs)
        others = {name: each for name, each in launch.arguments.items() if name != "A_E4M3"}
        candidates = tuple(Config({"ROWS": 64, "STAGES": 2, "A_E4M3": right}, num_warps=4) for right in (True, False))
        return replace(launch, arguments=others, candidates=candidates)

    x, weight = torch.randn(48, 80).bfloat16(), torch.randn(2, 32, 80).bfloat16()
    ends, recipe = torch.tensor([20, 48], dtype=torch.int32), f8.recipes.blockwise()

    def product(x, weight):
        return f8.grouped_linear(x, weight, ends, recipe=recipe)

    with mock.patch.object(kernels, "multiply_rows", multiply):
        run = run_gpu_program(product, x, weight, configurations="all")
    found = [each.where for each in run.differences]
    assert found
    assert not any("configuration 0" in where for where in found), found


def test_the_first_candidate_is_taken_when_asked():
    from torch._inductor import config

    def configurations():
        with FakeTensorMode():
            (code, *_) = gpu_kernels(block("blockwise"), *experts_arguments(*SMALL))
        torch._dynamo.reset()
        return set(re.findall(r"'ROWS': (\d+)", code.kernel("rows_kernel_2")))

    assert configurations() == {"128", "64"}
    with config.patch({"triton.autotune_pointwise": False}):
        assert configurations() == {"128"}


# ---------------------------------------------------------------------------------- printed launches


@pytest.mark.parametrize(("recipe", "arch"), RECIPES)
def test_no_op_of_ours_is_called_in_a_step_of_experts(recipe, arch):
    with FakeTensorMode():
        codes = gpu_kernels(block(recipe), *experts_arguments(*SMALL), arch=arch)
    torch._dynamo.reset()
    for code in codes:
        called = {launch.name for launch in code.launches if launch.name.startswith("fp8compile.")}
        assert called <= {"fp8compile.grouped_nvfp4_mm.default"}, called  # PyTorch's GEMM
        assert code.no_cuda_graph is None
        assert not code.mutated_inputs


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="2.11 compiles kernels first, which takes a GPU")
def test_the_cpp_wrapper_prints_launches():
    from torch._inductor import compile_fx, config

    sources = []
    with FakeTensorMode():
        graph, *_ = gpu_graphs(block("blockwise"), experts_arguments(*SMALL), GPUS["h200"])
        in_cpp = partial(compile_fx.compile_fx_inner, cpp_wrapper=True)
        with (
            pretend_gpu(GPUS["h200"]),
            config.patch({"cpp_wrapper": True, "triton.autotune_at_compile_time": False}),
            mock.patch.object(compile_fx, "compile_fx_inner", in_cpp),
        ):
            take_code(graph, torch.device("cuda", 0), lambda lowering, source: sources.append(str(source)))
    torch._dynamo.reset()
    (source,) = sources
    assert "custom_op_wrapper" not in source
    assert "rows_kernel" in source
