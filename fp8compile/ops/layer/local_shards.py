"""What a rank has of a tensor: its elements, or its codes and scales, and how they lie in the whole.

    LocalShard       a rank's part of a tensor, in its own dtype
    QuantizedShard   a rank's part of a quantized tensor: codes and scales are those of the whole

A tensor that is whole is a shard without cuts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.formats import pack, unpack
from fp8compile.ops.async_tp import on_the_wire
from fp8compile.ops.collectives import all_gather
from fp8compile.ops.dequantize import dequantize
from fp8compile.ops.gemm import Operand
from fp8compile.ops.layer.shards import AxisBlocks, DimSharding, Sharding, axis_blocks
from fp8compile.quantizers import Quantizer

__all__ = ["LocalShard", "QuantizedShard", "check_not_packed"]


def _without(cuts: Sharding, index: int) -> Sharding:
    return (*cuts[:index], None, *cuts[index + 1 :])


def _cut_again(cuts: Sharding, index: int, dim: int) -> int | None:
    """The last group, behind this one, that cuts a dim: parts of parts, to be put together before it is cut anew."""
    return next((i for i in reversed(range(index + 1, len(cuts))) if cuts[i] is not None and cuts[i].dim == dim), None)


@dataclass(frozen=True)
class LocalShard:
    """A rank's part of a tensor.

    Attributes:
        local: The elements, in the order of the whole.
        cuts: An entry for each group in play, the same ones in the same order for all tensors of a layer; None for a
            group whose ranks have the same elements. Empty for a matrix that is whole.
    """

    local: Tensor
    cuts: Sharding = ()

    def whole_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape of what this group and those after it have together; for the first one, of the whole."""
        shape = list(self.local.shape)
        for cut in reversed(self.cuts[index:]):
            if cut is not None:
                shape[cut.dim] = cut.total
        return tuple(shape)

    def gather(self, index: int) -> LocalShard:
        """Put together what the ranks of one group have, and before, along the same dim, of those behind it."""
        cut = self.cuts[index]
        if cut.group is None:
            raise RuntimeError(
                f"a layer's operand that is cut along dim {cut.dim} would have to be gathered, and its mesh has no "
                "process groups: it only asks where results lie. Redistribute the operand before the layer."
            )
        if (again := _cut_again(self.cuts, index, cut.dim)) is not None:
            return self.gather(again).gather(index)
        return LocalShard(all_gather(self.local, cut.dim, cut.sizes, cut.group), _without(self.cuts, index))

    def narrow(self, index: int, cut: DimSharding) -> LocalShard:
        """Take this rank's part of what all ranks of a group have; groups behind it do not cut this dim any more."""
        if (again := _cut_again(self.cuts, index, cut.dim)) is not None:
            return self.gather(again).narrow(index, cut)
        local = self.local.narrow(cut.dim, cut.start, cut.length)
        return LocalShard(local, (*self.cuts[:index], cut, *self.cuts[index + 1 :]))


