"""The two values that a layer's products are made of, and how each lies in a whole.

    Plain        numbers in their own dtype
    Quantized    codes and scales of such numbers, and the quantizer that made them

    TensorLayout    how a tensor lies: the leading dims over which matrices are stacked, each quantized by itself; the
                    ends of groups of rows, such as each expert's tokens; the part that this rank has

A matrix has no batch, tokens without ends are one group, a tensor that is whole has no cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from fp8compile.layout.cuts import Sharding
from fp8compile.quantizers import Quantizer, transposed
from fp8compile.quantizers.check_returned import is_own, shape_said
from fp8compile.scale_layouts import untiled

__all__ = ["STACK", "WHOLE", "Plain", "Quantized", "TensorLayout"]


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor lies among others of its kind, and over ranks.

    Attributes:
        cuts: An entry for each group of ranks in play, the same groups in the same order for all tensors of a layer;
            None for a group whose ranks have the same elements. Empty if nothing is spread over ranks.
        batch: Number of leading dims over which matrices are stacked. Blocks never cross matrices, and an outer scale
            is one a matrix. The rows of a tensor without a batch are all its leading dims.
        ends: Ends of the groups of rows, (E,) int32; None if all rows are one group.
    """

    cuts: Sharding = ()
    batch: int = 0
    ends: Tensor | None = field(default=None, compare=False)


WHOLE = TensorLayout()
STACK = TensorLayout(batch=1)


@dataclass(frozen=True)
class Plain:
    """This rank's part of a tensor that is not quantized.

    Attributes:
        local: The elements of the part.
        layout: How the part lies in the whole.
    """

    local: Tensor
    layout: TensorLayout = WHOLE

    @property
    def cuts(self) -> Sharding:
        """The cuts of the layout: which part of the whole this rank has."""
        return self.layout.cuts

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.local.ndim

    def whole_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape once the groups from ``index`` on are gathered; for index 0 the shape of the whole."""
        shape = list(self.local.shape)
        for cut in reversed(self.cuts[index:]):
            if cut is not None:
                shape[cut.dim] = cut.total
        return tuple(shape)

    def with_cuts(self, cuts: Sharding) -> Plain:
        """The same elements, cut otherwise."""
        return replace(self, layout=replace(self.layout, cuts=cuts))


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Codes and scales, the quantizer that made them, and how they lie. One side of a product is such a value.

    If ranks share the tensor, the fields are those of this rank's part.

    Attributes:
        codes: uint8, ``quantizer.codes_shape`` of the matrix (M, K), or of each matrix of a stack (E, N, K). Codes
            along the tokens of groups are (features, C), with the columns of `fp8compile.ops.groups.layout`.
        scale: Grid of the quantizer's blocks, with one more dim for a stack. It is 1-D if it was written in tiles
            (`scale_layouts.tiled`) for a GEMM that reads those. Along the tokens of groups it is (C / block,
            features); (E, features) or (E, 1) if a group is one block.
        quantizer: The quantizer that made one matrix, or the rows of one group, in the coordinates of ``codes``.
        outer_scale: Second level of scales, float32: (1,) for a matrix, (E,) for a stack or for groups; None if the
            quantizer has one level.
        layout: How the codes lie.
        has_scales_of_whole: Whether ``scale`` has the rows, and the columns, of the whole tensor's grid, because ranks
            cut blocks along that side.
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer
    outer_scale: Tensor | None = None
    layout: TensorLayout = WHOLE
    has_scales_of_whole: tuple[bool, bool] = (False, False)

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Scales by level: of blocks first, then the outer scale if there is one."""
        return (self.scale,) if self.outer_scale is None else (self.scale, self.outer_scale)

    @property
    def cuts(self) -> Sharding:
        """The cuts of the layout: which part of the whole this rank has."""
        return self.layout.cuts

    @property
    def ndim(self) -> int:
        """Number of dims of the codes."""
        return self.codes.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values; packed codes are fewer."""
        codes, batch = self.codes.shape, self.layout.batch
        if is_own(type(self.quantizer)) and not batch:  # type: ignore[arg-type]  # classes are hashable
            return self.quantizer.values_shape(codes)
        return (*codes[:batch], *shape_said(self.quantizer, "values_shape", codes[batch:]))

    def grid(self) -> Tensor:
        """The scales of blocks of a matrix, 2-D."""
        if self.scale.ndim == 2:
            return self.scale
        rows, columns = self.shape
        if self.quantizer.block[0] == 1:
            return untiled(self.scale, rows, columns // self.quantizer.block[1])
        return untiled(self.scale, columns, rows // self.quantizer.block[0]).t()

    def t(self) -> Quantized:
        """The transposed matrix, or a stack of them; no data moves."""
        codes, scale = self.codes, self.scale
        is_matrix = codes.ndim == 2
        return Quantized(
            codes=codes.t() if is_matrix else codes.transpose(-2, -1),
            scale=scale.t() if is_matrix else scale.transpose(-2, -1),
            quantizer=transposed(self.quantizer),
            outer_scale=self.outer_scale,
            layout=self.layout,
        )

    def scale_values(self) -> Tensor:
        """The scales of blocks as float32 numbers."""
        return self.quantizer.scale_values(self.scale)

    def with_cuts(self, cuts: Sharding) -> Quantized:
        """The same codes, cut otherwise."""
        return replace(self, layout=replace(self.layout, cuts=cuts))
