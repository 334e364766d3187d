"""How an op runs on shards: which arguments are cut where, and how the results of the shards become the whole.

A sharding rule is a function of the op's arguments that returns every way to cut them, as plain values. It sees a
tensor's shape and nothing else, and imports no distributed code; what spreads tensors over ranks asks it.

    amax of (M, K), block (1, -1)    rows:     x cut along 0  -->  amaxes side by side along 0
                                     columns:  x cut along 1  -->  the largest of the shards' amaxes
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
    """A dim along which an argument may be cut.

    Attributes:
        dim: The dim, counted from either end.
        unit: Elements that stay together; the last unit may have fewer. All cut arguments of a split have the same
            number of units, and a rank gets the same ones of each.
    """

    dim: int
    unit: int = 1


@dataclass(frozen=True)
class Split:
    """One way to run an op on shards so that the result is that of the whole.

    Attributes:
        inputs: An entry for each argument of the op: a ``Cut``, or None if every rank has all of it (or if it is no
            tensor).
        outputs: An entry for each result: the dim along which ranks' results are concatenated; ``"max"``, ``"min"`` or
            ``"sum"`` if they are reduced element by element, NaN included; None if every rank has the whole.
        exact: Whether the result has the same bits as the whole. False for matrix products: each element is the same
            sum, but a backend chooses its order by the sizes that it gets.
    """

    inputs: tuple[Cut | None, ...]
    outputs: tuple[int | str | None, ...]
    exact: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, tuple) or any(i is not None and not isinstance(i, Cut) for i in self.inputs):
            raise TypeError(f"Split: inputs is {self.inputs!r}; it is a tuple of Cut or None, one an argument.")
        good = isinstance(self.outputs, tuple) and all(
            out is None or out in REDUCTIONS or type(out) is int for out in self.outputs
        )
        if not good:
            raise TypeError(
                f"Split: outputs is {self.outputs!r}; it is a tuple of dims, {', '.join(map(repr, REDUCTIONS))} or "
                "None, one a result."
            )


Sharding = Callable[..., Iterable[Split]]


def along_every_dim(ndim: int, *, inputs: int, outputs: int, others: int = 0) -> list[Split]:
    """The splits of an elementwise op: each tensor cut along the same dim.

    Args:
        ndim: Dims of the tensors.
        inputs: How many tensors it takes, first.
        outputs: How many it returns.
        others: Arguments after them that are no tensors.
    """
    return [Split((Cut(dim),) * inputs + (None,) * others, (dim,) * outputs) for dim in range(ndim)]


def grid_cuts(shape: Sequence[int], block: Block) -> list[tuple[Cut, Cut | None]]:
    """The cuts of a tensor between its blocks, each with the cut of its grid of scales.

    Args:
        shape: Shape of the tensor.
        block: Rows and columns that share a scale, in the (M, K) view.

    Returns:
        Pairs of cuts: of the tensor, and of its grid. The latter is None if the grid has one entry along the dim,
        which serves to cast or dequantize a shard, but can't be computed from one.
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
            # blocks lie over flattened leading dims: cut where a multiple of the inner ones ends a block
            rows = math.lcm(size, inner)
            cuts.append((Cut(0, rows // inner), Cut(0, rows // size)))
    return cuts
