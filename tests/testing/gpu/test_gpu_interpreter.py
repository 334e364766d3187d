"""Triton's interpreter as run_gpu_program mends it: numbers as PyTorch has them, memory that is watched."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
SIZE = 1 << 12


def launch(name, *tensors, order="forwards", arithmetic=None, grid=(1,), **constants):
    """Launch a kernel of tests/helpers/interpreted_functions.py."""
    import interpreted_functions

    from fp8compile.testing.gpu.program.arithmetic import Arithmetic
    from fp8compile.testing.gpu.program.interpreter import Interpreter

    kernel = getattr(interpreted_functions, name)
    if not constants:
        constants = {"SIZE": tensors[0].numel()}
    interpreter = Interpreter(arithmetic or Arithmetic())
    with interpreter.active(order):
        kernel[grid](*tensors, **constants)
    return interpreter


def floats(dtype=torch.float32):
    """Values of every magnitude, subnormals, halves between float8 values, infinities, NaN."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(-(1 << 31), (1 << 31) - 1, (SIZE,), generator=generator).to(torch.int32).view(torch.float32)
    e4m3 = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (e4m3[1:] + e4m3[:-1]) / 2
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 448.0, 464.0, 2.0**-149, 3.0e-39])
    some[: len(halves)], some[-len(special) :] = halves, special
    return some.to(dtype)


def every_bfloat16():
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "target"),
    [
        (every_bfloat16(), torch.float32),  # Triton loses subnormals
        (every_bfloat16(), torch.float64),
        (floats(), torch.bfloat16),  # Triton truncates
        (floats(), torch.float16),
        (floats(), torch.float64),
        (floats(torch.float64), torch.float32),
        (torch.arange(-2048, 2048, dtype=torch.int32), torch.bfloat16),  # Triton stores the integer's bits
        (torch.arange(-128, 128, dtype=torch.int32).bfloat16(), torch.int32),
        (torch.arange(-128, 128, dtype=torch.int32).bfloat16(), torch.float16),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)).removeprefix("torch."),
)
def test_casts_are_pytorchs(x, target, assert_bits_equal):
    y = torch.empty(x.shape, dtype=target)
    launch("cast", x, y)
    assert_bits_equal(y, x.to(target), "cast")


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_casts_to_float8_saturate_and_round_as_pytorchs(name):
    """As cvt.rn.satfinite does; Triton's interpreter loses the carry of a rounding, and NaN."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    x = floats()
    largest = torch.finfo(dtype).max
    y = torch.empty(x.shape, dtype=torch.uint8)
    launch(f"cast_to_{name}", x, y)
    expected = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    assert torch.equal(y, torch.where(x.isnan(), 0x7F, expected))


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_a_maximum_drops_a_nan(name, assert_bits_equal):
    """As max.f32 does; Triton's interpreter keeps it."""
    a, b = torch.tensor([1.0, torch.nan, 2.0, torch.nan]), torch.tensor([2.0, 3.0, torch.nan, torch.nan])
    y = torch.empty(4)
    launch(name, a, b, y)
    assert_bits_equal(y, getattr(torch, f"f{name[:3]}")(a, b), name)


def multiplied_and_added(rounded):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(SIZE, generator=generator) for _ in range(2))
    return a, b, -(a * b) * (1 + rounded * torch.randn(SIZE, generator=generator))


def exactly(a, b, c):
    """a * b + c by numbers that hold every bit, rounded once."""
    from fractions import Fraction

    sums = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    nearest = [np.float32(float(total)) for total in sums]  # float() rounds once, float32 again where it matters not
    for at, total in enumerate(sums):
        near = [np.nextafter(nearest[at], np.float32(side)) for side in (-np.inf, np.inf)]
        nearest[at] = min((nearest[at], *near), key=lambda each: abs(Fraction(float(each)) - total))
    return torch.from_numpy(np.array(nearest, np.float32))


@pytest.mark.parametrize("spread", [1e-7, 1.0])
def test_a_fused_multiply_add_is_rounded_once(spread, assert_bits_equal):
    a, b, c = multiplied_and_added(spread)
    y = torch.empty(SIZE)
    launch("multiply_add", a, b, c, y)
    assert_bits_equal(y, exactly(a, b, c), "fma")
    assert not torch.equal(y, a * b + c), "else nothing was shown"


