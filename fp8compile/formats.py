"""Number formats of codes and scales.

    format  bits  layout   largest  infinity  NaN            used for
    e4m3    8     s.4.3    448      no        0x7f, 0xff     codes
    e5m2    8     s.5.2    57344    yes       0x7d-7f, ...   codes with more range (gradients)
    e2m1    4     s.2.1    6        no        no             codes of MXFP4 and NVFP4
    e8m0    8     8.0      2**127   no        0xff           scales of the MX formats

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.target import CASTS_BY_FLOAT16, target_of

__all__ = ["E2M1", "E4M3", "E5M2", "E8M0", "Float8Format", "element_format", "pack", "unpack"]

FLOAT32_EXPONENT_MASK = 0x7F800000
FLOAT32_MANTISSA_BITS = 23
FLOAT32_BIAS = 127
FLOAT32_MAX = torch.finfo(torch.float32).max
# NaN is written as bits wherever a compiled graph may hold it. Two casts of one tensor are merged only if their nodes
# are equal, and a NaN literal is not equal to itself.
FLOAT32_NAN = 0x7FC00000
NAN_CODE = 0x7F  # the code for NaN in e4m3 and e5m2


def _to_a_neighbour(values: Tensor, noise: Tensor, fmt: Float8Format | Float4Format) -> Tensor:
    """Round each float32 value to one of the format's two values around it, selected by ``noise``."""
    saturated = values.clamp(-fmt.max, fmt.max)
    field = (saturated.view(torch.int32) & FLOAT32_EXPONENT_MASK) >> FLOAT32_MANTISSA_BITS
    exponent = field.clamp(min=FLOAT32_BIAS + fmt.min_exponent) - fmt.mantissa_bits - FLOAT32_BIAS
    # powers of two, so that neither product rounds
    per_unit = ((FLOAT32_BIAS - exponent) << FLOAT32_MANTISSA_BITS).view(torch.float32)
    unit = ((FLOAT32_BIAS + exponent) << FLOAT32_MANTISSA_BITS).view(torch.float32)
    in_units = saturated.abs() * per_unit
    lower = in_units.floor()
    rounded = (lower + (noise < in_units - lower).float()) * unit
    return rounded.copysign(saturated)


def _to_odd(values: Tensor) -> Tensor:
    """Round float32 values to 7 mantissa bits, to odd: the last kept bit becomes 1 if a dropped bit is 1.

    Codes stay the same, because they have at least two bits fewer (Boldo and Melquiond 2008, "Emulation of a FMA and
    correctly rounded sums: proved algorithms using rounding to odd"). A truncating cast of the result to float16
    changes no code either: the cast is exact, except for values that round to code 0. NaN stays NaN.
    """
    bits = values.view(torch.int32)
    sticky = ((bits & 0xFFFF) + 0xFFFF) & 0x10000
    return ((bits | sticky) & -0x10000).view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Float8Format:
    """An 8-bit floating point format of codes, such as e4m3.

    Attributes:
        name: Name of the format, such as ``"e4m3"``, as quantizers take it.
        dtype: The PyTorch dtype with the same bits.
        max: The largest finite value.
        max_exponent: The exponent of the largest finite value, ``floor(log2(max))``.
        min_exponent: The exponent of the smallest normal value; subnormal values below it have the same spacing.
        mantissa_bits: Number of bits after the leading one.
        bits: Number of bits of a code.
    """

    name: str
    dtype: torch.dtype
    max: float
    max_exponent: int
    min_exponent: int
    mantissa_bits: int
    bits: int = 8

    def encode(self, values: Tensor) -> Tensor:
        """Round float32 values to the nearest code, uint8, ties to even; saturates overflow and infinities.

        Every NaN gives the code 0x7f, so that codes made by different kernels can be compared as bytes.
        """
        saturated = self._saturated(values)
        # False for NaN; `isnan` on a GPU would first compute a magnitude and flush subnormals
        is_number = saturated <= self.max
        return torch.where(is_number, saturated.to(self.dtype).view(torch.uint8), NAN_CODE)

    def encode_numbers(self, values: Tensor) -> Tensor:
        """Encode float32 values as ``encode`` does, except that a NaN may give any of the codes for NaN."""
        return self._saturated(values).to(self.dtype).view(torch.uint8)

    def _saturated(self, values: Tensor) -> Tensor:
        """Clamp values to the format's range; then round to odd on GPUs that cast to float8 by way of float16."""
        saturated = values.clamp(-self.max, self.max)
        if target_of(values.device).capability == CASTS_BY_FLOAT16:
            return _to_odd(saturated)
        return saturated

    def encode_stochastic(self, values: Tensor, noise: Tensor) -> Tensor:
        """Round each float32 value at random to one of the two codes around it, without bias.

        ``noise`` is uniform in [0, 1), float32, of the same shape. Let f be the value's distance from the code nearer
        zero, as a fraction of the distance between the two codes: if the noise is less than f, the value is rounded
        away from zero. Overflow saturates, NaN gives 0x7f.
        """
        return self.encode(_to_a_neighbour(values, noise, self))

    def decode(self, codes: Tensor) -> Tensor:
        """Convert codes (uint8, any shape) to their values, float32, exact."""
        return codes.view(self.dtype).float()


