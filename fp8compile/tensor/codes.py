"""One set of codes with its scales, and the quantizer that made it. A quantized tensor has one such set or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8compile.ops.layer.weight_shapes import codes_shape, scale_shapes
from fp8compile.quantizers import Quantizer

__all__ = ["Codes", "alias_of"]


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Codes and scales as plain tensors.

    Attributes:
        codes: uint8.
        scale: Those of blocks.
        quantizer: What made them.
        outer_scale: Those of matrices, if the quantizer has two levels of scales.
        has_scales_of_whole: Whether rows, and columns, of ``scale`` are those of the whole tensor's blocks, because
            ranks cut blocks along them, or may.
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer
    outer_scale: Tensor | None = None
    has_scales_of_whole: tuple[bool, bool] = (False, False)

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Scales by level: those of blocks, then the outer ones."""
        return (self.scale,) if self.outer_scale is None else (self.scale, self.outer_scale)

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
        return replace(self, **{"codes": codes, "scale": scale, "outer_scale": alias_of(self.outer_scale), **others})

    def each(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Those of which each part is changed."""
        outer = None if self.outer_scale is None else change(self.outer_scale)
        return replace(self, codes=change(self.codes), scale=change(self.scale), outer_scale=outer)

    def codes_shape(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the codes of a weight of this size, a matrix or a stack."""
        return codes_shape(size, self.quantizer)

    def scale_shapes(self, size: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of all levels of scales of such a weight."""
        return scale_shapes(size, self.quantizer)


def alias_of(tensor: Tensor | None) -> Tensor | None:
    """A view of all of a tensor, if there is one."""
    return None if tensor is None else torch.ops.aten.alias.default(tensor)
