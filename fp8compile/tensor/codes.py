"""One set of codes of a quantized tensor, which has one such set or two."""

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
    """Codes and scales as plain tensors, which views share."""

    @property
    def has_all_scales(self) -> bool:
        """Whether it has scales of blocks that other ranks have elements of."""
        return any(self.has_scales_of_whole)

    def parts(self) -> tuple[Tensor, ...]:
        """The plain tensors that it is made of."""
        return self.codes, *self.scales

    def showing(self, codes: Tensor, scale: Tensor | None = None, **others: object) -> Codes:
        """Those of a view: these codes, and views of the scales that are not given."""
        scale = alias_of(self.scale) if scale is None else scale
        given: dict[str, Any] = {
            "codes": codes,
            "scale": scale,
            "outer_scale": alias_of(self.outer_scale),
            **others,
        }
        return replace(self, **given)

    def each(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Those of which each part is changed."""
        outer = None if self.outer_scale is None else change(self.outer_scale)
        return replace(self, codes=change(self.codes), scale=change(self.scale), outer_scale=outer)

    def codes_shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the codes of a weight of this size."""
        return codes_shape(size, self.quantizer)

    def scale_shapes(self, size: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of all levels of scales of such a weight."""
        return scale_shapes(size, self.quantizer)


def alias_of(tensor: Tensor | None) -> Tensor | None:
    """A view of all of a tensor, if there is one."""
    return None if tensor is None else torch.ops.aten.alias.default(tensor)
