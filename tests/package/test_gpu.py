"""What a GPU computes: the codes, scales and golden vectors of the CPU, bit for bit, and products within their bound.

Each test runs its body on the CPU too, on fewer shapes: a test that can run only where there is a GPU is wrong for
long before anyone sees it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from eight_bits import EIGHT_BITS
from golden_cases import BLOCKS, CASES
from token_groups import GROUPS

import fp8compile as f8
from fp8compile.ops import (
    cast_transpose,
    group_amax,
    group_cast,
    group_cast_transpose,
    group_quantize,
    group_quantize_rows,
)
from fp8compile.ops.cast_transpose import two_casts
from fp8compile.ops.groups.group_quantize_two_levels import quantize_groups_in_two_levels
from fp8compile.quantizers import GEMMS
from fp8compile.testing.explain.recipe_support import recipe_support

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZERS = tuple(
    f8.CurrentScaling(format=format, block=block, scale=scale, eps=eps)
    for format, block, scale, eps in [
        ("e4m3", (-1, -1), "fp32", 0.0),
        ("e5m2", (-1, -1), "pow2", 1e-12),
        ("e4m3", (1, -1), "fp32", 0.0),
        ("e5m2", (1, -1), "fp32", 1e-6),
        ("e4m3", (-1, 1), "pow2", 0.0),
        ("e4m3", (1, 128), "fp32", 0.0),
        ("e4m3", (128, 128), "pow2", 0.0),
        ("e4m3", (1, 32), "e8m0_rceil", 0.0),
        ("e5m2", (1, 32), "e8m0_floor", 0.0),
    ]
)
# A Triton kernel each on a GPU, where Triton has miscompiled some (ao#4652, triton#11111); here,
# minutes of C++ compiler.
TRANSPOSED_SHAPES = {
    "cpu": ((48, 64), (33, 65)),
    "cuda": tuple((m, k) for m in (1, 16, 33, 128, 500, 4096) for k in (16, 24, 65, 256, 1000, 4096)),
}
LAYER_SHAPES = [
    (0, 32, 16), (1, 32, 16), (2, 16, 16), (5, 24, 40), (17, 100, 36), (64, 129, 257), (256, 512, 128), (256, 896, 640)
]  # fmt: skip


def edges(dtype, device):
    """Rows and columns with everything that a scale rule treats on its own."""
    info = torch.finfo(dtype)
    x = torch.randn(160, 144)
    x[3] = 0
    x[4] = -0.0
    x[5] = info.tiny / 4  # subnormal
    x[6] *= info.tiny
    x[7, 11] = info.max
    x[8, 12] = torch.inf
    x[9, 13] = torch.nan
    x[10, 14] = -torch.inf
    x[:, 30] = 0
    x[:, 31] *= 1e-6
    return x.to(dtype).to(device)


def quantized(x, quantizer):
    out = f8.quantize(x, quantizer)
    return out.codes, out.scale


def quantized_by_all(xs, quantizers):
    return [quantized(x, quantizer) for x, quantizer in zip(xs, quantizers, strict=True)]


def assert_quantized_equal(found, expected, what, assert_bits_equal):
    for name, actual, wanted in zip(("codes", "scale"), found, expected, strict=True):
        assert_bits_equal(actual.cpu(), wanted.cpu(), f"{name} of {what}")


# ---------------------------------------------------------------------------------- codes and scales


def runs():
    """(device, compiled, dtype); compiled on a CPU, bfloat16 only: test_numerics.py has the others."""
    for dtype in DTYPES:
        yield "cpu", False, dtype
        for compiled in (False, True):
            yield pytest.param("cuda", compiled, dtype, marks=pytest.mark.gpu)
    yield "cpu", True, torch.bfloat16


@pytest.mark.parametrize(("device", "compiled", "dtype"), runs(), ids=str)
def test_codes_and_scales_are_those_of_the_cpu(device, compiled, dtype, assert_bits_equal):
    cases = [(x, q) for q in QUANTIZERS for x in (edges(dtype, "cpu"), edges(dtype, "cpu")[20:, :33])]
    xs, quantizers = [x.to(device) for x, _ in cases], tuple(q for _, q in cases)
    run = torch.compile(quantized_by_all, fullgraph=True) if compiled else quantized_by_all
    for (x, quantizer), found in zip(cases, run(xs, quantizers), strict=True):
        assert_quantized_equal(found, quantized(x, quantizer), quantizer, assert_bits_equal)


@pytest.mark.parametrize("device", DEVICES)
def test_a_cast_fused_with_what_made_its_input_sees_rounded_values(device, assert_bits_equal):
    x, y = (torch.randn(96, 80, dtype=torch.bfloat16, device=device) for _ in range(2))

    def fused(x, y):  # a product of bfloat16 numbers is exact in float32, so there is one rounding, the last
        return [quantized(x * y, quantizer) for quantizer in QUANTIZERS[:5]]

    expected = fused(x.cpu(), y.cpu())
    for quantizer, found, wanted in zip(
        QUANTIZERS, torch.compile(fused, fullgraph=True)(x, y), expected, strict=False
    ):
        assert_quantized_equal(found, wanted, quantizer, assert_bits_equal)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("device", DEVICES)
def test_golden_vectors(device, kind, assert_bits_equal):
    cases = [case for case in CASES if case.kind == kind]
    assert cases
    for case in cases:
        found = quantized(case.x.to(device), case.quantizer)
        assert_quantized_equal(found, (case.codes, case.scale), case.name, assert_bits_equal)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BLOCKS)
def test_compiled_golden_vectors(kind, assert_bits_equal):
    """On a CPU: tests/quantizers/test_golden.py."""
    groups = defaultdict(list)
    for case in CASES:
        if case.kind == kind:
            groups[case.signature()].append(case)
    quantizers = tuple(quantizer for quantizer, _, _ in groups)
    compiled = torch.compile(quantized_by_all, fullgraph=True, dynamic=False)
    for turn in range(max(map(len, groups.values()))):
        cases = [group[turn % len(group)] for group in groups.values()]
        for case, found in zip(cases, compiled([case.x.cuda() for case in cases], quantizers), strict=True):
            assert_quantized_equal(found, (case.codes, case.scale), case.name, assert_bits_equal)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("device", DEVICES)
def test_transposed_codes_are_stored_right(device, format, assert_bits_equal):
    """Columnwise and rowwise codes of one tensor, stored as they are and transposed."""
    row, column = (f8.CurrentScaling(format=format, block=block) for block in ((1, -1), (-1, 1)))

    def both_ways(xs):
        codes = [tuple(f8.quantize(x.relu(), q).codes for q in (row, column)) for x in xs]
        return [(a, a.t().contiguous(), b, b.t().contiguous()) for a, b in codes]

    xs = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in TRANSPOSED_SHAPES[device]]
    for x, found in zip(xs, torch.compile(both_ways, fullgraph=True, dynamic=False)(xs), strict=True):
        by_row, by_column = (f8.quantize(x.cpu().relu(), q).codes for q in (row, column))
        expected = (by_row, by_row.t().contiguous(), by_column, by_column.t().contiguous())
        names = ("rowwise", "rowwise transposed", "columnwise", "columnwise transposed")
        for name, actual, wanted in zip(names, found, expected, strict=True):
            assert_bits_equal(actual.cpu(), wanted, f"{name} codes of {tuple(x.shape)}")


@pytest.mark.parametrize("n", [32, 128])
@pytest.mark.parametrize("device", DEVICES)
def test_codes_of_both_directions_are_those_of_two_casts(device, n, assert_bits_equal):
    """On a GPU one Triton kernel, whose transposed stores some versions of Triton miscompiled; its CPU twin."""
    scale = {32: "e8m0_rceil", 128: "fp32"}[n]
    for format in ("e4m3", "e5m2"):
        rows = f8.CurrentScaling(format=format, block=(1, n), scale=scale)
        columns = f8.CurrentScaling(format=format, block=(n, 1), scale=scale)
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 128)
        shapes = TRANSPOSED_SHAPES[device]
        for x in (every, edges(torch.float32, "cpu"), *(torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)):
            found, expected = cast_transpose(x.to(device), rows, columns), two_casts(x, rows, columns)
            for name, actual, wanted in zip(("codes", "scales") * 2, found, expected, strict=True):
                assert_bits_equal(actual.cpu().contiguous(), wanted.contiguous(), f"{name} of {tuple(x.shape)}")


def quantized_groups(x, offsets):
    """By each op over groups."""
    line, tall, column, whole = (f8.CurrentScaling(block=block) for block in ((1, -1), (1, 128), (-1, 1), (-1, -1)))
    pillar, small = f8.CurrentScaling(block=(128, 1)), f8.CurrentScaling(block=(32, 1), scale="e8m0_rceil")
    amax, of_whole = group_amax(x, offsets, column), group_amax(x, offsets, whole)
    yield from (amax, of_whole)
    for multiplied, quantizer in ((amax, column), (of_whole, whole)):
        yield group_cast(x, offsets, quantizer.multiplier(multiplied), quantizer)
    for quantizer in (pillar, small):
        yield from group_quantize(x, offsets, quantizer)
    yield from group_cast_transpose(x, offsets, tall, pillar)
    yield from group_quantize_rows(x, offsets, line, column)
    recipe = f8.recipes.nvfp4()
    pair = recipe.grad_output, recipe.grad_output_for_grad_weight
    yield from quantize_groups_in_two_levels(x, offsets, *pair, "both")


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_codes_of_groups_are_those_of_a_cpu(device, groups, assert_bits_equal):
    for dtype, columns in zip(DTYPES, (64, 150, 2100), strict=True):
        x, offsets = groups.tokens(columns, dtype), groups.offsets()
        found, expected = quantized_groups(x.to(device), offsets.to(device)), quantized_groups(x, offsets)
        for number, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_bits_equal(actual.cpu(), wanted, f"result {number} of {groups}, {dtype}")


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_that_compute_their_input_give_the_bits_of_those_that_read_it(device, assert_bits_equal):
    """Compiled for a GPU, what comes before the casts is a part of their kernels; nothing in it is rounded."""
    line, tall, pillar, column = (f8.CurrentScaling(block=block) for block in ((1, -1), (1, 128), (128, 1), (-1, 1)))

    def cast(x, other, offsets):
        doubled, larger = x.abs() * 2, torch.where(x > other, x, other)
        both = group_cast_transpose(doubled, offsets, tall, pillar)
        return *both, *group_quantize_rows(larger, offsets, line, column), larger + 0

    x, offsets = GROUPS[0].tokens(256, torch.bfloat16).to(device), GROUPS[0].offsets().to(device)
    arguments = x, x.roll(1, 1), offsets
    found = torch.compile(cast, fullgraph=True)(*arguments)
    for number, (actual, wanted) in enumerate(zip(found, cast(*arguments), strict=True)):
        assert_bits_equal(actual, wanted, f"result {number}")


# ---------------------------------------------------------------------------------- products


def exact(x, quantizer):
    """What the GEMM multiplies, in float64 (the product of a code and a scale is exact there)."""
    if quantizer is None:
        return x.cpu().double()
    if isinstance(quantizer, f8.DelayedScaling):  # before the first step
        scale = torch.ones(1, 1)
        codes = quantizer.cast(x.cpu(), scale)
    else:
        codes, scale = quantized(x.cpu(), quantizer)
    return quantizer.dequantize(codes, scale, torch.float64)


def assert_within_bound(actual, a, b, what):
    """|y - exact| <= one rounding to y's dtype, and what the sum of k products may lose (golden/README.md, section 9).

    A CPU adds in float32. A Hopper tensor core keeps 14 bits of the largest addend and adds 32 products a step
    (DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2): at most a truncation of 2**-13 for each step.
    """
    k = a.shape[1]
    lost = -(-k // 32) * 2.0**-13 if actual.is_cuda else (k + 2) * 2.0**-23
    y, sums = a @ b, a.abs() @ b.abs()
    allowed = torch.finfo(actual.dtype).eps * y.abs() + lost * sums + torch.finfo(actual.dtype).tiny
    error = (actual.cpu().double() - y).abs()
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert actual.shape == y.shape
    assert worst <= 1, f"{what}: the error is {worst:.2f} times what it may be"


def check_layer(name, device, dtype, shape, *, compiled):
    m, k, n = shape
    recipe = f8.recipes.by_name(name)
    if any(support.kind == "none" for support in recipe_support(recipe, torch.device(device), dtype)):
        recipe = replace(recipe, emulate=True)  # MX before Blackwell
    model = f8.Linear(k, n, bias=False, recipe=recipe, device=device, dtype=dtype)
    x, grad = (torch.randn(m, size, dtype=dtype, device=device) for size in (k, n))
    y = (torch.compile(model, fullgraph=True, dynamic=False) if compiled else model)(x.requires_grad_())
    results = y.detach(), *torch.autograd.grad(y, (x, model.weight), grad)
    tensors = {"input": x, "weight": model.weight, "grad_output": grad}
    operands = [("input", "weight"), ("grad_output", "weight"), ("grad_output", "input")]
    for result, gemm, (left, right) in zip(results, GEMMS, operands, strict=True):
        quantizers = recipe.quantizers(gemm) or (None, None)
        a, b = (exact(tensors[t].detach(), q) for t, q in zip((left, right), quantizers, strict=True))
        a, b = a.t() if gemm.a_transposed else a, b.t() if gemm.b_transposed else b
        assert result.dtype == dtype
        assert_within_bound(result, a, b, f"{gemm.name} {shape} of {name}, {dtype}")


@pytest.mark.parametrize("shape", LAYER_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", EIGHT_BITS)
@pytest.mark.parametrize("device", DEVICES)
def test_layers_multiply_within_the_bound(device, recipe, dtype, shape):
    check_layer(recipe, device, dtype, shape, compiled=False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LAYER_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_compiled_layers_multiply_within_the_bound(recipe, dtype, shape):
    """On a CPU: tests/ops/test_shapes.py."""
    check_layer(recipe, "cuda", dtype, shape, compiled=True)


@pytest.mark.parametrize("groups", [GROUPS[0], GROUPS[1], GROUPS[2]], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_blockwise_products_of_groups_are_within_the_bound(device, groups):
    k, n, recipe = 200, 144, f8.recipes.blockwise()
    x, grad = (torch.randn(sum(groups.sizes) + groups.tail, size).bfloat16().to(device) for size in (k, n))
    weight = torch.randn(len(groups.sizes), n, k).bfloat16().to(device)
    inputs = x.requires_grad_(), weight.requires_grad_()
    y = f8.grouped_linear(*inputs, groups.offsets().to(device), recipe=recipe)
    dx, dw = torch.autograd.grad(y, inputs, grad)
    for group, rows in enumerate(groups.rows()):
        a, b = exact(x[rows].detach(), recipe.input), exact(weight[group].detach(), recipe.weight)
        of_rows = exact(grad[rows], recipe.grad_output)
        of_tokens = exact(grad[rows], recipe.grad_output_for_grad_weight)
        along_tokens = exact(x[rows].detach(), recipe.input_for_grad_weight)
        assert_within_bound(y[rows], a, b.t(), f"y of group {group}")
        assert_within_bound(dx[rows], of_rows, b, f"dx of group {group}")
        assert_within_bound(dw[group], of_tokens.t(), along_tokens, f"dw of group {group}")
    assert not y[sum(groups.sizes) :].any()
    assert not dx[sum(groups.sizes) :].any()


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_one_percent_would_be_found(device):
    a, b = torch.randn(16, 64, dtype=torch.float64), torch.randn(64, 16, dtype=torch.float64)
    good = (a @ b).to(torch.bfloat16).to(device)
    assert_within_bound(good, a, b, "a rounded product")
    with pytest.raises(AssertionError, match="times what it may be"):
        assert_within_bound(good + (0.02 * a.abs() @ b.abs()).to(good), a, b, "a product that is off by 2% of its sum")


@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_inf_reach_the_output(device):
    """Of a bad row with a scale a row; of the whole output with one scale a tensor."""
    for name, bad_rows in (("rowwise", [3, 5]), ("tensorwise", list(range(8)))):
        x, weight = torch.randn(8, 32, device=device), torch.randn(16, 32, device=device)
        x[3, 7], x[5, 8] = torch.nan, torch.inf
        y = f8.linear(x.bfloat16(), weight.bfloat16(), recipe=f8.recipes.by_name(name))
        assert y.isnan().any(1).nonzero().flatten().tolist() == bad_rows
        assert y.isnan()[bad_rows].all()


# ---------------------------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize("device", DEVICES[1:])  # on a CPU there are no CUDA graphs
@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_reduce_overhead_trains_with_the_same_bits(recipe, device, assert_bits_equal):
    """Replayed from CUDA graphs, five steps, delayed scaling's state included."""
    if any(gemm.kind == "none" for gemm in recipe_support(f8.recipes.by_name(recipe), torch.device(device))):
        pytest.skip(f"{recipe} has no GEMM on this {torch.cuda.get_device_name()}")

    def trained(mode):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = torch.nn.Linear(128, 256, bias=False), torch.nn.ReLU(), torch.nn.Linear(256, 128, bias=False)
        model = f8.convert(torch.nn.Sequential(*layers).bfloat16(), f8.recipes.by_name(recipe)).to(device)
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        x = torch.randn(256, 128, dtype=torch.bfloat16).to(device)
        for _ in range(5):
            compiled(x).float().square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        return model.state_dict()

    torch._dynamo.utils.counters.clear()
    replayed = trained("reduce-overhead")
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    for name, expected in trained("default").items():
        assert_bits_equal(replayed[name], expected, name)
