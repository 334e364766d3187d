"""fp8compile::quantize_two_levels: the Triton kernel is its PyTorch twin, bit for bit, and what it is asked for."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from golden_cases import two_level_cases

import fp8compile as f8
from fp8compile.formats import unpack
from fp8compile.ops import outer_amaxes, quantize_two_levels
from fp8compile.ops.quantize_two_levels import is_packed_pair
from fp8compile.quantizers.hadamard import SIGNS
from fp8compile.scale_layouts import untiled
from fp8compile.target import pretend_target

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: it is its interpreter")
ROWS, COLUMNS = f8.TwoLevelScaling(), f8.TwoLevelScaling(block=(16, 1), packed="columns")
NOISY = {"rounding": "stochastic", "seed": 3}
PAIRS = {
    "activations": (ROWS, replace(COLUMNS, hadamard=SIGNS)),
    "gradients": (replace(ROWS, **NOISY), replace(COLUMNS, hadamard=SIGNS, **NOISY)),
    "not transformed": (replace(ROWS, **NOISY), COLUMNS),
    "torchao": (replace(ROWS, scale="torchao"), replace(COLUMNS, scale="torchao", hadamard=SIGNS)),
}
INPUTS = [((16, 16), torch.bfloat16, True), ((80, 48), torch.float32, False), ((16, 272), torch.float16, True)]


def values(shape, dtype, *, finite):
    """Magnitudes over many powers of two, zeros, and a NaN and an infinity where they need not be finite."""
    from interpreted_kernels import values as special

    x = special(shape, torch.float32)
    return (x.nan_to_num(-3.0, 0.5, -0.5) if finite else x).to(dtype)


def quantized(x, rows, columns):
    amaxes = outer_amaxes(x, rows, columns)
    return quantize_two_levels(x, amaxes[:1], amaxes[1:], rows, columns)


def interpreted(x, rows, columns, arch="h200"):
    """What the kernels make in Triton's interpreter."""
    from fp8compile.testing.gpu.gpus import GPUS
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic
    from fp8compile.testing.gpu.program.interpreter import Interpreter

    with Interpreter(Arithmetic()).active(), pretend_target(GPUS[arch].target):
        return quantized(x, rows, columns)


def differences(x, pair, expected_of):
    from interpreted_kernels import differing

    return list(map(differing, interpreted(x, *pair), quantized(x, *expected_of)))


