"""What kernels count of their casts, in Triton's interpreter, beside the same counts in PyTorch."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import fp8compile as f8
from fp8compile.ops.counting_kernels import counts_of_groups, no_counts_of_groups
from fp8compile.ops.groups.group_outer_amaxes import group_outer_amaxes
from fp8compile.ops.groups.group_quantize_two_levels import _counts as counts_in_two_levels
from fp8compile.ops.groups.group_quantize_two_levels import _empty_outputs as outputs_in_two_levels
from fp8compile.ops.groups.padding import alignment, padded_length
from fp8compile.ops.quantize_both import _counted_steps as both_steps
from fp8compile.ops.quantize_both import empty_outputs
from fp8compile.ops.quantize_columns import _counted_steps as column_steps
from fp8compile.ops.quantize_two_levels import _counted_steps as packed_steps
from fp8compile.ops.quantize_two_levels import _empty_outputs
from fp8compile.ops.quantize_weight import _counted_steps as weight_steps

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: it is its interpreter")
RULES = ("fp32", "e8m0_rceil", "e8m0_floor")  # by the last, amaxes saturate


def values(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(
        4 * torch.randn(rows, columns, generator=generator)
    )
    x[: rows // 2, columns // 2 :] = 0
    x[0, 0], x[-1, -1] = torch.nan, -torch.inf
    return x.bfloat16()


def interpreted(run):
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic
    from fp8compile.testing.gpu.program.interpreter import Interpreter

    with Interpreter(Arithmetic()).active():
        run()


def check(found, expected):
    """All programs together count what PyTorch counts; amaxes are bits of floats, and a NaN has several."""
    amax = found[:, 0].amax(-1).view(torch.float32)
    assert torch.equal(amax.nan_to_num(-1), expected[:, 0].amax(-1).view(torch.float32).nan_to_num(-1))
    assert torch.equal(found[:, 1:].sum(-1), expected[:, 1:].sum(-1))
    assert (expected[:, 1].sum(-1) > 0).all()  # something underflows


@needs_triton
@pytest.mark.parametrize("rule", RULES)
def test_a_weight_is_counted_where_it_is_cast(rule):
    from fp8compile.kernels.quantize_weight import rows_and_columns, square_blocks

    for block, again in (((1, -1), (-1, 1)), ((16, 16), (16, 16))):
        first, other = f8.CurrentScaling(block=block, scale=rule), f8.CurrentScaling(block=again, scale=rule)
        x = values(130, 150)
        *outputs, counts = (torch.zeros_like(each) for each in weight_steps(x, first, other))
        launch = rows_and_columns if block[0] == 1 else square_blocks
        interpreted(lambda launch=launch, own=(x, first, *outputs, counts): launch(*own))
        check(counts, weight_steps(x, first, other)[-1])


@needs_triton
@pytest.mark.parametrize("rule", RULES)
def test_both_directions_are_counted_where_they_are_cast(rule):
    from fp8compile.kernels.both_directions import both_directions

    rows = f8.CurrentScaling(block=(1, 32), scale=rule)
    columns = f8.CurrentScaling(block=(32, 1), scale=rule, format="e5m2")
    x = values(130, 150)
    codes, scale, column_codes, column_scale = empty_outputs(x, rows, columns)
    outputs = codes, scale.movedim(-1, 0), column_codes.transpose(-2, -1), column_scale
    expected = both_steps(x, rows, columns)[-1]
    counts = torch.zeros_like(expected)
    interpreted(lambda: both_directions(x, rows, columns, outputs, counts))
    check(counts, expected)


@needs_triton
def test_codes_along_columns_alone_are_counted_where_they_are_cast():
    from fp8compile.kernels.both_directions import along_columns

    quantizer = f8.CurrentScaling(block=(32, 1), scale="e8m0_floor")
    for x in (values(130, 150), values(130, 150).view(2, 65, 150)):
        codes, scale, expected = column_steps(x, quantizer)
        counts = torch.zeros_like(expected)
        own = x, quantizer, (codes.transpose(-2, -1), scale), counts
        interpreted(lambda own=own: along_columns(*own))
        check(counts, expected)


@needs_triton
def test_codes_of_four_bits_are_counted_where_they_are_cast():
    from fp8compile.kernels.quantize_two_levels import both_packed

    recipe = f8.recipes.nvfp4()
    rows, columns = recipe.input, recipe.input_for_grad_weight  # the latter transforms tokens
    x = values(96, 144)
    x[0, 0] = x[-1, -1] = 0  # an outer amax that is no number leaves nothing to count
    amaxes = [each.outer_amax(each.amax(x)).clone() for each in (rows, columns)]
    codes, scale, outer, column_codes, *others = _empty_outputs(x, *amaxes, rows, columns)
    outputs = codes.view(torch.int64), scale, outer, column_codes.t().view(torch.int64), *others
    expected = packed_steps(x, *amaxes, rows, columns)[-1]
    counts = torch.zeros_like(expected)
    interpreted(lambda: both_packed(x, tuple(amaxes), rows, columns, outputs, counts))
    check(counts, expected)


# ---------------------------------------------------------------------------------- groups

ENDS = torch.tensor([0, 37, 37, 101, 118], dtype=torch.int32)  # two experts starve, and rows are left behind


def check_groups(found, expected):
    assert torch.equal(
        found[:, 0].int().view(torch.float32).nan_to_num(-1), expected[:, 0].int().view(torch.float32).nan_to_num(-1)
    )
    assert torch.equal(found[:, 1:], expected[:, 1:])
    assert (expected[:, 1, [1, 3]] > 0).all()  # something underflows
    assert not expected[:, 1:, [0, 2]].any()


def of_groups():
    x = values(130, 150)
    x[118:] = 1e-30  # behind the groups: counted nowhere
    return x


@needs_triton
@pytest.mark.parametrize("rule", RULES)
def test_groups_are_counted_where_they_are_cast(rule):
    from fp8compile.kernels.group_quantize_both import groups_both_directions

    rows = f8.CurrentScaling(block=(1, 32), scale=rule)
    columns = f8.CurrentScaling(block=(32, 1), scale=rule, format="e5m2")
    x, align = of_groups(), alignment(columns)
    length = padded_length(len(x), len(ENDS), align)
    launch = groups_both_directions(x, ENDS, length, rows, columns, align, counts=True)
    byte = {"dtype": torch.uint8}
    of_scale = {"dtype": rows.scale_dtype()}
    outputs = (
        torch.zeros(x.shape, **byte),
        torch.zeros((5, 130), **of_scale),
        torch.zeros((150, length), **byte),
        torch.zeros((length // 32, 150), **of_scale),
    )
    counts = no_counts_of_groups(ENDS, 2)
    interpreted(lambda: launch(x, ENDS, *outputs, counts))
    check_groups(counts, counts_of_groups(x, ENDS, (rows, columns)))


@needs_triton
def test_rows_of_groups_are_counted_where_they_are_cast():
    from fp8compile.kernels.group_quantize_rows import rows_of_groups

    rows, x = f8.CurrentScaling(block=(1, -1)), of_groups()
    launch = rows_of_groups(x, ENDS, rows, counts=True)
    outputs = torch.zeros(x.shape, dtype=torch.uint8), torch.zeros((130, 1)), torch.zeros((5, 150))
    counts = no_counts_of_groups(ENDS, 1)
    interpreted(lambda: launch(x, ENDS, *outputs, counts))
    check_groups(counts, counts_of_groups(x, ENDS, (rows,)))


@needs_triton
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [(-1, 1), (-1, -1)])
def test_casts_by_multipliers_of_groups_are_counted(rule, block):
    from fp8compile.kernels.group_amax_and_cast import cast_groups

    quantizer, x = f8.CurrentScaling(block=block, scale=rule, format="e5m2"), of_groups()
    x[0, 0] = x[-1, -1] = 0  # a scale that is no number leaves nothing to count
    align = alignment(quantizer)
    multiplier = quantizer.multiplier(f8.ops.group_amax(x, ENDS, quantizer))
    codes = torch.zeros((150, padded_length(len(x), len(ENDS), align)), dtype=torch.uint8)
    counts = no_counts_of_groups(ENDS, 1)
    interpreted(lambda: cast_groups(x, ENDS, multiplier, quantizer, align, codes, counts))
    check_groups(counts, counts_of_groups(x, ENDS, (quantizer,), multiplier))


@needs_triton
@pytest.mark.parametrize("directions", ["both", "rows", "tokens"])
def test_groups_in_four_bits_are_counted_where_they_are_cast(directions):
    from fp8compile.kernels.group_quantize_two_levels import codes_of_groups

    recipe, x = f8.recipes.nvfp4(), of_groups()
    rows, columns = recipe.input, recipe.input_for_grad_weight
    how = rows, columns, directions
    amaxes = group_outer_amaxes(x, ENDS, *how)
    codes, scale, outer, column_codes, *others = outputs_in_two_levels(x, ENDS, amaxes, *how)
    words = [each.view(torch.int64) if each.numel() else each for each in (codes, column_codes)]
    outputs = words[0], scale, outer, words[1], *others
    wanted = (rows if directions != "tokens" else None, columns if directions != "rows" else None)
    counts = no_counts_of_groups(ENDS, 2)
    interpreted(lambda: codes_of_groups(x, ENDS, amaxes, *wanted, outputs, counts))
    expected = counts_in_two_levels(x, ENDS, amaxes, *how)
    there = [index for index, each in enumerate(wanted) if each is not None]
    check_groups(counts[there], expected[there])
    assert counts.any((1, 2)).tolist() == [each is not None for each in wanted]
