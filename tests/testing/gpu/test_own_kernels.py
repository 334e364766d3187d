"""run_gpu_program on functions that launch Triton kernels of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fp8compile.testing import gpu_kernels, run_gpu_program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
N = 200  # no multiple of a block


@pytest.fixture
def own():
    import own_kernels

    return own_kernels


@pytest.fixture
def args():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(N, generator=generator) for _ in range(2))


@pytest.mark.parametrize(("name", "kernels"), [("launched", 3), ("by_operators", 3), ("product", 2)])
def test_kernels_of_ones_own_run_among_inductors(own, args, name, kernels, assert_bits_equal):
    run = run_gpu_program(getattr(own, name), *args)
    assert not run.differences, str(run.differences)
    assert sum(len(graph.launches) for graph in run.graphs) == kernels
    x, y = args
    if name == "product":
        expected = (x.view(10, -1).double() @ y.view(-1, 10).double()).relu().float()
        torch.testing.assert_close(run.outputs[0], expected)  # sums of 20 float32 products
        return
    expected = ((x * 2 + y) * y).relu() if name == "launched" else ((x + y) * 2 + y) + 1
    assert_bits_equal(run.outputs[0], expected, name)


def test_a_pointer_may_be_none(own, args, assert_bits_equal):
    run = run_gpu_program(own.without_bias, *args)
    assert not run.differences, str(run.differences)
    assert_bits_equal(run.outputs[0], args[0] + args[1], "output")


@pytest.mark.parametrize("name", ["launched", "by_operators", "without_bias"])
def test_gpu_kernels_has_kernels_of_ones_own(own, args, name):
    (code,) = gpu_kernels(getattr(own, name), *args)
    (ours,) = [each for each in code.kernels if not each.startswith("triton_")]
    assert ours.rpartition("_")[0] == ("biased_kernel" if name == "without_bias" else "add_kernel")
    assert ours in {launch.name for launch in code.launches if launch.kind == "triton"}
    assert ours in {each.name for each in code.resources()}


def test_autotuned_kernels_with_heuristics_run_in_every_configuration_and_in_the_backward(
    own, args, assert_bits_equal
):
    x, y = (each.bfloat16().requires_grad_() for each in args)
    run = run_gpu_program(own.differentiated, x, y, configurations="all", orders=("forwards", "shuffled"))
    assert not run.differences, str(run.differences)
    assert [launch.configurations for launch in run.graphs[0].launches if launch.name == "exp_kernel"] == [2]
    power = (x.detach().float() * 0.5).exp()
    assert_bits_equal(run.outputs[0], (power * y.detach().float()).bfloat16(), "output")


def test_a_kernel_takes_descriptors_that_the_host_makes(own, args, assert_bits_equal):
    run = run_gpu_program(own.described, *args, orders=("forwards", "shuffled"))
    assert not run.differences, str(run.differences)
    x, y = args
    assert_bits_equal(run.outputs[0], (x * y * 2 + 1).view(10, 20), "output")


def test_a_missing_mask_is_found_with_kernel_program_and_line(own, args):
    lines = Path(own.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "planted: no mask" in text)
    with pytest.raises(
        IndexError,
        match=rf"unmasked_kernel: program 3 would load 56 of 64 elements outside .* own_kernels.py:{line}\.",
    ):
        run_gpu_program(own.unmasked, *args)


def test_programs_that_need_an_order_are_a_race(own, args):
    with pytest.raises(
        RuntimeError, match="running_kernel: 3 addresses are written by one program and read by another"
    ):
        run_gpu_program(own.running, *args)


def test_an_operator_that_only_a_cpu_has_is_refused(own, args):
    with pytest.raises(NotImplementedError, match=r"fp8compile_tests\.of_a_cpu\.default, whose GPU kernel is unknown"):
        run_gpu_program(own.by_a_cpu, *args)
