"""Noise for stochastic rounding: a hash of seed, position and value, equal in all backends.

No random number generator is read, so a resumed run or a recomputed forward rounds as before. A position is the
element's index in the whole flattened tensor, so that a shard has the noise of the whole tensor.

Source: Wellons, "Prospecting for Hash Functions" (2018), for the 32-bit mixing constants; Gupta et al. 2015, "Deep
Learning with Limited Numerical Precision", arXiv:1502.02551, for stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ROUNDINGS", "check_rounding", "noise", "positions"]

MASK = 0xFFFFFFFF
SEED_STEP = 0x9E3779B9  # 2**32 divided by the golden ratio, so that seeds 0, 1, 2, ... are far apart
FRACTION_BITS = 24
LARGEST_SEED = (1 << 31) - 1


ROUNDINGS = ("nearest", "stochastic")


def check_rounding(owner: str, rounding: object, seed: object, allowed: Sequence[str] = ROUNDINGS) -> None:
    """Raise a ValueError unless a quantizer's fields ``rounding`` and ``seed`` have allowed values.

    ``owner`` is the class that the error names; ``allowed`` are the roundings that it has.
    """
    if rounding not in allowed:
        raise ValueError(f"{owner}: `rounding` is {rounding!r}; it must be {' or '.join(map(repr, allowed))}.")
    if type(seed) is not int or not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"{owner}: `seed` is {seed!r}; it must be an int from 0 to {LARGEST_SEED}.")


def _mixed(h: Tensor) -> Tensor:
    """Mix the 32-bit numbers in an int64 tensor by a bijection (two multiplications, three xor-shifts).

    Both factors are below 2**31, so that no product overflows int64.
    """
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & MASK
    h = ((h ^ (h >> 15)) * 0x735A2D97) & MASK
    return h ^ (h >> 15)


def positions(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute the arguments ``rows`` and ``columns`` of `noise` for a whole matrix of shape ``shape``."""
    return torch.arange(shape[0], device=device) * shape[1], torch.arange(shape[1], device=device)


def noise(values: Tensor, seed: int, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
    """Compute a number in [0, 1) for each element of ``values``, (M, K) float32.

    Args:
        values: The values that will be rounded.
        seed: At least 0.
        rows: Position in the whole flattened tensor of the first element of each row, (M,) int64; None if ``values``
            is whole.
        columns: Offset of each column from the first element of a row, (K,) int64; None if ``values`` is whole.
    """
    if rows is None or columns is None:
        rows, columns = positions(values.shape, values.device)
    position = rows.unsqueeze(1) + columns
    bits = values.contiguous().view(torch.int32).long() & MASK
    h = _mixed((position + (seed * SEED_STEP & MASK)) & MASK) ^ (position >> 32)
    h = _mixed(h ^ bits)
    return (h >> (32 - FRACTION_BITS)).int().float() * 2.0**-FRACTION_BITS
