"""What quantization has to give, block by block in numpy, on top of tests/helpers/oracle.py."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import oracle
import torch
from torch import Tensor

import fp8compile as f8

__all__ = ["quantized"]


def _amax(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest magnitude of each block of a matrix; NaN wins, nothing gives 0."""
    rows, columns = values.shape
    height, width = rows if block[0] == -1 else block[0], columns if block[1] == -1 else block[1]
    grid_rows = 1 if block[0] == -1 else -(-rows // height)
    grid_columns = 1 if block[1] == -1 else -(-columns // width)
    grid = np.zeros((grid_rows, grid_columns), np.float32)
    for i in range(grid_rows):
        for j in range(grid_columns):
            part = np.abs(values[i * height : (i + 1) * height, j * width : (j + 1) * width])
            grid[i, j] = part.max() if part.size else 0
    return grid


def _spread(per_block: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """One value a block, for each element."""
    row = np.zeros(shape[0], int) if block[0] == -1 else np.arange(shape[0]) // block[0]
    column = np.zeros(shape[1], int) if block[1] == -1 else np.arange(shape[1]) // block[1]
    return per_block[row[:, None], column[None, :]]


def _nearest_float32(number: Fraction) -> np.float32:
    guess = np.float32(float(number))
    around = (np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(np.inf)))
    return min((a for a in around if np.isfinite(a)), key=lambda candidate: abs(Fraction(float(candidate)) - number))


def _multiplier_at_eps(quantizer: f8.CurrentScaling) -> np.float32:
    """Of a block below the floor: from eps as it is for a quotient, from the nearest float32 for an E8M0 byte."""
    fmt, rule, eps = quantizer.format, quantizer.scale, quantizer.eps
    if rule.startswith("e8m0"):
        return oracle.multiplier(np.array([eps], np.float32), fmt, rule)[0]
    quotient = _nearest_float32(Fraction(oracle.LARGEST[fmt]) / Fraction(eps))
    return np.float32(2.0 ** (int(np.frexp(quotient)[1]) - 1)) if rule == "pow2" else quotient


def _multiplier(amax: np.ndarray, quantizer: f8.CurrentScaling) -> np.ndarray:
    multiplier = oracle.multiplier(amax, quantizer.format, quantizer.scale).astype(np.float32)
    if not quantizer.eps:
        return multiplier
    with np.errstate(invalid="ignore"):  # a NaN is not below
        below = amax.astype(np.float64) < quantizer.eps
    return np.where(below, _multiplier_at_eps(quantizer), multiplier)


def _stored_scale(multiplier: np.ndarray, quantizer: f8.CurrentScaling) -> np.ndarray:
    scale = oracle.inverse(multiplier)
    if not quantizer.scale.startswith("e8m0"):
        return scale
    exponent = np.frexp(np.where(np.isnan(scale), np.float32(1), scale))[1] - 1
    return np.where(np.isnan(scale), 255, exponent + 127).astype(np.uint8)


def quantized(x: Tensor, quantizer: f8.CurrentScaling) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scale of a tensor, and the float32 values that they stand for.

    Returns:
        uint8 of the shape of x; float32 or uint8, the grid of blocks as a matrix; float32 of the shape of x.
    """
    rows, columns = x.shape[:-1].numel(), x.shape[-1] if x.ndim else 1
    values, block = x.detach().float().reshape(rows, columns).numpy(), quantizer.block
    multiplier = _multiplier(_amax(values, block), quantizer)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        codes = oracle.encode(values * _spread(multiplier, values.shape, block), quantizer.format)
        scale = oracle.inverse(multiplier)
        table = np.array([oracle.value(code, quantizer.format) for code in range(256)], np.float32)
        product = table[codes] * _spread(scale, values.shape, block)
    return (
        torch.from_numpy(codes).view(x.shape),
        torch.from_numpy(_stored_scale(multiplier, quantizer)),
        torch.from_numpy(product).view(x.shape),
    )
