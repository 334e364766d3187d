"""Formats: every code means what the OFP8 and MX specifications say, and encoding finds the nearest one."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

from fp8compile.formats import E2M1, E4M3, E5M2, E8M0, element_format

FLOAT8 = {"e4m3": E4M3, "e5m2": E5M2}
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
float8 = pytest.mark.parametrize("name", FLOAT8)


def _values(name: str) -> torch.Tensor:
    return torch.tensor([oracle.value(code, name) for code in range(256)], dtype=torch.float32)


@float8
def test_each_of_256_codes_decodes_to_its_value(name, assert_bits_equal):
    assert_bits_equal(FLOAT8[name].decode(ALL_BYTES), _values(name))


@float8
def test_each_finite_code_survives_decode_and_encode(name, assert_bits_equal):
    finite = ALL_BYTES[_values(name).isfinite()]
    assert len(finite) == {"e4m3": 254, "e5m2": 248}[name]
    assert_bits_equal(FLOAT8[name].encode(FLOAT8[name].decode(finite)), finite)


@float8
def test_constants_are_those_of_the_largest_code(name):
    fmt = FLOAT8[name]
    assert fmt.max == oracle.value(oracle.LARGEST_CODE[name], name) == torch.finfo(fmt.dtype).max
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    assert (fmt.name, fmt.bits, element_format(name)) == (name, 8, fmt)


@float8
def test_ties_go_to_the_even_code_and_one_ulp_beside_them_to_the_nearest(name, assert_bits_equal):
    largest = oracle.LARGEST_CODE[name]
    magnitudes = _values(name)[: largest + 1]
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    below, above = torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, torch.tensor(1e9))
    lower = torch.arange(largest, dtype=torch.uint8)
    for sign, sign_bit in ((1.0, 0), (-1.0, 0x80)):
        assert_bits_equal(FLOAT8[name].encode(sign * below), lower | sign_bit)
        assert_bits_equal(FLOAT8[name].encode(sign * above), lower + 1 | sign_bit)
        assert_bits_equal(FLOAT8[name].encode(sign * middles), lower + lower % 2 | sign_bit)


@float8
@pytest.mark.parametrize("factor", [1.0 + 2**-23, 1.03, 1.0625, 2.0, 1e30, torch.inf])
@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_the_largest_value_codes_saturate(name, factor, sign):
    code = FLOAT8[name].encode(torch.tensor([sign * FLOAT8[name].max * factor])).item()
    assert code == oracle.LARGEST_CODE[name] | (0x80 if sign < 0 else 0)


@float8
@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -1, -0x7FFFFF])
def test_every_nan_encodes_to_7f(name, pattern):
    nan = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    assert FLOAT8[name].encode(nan).item() == 0x7F


@float8
def test_zeros_keep_their_sign_and_empty_stays_empty(name):
    fmt = FLOAT8[name]
    assert fmt.encode(torch.tensor([0.0, -0.0, 1e-45, -1e-45])).tolist() == [0, 0x80, 0, 0x80]
    assert fmt.encode(torch.empty(0, 3)).shape == fmt.decode(torch.empty(0, 3, dtype=torch.uint8)).shape == (0, 3)


@float8
def test_two_million_random_floats_encode_as_the_oracle_says(name, assert_bits_equal):
    # exponents around the format's range: of plain random bit patterns, most saturate or vanish
    generator = np.random.default_rng(0)
    exponents = generator.integers(127 - 20, 127 + 18, 2_000_000, dtype=np.uint32)
    bits = generator.integers(0, 2**32, 2_000_000, dtype=np.uint32) & np.uint32(0x807FFFFF)
    values = (bits | exponents << np.uint32(23)).view(np.float32)
    assert_bits_equal(FLOAT8[name].encode(torch.from_numpy(values)), torch.from_numpy(oracle.encode(values, name)))


# ---------------------------------------------------------------------------------- e2m1


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.0, 0), (0.5, 1), (1.0, 2), (1.5, 3), (2.0, 4), (3.0, 5), (4.0, 6), (6.0, 7), (7.0, 7), (torch.inf, 7)],
)
def test_e2m1_values(value, code):
    assert E2M1.encode(torch.tensor([value, -value])).tolist() == [code, code | 8]
    if value <= 6:
        assert E2M1.decode(torch.tensor([code, code | 8], dtype=torch.uint8)).tolist() == [value, -value]


@pytest.mark.parametrize(("tie", "code"), [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)])
def test_e2m1_ties_go_to_the_even_code(tie, code):
    tie = torch.tensor(tie)
    below, above = torch.nextafter(tie, torch.tensor(0.0)), torch.nextafter(tie, torch.tensor(9.0))
    assert E2M1.encode(torch.stack([tie, -tie])).tolist() == [code, code | 8]
    assert E2M1.encode(above).item() - E2M1.encode(below).item() == 1


def test_e2m1_zeros_keep_their_sign():
    assert E2M1.encode(torch.tensor([0.0, -0.0, -1e-45])).tolist() == [0, 8, 8]
    assert E2M1.decode(torch.tensor([0, 8], dtype=torch.uint8)).signbit().tolist() == [False, True]


# ---------------------------------------------------------------------------------- e8m0


def test_each_e8m0_byte_is_two_to_the_byte_less_127(assert_bits_equal):
    expected = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan])
    assert expected[0] == 2.0**-127  # a float32 subnormal, kept
    assert_bits_equal(E8M0.decode(ALL_BYTES), expected)


def test_all_256_e8m0_bytes_survive_decode_and_encode(assert_bits_equal):
    assert_bits_equal(E8M0.encode(E8M0.decode(ALL_BYTES)), ALL_BYTES)


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ValueError, match="format 'e3m4' is not known; it must be one of 'e4m3', 'e5m2', 'e2m1'"):
        element_format("e3m4")


def test_bytes_of_inverses_are_those_of_exact_quotients(assert_bits_equal):
    powers = torch.cat([torch.ldexp(torch.ones(255), torch.arange(-127, 128)), torch.tensor([torch.nan])])
    quotients = (1.0 / powers.double()).float()
    assert_bits_equal(E8M0.encode_inverses(powers), E8M0.encode(quotients), "bytes")
