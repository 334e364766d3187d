"""`Plain` and `Quantized`, the two kinds of operands of a layer's GEMMs, and their layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.layout.cuts import SIDES, AxisBlocks, Sharding, axis_blocks
from fp8compile.quantizers import Quantizer, transposed
from fp8compile.quantizers.check_returned import is_own, shape_said
from fp8compile.scale_layouts import untiled

__all__ = ["STACK", "WHOLE", "Plain", "Quantized", "TensorLayout", "as_operand"]


@dataclass(frozen=True)
class TensorLayout:
    """How an operand is divided: into stacked matrices, groups of rows (tokens), and shards over ranks."""

    # An entry for each group of ranks, with the same groups in the same order for all tensors of a layer. An entry is
    # None if the group's ranks have the same elements. Empty if nothing is spread over ranks.
    cuts: Sharding = ()
    # Number of leading dims over which matrices are stacked. Blocks never cross matrices, and each matrix has its own
    # outer scale. If it is 0, all leading dims together are the rows of one matrix.
    batch: int = 0
    # ends of the groups of rows, (E,) int32; None if all rows are one group
    offs: Tensor | None = field(default=None, compare=False)


WHOLE = TensorLayout()
STACK = TensorLayout(batch=1)


@dataclass(frozen=True)
class Plain:
    """A tensor in high precision: this rank's shard, and how the whole tensor is sharded."""

    local: Tensor  # the elements of the part
    layout: TensorLayout = WHOLE  # how the whole tensor is divided, and which part of it this is

    @property
    def cuts(self) -> Sharding:
        """How the full tensor is sharded: for each group of ranks, a `DimSharding` or None."""
        return self.layout.cuts

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.local.ndim

    def whole_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape after a gather over the ranks of ``cuts[index:]``; 0 gives the whole tensor's shape."""
        shape = list(self.local.shape)
        for cut in reversed(self.cuts[index:]):
            if cut is not None:
                shape[cut.dim] = cut.total
        return tuple(shape)

    def with_cuts(self, cuts: Sharding) -> Plain:
        """Return the same tensor with ``cuts`` as its sharding."""
        return replace(self, layout=replace(self.layout, cuts=cuts))


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized operand of a GEMM: data and scales, the quantizer that produced them, and their layout.

    If the tensor is sharded, the fields are those of this rank's shard. E is the number of stacked matrices (weights
    of experts), or of groups of rows (tokens of experts).

    Attributes:
        codes: uint8, ``quantizer.codes_shape`` of the matrix (M, K), or of each matrix of a stack (E, N, K). Data with
            blocks along the tokens of groups is (features, C), with C tokens including the padding of each group
            (`fp8compile.ops.groups.padding`).
        scale: One scale per block, as a 2-D grid; with one more dim for a stack. It is 1-D if written in tiles
            (`scale_layouts.tiled`) for a GEMM that reads tiles. With blocks along the tokens of groups: (C / block,
            features), or (E, features) or (E, 1) if each group is one block.
        quantizer: Quantizer of one matrix, or of one group's rows; its block counts rows and columns of ``codes``.
        outer_scale: Global scale, float32: (1,) for a matrix, (E,) for a stack or for groups; None if the quantizer
            has one level of scales.
        layout: How the operand is divided into matrices, groups of rows and shards.
        has_scales_of_whole: (rows, columns): for each dim, whether ``scale`` has the grid of the full tensor, because
            shards end inside of blocks along this dim.
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer
    outer_scale: Tensor | None = None
    layout: TensorLayout = WHOLE
    has_scales_of_whole: tuple[bool, bool] = (False, False)

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The block scales and, if there are two levels, the global scale."""
        return (self.scale,) if self.outer_scale is None else (self.scale, self.outer_scale)

    @property
    def has_all_scales(self) -> bool:
        """Whether ``scale`` also has scales of blocks that are on other ranks."""
        return any(self.has_scales_of_whole)

    @property
    def cuts(self) -> Sharding:
        """How the full tensor is sharded: for each group of ranks, a `DimSharding` or None."""
        return self.layout.cuts

    @property
    def ndim(self) -> int:
        """Number of dims of ``codes``."""
        return self.codes.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values; differs from the shape of ``codes`` if codes are packed."""
        codes, batch = self.codes.shape, self.layout.batch
        if is_own(type(self.quantizer)) and not batch:  # type: ignore[arg-type]  # classes are hashable
            return self.quantizer.values_shape(codes)
        return (*codes[:batch], *shape_said(self.quantizer, "values_shape", codes[batch:]))

    def grid(self) -> Tensor:
        """Return a matrix's block scales as a 2-D grid; undoes a tiled layout."""
        if self.scale.ndim == 2:
            return self.scale
        rows, columns = self.shape
        if self.quantizer.block[0] == 1:
            return untiled(self.scale, rows, columns // self.quantizer.block[1])
        return untiled(self.scale, columns, rows // self.quantizer.block[0]).t()

    def t(self) -> Quantized:
        """Return an unsharded operand with each matrix transposed, as views."""
        codes, scale = self.codes, self.scale
        is_matrix = codes.ndim == 2
        return Quantized(
            codes=codes.t() if is_matrix else codes.transpose(-2, -1),
            scale=scale.t() if is_matrix else scale.transpose(-2, -1),
            quantizer=transposed(self.quantizer),
            outer_scale=self.outer_scale,
            layout=self.layout,
        )

    def parts(self) -> tuple[Tensor, ...]:
        """Return data, block scales and, if there are two levels, the global scale."""
        return self.codes, *self.scales

    def each(self, change: Callable[[Tensor], Tensor]) -> Quantized:
        """Return a copy with ``change`` applied to data, block scales and global scale."""
        outer = None if self.outer_scale is None else change(self.outer_scale)
        return replace(self, codes=change(self.codes), scale=change(self.scale), outer_scale=outer)

    def showing(self, codes: Tensor, scale: Tensor | None = None, **others: Any) -> Quantized:
        """Return a copy with other data and, if given, other scales; ``others`` replace further fields.

        Scales that are not replaced are aliases of this operand's scales.
        """
        alias = torch.ops.aten.alias.default
        scale = alias(self.scale) if scale is None else scale
        outer = None if self.outer_scale is None else alias(self.outer_scale)
        changed: dict[str, Any] = {"codes": codes, "scale": scale, "outer_scale": outer, **others}
        return replace(self, **changed)

    def scale_values(self) -> Tensor:
        """Return the block scales as float32 numbers."""
        return self.quantizer.scale_values(self.scale)

    def with_cuts(self, cuts: Sharding) -> Quantized:
        """Return the same data and scales with ``cuts`` as their sharding."""
        return replace(self, layout=replace(self.layout, cuts=cuts))


def as_operand(part: Quantized) -> tuple[Quantized, AxisBlocks | None, AxisBlocks | None]:
    """Turn this rank's shard into an operand without ``cuts``, which a GEMM on this rank can take.

    If shards end inside of blocks, the codes are padded with zeros as by `AxisBlocks.embed`. If not, an operand with
    groups of rows is returned unchanged, ``cuts`` included.

    Returns:
        The operand. Then, for rows and for columns, the `AxisBlocks` whose ``extract`` removes the padding from a
        result; None for a side without padding.
    """
    is_whole = part.layout.offs is not None and not any(part.has_scales_of_whole)
    if not part.layout.cuts or is_whole:
        return part, None, None
    codes, grid, batch = part.codes, part.scale, part.layout.batch
    if not batch:
        # a matrix is reshaped too: if scales of blocks came right after a gather, PyTorch's async tensor parallelism
        # would take them for scales of rows
        codes = codes.reshape(codes.shape[:-1].numel(), codes.shape[-1])
        grid = grid.reshape(grid.shape[:-1].numel(), grid.shape[-1])
    windows: list[AxisBlocks | None] = [None, None]
    sides = axis_blocks(part.codes.shape, part.cuts, part.quantizer.block, batch)
    for index, (dim, side) in enumerate(zip(SIDES, sides, strict=True)):
        if part.has_scales_of_whole[index] and side.groups:
            codes, grid = side.embed(codes, dim), side.window(grid, dim)
            windows[index] = side
    layout = TensorLayout((), batch, part.layout.offs)
    found = Quantized(codes=codes, scale=grid, quantizer=part.quantizer, outer_scale=part.outer_scale, layout=layout)
    return found, windows[0], windows[1]