@needs_triton
@pytest.mark.parametrize(("shape", "dtype", "finite"), INPUTS, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_kernel_is_its_twin_bit_for_bit(pair, shape, dtype, finite):
    assert differences(values(shape, dtype, finite=finite), PAIRS[pair], PAIRS[pair]) == [0] * 6


@needs_triton
@pytest.mark.parametrize(
    ("planted", "differs"),
    [
        ((replace(ROWS, rounding="nearest"), PAIRS["gradients"][1]), [0]),
        ((PAIRS["gradients"][0], replace(PAIRS["gradients"][1], seed=4)), [3]),
        ((PAIRS["gradients"][0], replace(PAIRS["gradients"][1], hadamard=(1,) * 16)), [3, 4, 5]),
    ],
    ids=["other rounding", "other seed", "other signs"],
)
def test_another_quantizer_is_seen(planted, differs):
    found = differences(torch.randn(32, 64).bfloat16(), PAIRS["gradients"], planted)
    assert [i for i, count in enumerate(found) if count] == differs


@needs_triton
@pytest.mark.parametrize(("source", "count"), [("te", 20), ("ao", 6)])
def test_the_kernel_has_the_codes_and_scales_of_the_references(source, count, assert_bits_equal):
    """Golden cases with whole blocks along rows; transposed, along columns; zeros fill sixteen of the other dim."""
    cases = [case for case in two_level_cases(source) if case.quantizer.block == (1, 16) and case.x.shape[1] % 16 == 0]
    assert len(cases) == count
    for case in cases:
        m, k = case.x.shape
        filled = torch.cat([case.x, case.x.new_zeros(-m % 16, k)])
        columns = replace(COLUMNS, scale=case.quantizer.scale)
        along_rows = interpreted(filled, case.quantizer, columns)[:3]
        turned, *scales = interpreted(filled.t().contiguous(), case.quantizer, columns)[3:]
        for what, (codes, tiles, outer) in (("rows", along_rows), ("columns", (turned.t(), *scales))):
            assert_bits_equal(codes[:m].contiguous(), case.codes, f"codes of {what} of {case.name}")
            assert_bits_equal(untiled(tiles, len(filled), k // 16)[:m], case.scale, f"scales of {what} of {case.name}")
            assert_bits_equal(outer, case.outer_scale, f"outer scale of {what} of {case.name}")


def by_hardware(pair):
    return tuple(replace(each, rounding="stochastic_hardware") for each in pair)


@needs_triton
def test_a_gpu_without_the_instruction_draws_the_bits_of_a_cpu():
    x, pair = values((80, 48), torch.float32, finite=True), PAIRS["gradients"]
    assert differences(x, by_hardware(pair), pair) == [0] * 6
    assert differences(x, pair, by_hardware(pair)) == [0] * 6, "on a CPU both are the same"


@needs_triton
def test_the_instruction_rounds_to_a_neighbour_without_bias():
    """As the PTX ISA has it: no GPU has run it here, and other bits than ours are what it promises."""
    pair = by_hardware((ROWS, replace(COLUMNS, seed=7)))
    x = torch.rand(64, 128, generator=torch.Generator().manual_seed(2)) * 12 - 6
    x[:, ::16] = x[::16] = 6  # the amax of every block, so that multipliers are the same
    found, exact = interpreted(x, *pair, arch="b200"), interpreted(x, ROWS, COLUMNS)
    hashed = interpreted(x, *pair)
    for at, quantizer in ((0, ROWS), (3, COLUMNS)):
        assert torch.equal(found[at + 1], exact[at + 1])
        assert torch.equal(found[at + 2], exact[at + 2])
        assert not torch.equal(found[at], hashed[at])
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        dim = 1 if quantizer is ROWS else 0
        got = numbers[unpack(found[at].contiguous(), dim).long()].double()
        magnitude = x.abs().double()
        unit = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        share = (got - x).abs() / unit
        assert share.max() < 1, "another neighbour"
        assert (got * x >= 0).all(), "another sign"
        # up where 8 bits of noise carry: with the probability rounded down to 1 / 256
        fraction = magnitude / unit % 1
        probability = (fraction * 256).floor() / 256
        went_up = (got.abs() > magnitude) | (fraction == 0)
        surplus = (went_up.double() - probability)[fraction > 0]
        sigma = (probability * (1 - probability))[fraction > 0].sum().sqrt()
        assert surplus.sum().abs() < 4 * sigma


@needs_triton
def test_equal_neighbours_draw_different_noise_from_the_instruction():
    x = torch.full((64, 128), 2.5)
    x[:, ::16] = x[::16] = 6
    codes = interpreted(x, *by_hardware((ROWS, COLUMNS)), arch="b200")[0]
    found = unpack(codes, 1).view(64, 8, 16)[:, :, 1:][torch.arange(64) % 16 != 0]
    for place in range(15):
        share = (found[:, :, place] == 5).double().mean()  # 3 in place of 2
        assert abs(share - 0.5) < 4 * 0.5 / found[:, :, place].numel() ** 0.5, place


@pytest.mark.parametrize("pair", PAIRS)
def test_the_op_is_two_quantizations(pair, assert_bits_equal):
    x, (rows, columns) = torch.randn(144, 48).bfloat16(), PAIRS[pair]
    found = quantized(x, rows, columns)
    for quantizer, (codes, tiles, outer) in ((rows, found[:3]), (columns, found[3:])):
        expected = f8.quantize(x, quantizer)
        assert_bits_equal(codes.contiguous(), expected.codes, f"codes by {quantizer}")
        assert_bits_equal(outer, expected.outer_scale, f"outer scale by {quantizer}")
        along_rows = expected.scale if quantizer is rows else expected.scale.t()
        assert_bits_equal(untiled(tiles, *along_rows.shape), along_rows.contiguous(), f"scales by {quantizer}")
    assert found[3].stride() == (1, 72)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        *((*pair, True) for pair in PAIRS.values()),
        (ROWS, None, False),
        (COLUMNS, ROWS, False),
        (ROWS, replace(COLUMNS, packed="none"), False),
        (replace(ROWS, scale="torchao"), COLUMNS, False),
        (replace(ROWS, hadamard=SIGNS), COLUMNS, False),
        (f8.TwoLevelScaling(block=(16, 16)), COLUMNS, False),
        (f8.CurrentScaling(block=(1, 16)), f8.CurrentScaling(block=(16, 1)), False),
    ],
    ids=str,
)
def test_which_pairs_the_kernel_takes(rows, columns, expected):
    assert is_packed_pair(rows, columns) is expected
