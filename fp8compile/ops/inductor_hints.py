"""Hints to Inductor: ops that return their input's values, and say when and how to store them.

after       its input, made to depend on `other`, so that the partitioner computes `other` in the forward
stored      its input, stored by Inductor as `realize`, `snapshot` or `store` say
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding_rules import along_every_dim

__all__ = ["after", "realize", "snapshot", "store", "stored"]


ONCE, COPY, LAYOUT = "once", "copy", "layout"


def _register(name: str, impl: Callable[..., Tensor], lower: Callable[..., Any]) -> OpOverload:
    """Register an op that copies its first argument; ``lower`` is its lowering."""
    op = register_op(
        name,
        impl,
        fake=lambda x, other: torch.empty_like(x),
        backward=None,
        decompose=None,  # it has a lowering instead
        sharding=lambda x, other: along_every_dim(x.ndim, inputs=1, outputs=1, others=1),
    )
    inductor.register_lowering(op, lower)
    return op


def _after(x: Tensor, other: Tensor) -> Tensor:
    return x.clone()


after: OpOverload = _register("fp8compile::after", _after, lambda x, other: x)
"""Return the first tensor unchanged, with an artificial dependency on the second tensor.

The partitioner places a tensor that only the backward reads in the backward, and computes it there from saved tensors.
A mark that the tensor must be saved works only if the forward needs the tensor (PyTorch 2.11 to 2.15). Sometimes the
forward could compute the tensor for free, while the backward would have to read a large source again. `after` then
makes an operand of the forward depend on the tensor.
"""


def _stored(x: Tensor, how: str) -> Tensor:
    return x.clone()


def _lower(x: Any, how: str) -> Any:
    from torch._inductor import ir, lowering

    has_layout = isinstance(x.data, ir.ReinterpretView) or not isinstance(x.data, ir.BaseView)
    if how == COPY or (how == LAYOUT and not has_layout):
        x = lowering.clone(x)
    x.realize()
    if how == LAYOUT:
        x.freeze_layout()
    return x


stored: OpOverload = _register("fp8compile::stored", _stored, _lower)


def realize(x: Tensor) -> Tensor:
    """Mark a value that Inductor computes once and stores, instead of computing it for each use.

    Inductor inlines pointwise code into every reader. For the multiplier of a block, that would mean an exact
    division for every element of the block.
    """
    return stored(x, ONCE)


def snapshot(x: Tensor) -> Tensor:
    """Copy a tensor; the copy keeps its values when its source is overwritten.

    `clone` is not enough: if a graph does not change its input, compilers replace a clone of that input by the input
    itself. But another graph may change it: the backward updates the state that the forward read. Nothing removes this
    op before Inductor lowers it.
    """
    return stored(x, COPY)


def store(x: Tensor) -> Tensor:
    """Mark codes that Inductor writes to memory once, in their present layout, for all GEMMs that read them.

    Layers that share an input, such as q, k and v, share its codes. If a product reads codes through a view, Inductor
    copies the codes, unless they are in a buffer whose strides are frozen. Without this op it would write the same
    codes once for each layer.
    """
    return stored(x, LAYOUT)