@dataclass(frozen=True, kw_only=True)
class Float4Format:
    """A 4-bit floating point format: sign, two exponent bits, one mantissa bit; no NaN and no infinity.

    Each code takes one byte here; `pack` puts two codes into a byte. Attributes are those of `Float8Format` without
    ``dtype``. The attribute ``values`` has the magnitudes of codes 0 to 7.
    """

    name: str
    values: tuple[float, ...]
    max: float
    max_exponent: int
    min_exponent: int
    mantissa_bits: int
    bits: int = 4

    def encode(self, values: Tensor) -> Tensor:
        """Round float32 values to the nearest code, ties to even; overflow saturates.

        Codes are 0 to 15, uint8; bit 3 is the sign, also of a zero. The format has no NaN: a NaN gives the code 0,
        and the scale of its block has to be NaN.
        """
        magnitude = values.abs().clamp(max=self.max)
        bits = magnitude.view(torch.int32)
        # From 1 on, a code is the exponent and first mantissa bit of the float32; the other 22 bits are rounded off.
        large = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
        # below 1, codes are 0.5 apart, and a tie goes to the even code
        small = (magnitude > 0.25).to(torch.int32) + (magnitude >= 0.75).to(torch.int32)
        code = torch.where(magnitude < 1, small, large) | (values.signbit().to(torch.int32) << 3)
        return torch.where(magnitude <= self.max, code, 0).to(torch.uint8)  # False for NaN

    def encode_stochastic(self, values: Tensor, noise: Tensor) -> Tensor:
        """Round each float32 value at random to one of the two codes around it, without bias; a NaN gives the code 0.

        ``noise`` is uniform in [0, 1), float32, of the same shape.
        """
        return self.encode(_to_a_neighbour(values, noise, self))

    def decode(self, codes: Tensor) -> Tensor:
        """Convert codes 0 to 15 (uint8, any shape) to their values, float32, exact."""
        code = codes.to(torch.int32) & 7
        bits = ((code >> 1) + (FLOAT32_BIAS - 1)) << FLOAT32_MANTISSA_BITS | (code & 1) << (FLOAT32_MANTISSA_BITS - 1)
        half = (FLOAT32_BIAS - 1) << FLOAT32_MANTISSA_BITS  # the bits of 0.5, code 1; codes 0 and 1 are not normal
        magnitude = torch.where(code < 2, code * half, bits).view(torch.float32)
        return torch.where(codes >= 8, -magnitude, magnitude)


