"""FlopCounterMode counts a converted model as it counts the unconverted one."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fp8compile as f8

BIASES = {"with bias": True, "without bias": False}
SHAPES = {"2-D": (24,), "3-D": (4, 6), "4-D": (2, 3, 4)}
TOKENS, K, H, N = 24, 32, 48, 16


def mlp(*, bias=True):
    return nn.Sequential(nn.Linear(K, H, bias=bias), nn.ReLU(), nn.Linear(H, N, bias=bias)).to(torch.bfloat16)


def flops(model, x):
    """Of the forward, and of the backward."""
    with FlopCounterMode(display=False) as forward:
        y = model(x)
    with FlopCounterMode(display=False) as backward:
        y.float().sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("recipe", f8.recipes.names())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_a_converted_mlp_counts_as_before(recipe, shape, bias):
    model = mlp(bias=bias)
    x = torch.randn(*shape, K, dtype=torch.bfloat16, requires_grad=True)
    expected = flops(model, x)
    found = flops(f8.convert(copy.deepcopy(model), f8.recipes.by_name(recipe)), x)
    by_hand = 2 * TOKENS * (K * H + H * N)
    assert found == expected == (by_hand, 2 * by_hand)


def test_products_that_nobody_needs_are_not_counted():
    """A frozen first weight drops its grad_weight, an input without gradient its grad_input."""
    model = f8.convert(mlp(), f8.recipes.rowwise())
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16, requires_grad=True)
    model[0].weight.requires_grad = False
    first, second = 2 * TOKENS * K * H, 2 * TOKENS * H * N
    assert flops(model, x) == (first + second, first + 2 * second)
    assert flops(model, x.detach()) == (first + second, 2 * second)


def test_a_product_of_quantized_matrices_counts_as_a_matmul():
    rows = f8.CurrentScaling(block=(1, -1))
    a, b = (f8.quantize(torch.randn(m, K, dtype=torch.bfloat16), rows) for m in (TOKENS, N))
    with FlopCounterMode(display=False) as counter:
        f8.scaled_mm(a, b.t(), out_dtype=torch.bfloat16)
    assert counter.get_total_flops() == 2 * TOKENS * K * N


def test_each_op_is_counted_under_its_own_name():
    model = f8.convert(mlp(), f8.recipes.rowwise())
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).float().sum().backward()
    one = 2 * TOKENS * (K * H + H * N)
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    assert counts == {f"fp8compile.{name}": one for name in ("linear", "grad_input", "grad_weight")}


ORDERS = {
    "fp8compile first": "import fp8compile, torch.utils.flop_counter as counter",
    "the counter first": "import torch.utils.flop_counter as counter, fp8compile",
}


@pytest.mark.parametrize("imports", ORDERS.values(), ids=ORDERS)
def test_formulas_are_there_whichever_import_comes_first(imports):
    program = f"import torch; {imports}; print(*(op for op in counter.flop_registry if 'fp8compile' in str(op)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    layer = ("linear", "delayed_linear", "grad_input", "grad_weight")
    products = ("scaled_mm", "scaled_grouped_mm", "grouped_blockwise_mm", "grouped_mm", "nvfp4_mm", "grouped_nvfp4_mm")
    assert sorted(result.stdout.split()) == sorted(f"fp8compile.{name}" for name in (*layer, *products))


GROUPS = 4
GROUPED = {  # shapes, and multiplications of a group's rows, columns and contracted dim together
    "rows": ((TOKENS, K), (GROUPS, K, H), TOKENS * K * H),
    "columns": ((GROUPS, TOKENS, K), (K, H), TOKENS * K * H),
    "contracted": ((TOKENS, K), (K, H), TOKENS * K * H),
    "batch": ((GROUPS, TOKENS, K), (GROUPS, K, H), GROUPS * TOKENS * K * H),
}


@pytest.mark.parametrize(("a", "b", "products"), GROUPED.values(), ids=GROUPED)
def test_grouped_products_of_pytorch_are_not_free(a, b, products):
    """PyTorch's memory budget repeats in the backward what has no formula."""
    ends = None if len(a) == len(b) == 3 else torch.zeros(GROUPS, dtype=torch.int32, device="meta")
    operands = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in (a, b))
    with FlopCounterMode(display=False) as counter:
        torch.ops.aten._grouped_mm(*operands, ends)
    assert counter.get_total_flops() == 2 * products


def test_two_codes_of_four_bits_a_byte_are_two():
    from torch.utils.flop_counter import flop_registry

    codes = torch.empty(TOKENS, K // 2, dtype=torch.uint8, device="meta").view(torch.float4_e2m1fn_x2)
    other = torch.empty(H, K // 2, dtype=torch.uint8, device="meta").view(torch.float4_e2m1fn_x2).t()
    wide = torch.empty(TOKENS, K, dtype=torch.float8_e4m3fn, device="meta"), torch.empty(K, H, device="meta")
    names = ("_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
    for op in (getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)):
        assert flop_registry[op](codes, other, out_val=None) == 2 * TOKENS * K * H
        assert flop_registry[op](*wide, out_val=None) == 2 * TOKENS * K * H


def test_importing_fp8compile_does_not_import_the_counter():
    program = "import sys, fp8compile; print('torch.utils.flop_counter' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "False", result.stderr
