"""QuantizedStackParameter: the weights of experts, trained as codes and scales of each matrix.

(E, N, K) codes, (E, blocks, blocks) scales. FSDP2 cuts them along E, and then nobody shares a scale; or along N or K,
and then blocks that reach over ranks, or that ranks cut, have one scale on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile.layout.cuts import DimSharding, Sharding, split_axes
from fp8compile.layout.packing import one_a_byte, packed_in_rows, two_a_byte
from fp8compile.layout.quantized import STACK, Plain, Quantized, TensorLayout
from fp8compile.layout.shapes import codes_shape, scale_shape, values_shape
from fp8compile.ops.layer.quantize import Scales, cast_part, dequantized, outer_amax_of, scales_of, whole_amax
from fp8compile.quantizers import Quantizer
from fp8compile.tensor.fsdp import cut_dim
from fp8compile.tensor.parameter import ALIASES, BLANK, SHARD, SLICE, WHOLE, QuantizedParameter, flat
from fp8compile.tensor.quantized import VIEWS
from fp8compile.tensor.saved import load_stack
from fp8compile.tensor.scale_without_values import scale_without_values
from fp8compile.tensor.stack import QuantizedStack
from fp8compile.tensor.views import codes_slice

__all__ = ["QuantizedStackParameter"]

aten = torch.ops.aten


class QuantizedStackParameter(QuantizedParameter):
    """A parameter that holds several matrices, each with codes and scales of its own, such as the weights of experts.

    Its views are those that keep experts or matrices whole, parts of all matrices along one dim, and the stack of
    transposed matrices; any other op raises.

    Attributes:
        codes: (E, N, K), uint8; of four bits two of a row share a byte, or two of a column.
        scale: (E, blocks, blocks): for each matrix, ``quantizer.scale_shape((N, K))``.
        quantizer: Of each matrix, as it lies in memory.
        outer_scale: Of each matrix, (E,) float32, where the quantizer has two levels of scales.
    """

    gathered_as = QuantizedStack
    _loader = staticmethod(load_stack)

    @staticmethod
    def of(x: Tensor, quantizer: Quantizer) -> QuantizedStackParameter:
        """Quantize each matrix of a stack, bfloat16, float16 or float32; on the meta device, only its shape."""
        part, quantizer = Plain(x.detach(), STACK), packed_in_rows(quantizer, x.shape)
        multiplier, scale, outer_scale = scales_of(whole_amax(part, quantizer), quantizer)
        codes = cast_part(part, multiplier, quantizer).contiguous()  # else with room for the rest of blocks
        return QuantizedStackParameter(
            two_a_byte(codes, quantizer), scale, quantizer, x.dtype, outer_scale=outer_scale
        )

    @classmethod
    def _values_shape(cls, codes: Tensor, quantizer: Quantizer) -> tuple[int, ...]:
        """The shape of what codes stand for: of each matrix by itself, or of codes in one row."""
        return values_shape(codes.shape, quantizer)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict, metadata: tuple, outer_size: Any, outer_stride: Any
    ) -> QuantizedStackParameter:
        return QuantizedStackParameter._unflattened(inner, metadata)

    # ------------------------------------------------------------------ how its blocks lie

    def block_along(self, dim: int) -> int:
        """How many elements along a dim share a scale; -1 for all of them."""
        return 1 if dim == 0 else self.quantizer.block[dim - 1]

    def codes_shape(self, size: Sequence[int]) -> tuple[int, ...]:
        """The shape of the codes of a weight of this size."""
        return codes_shape(size, self.quantizer)

    def scale_shape(self, size: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scale of a weight of this size."""
        return scale_shape(size, self.quantizer)

    def is_stacked_along(self, dim: int) -> bool:
        """Whether entries along a dim have no scale in common."""
        return dim == 0

    def outer_amax_of(self, amax: Tensor) -> Tensor:
        """The amax of each matrix, (E,) float32."""
        return outer_amax_of(amax, self.quantizer)

    def two_scales_of(self, amax: Tensor, outer_amax: Tensor) -> Scales:
        """Multipliers and scales of both levels of each matrix."""
        return scales_of(amax, self.quantizer, outer_amax=outer_amax)

    def outer_scale_of_zeros(self, size: Sequence[int], device: torch.device) -> Tensor | None:
        """Those of the matrices; of other matrices, ones."""
        if self.outer_scale is None or size[0] == self.shape[0]:
            return super().outer_scale_of_zeros(size, device)
        return torch.ones(size[0], device=device)

    def cuts_blocks(self) -> bool:
        """Whether this is a shard with elements of blocks that other ranks have elements of."""
        if self.sizes is None or not self.shard_dim:
            return False
        shards = DimSharding("", 0, self.shard_dim - 1, self.sizes)
        return any(split_axes(self.shape[1:], (shards,), self.quantizer.block))

    def amax_of(self, values: Tensor) -> Tensor:
        """What this rank knows of the amaxes of all blocks that this has scales of, if these were its values."""
        return whole_amax(self.part(values), self.quantizer)

    def codes_of(self, values: Tensor, multiplier: Tensor, quantizer: Quantizer, cuts: Sharding) -> Tensor:
        """Codes of values of this shape. Stochastic noise is that of this rank's stack: see `MasterWeights`."""
        return two_a_byte(cast_part(self.part(values), multiplier, quantizer), quantizer)

    def _values(self, dtype: torch.dtype) -> Tensor:
        self._check_place()
        codes, quantizer = one_a_byte(self.codes, self.quantizer)
        layout = self.part(codes).layout
        found = Quantized(
            codes=codes,
            scale=self.scale,
            quantizer=quantizer,
            outer_scale=self.outer_scale,
            layout=layout,
            has_scales_of_whole=split_axes(codes.shape, layout.cuts, quantizer.block, 1),
        )
        return dequantized(found, dtype).local

    def part(self, values: Tensor) -> Plain:
        """Values of this shape, and how they lie among those of other ranks, if that cuts blocks."""
        return Plain(values, TensorLayout((self.shards(),) if self.cuts_blocks() else (), batch=1))

    def scale_of_zeros(self, size: Sequence[int], device: torch.device) -> tuple[Tensor, bool]:
        """A scale for zeros of another size, and whether it is that of all blocks of each matrix."""
        dim = cut_dim(self, size)
        block = self.block_along(dim)
        if self.has_all_scales or block == -1 or (block > 1 and size[dim] % block):
            return self.scale.to(device).clone(), self.has_all_scales or block != -1
        return scale_without_values(self.quantizer, self.scale_shape(size), 1.0, device), False

    def extent_of_zeros(self, size: Sequence[int]) -> str:
        """Whole if each rank has whole matrices; a blank, which FSDP2 fills, if it has parts of them."""
        return BLANK if cut_dim(self, size) else WHOLE

    # ------------------------------------------------------------------ views

    @classmethod
    def _written_or_viewed(cls, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        if func is aten.new_empty.default and len(args[1]) != 3:  # FSDP2, for a rank without elements
            return flat(args[0], args[0].codes.new_empty(args[1], **kwargs))
        if func in VIEWS and func not in ALIASES:
            found = OWN_VIEWS[func](func, *args, **kwargs) if func in OWN_VIEWS else None
            if found is None:
                raise TypeError(_no_view(func))
            return return_and_correct_aliasing(func, args, kwargs, found)
        return super()._written_or_viewed(func, types, args, kwargs)


def _no_view(func: object) -> str:
    return (
        f"{func} of the weights of experts, whose matrices are codes with scales of their own: it keeps no matrix. "
        "Nothing dequantizes in silence. Multiply by fp8compile.grouped_linear or grouped_mm, or call .dequantize()."
    )


def _transpose(func: Any, x: QuantizedStackParameter, *dims: int) -> QuantizedStackParameter | None:
    if {dim % 3 for dim in dims} != {1, 2}:
        return None
    found = x._like(func(x.codes, *dims), func(x.scale, *dims), x.quantizer.transposed())
    found.shard_dim = 3 - x.shard_dim if x.shard_dim else x.shard_dim
    return found


def _view(func: Any, x: QuantizedStackParameter, size: Sequence[int]) -> QuantizedParameter | None:
    whole = torch.empty(x.shape, device="meta").view(size).shape
    if len(whole) == 1:
        return flat(x, func(x.codes, [-1]))
    return _whole(x) if whole == x.shape else None


def _whole(x: QuantizedStackParameter) -> QuantizedParameter:
    return x._like(aten.alias.default(x.codes), aten.alias.default(x.scale))


def _as_strided(
    func: Any, x: QuantizedStackParameter, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QuantizedParameter | None:
    """The view that shows what it is a view of: AOTAutograd asks for it."""
    same = tuple(size) == tuple(x.shape) and tuple(stride) == x.stride() and offset in (None, x.storage_offset())
    return _whole(x) if same else None


def _slice(
    func: Any,
    x: QuantizedStackParameter,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedStackParameter | None:
    dim %= 3
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if step != 1:
        return None
    codes, block = codes_slice(aten.slice.Tensor, x, dim, start, end, step), x.block_along(dim)
    if dim == 0:
        found = x._like(codes, aten.slice.Tensor(x.scale, 0, start, end))
        if x.outer_scale is not None:
            found.outer_scale = aten.slice.Tensor(x.outer_scale, 0, start, end)
        return found
    if codes.shape == x.codes.shape:
        return x._like(codes, aten.alias.default(x.scale))
    is_cut = x.has_all_scales or (block > 1 and (first % block or (last % block and last != x.shape[dim])))
    if block != -1 and not is_cut:
        found = x._like(codes, aten.slice.Tensor(x.scale, dim, first // block, -(-last // block)))
        if x.outer_scale is None:
            return found
    else:
        found = x._like(codes, aten.alias.default(x.scale))
    found.has_all_scales = bool(is_cut)
    if found.extent != SHARD:
        found.extent, found.group, found.shard_dim, found.sizes = SLICE, None, None, None
    return found


def _split(func: Any, x: QuantizedStackParameter, sizes: int | list[int], dim: int = 0) -> list | None:
    total = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, max(total, 1), max(sizes, 1))]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [_slice(func, x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


OWN_VIEWS = {
    aten.as_strided.default: _as_strided,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.transpose.int: _transpose,
    aten.view.default: _view,
}