@dataclass(frozen=True, kw_only=True)
class ExponentFormat:
    """A format of powers of two without a sign: byte b stands for 2**(b - 127), byte 255 for NaN."""

    name: str
    bias: int = 127
    nan: int = 255

    def encode(self, values: Tensor) -> Tensor:
        """Convert float32 powers of two to bytes: each value is 2**k with -127 <= k <= 127, or NaN."""
        # 2**-127 is a float32 subnormal: its exponent field is 0, which is also its byte
        return self._bytes(values, values.view(torch.int32) >> FLOAT32_MANTISSA_BITS)

    def encode_inverses(self, values: Tensor) -> Tensor:
        """Convert ``1 / values`` to bytes; each of ``values`` is 2**k with -127 <= k <= 127, or NaN."""
        return self._bytes(values, 2 * self.bias - (values.view(torch.int32) >> FLOAT32_MANTISSA_BITS))

    def _bytes(self, values: Tensor, exponents: Tensor) -> Tensor:
        return torch.where(values <= torch.inf, exponents, self.nan).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Convert bytes (uint8, any shape) to float32 values, exactly; byte 0 gives 2**-127, a subnormal."""
        byte = codes.to(torch.int32)
        smallest = 1 << (FLOAT32_MANTISSA_BITS - 1)
        power = torch.where(byte == 0, smallest, byte << FLOAT32_MANTISSA_BITS)
        return torch.where(byte == self.nan, FLOAT32_NAN, power).view(torch.float32)


E4M3 = Float8Format(
    name="e4m3", dtype=torch.float8_e4m3fn, max=448.0, max_exponent=8, min_exponent=-6, mantissa_bits=3
)
E5M2 = Float8Format(
    name="e5m2", dtype=torch.float8_e5m2, max=57344.0, max_exponent=15, min_exponent=-14, mantissa_bits=2
)
E2M1 = Float4Format(
    name="e2m1",
    values=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    max=6.0,
    max_exponent=2,
    min_exponent=0,
    mantissa_bits=1,
)
E8M0 = ExponentFormat(name="e8m0")

ELEMENT_FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1)}


def element_format(name: str) -> Float8Format | Float4Format:
    """Return the format of codes with this name; raise a ValueError that lists all names if there is none."""
    if name not in ELEMENT_FORMATS:
        allowed = ", ".join(repr(n) for n in ELEMENT_FORMATS)
        raise ValueError(f"format {name!r} is not known; it must be one of {allowed}.")
    return ELEMENT_FORMATS[name]


def limit_of(fmt: Float8Format | Float4Format) -> float:
    """Return the midpoint of ``fmt.max`` and the number that would follow if the format did not end there."""
    return fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)


def pack(codes: Tensor, dim: int) -> Tensor:
    """Pack 4-bit codes, uint8 from 0 to 15: two neighbours along ``dim`` share a byte, the first in the low bits.

    The size along ``dim`` must be even, and is half as large in the result.
    """
    last = codes.movedim(dim, -1)
    return (last[..., ::2] | (last[..., 1::2] << 4)).movedim(-1, dim)


def repack(packed: Tensor) -> Tensor:
    """Repack 4-bit codes (M, K): from two neighbours of a row per byte to two neighbours of a column.

    ``packed`` is (M, K / 2), the result is (M / 2, K).
    """
    first, second = packed[::2], packed[1::2]
    return torch.stack([(first & 15) | (second << 4), (first >> 4) | (second & 240)], -1).flatten(-2)


def unpack(packed: Tensor, dim: int) -> Tensor:
    """Undo `pack`: return one code per byte, twice as many along ``dim``."""
    return torch.stack(lanes_of(packed.movedim(dim, -1)), -1).flatten(-2).movedim(-1, dim)


def lanes_of(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Split bytes of two codes into two tensors, one code per byte: lower four bits, upper four bits."""
    return packed & 15, packed >> 4
