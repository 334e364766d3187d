"""The grouped GEMM of Triton, in Triton's interpreter, against float64 products of the exact codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from token_groups import GROUPS

import fp8compile as f8
from fp8compile.ops import group_amax, group_cast, group_quantize, grouped_blockwise_mm

pytest.importorskip("triton", reason="needs Triton: it is its interpreter")

from pretended_gpu import on_a_gpu

from fp8compile.testing import run_gpu_program

LINE, TILE, PILLAR = (1, 128), (128, 128), (128, 1)
ROW, COLUMN, WHOLE = (1, -1), (-1, 1), (-1, -1)
ROUNDING = 2.0**-24  # of float32
SIZES = [(256, 130), (200, 260)]  # of the sum, of columns: of whole blocks, and not
with_rows = [groups for groups in GROUPS if sum(groups.sizes) + groups.tail]


def integers(*shape):
    """Numbers that pow2 scales and float32 sums keep exact."""
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def rounded(expected):
    """In float32; a sum begins with 0 and is never -0."""
    return expected.float() + 0.0


def exact(x, quantizer):
    """What the GEMM multiplies, in float64."""
    found = f8.quantize(x, quantizer)
    return quantizer.dequantize(found.codes, found.scale, torch.float64)


def products_of_rows(groups, x, weight, of_x, of_weight, *, turned=False):
    """The kernel's product, and the products of each group in float64.

    Args:
        groups: Where rows belong.
        x: (R, K).
        weight: (E, N, K), or turned (E, K, N).
        of_x: Quantizer of x.
        of_weight: Of each matrix, as ``weight`` has it.
        turned: Whether the op is given transposes of the matrices, as grad_input has them.
    """
    a, matrices = f8.quantize(x, of_x), [f8.quantize(each, of_weight) for each in weight]
    b, scale = torch.stack([each.codes for each in matrices]), torch.stack([each.scale for each in matrices])
    if turned:
        b, scale = b.transpose(1, 2).contiguous(), scale.transpose(1, 2)
    kind = of_x.format, of_weight.format, torch.float32, of_x.block[1]
    with on_a_gpu():
        y = grouped_blockwise_mm(a.codes, b, a.scale, scale, groups.offsets(), *kind)
    expected, sums = torch.zeros(y.shape, dtype=torch.float64), torch.zeros(y.shape, dtype=torch.float64)
    for rows, matrix in zip(groups.rows(), weight, strict=True):
        left, right = exact(x[rows], of_x), exact(matrix, of_weight)
        right = right if turned else right.t()
        expected[rows], sums[rows] = left @ right, left.abs() @ right.abs()
    return y, expected, sums


def along_tokens(x, offsets, quantizer):
    """Transposed codes of each group, and their scales."""
    if quantizer.block == PILLAR:
        return group_quantize(x, offsets, quantizer)
    multiplier = quantizer.multiplier(group_amax(x, offsets, quantizer))
    return group_cast(x, offsets, multiplier, quantizer), 1 / multiplier


def products_over_tokens(groups, grad, x, of_grad, of_x):
    """The kernel's product, and the products of each group in float64."""
    a, a_scale = along_tokens(grad, groups.offsets(), of_grad)
    b, b_scale = along_tokens(x, groups.offsets(), of_x)
    kind = of_grad.format, of_x.format, torch.float32, of_x.block[0]
    with on_a_gpu("backwards"):
        d = grouped_blockwise_mm(a, b, a_scale, b_scale, groups.offsets(), *kind)
    pairs = [(exact(grad[rows], of_grad).t(), exact(x[rows], of_x)) for rows in groups.rows()]
    expected = torch.stack([left @ right for left, right in pairs])
    return d, expected, torch.stack([left.abs() @ right.abs() for left, right in pairs])