def test_contraction_is_a_choice(assert_bits_equal):
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic

    a, b, c = multiplied_and_added(1e-7)
    y = torch.empty(SIZE)
    assert launch("multiply_then_add", a, b, c, y).multiply_adds == 0
    assert_bits_equal(y, a * b + c, "product and sum")
    assert launch("multiply_then_add", a, b, c, y, arithmetic=Arithmetic(contract=True)).multiply_adds == SIZE
    assert_bits_equal(y, exactly(a, b, c), "contracted")


@pytest.mark.parametrize(("name", "expected"), [("divide", torch.div), ("exp", torch.exp), ("rsqrt", torch.rsqrt)])
def test_approximation_is_a_choice_and_two_units_off_at_most(name, expected, assert_bits_equal):
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic

    args = multiplied_and_added(1.0)[: 2 if name == "divide" else 1]
    args = [arg.abs() + 0.01 for arg in args]
    y, exact = torch.empty(SIZE), expected(*args)
    launch(name, *args, y)
    assert_bits_equal(y, exact, name)
    launch(name, *args, y, arithmetic=Arithmetic(approximate=True))
    apart = (y.view(torch.int32) - exact.view(torch.int32)).abs()
    assert 0 < apart.max() <= 2 + 2 * (name == "exp")  # exp's product by log2(e) is rounded, too


def test_a_shift_leaves_its_operands(assert_bits_equal):
    x, by = torch.tensor([-8, 7, -1, 1 << 30], dtype=torch.int32), torch.tensor([1, 1, 5, 3], dtype=torch.int32)
    y, again = torch.empty_like(x), torch.empty_like(x)
    launch("shift", x, by, y, again)
    assert_bits_equal(y, x >> by, "shifted")
    assert_bits_equal(again, x, "operand")


def test_sums_are_rounded_once(assert_bits_equal):
    x, y = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0)) * 1e3, torch.empty(8)
    launch("row_sums", x, y, ROWS=8, SIZE=1024)
    assert_bits_equal(y, x.double().sum(1).float(), "sums")


def test_a_reduction_by_any_function_keeps_its_nan(assert_bits_equal):
    x, y = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), torch.empty(8)
    x[3, 17] = torch.nan
    launch("row_maxima", x, y, ROWS=8, SIZE=64)
    assert_bits_equal(y, x.amax(1), "maxima")


def test_functions_that_a_module_imported_by_name_or_from_a_copy_of_libdevice(assert_bits_equal):
    x, y = torch.arange(1, 17, dtype=torch.int32), torch.empty(16)
    launch("by_names", x, y)
    assert_bits_equal(y, x.float().rsqrt(), "rsqrt")


def test_an_unknown_function_raises():
    with pytest.raises(NotImplementedError, match=r"libdevice\.j0, which the simulation does not support"):
        launch("bessel", torch.ones(4), torch.empty(4))


def test_programs_that_wait_for_one_another_raise():
    with pytest.raises(NotImplementedError, match="calls x_grid_barrier, so its programs wait for each other"):
        launch("waits", torch.zeros(1, dtype=torch.int32), grid=(2,), PROGRAMS=2)


def test_unknown_inline_assembly_raises():
    with pytest.raises(NotImplementedError, match="is not supported: "):
        launch("assembly", torch.ones(4), torch.empty(4))


def test_arithmetic_in_bfloat16_raises():
    x = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="arithmetic in bfloat16"):
        launch("multiply_then_add", x, x, x, torch.empty(4, dtype=torch.bfloat16))


def test_kernels_stay_compilable():
    """What was interpreted is no other function after it: one process interprets and compiles."""
    import interpreted_functions
    import triton

    launch("exp", torch.ones(4), torch.empty(4))
    assert type(interpreted_functions.exp) is triton.runtime.jit.JITFunction
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        interpreted_functions.exp(1, 2, 3)


# ---------------------------------------------------------------------------------- memory


