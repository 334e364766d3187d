"""The Triton kernels over groups of tokens, in Triton's interpreter: bit for bit their twins on a CPU."""

from __future__ import annotations

import pytest
import torch
from token_groups import GROUPS

import fp8compile as f8
from fp8compile.ops import (
    group_amax,
    group_cast,
    group_cast_transpose,
    group_quantize,
    group_quantize_rows,
    grouped_blockwise_mm,
)
from fp8compile.ops.groups.group_quantize_two_levels import quantize_groups_in_two_levels
from fp8compile.quantizers.hadamard import SIGNS

pytest.importorskip("triton", reason="needs Triton: it is its interpreter")

from pretended_gpu import on_a_gpu

from fp8compile.testing import run_gpu_program

RULES = ("fp32", "pow2", "e8m0_rceil", "e8m0_floor")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = 150  # more than a tile
every_groups = pytest.mark.parametrize("groups", GROUPS, ids=str)


def laid_out(x, number):
    """The values of x in one of three layouts."""
    if number % 3 == 0:
        return x
    return x.t().contiguous().t() if number % 3 == 1 else x.repeat_interleave(2, 1)[:, ::2]


@every_groups
def test_amaxes_and_codes_of_groups_are_their_twins(groups, assert_bits_equal):
    offsets = groups.offsets()
    for number, (rule, block) in enumerate((rule, block) for rule in RULES for block in ((-1, 1), (-1, -1))):
        quantizer = f8.CurrentScaling(block=block, scale=rule, format=("e4m3", "e5m2")[number % 2])
        x = laid_out(groups.tokens(COLUMNS, DTYPES[number % 3]), number // 3)
        amax = group_amax(x, offsets, quantizer)
        multiplier = laid_out(quantizer.multiplier(amax), number)
        codes = group_cast(x, offsets, multiplier, quantizer)
        with on_a_gpu(("forwards", "backwards")[number % 2]):
            found = group_amax(x, offsets, quantizer), group_cast(x, offsets, multiplier, quantizer)
        assert_bits_equal(found[0], amax, f"amax, {quantizer}")
        assert_bits_equal(found[1], codes, f"codes, {quantizer}")


@every_groups
def test_codes_and_scales_of_blocks_are_their_twins(groups, assert_bits_equal):
    for number, (rule, n) in enumerate((rule, n) for rule in RULES for n in (8, 32, 128)):
        quantizer = f8.CurrentScaling(block=(n, 1), scale=rule, format=("e4m3", "e5m2")[number % 2], eps=number % 2)
        x = laid_out(groups.tokens(COLUMNS, DTYPES[number % 3]), number // 3)
        expected = group_quantize(x, groups.offsets(), quantizer)
        with on_a_gpu():
            found = group_quantize(x, groups.offsets(), quantizer)
        for name, got, wanted in zip(("codes", "scale"), found, expected, strict=True):
            assert_bits_equal(got, wanted, f"{name}, {quantizer}")


@every_groups
def test_codes_of_both_directions_are_their_twins(groups, assert_bits_equal):
    for number, n in enumerate((16, 32, 128, 32)):
        formats = ("e4m3", "e5m2")[:: 1 - 2 * (number % 2)]
        rows, columns = (
            f8.CurrentScaling(block=block, scale=rule, format=format)
            for block, rule, format in zip(((1, n), (n, 1)), (RULES[number], RULES[number - 1]), formats, strict=True)
        )
        x = laid_out(groups.tokens(COLUMNS, DTYPES[number % 3]), number)
        expected = group_cast_transpose(x, groups.offsets(), rows, columns)
        with on_a_gpu(("forwards", "shuffled")[number % 2]):
            found = group_cast_transpose(x, groups.offsets(), rows, columns)
        alone = f8.quantize(x, rows)
        for name, got, wanted in zip(("codes", "scale", "codes", "scale"), found, expected, strict=True):
            assert_bits_equal(got, wanted, f"{name}, {rows} {columns}")
        assert_bits_equal(found[0], alone.codes, "codes of rows")
        assert_bits_equal(found[1], alone.scale, "scales of rows")
        assert found[1].t().is_contiguous()


@every_groups
def test_codes_of_rows_and_amaxes_of_groups_are_their_twins(groups, assert_bits_equal, monkeypatch):
    monkeypatch.setattr("fp8compile.kernels.group_quantize_rows.PROGRAMS", 5)  # each with rows of several groups
    for number, rule in enumerate(RULES):
        rows = f8.CurrentScaling(block=(1, -1), scale=rule, format=("e4m3", "e5m2")[number % 2], eps=number % 2)
        column = f8.CurrentScaling(block=(-1, 1))
        x = laid_out(groups.tokens((COLUMNS, 3000)[number % 2], DTYPES[number % 3]), number)
        expected = group_quantize_rows(x, groups.offsets(), rows, column)
        with on_a_gpu(("forwards", "shuffled")[number % 2]):
            found = group_quantize_rows(x, groups.offsets(), rows, column)
        for name, got, wanted in zip(("codes", "scale", "amax"), found, expected, strict=True):
            assert_bits_equal(got, wanted, f"{name}, {rows}")
        alone = f8.quantize(x, rows)
        assert_bits_equal(found[0], alone.codes, "codes of rows")


NOISY = {"rounding": "stochastic", "seed": 3}
FOUR_BITS = (
    ("both", NOISY, SIGNS),
    ("rows", {"scale": "torchao", **NOISY}, ()),
    ("tokens", {"scale": "torchao"}, SIGNS),
    ("both", {}, ()),
)


@every_groups
def test_codes_in_two_levels_are_their_twins(groups, assert_bits_equal):
    number = GROUPS.index(groups)
    directions, options, signs = FOUR_BITS[number % len(FOUR_BITS)]
    rows = f8.TwoLevelScaling(**options)
    columns = f8.TwoLevelScaling(block=(16, 1), packed="columns", hadamard=signs, **options)
    x = laid_out(groups.tokens((40, COLUMNS)[number % 2], DTYPES[number % 3]), number)
    arguments = x, groups.offsets(), rows, columns, directions
    expected = quantize_groups_in_two_levels(*arguments)
    with on_a_gpu(("forwards", "backwards", "shuffled")[number % 3]):
        found = quantize_groups_in_two_levels(*arguments)
    names = [f"{name} along {way}" for way in ("rows", "tokens") for name in ("codes", "scales", "outer scales")]
    for name, got, wanted in zip(names, found, expected, strict=True):
        assert_bits_equal(got, wanted, f"{name} of {groups}")


@pytest.mark.parametrize("ends", [(90, 20, 50), (200, 300, 400), (-5, 40, 1 << 20)], ids=str)
def test_offsets_that_are_no_ends_of_groups_reach_no_other_memory(ends):
    """The interpreter raises where a program would access what is outside of its tensors."""
    x, offsets = torch.randn(100, 40), torch.tensor(ends, dtype=torch.int32)
    column, line, pillar = (f8.CurrentScaling(block=block) for block in ((-1, 1), (1, 128), (128, 1)))
    with on_a_gpu():
        multiplier = column.multiplier(group_amax(x, offsets, column))
        group_cast(x, offsets, multiplier, column)
        group_quantize_rows(x, offsets, f8.CurrentScaling(block=(1, -1)), column)
        codes, scale, *transposed = group_cast_transpose(x, offsets, line, pillar)
        matrices = codes.new_zeros(3, 24, 40), torch.ones(3, 1, 1)
        rest = offsets, "e4m3", "e4m3", torch.bfloat16
        grouped_blockwise_mm(codes, matrices[0], scale, matrices[1], *rest)
        grouped_blockwise_mm(transposed[0], transposed[0], transposed[1], transposed[1], *rest)
        grouped_blockwise_mm(codes, matrices[0], scale, matrices[1], *rest, -1)
        grouped_blockwise_mm(transposed[0], transposed[0], torch.ones(3, 40), torch.ones(3, 1), *rest, -1)
        group_quantize(x, offsets, pillar)
        four = f8.TwoLevelScaling(), f8.TwoLevelScaling(block=(16, 1), packed="columns")
        quantize_groups_in_two_levels(x, offsets, *four, "both")


def test_another_rule_is_seen(assert_bits_equal):
    groups = GROUPS[0]
    x, offsets = groups.tokens(COLUMNS, torch.bfloat16), groups.offsets()
    expected = group_quantize(x, offsets, f8.CurrentScaling(block=(32, 1)))
    with on_a_gpu():
        found = group_quantize(x, offsets, f8.CurrentScaling(block=(32, 1), scale="pow2"))
    for got, wanted in zip(found, expected, strict=True):
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bits_equal(got, wanted)


@pytest.mark.parametrize("arch", ["h200", "b200"])
@pytest.mark.parametrize("groups", [GROUPS[1], GROUPS[2]], ids=str)
def test_a_gpus_program_runs_the_kernels(groups, arch):
    column = f8.CurrentScaling(block=(-1, 1))
    line, pillar = (f8.CurrentScaling(block=block, scale="e8m0_rceil") for block in ((1, 32), (32, 1)))

    def quantized(x, offsets):
        x = x.relu()
        multiplier, scale = torch.ops.fp8compile.scale(group_amax(x, offsets, column), column)
        both = group_cast_transpose(x, offsets, line, pillar)
        return group_cast(x, offsets, multiplier, column), scale, *group_quantize(x, offsets, pillar), *both

    x = groups.tokens(32, torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    run = run_gpu_program(quantized, x, groups.offsets(), arch=arch, orders=("forwards", "shuffled"))
    assert not run.differences, str(run.differences)
    launched = {launch.name for launch in run.graphs[0].launches}
    assert launched >= {"amax_kernel", "cast_kernel", "quantize_kernel", "groups_both_kernel"}
    calls = [line for line in run.graphs[0].source.splitlines() if "torch.ops.fp8compile" in line.partition("#")[0]]
    assert not calls
    assert ".item()" not in run.graphs[0].source
