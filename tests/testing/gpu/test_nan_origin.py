"""Where the first NaN of a GPU's program comes from: kernel, line and tensor, or the product; planted cases."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.testing import run_gpu_program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
ALONE, TOGETHER = 1, 1 << 17
ODD = 100  # the element that a NaN comes of
FOUND = {  # the operands, and the element that is stored first
    "divided": ("0.0 and 0.0", ODD),
    "replaced": ("inf and inf", ODD),
    "summed": ("a row with -inf and inf", ODD - ODD % 16),
    "multiplied": ("an infinity in the left tile", ODD),
    "of_a_library": ("2.0", ODD),
    "in_a_loop": ("0.0 and 0.0", ODD),
    "as_codes": ("inf and 0.0", ODD),
}


@pytest.fixture
def planted():
    import nan_kernels

    return nan_kernels


def line_of(module, kernel):
    """Number and text of the planted line of a kernel."""
    text = Path(module.__file__).read_text()
    before, _, after = text.partition(f"def {kernel}(")
    number = before.count("\n") + after.partition("# planted")[0].count("\n") + 1
    return number, text.splitlines()[number - 1].strip()


@pytest.mark.parametrize("elements", [ALONE, TOGETHER])
@pytest.mark.parametrize("name", FOUND)
def test_the_line_that_makes_a_nan_is_found_and_changes_no_bit(planted, name, elements, assert_bits_equal):
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic
    from fp8compile.testing.gpu.program.interpreter import Interpreter
    from fp8compile.testing.gpu.program.nan_origin import NanSearch

    kernel = planted.KERNELS[name]
    x = torch.arange(planted.COUNT, dtype=torch.float32) / 32 + 1
    x[ODD] = torch.inf if name == "as_codes" else 0
    search, dtype = NanSearch("forward"), torch.uint8 if name == "as_codes" else torch.float32
    with Interpreter(Arithmetic(), elements, search).active():
        found = planted.launched(kernel, x, dtype)
    with Interpreter(Arithmetic(), elements).active():
        assert_bits_equal(found, planted.launched(kernel, x, dtype), name)
    operands, element = FOUND[name]
    number, text = line_of(planted, name)
    origin = search.origin
    assert origin.is_made
    assert (origin.name, origin.place, origin.line) == (name, f"nan_kernels.py:{number}", text)
    assert (origin.operands, origin.tensor) == (operands, f"stored to out_ptr, element {element}")


def test_without_a_nan_there_is_no_origin_and_no_second_run(planted, monkeypatch):
    from fp8compile.testing.gpu.program.nan_origin import NanSearch

    monkeypatch.setattr(NanSearch, "watching", None)
    x = torch.ones(planted.COUNT)
    assert run_gpu_program(lambda x: planted.launched(planted.divided, x), x).nan_origin is None


def test_memory_that_nobody_has_written_is_named(planted):
    run = run_gpu_program(lambda x: planted.launched(planted.unwritten, x) * 2, torch.ones(planted.COUNT))
    origin, (number, _) = run.nan_origin, line_of(planted, "unwritten")
    assert (origin.is_made, origin.name, origin.place) == (False, "unwritten", f"nan_kernels.py:{number}")
    assert origin.tensor == "from out_ptr, element 0, memory that nobody has written"
    assert "NaN: in the forward unwritten reads the first one, nan_kernels.py" in str(run)


def test_an_input_that_has_a_nan_is_named_unless_another_is_made():
    x = torch.tensor([1.0, torch.nan, 0.0])
    origin = run_gpu_program(lambda x: x + 1, x).nan_origin
    assert (origin.is_made, origin.tensor) == (False, "from in_ptr0, element 1, the graph's input arg0_1")
    origin = run_gpu_program(lambda x: x / x + 1, x).nan_origin
    assert (origin.is_made, origin.operands) == (True, "0.0 and 0.0")


def test_a_generated_kernel_of_the_backward():
    x = torch.tensor([1.0, 0.0, 4.0], requires_grad=True)
    run = run_gpu_program(lambda x: x.sqrt() * x.detach(), x)
    assert not run.outputs[0].isnan().any()
    origin = run.nan_origin
    assert (origin.graph, origin.is_made, origin.name.partition("__")[0]) == ("backward", True, "triton_poi")
    assert origin.tensor == "stored to out_ptr0, element 1"
    assert origin.line.startswith("tmp"), origin.line
    assert origin.operands == "-0.0 and 0.0", "Triton's 0 - x"


def test_a_constant_that_is_chosen_is_named_where_it_is_chosen():
    x = torch.tensor([1.0, -1.0])
    origin = run_gpu_program(lambda x: torch.where(x > 0, x, torch.nan) * 2, x).nan_origin
    assert origin.operands == "False and -1.0 and nan"
    assert "tl.where" in origin.line
    origin = run_gpu_program(lambda x: (torch.full_like(x, torch.nan), x + 1), x).nan_origin
    assert (origin.is_made, origin.operands, origin.tensor) == (True, "a constant", "stored to out_ptr0, element 0")


def test_a_product_that_makes_a_nan_of_an_infinity_is_named():
    x, weight = torch.zeros(16, 32), torch.ones(32, 16)
    weight[3, 5] = torch.inf
    origin = run_gpu_program(lambda x, weight: (x + 0) @ weight + 1, x, weight).nan_origin
    assert origin.is_made
    assert origin.name.startswith("product 0, mm: (16, 32) x (32, 16) -> (16, 16) float32")
    assert origin.operands == "an infinity in the right operand"


def test_a_product_that_reads_a_nan_names_the_input():
    x, weight = torch.ones(16, 32), torch.ones(32, 16)
    weight[3, 5] = torch.nan
    origin = run_gpu_program(torch.mm, x, weight).nan_origin
    assert (origin.is_made, origin.tensor) == (False, "from the right operand, the graph's input arg1_1")


def test_a_recipe_that_answers_an_infinity_with_nan():
    """The multiplier of an infinite amax is NaN: the kernel is named, and the line that chooses it."""
    torch.manual_seed(0)
    model = f8.convert(nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16(), f8.recipes.rowwise())
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    x[2, 7] = torch.inf
    origin = run_gpu_program(model, x).nan_origin
    assert origin.is_made
    assert origin.name.startswith("triton_per")
    assert "tl.where" in origin.line
    assert origin.operands.startswith("False and "), origin.operands
