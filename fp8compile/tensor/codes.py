"""One set of codes of a QuantizedTensor; a tensor has one set or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.layout.shapes import codes_shape, scale_shapes

__all__ = ["Codes", "alias_of"]


@dataclass(frozen=True, kw_only=True)
class Codes(Quantized):
    """One set of codes with its scales, as plain tensors. Views of a QuantizedTensor share their memory."""

    @property
    def has_all_scales(self) -> bool:
        """Whether this part of a tensor holds the scales of all blocks of the whole tensor along a side."""
        return any(self.has_scales_of_whole)

    def parts(self) -> tuple[Tensor, ...]:
        """The plain tensors: codes, scale and, if present, the outer scale."""
        return self.codes, *self.scales

    def showing(self, codes: Tensor, scale: Tensor | None = None, **others: object) -> Codes:
        """The set for a view of the tensor.

        Args:
            codes: The codes of the view.
            scale: The scale of the view; None for a view of this set's scale.
            others: Other fields that differ.
        """
        scale = alias_of(self.scale) if scale is None else scale
        given: dict[str, Any] = {
            "codes": codes,
            "scale": scale,
            "outer_scale": alias_of(self.outer_scale),
            **others,
        }
        return replace(self, **given)

    def each(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """A set in which ``change`` was applied to the codes and to each scale."""
        outer = None if self.outer_scale is None else change(self.outer_scale)
        return replace(self, codes=change(self.codes), scale=change(self.scale), outer_scale=outer)

    def codes_shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this quantizer's codes for a weight of this size."""
        return codes_shape(size, self.quantizer)

    def scale_shapes(self, size: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of this quantizer's scales for a weight of this size, by level."""
        return scale_shapes(size, self.quantizer)


def alias_of(tensor: Tensor | None) -> Tensor | None:
    """A view of a whole tensor; None for None."""
    return None if tensor is None else torch.ops.aten.alias.default(tensor)
