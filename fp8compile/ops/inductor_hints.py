"""Hints to Inductor: ops that return their input's values, and say when and how to store them.

after       its input, made to depend on `other`, so that the partitioner computes `other` in the forward
realize     a value that is computed once and stored, instead of computed for each use
snapshot    a copy that keeps its values when its source is overwritten
store       codes that are written to memory once, in one layout, for all GEMMs that read them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.ops.registry import register_op
from fp8compile.ops.sharding_rules import along_every_dim

__all__ = ["after", "realize", "snapshot", "store"]


def _copy(x: Tensor) -> Tensor:
    return x.clone()


def _samples() -> Iterator[tuple[Any, ...]]:
    yield (torch.arange(6.0).view(2, 3),)
    yield (torch.arange(6.0).view(2, 3).t(),)
    yield (torch.empty(0, 3),)


def _register(
    name: str,
    lower: Callable[..., Any],
    impl: Callable[..., Tensor] = _copy,
    samples: Callable[[], Iterator[tuple[Any, ...]]] = _samples,
) -> OpOverload:
    """Register an op that copies its first tensor; ``lower`` is its Inductor lowering, a function of Inductor's IR."""
    op = register_op(
        name,
        impl,
        fake=lambda x, *others: torch.empty_like(x),
        backward=None,
        decompose=None,  # it has a lowering instead
        sharding=lambda x, *others: along_every_dim(x.ndim, inputs=1, outputs=1, others=len(others)),
        samples=samples,
    )
    inductor.register_lowering(op, lower)
    return op


def _after(x: Tensor, other: Tensor) -> Tensor:
    return x.clone()


def _after_samples() -> Iterator[tuple[Any, ...]]:
    others = torch.ones(4), torch.ones(()), torch.empty(0, dtype=torch.uint8)
    for own, other in zip(_samples(), others, strict=True):
        yield *own, other


after: OpOverload = _register("fp8compile::after", lambda x, other: x, _after, _after_samples)
"""Return the first tensor unchanged, with an artificial dependency on the second tensor.

The partitioner places a tensor that only the backward reads in the backward, and computes it there from saved tensors.
A mark that the tensor must be saved works only if the forward needs the tensor (PyTorch 2.11 to 2.15). Sometimes the
forward could compute the tensor for free, while the backward would have to read a large source again. `after` then
makes an operand of the forward depend on the tensor.
"""


def _lower_realize(x: Any) -> Any:
    x.realize()
    return x


realize: OpOverload = _register("fp8compile::realize", _lower_realize)
"""Mark a value that Inductor computes once and stores, instead of computing it for each use.

Inductor inlines pointwise code into every reader. For the multiplier of a block, that would mean an exact (float64)
division for every element of the block.
"""


def _lower_snapshot(x: Any) -> Any:
    from torch._inductor import lowering

    copy = lowering.clone(x)
    copy.realize()
    return copy


snapshot: OpOverload = _register("fp8compile::snapshot", _lower_snapshot)
"""Copy a tensor; the copy keeps its values when its source is overwritten.

`clone` is not enough: if a graph does not change its input, compilers replace a clone of that input by the input
itself. But another graph may change it: the backward updates the state that the forward read. Nothing removes this op
before Inductor lowers it.
"""


def _lower_store(x: Any) -> Any:
    from torch._inductor import ir, lowering

    if isinstance(x.data, ir.BaseView) and not isinstance(x.data, ir.ReinterpretView):
        x = lowering.clone(x)  # a view has no own layout to freeze, such as codes that end in a view of their bits
    x.realize()
    x.freeze_layout()
    return x


store: OpOverload = _register("fp8compile::store", _lower_store)
"""Mark codes that Inductor writes to memory once, in their present layout, for all GEMMs that read them.

Layers that share an input, such as q, k and v, share its codes. If a product reads codes through a view, Inductor
copies the codes, unless they are in a buffer whose strides are frozen. Without this op it would write the same codes
once for each layer.
"""
