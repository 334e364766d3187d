"""Random Hadamard transform: replace sixteen neighbours by sixteen sums of them with random signs.

    y[j] = 1/4 * sum over i of x[i] * sign[i] * (-1)**popcount(i & j)

The transform is orthogonal, so a product does not change if both matrices are transformed. It spreads an outlier,
whose block would otherwise lose most of its four bits. Terms are added in the order of i, so that all backends have
the same bits.

Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149. The signs are
TransformerEngine's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile._compat import statically_true

__all__ = ["GROUP", "SIGNS", "factors", "inverse_hadamard", "is_signs", "random_hadamard"]

GROUP = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def is_signs(signs: object) -> bool:
    """Whether a value is a tuple of sixteen signs, each 1 or -1."""
    return isinstance(signs, tuple) and len(signs) == GROUP and all(type(s) is int and abs(s) == 1 for s in signs)


def _parity_quarters(places: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
    """Compute 0.25 * (-1)**popcount(i & j) for i from 1 to 15, each as a tensor over the numbers j in ``places``.

    A graph gets one node for each i, instead of eight nodes that count bits.
    """
    quarters: dict[int, Tensor] = {}
    for bit in range(GROUP.bit_length() - 1):
        sign = (1 - 2 * ((places >> bit) & 1)).to(dtype)
        with_bit = {below | 1 << bit: quarter * sign for below, quarter in quarters.items()}
        quarters |= {1 << bit: 0.25 * sign, **with_bit}
    return quarters


def _sign_vector(signs: tuple[int, ...], places: Tensor) -> Tensor:
    """Return the sixteen signs as a float32 tensor in the shape of ``places``, computed from one int.

    A graph then holds no constant tensor.
    """
    negative = sum(1 << i for i, sign in enumerate(signs) if sign < 0)
    return (1 - 2 * ((negative >> places) & 1)).float()


def factors(signs: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """Return the factors of the transform's sixteen sums: row j has the sixteen neighbours' factors in sum j."""
    return tuple(
        tuple(0.25 * sign * (-1) ** (i & j).bit_count() for i, sign in enumerate(signs)) for j in range(GROUP)
    )


def _groups(x: Tensor, dim: int) -> Tensor:
    """View a matrix (M, K), padded with zeros, as groups of 16: (M / 16, 16, K) or (M, K / 16, 16).

    ``dim``, 0 or 1, is the dim that is split.
    """
    missing = -x.shape[dim] % GROUP
    if not statically_true(missing == 0):
        x = pad(x, (0, 0, 0, missing) if dim == 0 else (0, missing))
    return x.unflatten(dim, (x.shape[dim] // GROUP, GROUP))


def _places(dim: int, device: torch.device) -> Tensor:
    places = torch.arange(GROUP, device=device)
    return places.unsqueeze(1) if dim == 0 else places


def _sums(groups: Tensor, dim: int, places: Tensor, signs: tuple[int, ...]) -> Tensor:
    inside, quarters = dim + 1, _parity_quarters(places, groups.dtype)
    total = groups.narrow(inside, 0, 1) * (0.25 * signs[0])
    for i in range(1, GROUP):
        total = total + groups.narrow(inside, i, 1) * (quarters[i] * signs[i])
    return total


def random_hadamard(x: Tensor, dim: int, signs: tuple[int, ...], *, every: slice = slice(None)) -> Tensor:
    """Transform each group of sixteen neighbours of a float32 matrix (M, K), along ``dim`` (0 or 1).

    ``signs`` are the transform's sixteen signs; ``every`` selects some of the sixteen sums. The size along ``dim`` is
    first rounded up to a multiple of 16, with zeros for missing neighbours.
    """
    return _sums(_groups(x, dim), dim, _places(dim, x.device)[every], signs).flatten(dim, dim + 1)


def inverse_hadamard(y: Tensor, dim: int, signs: tuple[int, ...]) -> Tensor:
    """Undo `random_hadamard` along ``dim``, in the dtype of ``y``.

    The size of ``y`` along ``dim`` is a multiple of 16; ``signs`` are the transform's sixteen signs.
    """
    places = _places(dim, y.device)
    sums = _sums(_groups(y, dim), dim, places, (1,) * GROUP)
    return (sums * _sign_vector(signs, places).to(y.dtype)).flatten(dim, dim + 1)
