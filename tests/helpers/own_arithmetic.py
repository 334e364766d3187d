"""Quantizers whose codes only their own `dequantize` understands, in a module that other processes can import."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8compile.library import E2M1, E4M3, Quantizer, as_matrix, exact_quotient, expand_blocks


@dataclass(frozen=True, repr=False)
class Int8(Quantizer):
    """Symmetric int8, -127 to 127; -128 stands for NaN."""

    block: tuple[int, int] = (1, -1)

    def multiplier(self, amax: Tensor) -> Tensor:
        quotient = exact_quotient(127.0, amax).clamp(max=torch.finfo(torch.float32).max)
        multiplier = torch.where(amax <= 0, 1.0, quotient)
        return torch.where(amax.isfinite(), multiplier, torch.nan)

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        scaled = as_matrix(x).float() * expand_blocks(multiplier, x.shape, self.block)
        codes = torch.where(scaled.isnan(), -128.0, scaled.round().clamp(-127, 127))
        return codes.to(torch.int8).view(torch.uint8).reshape(x.shape)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        numbers = codes.view(torch.int8).to(dtype)
        numbers = as_matrix(torch.where(numbers == -128, torch.nan, numbers))
        return (numbers * expand_blocks(scale.to(dtype), codes.shape, self.block)).reshape(codes.shape)


@dataclass(frozen=True, repr=False)
class Subclass(Int8):
    """Inherits a dequantize that is not the library's."""


@dataclass(frozen=True, repr=False)
class FourBits(Quantizer):
    """e2m1 codes, one a byte, with a scale for a row, column, block or tensor."""

    format: str = "e2m1"

    def multiplier(self, amax: Tensor) -> Tensor:
        quotient = exact_quotient(E2M1.max, amax).clamp(max=torch.finfo(torch.float32).max)
        multiplier = torch.where(amax <= 0, 1.0, quotient)
        return torch.where(amax.isfinite(), multiplier, torch.nan)


@dataclass(frozen=True, repr=False)
class Packed(FourBits):
    """Two codes a byte, neighbours along the dim ``along``: -1 in rows, -2 in columns."""

    along: int = -1

    def transposed(self) -> Packed:
        return replace(super().transposed(), along=-3 - self.along)

    def codes_shape(self, shape):
        return tuple(size // 2 if dim - len(shape) == self.along else size for dim, size in enumerate(shape))

    def values_shape(self, codes_shape):
        count = len(codes_shape)
        return tuple(size * 2 if dim - count == self.along else size for dim, size in enumerate(codes_shape))

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        codes = super().cast(x, multiplier).movedim(self.along, -1)
        return (codes[..., ::2] | (codes[..., 1::2] << 4)).movedim(-1, self.along)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        pairs = codes.movedim(self.along, -1)
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).movedim(-1, self.along)
        return super().dequantize(codes, scale, dtype)


@dataclass(frozen=True, repr=False)
class Cuttable(Packed):
    """Packed, and says which codes these are, one a byte, so that ranks can cut them anywhere."""

    def unpacked(self) -> FourBits:
        return FourBits(block=self.block)


@dataclass(frozen=True, repr=False)
class SameFloat8(Quantizer):
    """This class has its own dequantize, computes what the inherited one does, and declares it."""

    block: tuple[int, int] = (1, -1)

    def gemm_format(self):
        return E4M3

    def multiplier(self, amax: Tensor) -> Tensor:
        multiplier = torch.where(amax <= 0, 1.0, exact_quotient(256.0, amax).clamp(max=torch.finfo(torch.float32).max))
        return torch.where(amax.isfinite(), multiplier, torch.nan)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().dequantize(codes, scale, dtype)


@dataclass(frozen=True, repr=False)
class ByteScales(SameFloat8):
    """Stores scales as E4M3 bytes, with the blocks of MX, whose GEMM would read them as powers of two."""

    block: tuple[int, int] = (1, 32)

    def multiplier(self, amax: Tensor) -> Tensor:
        scale = E4M3.decode(E4M3.encode(amax / 448.0))
        return exact_quotient(1.0, torch.where(scale > 0, scale, 1.0))

    def scale_dtype(self) -> torch.dtype:
        return torch.uint8

    def scale_of(self, multiplier: Tensor) -> Tensor:
        return E4M3.encode(exact_quotient(1.0, multiplier))

    def scale_values(self, scale: Tensor) -> Tensor:
        return E4M3.decode(scale)
