"""Faults planted in kernels of users: each is found, with the kernel and its line where a line shows it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from fp8compile.testing import run_gpu_program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
FOUND = {
    "without_mask": (IndexError, "program 3 would load 16 of 64 elements outside"),
    "mask_one_too_far": (IndexError, "program 3 would store 1 of 49 elements outside"),
    "stride_of_padded_rows": (IndexError, "program . would load .* elements outside"),
    "strides_exchanged": (RuntimeError, "addresses are written by two programs"),
    "without_barrier": (RuntimeError, "3 addresses are written by one program and read by another"),
    "overlapping": (RuntimeError, "12 addresses are written by two programs"),
    "adds_without_atomic": (RuntimeError, "1 addresses are written by two programs"),
    "tile_off_its_alignment": (ValueError, "must begin at an address that is a multiple of 16 bytes"),
    "tiles_beyond_memory": (IndexError, "program 1 would load 8 of 24 elements outside"),
}


@pytest.fixture
def faulty():
    import faulty_kernels

    return faulty_kernels


@pytest.fixture
def x():
    return torch.randn(240, generator=torch.Generator().manual_seed(0))  # 10 x 24, and no multiple of 64


def line_of(module, kernel):
    """The planted line of a kernel."""
    text = Path(module.__file__).read_text()
    before, _, after = text.partition(f"def {kernel}(")
    planted = after.partition("# planted")[0]
    return before.count("\n") + planted.count("\n") + 1


@pytest.mark.parametrize("name", FOUND)
def test_what_a_kernel_must_not_do_is_found_with_kernel_and_line(faulty, x, name):
    error, words = FOUND[name]
    with pytest.raises(error) as caught:
        run_gpu_program(faulty.FUNCTIONS[name], x)
    said = " ".join(str(caught.value).split())
    assert re.search(words, said), said
    assert said.startswith(f"{name}: "), said
    assert f"faulty_kernels.py:{line_of(faulty, name)}" in said, said


def test_a_configuration_that_the_grid_is_not_for_is_found(faulty, x):
    """Half of the elements stay unwritten in the second configuration, which autotuning may take."""
    run = run_gpu_program(faulty.FUNCTIONS["tuned_for_another_size"], x, configurations="all")
    (difference,) = run.differences
    assert "configuration 1" in difference.where
    assert difference.element == (128,), "4 programs of 32"
    assert difference.got != difference.got, "NaN, which fills what nobody wrote"
    assert not run_gpu_program(faulty.FUNCTIONS["tuned_for_another_size"], x).differences


def test_a_sum_whose_order_is_that_of_the_programs_is_found(faulty):
    x = torch.zeros(240)
    x[::64] = torch.tensor([2.0**24, 1, 1, -(2.0**24)])  # 0 if the first is added first, and 2 if it is added last
    run = run_gpu_program(faulty.FUNCTIONS["adds_by_atomics"], x, orders=("forwards", "backwards"))
    (difference,) = run.differences
    assert difference.where == "forward (programs backwards, the largest blocks), output 0"
    assert not run_gpu_program(faulty.FUNCTIONS["adds_by_atomics"], torch.ones(240), orders=("backwards",)).differences


def test_a_sum_in_float16_is_found_beside_the_formula(faulty, x):
    """A kernel is its own reference, so that only a formula shows what it adds in; the bound is that of float32."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*shape, generator=generator).half().float() for shape in ((16, 256), (256, 16)))
    run = run_gpu_program(faulty.summed, x, a, b)
    assert not run.differences, str(run.differences)
    error = (run.outputs[0].double() - a.double() @ b.double()).abs()
    bound = 256 * 2**-24 * (a.double().abs() @ b.double().abs())
    assert (error > bound).float().mean() > 0.5