def test_a_copy_in_blocks_is_allowed():
    x, y = torch.randn(100), torch.empty(100)
    launch("copy", x, y, 100, FIRST=0, STEP=32, BLOCK=32, grid=(4,))
    assert torch.equal(x, y)


def test_an_access_outside_of_a_tensor_raises():
    with pytest.raises(IndexError, match=r"copy_without_mask: program 3 would load 28 of 32 elements outside"):
        launch("copy_without_mask", torch.randn(100), torch.empty(128), BLOCK=32, grid=(4,))


def test_an_access_between_two_views_of_one_memory_raises():
    memory = torch.zeros(128)
    with pytest.raises(IndexError, match="would load 4 of 32 elements outside"):
        launch("copy_without_mask", memory[:28], memory[64:96], BLOCK=32)


def test_a_mask_with_a_scalar_part_says_which_elements_are_accessed():
    x, y = torch.randn(32), torch.zeros(32)
    launch("copy_of_the_first_program", x, y, 64, BLOCK=32, grid=(2,))
    assert torch.equal(x, y)
    with pytest.raises(IndexError, match="program 0 would load 4 of 30 elements outside"):
        launch("copy_of_the_first_program", x[:26], y, 30, BLOCK=32, grid=(2,))


@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_programs_that_overlap_are_a_race_in_every_order(order):
    with pytest.raises(
        RuntimeError, match=r"copy: 48 addresses are written by two programs, the first at y_ptr \+ 64"
    ):
        launch("copy", torch.randn(64), torch.empty(64), 64, FIRST=0, STEP=16, BLOCK=32, grid=(4,), order=order)


def test_a_neighbours_element_that_is_read_is_a_race():
    with pytest.raises(RuntimeError, match="3 addresses are written by one program and read by another"):
        launch("shift_in_place", torch.randn(64), 64, BLOCK=16, grid=(4,))


def test_atomics_of_several_programs_are_no_race():
    x, y = torch.arange(64.0), torch.zeros(1)
    launch("add_up", x, y, BLOCK=16, grid=(4,))
    assert y.item() == x.sum().item()


@pytest.mark.parametrize(("reader", "raced"), [(0, 1), (1, 2), (2, 2)])
def test_what_atomics_of_several_programs_change_nobody_may_read(reader, raced):
    """Programs 0, 1 and 0 change address 16, program 0 alone address 24, and the reader reads 8 to 24."""
    import numpy as np

    from fp8compile.testing.gpu.program.memory import Access

    access = Access("kernel", {"x": (8, 40)})
    for programs, address in (((0,), 16), ((1,), 16), ((0,), 16), ((0,), 24)):
        access.programs = np.array(programs)
        access.record("atomic", np.array([[address]], np.uint64), np.ones((1, 1), bool), 8, "a.py:1")
    access.programs = np.array([reader])
    access.record("load", np.array([[8, 16, 24]], np.uint64), np.ones((1, 3), bool), 8, "a.py:2")
    with pytest.raises(RuntimeError, match=f"{raced} addresses are changed by an atomic of one program and read by"):
        access.assert_no_race()


@pytest.mark.parametrize(("order", "last"), [("forwards", 7), ("backwards", 0), ("shuffled", 6)])
def test_programs_run_in_the_order_that_is_asked_for(order, last):
    y = torch.zeros(1, dtype=torch.int32)
    launch("last_writes", y, grid=(8,), order=order, PROGRAMS=8)
    assert y.item() == last


# ---------------------------------------------------------------------------------- the compiler afterwards


def test_the_compiler_that_is_imported_first_while_kernels_are_interpreted_compiles_as_ever(monkeypatch):
    import triton

    from fp8compile.testing.gpu.program import interpreter
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic

    name = "triton.compiler.code_generator"
    monkeypatch.setattr(triton.compiler, "code_generator", None, raising=False)  # both are put back after the test
    monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("interpreter_imported_anew", interpreter.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    with anew.Interpreter(Arithmetic()).active():
        namespace = importlib.import_module(name).CodeGenerator.builtin_namespace
    found = {each: function for each, function in namespace.items() if function.__module__.startswith("triton")}
    assert {"min", "max", "print"} <= found.keys()
    assert all(function is getattr(triton.language.core, function.__name__) for function in found.values())