@dataclass(frozen=True)
class QuantizedShard:
    """A rank's part of a quantized tensor.

    Attributes:
        local: Codes, uint8.
        scale: Of the local blocks, or along rows or columns of the whole's; of a whole matrix also in tiles, 1-D, as
            an ``Operand`` has them.
        quantizer: What made them.
        cuts: As of a ``LocalShard``.
        whole: Whether rows and columns of ``scale`` are those of the whole tensor's grid.
        outer_scale: Of the whole tensor, where its quantizer has two levels of scales.
    """

    local: Tensor
    scale: Tensor
    quantizer: Quantizer
    cuts: Sharding
    whole: tuple[bool, bool] = (False, False)
    outer_scale: Tensor | None = None

    def gather(self, index: int) -> QuantizedShard:
        """Put together codes, and scales where ranks have different ones, in the order of ``LocalShard.gather``."""
        check_not_packed(self.quantizer, self.local.shape, self.quantizer.values_shape(self.local.shape))
        cut = self.cuts[index]
        if (again := _cut_again(self.cuts, index, cut.dim)) is not None:
            return self.gather(again).gather(index)
        codes, scale = self._gathered_codes(cut), self._gathered_scale(cut)
        return replace(self, local=codes, scale=scale, cuts=_without(self.cuts, index))

    def _gathered_codes(self, cut: DimSharding) -> Tensor:
        last = self.local.ndim - 1
        are_pairs = cut.dim != last and _compat.statically_true(self.local.shape[-1] % 2 == 0)
        if are_pairs and self.quantizer.code_bits() == 4:
            return unpack(all_gather(pack(self.local, last), cut.dim, cut.sizes, cut.group), last)
        sent = on_the_wire(self.local, self.quantizer)
        codes = all_gather(sent, cut.dim, cut.sizes, cut.group)
        return codes if sent is self.local else codes.view(torch.uint8)

    def _gathered_scale(self, cut: DimSharding) -> Tensor:
        last = self.local.ndim - 1
        is_column = cut.dim == last
        block = self.quantizer.block[is_column]
        if block == -1 or self.whole[is_column]:
            return self.scale
        if block == 1:
            return all_gather(self.scale, -1 if is_column else cut.dim, cut.sizes, cut.group)
        shape = self.local.shape
        inner = 1 if is_column else math.prod(shape[cut.dim + 1 : last])
        counts = [-(-size * inner // block) for size in cut.sizes]
        if is_column:
            return all_gather(self.scale, -1, counts, cut.group)
        outer = math.prod(shape[: cut.dim])
        grid = self.scale.view(outer, counts[cut.rank], self.scale.shape[-1])
        return all_gather(grid, 1, counts, cut.group).flatten(0, 1)

    def narrow(self, index: int, cut: DimSharding) -> QuantizedShard:
        """Take this rank's part of what all ranks of a group have, as ``LocalShard.narrow`` does."""
        check_not_packed(self.quantizer, self.local.shape, self.quantizer.values_shape(self.local.shape))
        if (again := _cut_again(self.cuts, index, cut.dim)) is not None:
            return self.gather(again).narrow(index, cut)
        is_column = cut.dim == self.local.ndim - 1
        block, whole, found = self.quantizer.block[is_column], list(self.whole), self.scale
        if block == 1:
            found = found.narrow(-1 if is_column else cut.dim, cut.start, cut.length)
        elif block != -1 and not whole[is_column]:
            # other groups may cut other dims of this side: then these are the scales of their own blocks alone
            side = axis_blocks(self.local.shape, self.cuts, self.quantizer.block)[is_column]
            found, whole[is_column] = side.widen(found, int(is_column)), True
        local = self.local.narrow(cut.dim, cut.start, cut.length)
        cuts = (*self.cuts[:index], cut, *self.cuts[index + 1 :])
        return replace(self, local=local, scale=found, cuts=cuts, whole=(whole[0], whole[1]))

    def operand(self) -> tuple[Operand, AxisBlocks | None, AxisBlocks | None]:
        """The matrix that a GEMM takes, and the sides along which it is a window."""
        if not self.cuts:
            return self._operand(self.local, self.scale), None, None
        # a matrix is reshaped too: PyTorch's async tensor parallelism takes scales of blocks right behind a gather for
        # those of rows
        codes = self.local.reshape(self.local.shape[:-1].numel(), self.local.shape[-1])
        grid = self.scale.reshape(self.scale.shape[:-1].numel(), self.scale.shape[-1])
        windows: list[AxisBlocks | None] = [None, None]
        sides = axis_blocks(self.local.shape, self.cuts, self.quantizer.block)
        for dim, (side, whole) in enumerate(zip(sides, self.whole, strict=True)):
            if whole and side.groups:
                codes, grid = side.embed(codes, dim), side.window(grid, dim)
                windows[dim] = side
        return self._operand(codes, grid), windows[0], windows[1]

    def dequantized(self, dtype: torch.dtype) -> LocalShard:
        """The values that the codes stand for, rounded to a dtype."""
        operand, *windows = self.operand()
        outer = () if operand.outer_scale is None else (operand.outer_scale,)
        values = dequantize(operand.codes, operand.scale, operand.quantizer, dtype, *outer)
        for dim, window in enumerate(windows):
            values = values if window is None else window.extract(values, dim)
        return LocalShard(values.reshape(self.quantizer.values_shape(self.local.shape)), self.cuts)

    def _operand(self, codes: Tensor, scale: Tensor) -> Operand:
        return Operand(codes=codes, scale=scale, quantizer=self.quantizer, outer_scale=self.outer_scale)


def check_not_packed(quantizer: Quantizer, codes: Sequence[int], values: Sequence[int]) -> None:
    """Raise a ValueError if codes have another shape than the values that they stand for."""
    if tuple(codes) != tuple(values):
        raise ValueError(
            f"{quantizer!r} packs codes of several values in a byte, and the tensor, or one that it is multiplied by, "
            "is spread over ranks, which it has no rule for. Let its unpacked() return a quantizer of the same codes, "
            "one a byte, or quantize and multiply whole tensors with it."
        )
