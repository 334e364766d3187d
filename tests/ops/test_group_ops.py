"""Ops over groups of tokens: each group is quantized as if it were alone, and lies where the layout says."""

from __future__ import annotations

import pytest
import torch
from token_groups import GROUPS, Groups

import fp8compile as f8
from fp8compile.ops import group_amax, group_cast, group_cast_transpose, group_quantize, group_quantize_rows
from fp8compile.ops.groups.padding import alignment, padded_length, row_of_columns
from fp8compile.target import Target, pretend_target

every_groups = pytest.mark.parametrize("groups", GROUPS, ids=str)
PER_GROUP = [f8.CurrentScaling(block=(-1, 1)), f8.CurrentScaling(format="e5m2", scale="pow2")]
PER_BLOCK = [
    f8.CurrentScaling(block=(128, 1)),
    f8.CurrentScaling(block=(32, 1), scale="e8m0_rceil", eps=1e-3),
    f8.CurrentScaling(block=(8, 1), format="e5m2", scale="e8m0_floor"),  # two blocks a unit of columns
]


def assert_laid_out(codes, by_group, groups, quantizer, assert_bits_equal):
    """Codes (K, C) hold those of each group, (n, K), at its columns, and zeros elsewhere."""
    align = alignment(quantizer)
    columns = padded_length(sum(groups.sizes) + groups.tail, len(groups.sizes), align)
    row, _ = row_of_columns(groups.offsets(), align, columns)
    # a last row of zeros is what row -1 refers to
    rows = torch.cat([*by_group, torch.zeros(1, codes.shape[0], dtype=torch.uint8)])
    assert_bits_equal(codes, rows[row.long()].t().contiguous(), "codes")


@every_groups
@pytest.mark.parametrize("quantizer", PER_GROUP, ids=repr)
def test_a_group_has_the_codes_that_it_would_have_alone(groups, quantizer, assert_bits_equal):
    x = groups.tokens(24, torch.bfloat16)
    amax = group_amax(x, groups.offsets(), quantizer)
    codes = group_cast(x, groups.offsets(), quantizer.multiplier(amax), quantizer)
    alone = [f8.quantize(x[rows], quantizer) for rows in groups.rows()]
    assert_bits_equal(quantizer.scale_of(quantizer.multiplier(amax)), torch.cat([each.scale for each in alone]))
    assert_laid_out(codes, [each.codes for each in alone], groups, quantizer, assert_bits_equal)


@every_groups
@pytest.mark.parametrize("quantizer", PER_BLOCK, ids=repr)
def test_blocks_begin_with_each_group(groups, quantizer, assert_bits_equal):
    x = groups.tokens(24, torch.float32)
    codes, scale = group_quantize(x, groups.offsets(), quantizer)
    alone = [f8.quantize(x[rows], quantizer) for rows in groups.rows()]
    assert_laid_out(codes, [each.codes for each in alone], groups, quantizer, assert_bits_equal)
    # from one group to the next its padded length, in blocks; behind them what has no token
    n, align, first = quantizer.block[0], alignment(quantizer), 0
    expected = quantizer.scale_of(quantizer.multiplier(torch.zeros(scale.shape)))
    for each, size in zip(alone, groups.sizes, strict=True):
        expected[first : first + each.scale.shape[0]] = each.scale
        first += -(-size // align) * align // n
    assert_bits_equal(scale, expected, "scale")


def test_a_nan_behind_the_last_group_reaches_nothing():
    groups = Groups("tail", (5, 7), tail=3)
    x, offsets, quantizer = groups.tokens(16, torch.bfloat16), groups.offsets(), f8.CurrentScaling(block=(-1, 1))
    amax = group_amax(x, offsets, quantizer)
    assert amax.isfinite().all()
    codes = group_cast(x, offsets, quantizer.multiplier(amax), quantizer)
    assert (codes & 0x7F).max() == 0x7E  # 448, the largest of a group; 0x7f is NaN


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_every_number_of_rows_and_every_split(backend, assert_bits_equal):
    column, pillar = PER_GROUP[0], PER_BLOCK[1]

    def quantized(x, offsets):
        x = x * 2  # the ops read what another kernel wrote
        multiplier, _ = torch.ops.fp8compile.scale(group_amax(x, offsets, column), column)
        return group_cast(x, offsets, multiplier, column), *group_quantize(x, offsets, pillar)

    compiled = torch.compile(quantized, fullgraph=True, dynamic=True, backend=backend)
    for sizes in ((3, 30), (33, 0), (0, 70)):
        x, offsets = (groups := Groups("", sizes, tail=2)).tokens(24, torch.bfloat16), groups.offsets()
        for got, expected in zip(compiled(x, offsets), quantized(x, offsets), strict=True):
            assert_bits_equal(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_has_no_kernel_raises_on_a_gpu_and_says_what_has():
    x, offsets = torch.zeros(8, 16), torch.tensor([4, 8], dtype=torch.int32)
    stochastic = f8.CurrentScaling(block=(-1, 1), rounding="stochastic")
    with pretend_target(Target("cuda", (9, 0))):
        with pytest.raises(ValueError, match=r"group_amax: .*'stochastic'.*CurrentScaling with rounding='nearest'"):
            group_amax(x, offsets, stochastic)
        with pytest.raises(ValueError, match=r"group_cast: .*block \(-1, 1\), one scale per column of a group"):
            group_cast(x, offsets, torch.ones(2, 1), f8.CurrentScaling(block=(-1, 8)))
        with pytest.raises(ValueError, match=r"group_quantize: .*\(48, 1\).*n divides 128.*high precision"):
            group_quantize(x, offsets, f8.CurrentScaling(block=(48, 1)))
        with pytest.raises(ValueError, match=r"group_cast_transpose: .*\(1, -1\).*blocks \(1, n\).*with two calls"):
            group_cast_transpose(x, offsets, f8.CurrentScaling(block=(1, -1)), PER_BLOCK[1])
        with pytest.raises(
            ValueError,
            match=r"group_quantize_rows: .*x has 16 columns; .*\(1, -1\) and \(-1, "
            r"1\).*16384",
        ):
            group_quantize_rows(x, offsets, *PER_GROUP)
