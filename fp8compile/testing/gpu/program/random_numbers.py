"""Random numbers as Inductor's kernels draw them on a GPU: Philox 4x32-10, from seed and index.

The index counts elements. A kernel draws one word for each element, or four words for four consecutive elements,
by Inductor's ``rand4x``. So two kernels that draw the same tensor may get different numbers; the reference draws
like the first kernel.

Sources: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; triton/language/random.py;
torch/_inductor/runtime/triton_helpers.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8compile.testing.gpu.program.arithmetic import square_root

__all__ = ["RandomNumbers", "philox", "seeds"]

ROUNDS = 10
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEYS = 0x9E3779B9, 0xBB67AE85
LOW, HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(seed: int, *counters: np.ndarray) -> list[np.ndarray]:
    """Draw four words for each counter.

    Args:
        seed: The key, 64 bits.
        counters: The four words of each counter, from the lowest on, as arrays of one shape. Missing words are 0.

    Returns:
        Four arrays of uint32 with the counters' shape.
    """
    words = [each.astype(np.uint64) for each in counters]
    words += [np.zeros_like(words[0])] * (4 - len(words))
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(ROUNDS):
        first, third = MULTIPLIERS[0] * words[0], MULTIPLIERS[1] * words[2]
        words = [
            third >> HIGH ^ words[1] ^ np.uint64(keys[0]), third & LOW,
            first >> HIGH ^ words[3] ^ np.uint64(keys[1]), first & LOW,
        ]  # fmt: skip
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, KEYS, strict=True)]
    return [word.astype(np.uint32) for word in words]


def seeds(count: int) -> Tensor:
    """Draw seeds as generated code does, (count,) int64, from PyTorch's CPU generator."""
    return torch.randint(-(2**63), 2**63 - 1, [count])


def _uniform(words: np.ndarray) -> np.ndarray:
    signed = words.view(np.int32)
    return np.where(signed < 0, ~signed, signed).astype(np.float32) * np.float32(4.6566127342e-10)


def _normal(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    radius = square_root(-2.0 * torch.log(torch.from_numpy(np.maximum(np.float32(1e-7), first))))
    angle = torch.from_numpy(np.float32(2 * math.pi) * second)
    return (radius * torch.cos(angle)).numpy(), (radius * torch.sin(angle)).numpy()


class RandomNumbers:
    """The random numbers of one run; graphs that draw from the same seed get the same numbers."""

    def __init__(self) -> None:
        self._by_fours: dict[int, bool] = {}  # by seed: how the first kernel draws that draws from it

    def drawn(self, name: str, args: Sequence[Any], *, by_fours: bool) -> Tensor:
        """Compute ``prims.inductor_random`` or ``prims.inductor_randint``.

        Args:
            name: The operator's name, without its namespace.
            args: The operator's arguments.
            by_fours: Whether the kernel takes all four words of a Philox counter, or only the first. A later call with
                the same seed draws as the first call did, whatever it passes here.

        Returns:
            Numbers in float32; whole numbers in int64.
        """
        if name == "inductor_randint":
            low, high, size, seed = args
            first, second, *_ = philox(int(seed), np.arange(math.prod(size)))
            spread = (first.astype(np.uint64) | second.astype(np.uint64) << HIGH) % np.uint64(high - low)
            return torch.from_numpy(spread.astype(np.int64) + low).view(size)
        size, seed, mode = args
        count, by_fours = math.prod(size), self._by_fours.setdefault(int(seed), by_fours)
        words = philox(int(seed), np.arange(-(-count // 4) if by_fours else count))
        uniform = [_uniform(each) for each in words]
        if mode == "randn":
            uniform = [*_normal(*uniform[:2]), *_normal(*uniform[2:])]
        numbers = np.stack(uniform, -1).reshape(-1)[:count] if by_fours else uniform[0]
        return torch.from_numpy(numbers).view(size)
