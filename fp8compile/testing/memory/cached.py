"""Codes of weights that live from micro-batch to micro-batch, with ``weight_lifetime="step"``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fp8compile.tensor.weight_codes import WeightCodes, known_codes

__all__ = ["CachedCodes", "cached_codes", "found_codes"]


@dataclass(frozen=True, kw_only=True)
class CachedCodes:
    """A quantized weight that its layer caches between optimizer steps.

    Attributes:
        parameter: Name of the weight in the model.
        shape: Its shape.
        dtype: Dtype to which the layer casts the weight before quantizing it.
        sets: 1 if forward and backward use the same quantized weight, else 2.
        bytes: Bytes of all quantized data and scales.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sets: int
    bytes: int


def found_codes(model: nn.Module) -> dict[str, WeightCodes]:
    """The codes that are kept beside a model's parameters now, by the parameters' names."""
    every = ((name, known_codes(parameter)) for name, parameter in model.named_parameters())
    return {name: codes for name, codes in every if codes is not None}


def cached_codes(model: nn.Module) -> tuple[CachedCodes, ...]:
    """The codes that are kept beside a model's parameters now, in the order of the parameters."""
    return tuple(
        CachedCodes(
            parameter=name,
            shape=tuple(codes.shape),
            dtype=codes.dtype,
            sets=len(codes.sets()),
            bytes=sum(part.untyped_storage().nbytes() for part in codes.parts()),
        )
        for name, codes in found_codes(model).items()
    )
