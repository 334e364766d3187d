"""Hints to Inductor. In eager mode each op copies its input; in a graph it says how Inductor is to store it.

    after      identity with an artificial dependency on another tensor; the partitioner then keeps that in the forward
    realize    a value that is computed once and stored, instead of once for each use
    snapshot   a copy that keeps its values when its source is overwritten
    store      codes that are written to memory once, in one layout, for all GEMMs that read them

None of these ops changes a value. They appear in decompositions only, and Inductor lowers them to little or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fp8compile import inductor
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding import Split, along_every_dim

__all__ = ["after", "realize", "snapshot", "store"]


def _copy(x: Tensor) -> Tensor:
    return x.clone()


def _sharding(x: Tensor) -> list[Split]:
    return along_every_dim(x.ndim, inputs=1, outputs=1)


def _samples() -> Iterator[tuple[Any, ...]]:
    yield (torch.arange(6.0).view(2, 3),)
    yield (torch.arange(6.0).view(2, 3).t(),)
    yield (torch.empty(0, 3),)


def _register(name: str, lower: Callable[..., Any]) -> torch._ops.OpOverload:
    """Register an op that copies its tensor; ``lower`` is its lowering, from IR to IR."""
    op = register_op(
        name,
        _copy,
        fake=torch.empty_like,
        backward=None,
        decompose=None,  # a lowering instead
        sharding=_sharding,
        samples=_samples,
    )
    inductor.register_lowering(op, lower)
    return op


# ---------------------------------------------------------------------------------- after


def _after(x: Tensor, other: Tensor) -> Tensor:
    return x.clone()


def _after_fake(x: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(x)


def _after_sharding(x: Tensor, other: Tensor) -> list[Split]:
    return along_every_dim(x.ndim, inputs=1, outputs=1, others=1)


def _after_samples() -> Iterator[tuple[Any, ...]]:
    yield torch.arange(6.0).view(2, 3), torch.ones(4)
    yield torch.arange(6.0).view(2, 3).t(), torch.ones(())
    yield torch.empty(0, 3), torch.empty(0, dtype=torch.uint8)


after: OpOverload = register_op(
    "fp8compile::after",
    _after,
    fake=_after_fake,
    backward=None,
    decompose=None,  # a lowering instead
    sharding=_after_sharding,
    samples=_after_samples,
)
"""A tensor as it is, that counts as made after another one.

Compilers leave to the backward what only the backward reads, and make it there from what the forward has kept; what is
marked as to be saved they save only where the forward needs it (PyTorch 2.11 to 2.15). Where the forward has the
values at hand and the backward would read a tensor for them once more, an operand of the forward is made to wait.
"""


def _lower_after(x: Any, other: Any) -> Any:
    return x


inductor.register_lowering(after, _lower_after)

# ---------------------------------------------------------------------------------- copies


def _lower_realize(x: Any) -> Any:
    x.realize()
    return x


realize: OpOverload = _register("fp8compile::realize", _lower_realize)
"""A value that Inductor computes once and stores, instead of once for each use.

Inductor inlines pointwise code into whatever reads it. For the multiplier of a block that means an exact (float64)
division for every element.
"""


def _lower_snapshot(x: Any) -> Any:
    from torch._inductor import lowering

    copy = lowering.clone(x)
    copy.realize()
    return copy


snapshot: OpOverload = _register("fp8compile::snapshot", _lower_snapshot)
"""A copy that keeps its values when the tensor that it was made of is overwritten.

`clone` would say the same, but compilers take a clone of an unchanged input for the input itself, also where another
graph changes that: the backward, which updates what the forward read. This op nothing removes before Inductor.
"""


def _lower_store(x: Any) -> Any:
    from torch._inductor import ir, lowering

    if isinstance(x.data, ir.BaseView) and not isinstance(x.data, ir.ReinterpretView):
        x = lowering.clone(x)  # codes that end in a view of their bits have no layout of their own to freeze
    x.realize()
    x.freeze_layout()
    return x


store: OpOverload = _register("fp8compile::store", _lower_store)
"""Codes that Inductor lays down once, as they are, for all GEMMs that read them.

Layers that share an input, such as q, k and v, share its codes. But Inductor copies what a product reads through a
view, unless that already is a buffer with strides that no longer change: it would write the same codes once for each
layer.
"""
