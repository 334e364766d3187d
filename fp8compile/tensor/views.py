"""Ops on a QuantizedTensor that keep what it stands for, without touching a number: views, copies, other devices.

A view has the codes that it shows, and the scales of their blocks. One that would cut a block raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.packing import packed_dim
from fp8compile.tensor.quantized import HANDLERS, VIEWS, QuantizedTensor

aten = torch.ops.aten


def _same(func: Any, x: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    return _with_outer(x._like(func(x.codes, **kwargs), func(x.scale)), func)


def _with_outer(found: QuantizedTensor, func: Any, **kwargs: Any) -> QuantizedTensor:
    """A copy, with a copy of the outer scale."""
    found.outer_scale = None if found.outer_scale is None else func(found.outer_scale, **kwargs)
    return found


def _check_not_packed(func: Any, x: QuantizedTensor) -> None:
    if x.codes.shape != x.shape:
        raise TypeError(
            f"{func} of a QuantizedTensor of {x.quantizer!r}, which packs several values in a byte: its codes have "
            f"shape {tuple(x.codes.shape)} and can't be cut or reshaped as {tuple(x.shape)} can. Call .dequantize() "
            "first."
        )


def _check_keeps_blocks(func: Any, x: QuantizedTensor, *, keeps_bytes: bool = False) -> None:
    """Raise a TypeError if no view but the whole keeps the blocks of x, or the bytes that its codes share."""
    if not keeps_bytes or packed_dim(x.quantizer) is None:
        _check_not_packed(func, x)
    if x.cuts_blocks():
        raise TypeError(
            f"{func} of a QuantizedTensor whose first or last block lies on other ranks too, being a shard of sizes "
            f"{x.sizes} along dim {x.shard_dim} with block {x.quantizer.block}: no view of it knows where its blocks "
            "begin. Call .all_gather() or .dequantize() first."
        )


def _transpose(func: Any, x: QuantizedTensor, *dims: int) -> QuantizedTensor:
    if x.ndim < 2:
        return x._like(func(x.codes, *dims), aten.alias.default(x.scale))
    if x.ndim != 2:
        raise TypeError(
            f"{func} of a QuantizedTensor takes a matrix, this has shape {tuple(x.shape)}: its blocks lie over "
            "flattened leading dims. Flatten them with .reshape, or call .dequantize() first."
        )
    if dims and dims[0] % 2 == dims[1] % 2:
        return x._like(func(x.codes, *dims), func(x.scale, *dims))
    shard_dim = None if x.shard_dim is None else 1 - x.shard_dim
    found = x._view(func(x.codes, *dims), func(x.scale, *dims), shard_dim, x.quantizer.transposed())
    if found.shape != (x.shape[1], x.shape[0]):
        raise TypeError(
            f"{func} of a QuantizedTensor of shape {tuple(x.shape)}: transposed codes of {x.quantizer!r} stand for "
            f"shape {tuple(found.shape)} by its transposed(), {found.quantizer!r}. Mend transposed() or values_shape."
        )
    return found


def _permute(func: Any, x: QuantizedTensor, dims: list[int]) -> QuantizedTensor:
    codes = func(x.codes, dims)  # raises where these are no permutation
    if [dim % x.ndim for dim in dims] == list(range(x.ndim)):
        return x._like(codes, aten.alias.default(x.scale))
    return _transpose(aten.t.default if x.ndim == 2 else func, x)  # raises if there are more dims than a matrix has


def _dim_after(dim: int | None, before: Sequence[int], after: Sequence[int]) -> int | None:
    """Where a view that keeps the last dim has another one, so that parts along it still make the whole; or None."""
    if dim is None or dim == len(before) - 1:
        return None if dim is None else len(after) - 1
    outer = math.prod(before[:dim])
    found = [each for each in range(len(after) - 1) if math.prod(after[:each]) == outer]
    same = [each for each in found if after[each] == before[dim]]
    return next(iter([*same, *found]), None)


def _reshaped(func: Any, x: QuantizedTensor, codes: Tensor, shape: torch.Size) -> QuantizedTensor:
    """The view whose values have this shape."""
    if codes.shape == x.codes.shape:
        return x._like(codes, aten.alias.default(x.scale))
    _check_keeps_blocks(func, x, keeps_bytes=True)
    tensorwise = x.quantizer.block == (-1, -1)
    keeps_last_dim = x.ndim > 0 and len(shape) > 0 and shape[-1] == x.shape[-1]
    if not (tensorwise or keeps_last_dim):
        raise TypeError(
            f"{func} from {tuple(x.shape)} to {tuple(shape)} moves elements between blocks "
            f"{x.quantizer.block}. Keep the last dim as it is, or call .dequantize() first."
        )
    shard_dim = _dim_after(x.shard_dim, x.shape, shape) if keeps_last_dim else None
    return x._view(codes, x.scale.view(x.quantizer.scale_shape(shape)), shard_dim)


def _view(func: Any, x: QuantizedTensor, *args: Any) -> QuantizedTensor:
    if args and not isinstance(args[0], int) and tuple(args[0]) == tuple(x.shape):
        return x._like(aten.alias.default(x.codes), aten.alias.default(x.scale))
    if x.codes.shape != x.shape:
        return _view_of_bytes(func, x, *args)
    codes = func(x.codes, *args)
    return _reshaped(func, x, codes, codes.shape)


def _view_of_bytes(func: Any, x: QuantizedTensor, *args: Any) -> QuantizedTensor:
    """A view of codes that share bytes along rows, which have to stay whole: PyTorch is asked of values, not codes."""
    shape = func(torch.empty(x.shape, device="meta"), *args).shape
    if packed_dim(x.quantizer) != -1 or not shape or shape[-1] != x.shape[-1]:
        _check_not_packed(func, x)
    return _reshaped(func, x, x.codes.view(*shape[:-1], x.codes.shape[-1]), shape)


def _as_strided(
    func: Any, x: QuantizedTensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> QuantizedTensor:
    """The view with this size and stride, found among the others: AOTAutograd asks so for views that leave a graph."""
    size, stride = tuple(size), tuple(stride)
    if _compat.TORCH_VERSION >= (2, 14) and x.storage_offset():
        raise TypeError(
            f"{func} of a QuantizedTensor that starts inside another one: this PyTorch adds the offset twice where "
            "such a view leaves a compiled graph. Clone it before the graph, or call .dequantize() first."
        )
    offset = 0 if storage_offset is None else storage_offset - x.storage_offset()
    if x.ndim == len(size) == 2 and x.stride() != stride == x.stride()[::-1]:
        return _as_strided(func, _transpose(aten.t.default, x), size, stride, storage_offset)
    if x.stride() == stride and x.ndim:
        starts = _position(offset, stride)
        if all(start + length <= full for start, length, full in zip(starts, size, x.shape, strict=True)):
            for dim, (start, length) in enumerate(zip(starts, size, strict=True)):
                if length != x.shape[dim]:
                    x = _slice(aten.slice.Tensor, x, dim, start, start + length)
            return x._like(aten.alias.default(x.codes), aten.alias.default(x.scale))
    flat = torch.empty(size, device="meta")
    if offset == 0 and x.is_contiguous() and flat.numel() == x.numel() and flat.stride() == stride:
        return _view(aten.view.default, x, size)
    raise TypeError(
        f"{func} with size {size} and stride {stride} of a QuantizedTensor with shape {tuple(x.shape)} and stride "
        f"{tuple(x.stride())} is no view that keeps its blocks. Call .dequantize() first."
    )


def _position(offset: int, stride: tuple[int, ...]) -> list[int]:
    """Indices of the element at ``offset``."""
    indices = [0] * len(stride)
    for dim in sorted(range(len(stride)), key=lambda d: -stride[d]):
        indices[dim], offset = divmod(offset, stride[dim]) if stride[dim] else (0, offset)
    return indices


def _block_along(x: QuantizedTensor, dim: int) -> int:
    """Elements along ``dim`` that share a scale, -1 for all of them, where scales can be cut along that dim."""
    rows, columns = x.quantizer.block
    if dim == x.ndim - 1:
        return columns
    if rows in (1, -1) or x.ndim == 2:
        return rows
    raise TypeError(
        f"a QuantizedTensor of shape {tuple(x.shape)} with block {x.quantizer.block} can't be cut along dim {dim}: "
        "its blocks lie over flattened leading dims. Flatten them with .reshape, or call .dequantize() first."
    )


def _slice(
    func: Any,
    x: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedTensor:
    if not x.ndim:
        raise IndexError(f"{func} of a QuantizedTensor of 0 dims: there is nothing to cut.")
    dim %= x.ndim
    size = x.shape[dim]
    if x.may_cut_rows and dim == 0 and x.ndim == 2 and step == 1 and x.cut_by(*slice(start, end).indices(size)[:2]):
        return x.rows_cut(codes_slice(func, x, dim, start, end, step))
    _check_keeps_blocks(func, x, keeps_bytes=True)
    block = _block_along(x, dim)
    # blocks over several leading dims: the grid has two dims, whatever x has
    scale_dim = -1 if dim == x.ndim - 1 else dim
    if block == -1:
        return x._view(func(x.codes, dim, start, end, step), aten.alias.default(x.scale), x.shard_dim)
    if block == 1:
        codes = func(x.codes, dim, start, end, step)
        return x._view(codes, func(x.scale, scale_dim, start, end, step), x.shard_dim)
    first, last, _ = slice(start, end).indices(size)
    if step != 1 or first % block or (last % block and last != size and not x.ends_in_padding):
        raise TypeError(
            f"{func} [{first}:{last}:{step}] along dim {dim} of {size} cuts blocks of {block}. Cut at multiples of "
            f"{block}, or {x.instead_of_cutting}"
        )
    codes = codes_slice(func, x, dim, start, end, step)
    return x._view(codes, func(x.scale, scale_dim, first // block, -(-last // block), 1), x.shard_dim)


def codes_slice(func: Any, x: QuantizedTensor, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    """The codes of a slice along a dim; along the one whose neighbours share a byte, of whole bytes."""
    if x.codes.shape[dim] == x.shape[dim]:
        return func(x.codes, dim, start, end, step)
    first, last, _ = slice(start, end).indices(x.shape[dim])
    per_byte = x.shape[dim] // x.codes.shape[dim]
    if step != 1 or first % per_byte or last % per_byte:
        raise TypeError(
            f"{func} [{first}:{last}:{step}] along dim {dim} of codes of which {per_byte} share a byte. Cut at even "
            f"places, or {x.instead_of_cutting}"
        )
    return func(x.codes, dim, first // per_byte, last // per_byte, 1)


def _select(func: Any, x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    dim %= x.ndim
    _check_keeps_blocks(func, x)
    block = _block_along(x, dim)
    if dim == x.ndim - 1 or block not in (1, -1):
        raise TypeError(
            f"{func} along dim {dim} of a QuantizedTensor with block {x.quantizer.block} leaves no block. Call "
            ".dequantize() first."
        )
    shard_dim = None if x.shard_dim in (None, dim) else x.shard_dim - (x.shard_dim > dim)
    return x._view(func(x.codes, dim, index), func(x.scale, dim, index if block == 1 else 0), shard_dim)


def _split(func: Any, x: QuantizedTensor, sizes: int | list[int], dim: int = 0) -> list[QuantizedTensor]:
    size = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, max(size, 1), max(sizes, 1))]
    if sum(sizes) != size:
        raise RuntimeError(f"{func}: sizes {sizes} do not sum to {size}, the size of dim {dim}.")
    parts, start = [], 0
    for length in sizes:
        parts.append(_slice(aten.slice.Tensor, x, dim, start, start + length))
        start += length
    return parts


def _to_copy(func: Any, x: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, x.dtype):
        raise TypeError(
            f"a QuantizedTensor of {x.dtype} can't be cast to {dtype}: its codes have their own format. Call "
            f".dequantize({dtype}) for a plain tensor."
        )
    return _with_outer(x._like(func(x.codes, **kwargs), func(x.scale, **kwargs)), func, **kwargs)


VIEWS.update(
    {
        aten.detach.default,
        aten.alias.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.as_strided.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
    }
)
HANDLERS.update(
    {
        aten.detach.default: _same,
        aten.alias.default: _same,
        aten.clone.default: _same,
        aten._pin_memory.default: _same,  # as CPUOffloadPolicy of FSDP2 does
        aten.is_pinned.default: lambda func, x, *args: x.codes.is_pinned(),
        aten.t.default: _transpose,
        aten.transpose.int: _transpose,
        aten.permute.default: _permute,
        aten.as_strided.default: _as_strided,
        aten.view.default: _view,
        aten._unsafe_view.default: _view,
        aten.unsqueeze.default: _view,
        aten.slice.Tensor: _slice,
        aten.select.int: _select,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
        aten._to_copy.default: _to_copy,
    }
)
