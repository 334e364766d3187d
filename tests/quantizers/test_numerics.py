"""N1 to N4: scales and codes of every bfloat16 and float16 number and of millions of float32, against numpy."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import oracle
import pytest
import torch

import fp8compile as f8
from fp8compile import ops
from fp8compile.library import exact_quotient

FORMATS = ("e4m3", "e5m2")
RULES = ("fp32", "pow2", "e8m0_rceil", "e8m0_floor")
ELEMENTWISE = (1, 1)
MULTIPLIERS = (1.0, 448.0, 3.7, 2.0**-140, 1.1e-3, 2.0**127, oracle.LARGEST_FLOAT32)
MODES = pytest.mark.parametrize("mode", ["eager", "inductor"])
formats = pytest.mark.parametrize("fmt", FORMATS)
rules = pytest.mark.parametrize("rule", RULES)


def _every_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def _random_floats(count: int, *, signed: bool = True) -> np.ndarray:
    bits = np.random.default_rng(1).integers(0, 2**32 if signed else 2**31, count, dtype=np.uint32)
    return bits.view(np.float32)


def _amaxes() -> np.ndarray:
    """Every bfloat16 and a million random float32 that are not negative, and the ulps beside each power of two."""
    every = _every_number(torch.bfloat16)[2**15 :].float().numpy()
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    edges = np.concatenate([powers, powers * np.float32(1.75)]).view(np.int32)
    beside = np.concatenate([edges - 1, edges, edges + 1]).view(np.float32)
    return np.concatenate([every, beside, _random_floats(1_000_000, signed=False)])


def _run(mode: str, fn, *args):
    return fn(*args) if mode == "eager" else torch.compile(fn, fullgraph=True, dynamic=False)(*args)


# ---------------------------------------------------------------------------------- N2, N4: scale rules


def _scales(amax: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [ops.scale(amax, f8.CurrentScaling(format=fmt, scale=rule)) for fmt, rule in product(FORMATS, RULES)]


@MODES
def test_multipliers_and_scales_of_a_million_amaxes_are_the_oracles(mode, assert_bits_equal):
    amax = _amaxes()
    results = _run(mode, _scales, torch.from_numpy(amax))
    for (fmt, rule), (multiplier, scale) in zip(product(FORMATS, RULES), results, strict=True):
        expected = oracle.multiplier(amax, fmt, rule)
        assert_bits_equal(multiplier, torch.from_numpy(expected), f"multiplier, {fmt} {rule}")
        if rule.startswith("e8m0"):
            bytes_ = torch.from_numpy(oracle.scale_byte(amax, fmt, rule)).to(torch.uint8)
            assert_bits_equal(scale, bytes_, f"scale, {fmt} {rule}")
        else:
            assert_bits_equal(scale, torch.from_numpy(oracle.inverse(expected)), f"scale, {fmt} {rule}")


@MODES
@pytest.mark.parametrize("number", [1.0, 448.0, 57344.0, 2.0**24 + 1, 1 / 6, 1e-300])
def test_quotients_are_rounded_once_for_every_sign_and_number(number, mode, assert_bits_equal):
    """2**24 + 1, 1 / 6 and 1e-300 are not float32 numbers."""
    x = torch.from_numpy(_amaxes())
    x = torch.cat([x, -x])
    quotient = torch.compile(exact_quotient, fullgraph=True) if mode == "inductor" else exact_quotient
    expected = (torch.full((1,), number, dtype=torch.float64) / x).float()
    quotient(3.0, x[:2])  # one graph for several numbers has a symbol for them
    assert_bits_equal(quotient(number, x).nan_to_num(0.0), expected.nan_to_num(0.0), "quotients")


@pytest.mark.parametrize(
    ("rule", "amax", "multiplier", "scale"),
    [
        ("fp32", 448.0, 1.0, 1.0),
        ("fp32", 224.0, 2.0, 0.5),
        ("fp32", 0.0, 1.0, 1.0),
        ("fp32", 2.0**-149, oracle.LARGEST_FLOAT32, 2.0**-128),  # the quotient overflows; its scale is subnormal
        ("fp32", torch.inf, torch.nan, torch.nan),
        ("fp32", torch.nan, torch.nan, torch.nan),
        ("pow2", 300.0, 1.0, 1.0),
        ("pow2", 448.0 * (1 + 2**-23), 0.5, 2.0),
        ("pow2", 0.0, 1.0, 1.0),
        ("pow2", 2.0**-149, 2.0**127, 2.0**-127),
        ("pow2", torch.inf, torch.nan, torch.nan),
        ("pow2", torch.nan, torch.nan, torch.nan),
        ("e8m0_rceil", 448.0, 1.0, 127),
        ("e8m0_rceil", 449.0, 0.5, 128),
        ("e8m0_rceil", 0.0, 2.0**127, 0),
        ("e8m0_rceil", torch.inf, torch.nan, 255),
        ("e8m0_floor", 511.0, 1.0, 127),
        ("e8m0_floor", 512.0, 0.5, 128),
        ("e8m0_floor", 2.0**-149, 2.0**127, 0),
        ("e8m0_floor", torch.nan, torch.nan, 255),
    ],
)
def test_scale_rules_by_hand(rule, amax, multiplier, scale, assert_bits_equal):
    quantizer = f8.CurrentScaling(scale=rule)
    got_multiplier, got_scale = ops.scale(torch.tensor([amax]), quantizer)
    assert_bits_equal(got_multiplier, torch.tensor([multiplier], dtype=torch.float32))
    if scale == 2.0**-128:  # 1 / largest is a bit more than 2**-128: the subnormal nearest to it is 2**-128
        assert got_scale.item() == float(np.float32(1) / oracle.LARGEST_FLOAT32) > 0
    assert_bits_equal(got_scale, torch.tensor([scale], dtype=quantizer.scale_dtype()))


def _nearest_float32(number: Fraction) -> np.float32:
    """The float32 nearest to a rational, by comparing distances exactly."""
    guess = np.float32(float(number))
    around = (np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(np.inf)))
    return min(around, key=lambda candidate: abs(Fraction(float(candidate)) - number))


@formats
# 1e-3 and 0.3: rounded to float32 before the division, they would give another multiplier
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-3, 0.3, 1, 3.0, 2.0**-20])
def test_eps_is_a_floor_under_the_amax_also_where_it_is_no_float32(fmt, eps, assert_bits_equal):
    above = np.nextafter(np.float32(eps), np.float32(np.inf))
    amax = torch.tensor([0.0, 2.0**-149, float(np.float32(eps)) / 2, float(above), 1e4])
    multiplier = f8.CurrentScaling(format=fmt, eps=eps).multiplier(amax)
    floored = [max(Fraction(float(a)), Fraction(eps)) for a in amax]
    expected = [_nearest_float32(Fraction(oracle.LARGEST[fmt]) / f) for f in floored]
    assert_bits_equal(multiplier, torch.tensor(np.array(expected)))
    pow2 = f8.CurrentScaling(format=fmt, eps=eps, scale="pow2").multiplier(amax)
    assert_bits_equal(pow2, torch.tensor([2.0 ** int(np.frexp(m)[1] - 1) for m in expected]))


@rules
@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_eps_does_not_hide_what_is_not_finite(rule, special):
    assert f8.CurrentScaling(scale=rule, eps=1e-4).multiplier(torch.tensor([special])).isnan().all()


@rules
def test_a_tensor_below_eps_has_the_scale_of_eps(rule, assert_bits_equal):
    quantizer = f8.CurrentScaling(scale=rule, eps=0.5)
    small, at_eps = f8.quantize(torch.full((4,), 2.0**-30), quantizer), f8.quantize(torch.tensor([0.5]), quantizer)
    assert_bits_equal(small.scale, at_eps.scale)


# ---------------------------------------------------------------------------------- N3: casts


def _casts(x: torch.Tensor, multipliers: torch.Tensor) -> list[torch.Tensor]:
    return [
        ops.cast(x, multiplier.view(1), f8.CurrentScaling(format=fmt))
        for fmt, multiplier in product(FORMATS, multipliers.unbind())
    ]


@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_all_65536_numbers_are_the_nearest(dtype, mode, assert_bits_equal):
    # inf included: under a finite multiplier it saturates. Such a multiplier never belongs to a block with inf (N4).
    x = _every_number(dtype)
    values = x.float().numpy()
    codes = _run(mode, _casts, x, torch.tensor(MULTIPLIERS))
    for (fmt, multiplier), got in zip(product(FORMATS, MULTIPLIERS), codes, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = values * np.float32(multiplier)
        assert_bits_equal(got, torch.from_numpy(oracle.encode(scaled, fmt)), f"{fmt} times {multiplier}")


def _elementwise_casts(x: torch.Tensor, multiplier: torch.Tensor) -> list[torch.Tensor]:
    return [ops.cast(x, multiplier, f8.CurrentScaling(format=fmt, block=ELEMENTWISE)) for fmt in FORMATS]


@MODES
def test_codes_of_two_million_random_products_are_rounded_twice(mode, assert_bits_equal):
    # each with its own multiplier, near enough to 1 / |x| for most products to lie inside the format
    x = _random_floats(2_000_000)
    near = np.random.default_rng(2).uniform(-20, 17, len(x)).astype(np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        multiplier = np.exp2(near) / np.abs(x)
        scaled = x * multiplier
    codes = _run(mode, _elementwise_casts, torch.from_numpy(x), torch.from_numpy(multiplier))
    for fmt, got in zip(FORMATS, codes, strict=True):
        expected = torch.from_numpy(oracle.encode(scaled, fmt))
        assert_bits_equal(got, expected, fmt)
        assert len(expected.unique()) > 240  # the data reaches (nearly) every code


# ---------------------------------------------------------------------------------- N1 to N4 together


@formats
@rules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_is_amax_rule_and_cast_of_each_block(fmt, rule, dtype, assert_bits_equal):
    x = (torch.randn(37, 100) * torch.exp2(torch.randint(-30, 14, (37, 1)).float())).to(dtype)
    quantized = f8.quantize(x, f8.CurrentScaling(format=fmt, block=(16, 16), scale=rule))
    values = x.float().numpy()
    for row, column in product(range(0, 37, 16), range(0, 100, 16)):
        block = values[row : row + 16, column : column + 16]
        multiplier = oracle.multiplier(np.abs(block).max(keepdims=True), fmt, rule)
        codes = torch.from_numpy(oracle.encode(block * multiplier, fmt))
        assert_bits_equal(quantized.codes[row : row + 16, column : column + 16], codes)


@formats
def test_the_largest_value_of_a_block_gets_the_largest_code(fmt):
    amax = torch.from_numpy(_amaxes())
    amax = amax[(amax > 2.0**-110) & amax.isfinite()]
    quantizer = f8.CurrentScaling(format=fmt, block=ELEMENTWISE)
    multiplier = quantizer.multiplier(amax)
    assert (amax * multiplier > oracle.LARGEST[fmt]).any()  # some products overflow by an ulp, and saturate
    assert (quantizer.cast(amax, multiplier) == oracle.LARGEST_CODE[fmt]).all()


@pytest.mark.parametrize(("x", "code"), [(449.0, 0x7E), (511.9, 0x7E), (-511.9, 0xFE), (448.0, 0x7E), (440.0, 0x7E)])
def test_what_e8m0_floor_leaves_above_448_saturates(x, code):
    quantized = f8.quantize(torch.tensor([x]), f8.CurrentScaling(scale="e8m0_floor"))
    assert (quantized.scale.item(), quantized.codes.item()) == (127, code)


@rules
def test_zeros_stay_zeros_of_their_sign(rule):
    quantized = f8.quantize(torch.tensor([0.0, -0.0, 0.0]), f8.CurrentScaling(scale=rule))
    assert quantized.codes.tolist() == [0, 0x80, 0]
    assert quantized.dequantize().tolist() == [0.0, -0.0, 0.0]
    assert quantized.dequantize().signbit().tolist() == [False, True, False]


@pytest.mark.parametrize("rule", ["fp32", "pow2"])
def test_a_block_of_subnormals_is_not_flushed(rule):
    x = torch.tensor([2.0**-133, -(2.0**-130), 2.0**-126])
    quantized = f8.quantize(x, f8.CurrentScaling(scale=rule))
    assert quantized.codes.tolist() != [0, 0x80, 0]
    assert torch.equal(quantized.dequantize(), x)


SPECIAL_QUANTIZERS = [
    f8.CurrentScaling(format=fmt, block=block, scale=rule)
    for fmt, rule in zip(FORMATS * 2, RULES, strict=True)
    for block in ((-1, -1), (1, -1), (-1, 1), (1, 16), (16, 16))
]


def _quantize_by_all(x: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    quantized = [f8.quantize(x, quantizer) for quantizer in SPECIAL_QUANTIZERS]
    return [(q.codes, q.scale, q.dequantize()) for q in quantized]


# in eager mode: that compiled codes have its bits, of NaN too, test_contracts.py shows for each kind of block
def test_one_special_value_makes_its_whole_block_nan_and_leaves_the_others(assert_bits_equal):
    clean = torch.randn(20, 40).bfloat16()
    for special in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        x = clean.clone()
        x[18, 33] = special
        for quantizer, got, expected in zip(
            SPECIAL_QUANTIZERS, _quantize_by_all(x), _quantize_by_all(clean), strict=True
        ):
            rows, columns = quantizer.block
            height, width = 20 if rows == -1 else rows, 40 if columns == -1 else columns
            block = torch.zeros(20, 40, dtype=torch.bool)
            top, left = 18 // height * height, 33 // width * width
            block[top : top + height, left : left + width] = True
            codes, scale, values = got
            assert (codes[block] == 0x7F).all(), quantizer
            assert values[block].isnan().all(), quantizer
            at = (18 // height, 33 // width)
            assert quantizer.scale_values(scale)[at].isnan(), quantizer
            scale, clean_scale = scale.clone(), expected[1].clone()
            scale[at] = clean_scale[at] = 1
            assert_bits_equal(scale, clean_scale, f"scales of other blocks, {quantizer}")
            assert_bits_equal(codes[~block], expected[0][~block], f"codes of other blocks, {quantizer}")
            assert_bits_equal(values[~block], expected[2][~block], f"values of other blocks, {quantizer}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@rules
def test_dequantize_rounds_the_exact_product_once(rule, dtype, assert_bits_equal):
    x = torch.randn(9, 48).to(dtype)
    quantized = f8.quantize(x, f8.CurrentScaling(block=(1, 16), scale=rule))
    values = np.array([oracle.value(code, "e4m3") for code in range(256)], dtype=np.float32)[quantized.codes.numpy()]
    scale = quantized.scale.numpy()
    scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127) if scale.dtype == np.uint8 else scale
    expected = torch.from_numpy(values * np.repeat(scale.astype(np.float32), 16, axis=1))
    assert_bits_equal(quantized.dequantize(), expected.to(dtype))
    assert_bits_equal(quantized.dequantize(torch.float32), expected)
