"""Sharding rules: which dims of an op's arguments may be sharded, and how results combine.

A rule is a function of the op's arguments that returns every way to shard them, and reads only shapes of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fp8compile.quantizers.blocks import Block

__all__ = ["REDUCTIONS", "Cut", "Sharding", "Split", "along_every_dim", "grid_cuts"]

REDUCTIONS = ("max", "min", "sum")


@dataclass(frozen=True)
class Cut:
    """One dim along which an argument may be sharded.

    Attributes:
        dim: The dim; negative numbers count from the end.
        unit: Number of neighbouring elements that stay on one rank; the last unit may have fewer. All sharded
            arguments of a `Split` have the same number of units, and a rank gets the same units of each argument.
    """

    dim: int
    unit: int = 1


@dataclass(frozen=True)
class Split:
    """One way to run an op on shards such that the combined results are the same as on full tensors.

    Attributes:
        inputs: One entry for each argument of the op: a ``Cut``, or None if the argument is replicated or is not a
            tensor.
        outputs: One entry for each result. A dim: ranks' results are concatenated along it. ``"max"``, ``"min"`` or
            ``"sum"``: ranks' results are reduced element by element, NaN included. None: the result is replicated.
        exact: Whether the combined result is bit-identical to the result on full tensors. False for GEMMs, because a
            backend chooses the order of summation from the sizes of its operands.
    """

    inputs: tuple[Cut | None, ...]
    outputs: tuple[int | str | None, ...]
    exact: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, tuple) or any(i is not None and not isinstance(i, Cut) for i in self.inputs):
            raise TypeError(f"Split: `inputs` must be a tuple of Cut or None, one per argument; got {self.inputs!r}.")
        good = isinstance(self.outputs, tuple) and all(
            out is None or out in REDUCTIONS or type(out) is int for out in self.outputs
        )
        if not good:
            raise TypeError(
                f"Split: `outputs` is {self.outputs!r}; it must be a tuple with a dim, "
                f"{', '.join(map(repr, REDUCTIONS))} or None for each result."
            )


Sharding = Callable[..., Iterable[Split]]


def along_every_dim(ndim: int, *, inputs: int, outputs: int, others: int = 0) -> list[Split]:
    """Return the splits of an elementwise op: for each of ``ndim`` dims, all tensors are sharded along that dim.

    The op takes ``inputs`` tensors, then ``others`` arguments that are not sharded, and returns ``outputs`` tensors.
    """
    return [Split((Cut(dim),) * inputs + (None,) * others, (dim,) * outputs) for dim in range(ndim)]


def grid_cuts(shape: Sequence[int], block: Block) -> list[tuple[Cut, Cut | None]]:
    """Return the ways to shard a tensor at block boundaries: pairs of the tensor's `Cut` and its scales' `Cut`.

    The scales' cut is None if there is one scale along the dim: shards can be cast by it, but can't compute it alone.
    """
    cuts: list[tuple[Cut, Cut | None]] = []
    last = len(shape) - 1
    for dim in range(len(shape)):
        size = block[1] if dim == last else block[0]
        if size == -1:
            cuts.append((Cut(dim), None))
        elif size == 1:
            cuts.append((Cut(dim), Cut(-1 if dim == last else dim)))  # the grid may have fewer leading dims
        elif dim == last:
            cuts.append((Cut(dim, size), Cut(-1)))
        elif dim == 0 and (inner := math.prod(shape[1:-1])):
            # blocks run over flattened leading dims: cut dim 0 only where its entries end together with a block
            rows = math.lcm(size, inner)
            cuts.append((Cut(0, rows // inner), Cut(0, rows // size)))
    return cuts