def assert_within_bound(found, expected, sums, length):
    """Products of codes are exact in float32: 128 at most are added, scaled by two roundings, added to the rest."""
    roundings = 128 + 2 + -(-length // 128)
    assert torch.equal(found.isnan(), expected.isnan())
    error = (found.double() - expected).abs().nan_to_num(0)
    assert (error <= roundings * ROUNDING * sums.nan_to_num(0)).all()


@pytest.mark.parametrize("groups", with_rows, ids=str)
@pytest.mark.parametrize(("k", "n"), SIZES, ids=str)
def test_exact_products_are_exact(groups, k, n, assert_bits_equal):
    line, tile, pillar = (f8.CurrentScaling(block=block, scale="pow2") for block in (LINE, TILE, PILLAR))
    x, grad = (integers(sum(groups.sizes) + groups.tail, size) for size in (k, n))
    for each in (x, grad):
        each[sum(groups.sizes) :] = torch.nan
    weight = integers(len(groups.sizes), n, k)
    for of_weight in (tile, line):
        found, expected, _ = products_of_rows(groups, x, weight, line, of_weight)
        assert_bits_equal(found, rounded(expected), f"rows, {of_weight.block}")
    found, expected, _ = products_of_rows(groups, grad, weight, line, tile, turned=True)
    assert_bits_equal(found, rounded(expected), "rows, by transposed matrices")
    found, expected, _ = products_over_tokens(groups, grad, x, pillar, pillar)
    assert_bits_equal(found, rounded(expected), "tokens")


@pytest.mark.parametrize("groups", [GROUPS[1], GROUPS[2], GROUPS[5]], ids=str)
@pytest.mark.parametrize(("of_x", "of_weight"), [(ROW, ROW), (ROW, WHOLE)], ids=str)
def test_exact_products_with_one_scale_a_sum_are_exact(groups, of_x, of_weight, assert_bits_equal):
    row, other = (f8.CurrentScaling(block=block, scale="pow2") for block in (of_x, of_weight))
    column, whole = (f8.CurrentScaling(block=block, scale="pow2") for block in (COLUMN, WHOLE))
    x, grad = (integers(sum(groups.sizes) + groups.tail, size) for size in (200, 136))
    for each in (x, grad):
        each[sum(groups.sizes) :] = torch.nan
    found, expected, _ = products_of_rows(groups, x, integers(len(groups.sizes), 136, 200), row, other)
    assert_bits_equal(found, rounded(expected), "rows")
    for of_grad, of_tokens in ((column, column), (replace(whole, format="e5m2"), whole)):
        found, expected, _ = products_over_tokens(groups, grad, x, of_grad, of_tokens)
        assert_bits_equal(found, rounded(expected), f"tokens, {of_tokens.block}")


@pytest.mark.parametrize("groups", [GROUPS[1], GROUPS[6]], ids=str)
def test_other_products_are_within_the_roundings_of_float32(groups):
    k, n = 384, 150
    x, grad = (groups.tokens(size, torch.bfloat16) for size in (k, n))
    weight = torch.randn(len(groups.sizes), n, k)
    line, wide = f8.CurrentScaling(block=LINE), f8.CurrentScaling(block=LINE, format="e5m2")
    tile, pillar = f8.CurrentScaling(block=TILE), f8.CurrentScaling(block=PILLAR)
    assert_within_bound(*products_of_rows(groups, x, weight, line, tile), k)
    assert_within_bound(*products_of_rows(groups, grad, weight, wide, tile, turned=True), n)
    tokens = max(groups.sizes)
    assert_within_bound(*products_over_tokens(groups, grad, x, replace(pillar, format="e5m2"), pillar), tokens)


def test_a_product_is_rounded_once_to_bfloat16(assert_bits_equal):
    groups, line = GROUPS[0], f8.CurrentScaling(block=LINE)
    a = f8.quantize(groups.tokens(256, torch.bfloat16), line)
    weight = [f8.quantize(each, f8.CurrentScaling(block=TILE)) for each in torch.randn(3, 128, 256)]
    b, scale = (torch.stack([getattr(each, part) for each in weight]) for part in ("codes", "scale"))
    operands = a.codes, b, a.scale, scale, groups.offsets(), "e4m3", "e4m3"
    with on_a_gpu():
        wide, narrow = (grouped_blockwise_mm(*operands, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert_bits_equal(narrow, wide.bfloat16())


@pytest.mark.parametrize(
    ("groups", "arch", "recipe"),
    [
        (GROUPS[1], "h200", f8.recipes.blockwise()),
        (GROUPS[2], "rtx5090", f8.recipes.blockwise()),
        (GROUPS[1], "rtx4090", f8.recipes.tensorwise()),
        (GROUPS[2], "b300", f8.recipes.rowwise()),
    ],
    ids=["h200", "rtx5090", "rtx4090", "b300"],
)
def test_a_program_of_a_layer_multiplies_by_it(groups, arch, recipe):
    x = groups.tokens(64, torch.bfloat16).requires_grad_()
    weight = torch.randn(len(groups.sizes), 48, 64, dtype=torch.bfloat16).requires_grad_()

    def layer(x, weight, offsets):
        return f8.grouped_linear(x, weight, offsets, recipe=recipe)

    run = run_gpu_program(layer, x, weight, groups.offsets(), arch=arch)
    assert not run.differences, str(run.differences)
    assert [product.name for graph in run.graphs for product in graph.products] == ["grouped_blockwise_mm"] * 3


def test_codes_that_it_would_copy_are_refused():
    codes, weight = torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(2, 32, 16, dtype=torch.uint8)
    scales, offsets = (torch.ones(8, 1), torch.ones(2, 16, 1)), torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"b has shape \(2, 16, 32\) and strides \(512, 1, 16\).*Pass b.contiguous"):
        grouped_blockwise_mm(codes, weight.transpose(1, 2), *scales, offsets, "e4m3", "e4m3", torch.float32, -1)
