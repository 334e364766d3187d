"""Stochastic rounding: one of the two nearest codes, right on average, the same each time and in compiled code."""

from __future__ import annotations

import math

import pytest
import torch

import fp8compile as f8
from fp8compile.formats import E4M3, E5M2

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def stochastic(**fields):
    return f8.CurrentScaling(rounding="stochastic", **fields)


def neighbours(values, fmt):
    """The codes' values at and below, and at and above, of magnitudes."""
    table = fmt.decode(torch.arange(128, dtype=torch.uint8))
    table = table[table.isfinite()]
    above = torch.searchsorted(table, values)
    return table[(above - (table[above] != values).long()).clamp(min=0)], table[above]


@pytest.mark.parametrize("format", FORMATS)
def test_a_value_becomes_one_of_the_two_codes_around_it(format):
    fmt = FORMATS[format]
    exponents = torch.randint(fmt.min_exponent - 8, fmt.max_exponent, (200_000,)).float()
    values = (1 + torch.rand(200_000)) * torch.exp2(exponents) * torch.randn(200_000).sign()
    found = fmt.decode(fmt.encode_stochastic(values, torch.rand(200_000)))
    below, above = neighbours(values.abs(), fmt)
    assert bool(((found.abs() == below) | (found.abs() == above)).all())
    assert torch.equal(found.signbit(), values.signbit())
    assert bool((found.abs() == below).any())
    assert bool((found.abs() == above).any())


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_code_holds_stays_as_it_is(format, assert_bits_equal):
    fmt = FORMATS[format]
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[fmt.decode(codes).isfinite()]
    for noise in (0.0, 1 - 2**-24):
        found = fmt.encode_stochastic(fmt.decode(codes), torch.full(codes.shape, noise))
        assert_bits_equal(found, codes, f"codes with noise {noise}")


def test_special_values():
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 0.0, -0.0])
    found = E4M3.encode_stochastic(values, torch.full((7,), 0.5))
    assert found.tolist() == [0x7F, 0x7E, 0xFE, 0x7E, 0xFE, 0x00, 0x80]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.03, 0.25, 0.5, 0.9])
def test_the_expected_error_is_zero(format, share):
    """A constant, `share` of the way between two codes, is rounded up in that share of a million places."""
    n, step = 1000, 2.0 ** -FORMATS[format].mantissa_bits
    x = torch.full((n, n), 1 + share * step)
    x[0, 0] = FORMATS[format].max  # a multiplier of 1
    q = f8.quantize(x, stochastic(format=format))
    assert float(q.scale) == 1.0
    up = (q.dequantize().view(-1)[1:] > 1.0).double().mean().item()
    deviation = math.sqrt(share * (1 - share)) / n  # of a mean of n * n coin tosses
    assert abs(up - share) < 5 * deviation, f"{up} of the values were rounded up, {share} expected"
    nearest = f8.quantize(x, f8.CurrentScaling(format=format)).dequantize().view(-1)[1:]
    assert float(nearest.min()) == float(nearest.max()), "to the nearest code all are rounded alike"


def test_positions_and_seeds_are_independent():
    n = 500
    x = torch.full((n, n), 1 + 0.5 / 8)
    x[0, 0] = 448.0
    ups = [f8.quantize(x, stochastic(seed=seed)).codes.flatten()[1:] == 0x39 for seed in range(4)]
    rows = ups[0][n - 1 :].view(n - 1, n)
    for a, b in [
        *((ups[i], ups[j]) for i in range(4) for j in range(i)),
        (rows[:-1], rows[1:]),
        (rows[:, :-1], rows[:, 1:]),
    ]:
        same = (a == b).double().mean().item()
        assert abs(same - 0.5) < 5 * 0.5 / math.sqrt(a.numel()), f"{same} of the decisions agree"


BF16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("block", "dtype"),
    [((-1, -1), FLOAT32), ((1, -1), BF16), ((-1, 1), FLOAT32), ((1, 32), BF16), ((32, 32), FLOAT32)],
    ids=str,
)
def test_compiled_rounds_as_eager(block, dtype, assert_bits_equal):
    quantizer = stochastic(format="e5m2", block=block, seed=7)
    x = (torch.randn(40, 100) * torch.exp(torch.randn(40, 100))).to(dtype)
    x[3, 4] = torch.nan

    def fn(x):
        q = f8.quantize(x.relu(), quantizer)
        return q.codes, q.scale

    for got, want, name in zip(torch.compile(fn, fullgraph=True)(x), fn(x), ("codes", "scale"), strict=True):
        assert_bits_equal(got, want, name)


def test_a_recomputed_forward_and_a_second_run_round_alike(assert_bits_equal):
    x = torch.randn(64, 64)
    first = f8.quantize(x, stochastic(seed=3)).codes
    torch.manual_seed(99)
    assert_bits_equal(f8.quantize(x, stochastic(seed=3)).codes, first, "codes, whatever the generator's state")
    assert not torch.equal(f8.quantize(x, stochastic(seed=4)).codes, first)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rounding": "up"}, "`rounding` is 'up'; it must be 'nearest' or 'stochastic'"),
        ({"seed": -1}, "`seed` is -1; it must be an int from 0 to 2147483647"),
        ({"seed": True}, "`seed` is True; it must be an int"),
        ({"seed": 1 << 31}, "`seed` is 2147483648; it must be an int"),
    ],
    ids=str,
)
def test_wrong_fields_say_what_is_allowed(fields, says):
    with pytest.raises(ValueError, match=says):
        f8.CurrentScaling(**fields)
