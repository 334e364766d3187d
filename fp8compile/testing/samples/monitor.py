"""Sample arguments of the ops that observe operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8compile.monitor.observe import Observer
from fp8compile.ops.layer.known import Known
from fp8compile.testing.samples.layer_ops import observe_samples

__all__ = ["SAMPLES"]


def _add_pieces() -> Iterator[tuple[Any, ...]]:
    counts, magnitudes = torch.arange(6, dtype=torch.int32), torch.arange(6.0)
    one = [0, 1, 1, 1, 2]  # flags of a matrix, of which this rank has a half
    for turned in (counts.view(1, 6), counts.view(6, 1).t()):
        numbers = [0, 0, 0, 1, 0, 1, 2, 0, 2]
        yield [turned, turned % 2, magnitudes.view(1, 6)], numbers, [2, 1], [], [], [24], one, [0, -1, 0], 1
    stack = [0, 0, 0, 1, 0, 1]
    yield [counts.view(2, 3), magnitudes.view(3, 2).t()], stack, [1, 1], [], [], [12], [1, 0, 1, 1, 1], [0, -1], 4
    group, sizes = torch.tensor([0, 0, 1, 2, 3, 3]), torch.tensor([8.0, 4.0, 4.0], dtype=torch.float64)
    flags = [*one, 0, 1, 0, 1, 1]  # another rank counts the second one's elements
    both = [0, 0, 0, 1, 1, 0, 2, 0, 1]
    yield [counts, counts.view(1, 6), magnitudes], both, [1, 1], [group], [sizes], [-1, 24], flags, [1, 0], 3
    yield [counts.view(3, 2)], [0, 0, 0], [1, 0], [], [sizes], [-1], [1, 1, 1, 1, 1], [0, -1], 4
    yield [magnitudes[:0].view(1, 0)], [0, 0, 0], [0, 1], [], [], [0], [0, 1, 1, 0, 0], [0], 1


def _observed() -> Iterator[tuple[Any, ...]]:
    """Yield grad_output, x, weight, the constants, buffers, and the arguments of `LayerArgs`."""
    # Compilers, and other strides, add in another order. Sums of counts, and of scales in float64, have the same bits
    # in each; sums of float32 values, as those of "square", have not.
    names = "amax,underflow,scale"
    for grad, (x, weight, _, offs, *args) in observe_samples():
        for values in (grad, grad.mT.contiguous().mT):
            buffer = Observer.empty(names, 1 if offs is None else offs.shape[0], x.device)
            # a graph counts codes of groups, which calls make, in the forward, and eager mode in the backward
            for later in (False, True) if offs is None else (False,):
                yield values, x, weight, (0, later, names), buffer, (offs, *args)


def _observe_gradient() -> Iterator[tuple[Any, ...]]:
    for values, x, weight, constants, _, (offs, known, *args) in _observed():
        _, later, _ = constants
        own = (x, weight) if later else (None, None)
        yield values, *own, *constants, offs, Known.last_set(known), *args


def _observe() -> Iterator[tuple[Any, ...]]:
    for values, x, weight, constants, buffer, args in _observed():
        yield values, x, weight, buffer.sums, buffer.maxima, *constants, *args


SAMPLES = {
    "fp8compile::add_pieces": _add_pieces,
    "fp8compile::observe_gradient": _observe_gradient,
    "fp8compile::observe": _observe,
}
