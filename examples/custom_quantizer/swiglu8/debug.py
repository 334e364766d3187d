"""Watch: a quantizer that quantizes as another one does, and counts what passes, without leaving the graph.

    x --inner.amax--> amax --(largest over ranks)--> multiplier --> cast --inner.cast--> codes --> ...
                       |                                 |                              |
                     amax here                    amax of all ranks            elements, zeros, saturated, NaN

A quantizer holds no state, and a graph has no side door. So what passes goes through an op, ``swiglu8::observe``,
which gives back a copy of it and notes what it saw, on the host, under the label. Whatever comes next reads that
copy: the op stays in every graph, is no graph break, and runs once for each time that the step runs (twice where
activation checkpointing recomputes it; once where a compiler merges two equal casts). Notes are tensors on the
device; ``seen`` is what waits for them.

    model = f8.convert(model, f8.library.recipe(watch(Ceil8(), "mlp")))
    train(torch.compile(model))
    print(seen()["mlp"])

Not for speed: codes are written once more, and nothing fuses over the op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fp8compile.library import Cut, Quantizer, Split, register_op

__all__ = ["Seen", "Watch", "clear", "observe", "seen", "watch"]

_NOTES: dict[str, dict[str, Tensor]] = {}


@dataclass(frozen=True)
class Seen:
    """What went by under one label, since the last ``clear``.

    Attributes:
        elements: Values that were quantized.
        zeros: Codes that are zero.
        saturated: Codes of the largest magnitude.
        nan: Codes that are NaN.
        amax: The largest amax of this process.
        group_amax: The largest amax that a scale was made of: over all ranks that share the block.
    """

    elements: int
    zeros: int
    saturated: int
    nan: int
    amax: float
    group_amax: float


def clear() -> None:
    """Forget what was seen."""
    _NOTES.clear()


def seen() -> dict[str, Seen]:
    """What was seen, by label."""
    nothing = torch.zeros(())
    return {
        label: Seen(
            **{name: int(notes.get(name, nothing)) for name in ("elements", "zeros", "saturated", "nan")},
            **{name: float(notes.get(name, nothing)) for name in ("amax", "group_amax")},
        )
        for label, notes in _NOTES.items()
    }


# ---------------------------------------------------------------------------------- the op


def _observe(x: Tensor, what: str, label: str, largest: int) -> Tensor:
    notes = _NOTES.setdefault(label, {})
    if what == "codes":
        magnitude = x & 0x7F
        found = {
            "elements": torch.tensor(x.numel()),
            "zeros": (magnitude == 0).sum(),
            "saturated": (magnitude == largest).sum(),
            "nan": (magnitude > largest).sum(),
        }
        for name, count in found.items():
            notes[name] = notes.get(name, 0) + count
    elif x.numel():
        notes[what] = torch.maximum(notes.get(what, x.new_zeros(())), x.amax())
    return x.clone(memory_format=torch.contiguous_format)


def _observe_fake(x: Tensor, what: str, label: str, largest: int) -> Tensor:
    return x.new_empty(x.shape)


def _observe_sharding(x: Tensor, what: str, label: str, largest: int) -> list[Split]:
    return [Split((Cut(dim), None, None, None), (dim,)) for dim in range(x.ndim)]


def _observe_samples() -> Iterator[tuple]:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for x in (codes, codes.t(), codes[:0]):
        yield x, "codes", "sample", 0x7E
    yield torch.rand(5, 1), "amax", "sample", 0x7E


observe = register_op(
    "swiglu8::observe",
    _observe,
    fake=_observe_fake,
    backward=None,
    decompose=None,  # taken apart it would lose its note
    sharding=_observe_sharding,
    samples=_observe_samples,
)

# ---------------------------------------------------------------------------------- the quantizer


@dataclass(frozen=True, repr=False)
class Watch(Quantizer):
    """What ``inner`` does, seen by ``swiglu8::observe``. Made by ``watch``, which copies format and block.

    Attributes:
        inner: The quantizer that does the work.
        label: What the counts are kept under.
    """

    inner: Quantizer | None = None
    label: str = "watch"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.inner and (self.inner.format, self.inner.block)
        if given != (self.format, self.block):
            raise ValueError(
                f"Watch: format and block are {self.format!r}, {self.block}, inner has {given}; use watch()."
            )

    def _noted(self, x: Tensor, what: str) -> Tensor:
        largest = 0x7E if self.format == "e4m3" else 0x7B
        return observe(x, what, self.label, largest)

    def transposed(self) -> Self:
        return replace(self, block=self.block[::-1], inner=self.inner.transposed())

    def gemm_format(self):
        return self.inner.gemm_format()  # its codes are those of inner, and so is dequantize

    def stores_e8m0(self) -> bool:
        return self.inner.stores_e8m0()

    def amax(self, x: Tensor) -> Tensor:
        return self._noted(self.inner.amax(x), "amax")

    def multiplier(self, amax: Tensor) -> Tensor:
        return self.inner.multiplier(self._noted(amax, "group_amax"))

    def cast(self, x: Tensor, multiplier: Tensor) -> Tensor:
        return self._noted(self.inner.cast(x, multiplier), "codes")

    def codes_shape(self, shape):
        return self.inner.codes_shape(shape)

    def values_shape(self, codes_shape):
        return self.inner.values_shape(codes_shape)

    def scale_shape(self, shape):
        return self.inner.scale_shape(shape)

    def scale_dtype(self) -> torch.dtype:
        return self.inner.scale_dtype()

    def scale_of(self, multiplier: Tensor) -> Tensor:
        return self.inner.scale_of(multiplier)

    def scale_values(self, scale: Tensor) -> Tensor:
        return self.inner.scale_values(scale)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inner.dequantize(codes, scale, dtype)


def watch(inner: Quantizer, label: str = "watch") -> Watch:
    """A quantizer that gives the bits of ``inner`` and counts what passes, under ``label``."""
    return Watch(format=inner.format, block=inner.block, inner=inner, label=label)
