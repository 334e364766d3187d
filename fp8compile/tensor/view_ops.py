"""Ops on a QuantizedTensor that keep its values: views, copies, moves between devices.

A view has the codes of its elements, and the scales of their blocks. A view that would begin or end within a block
raises a TypeError; some slices of a `QuantizedParameter` keep the scales of all blocks instead (``may_cut_blocks``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.four_bit_packing import packed_dim
from fp8compile.layout.quantized import Quantized
from fp8compile.tensor.quantized_tensor import HANDLERS, VIEWS, QuantizedTensor, no_meaning

__all__ = ["ALIASES"]

aten: Any = torch.ops.aten
Place = tuple[int | None, int | None, int]  # start, end and step of a slice
ALIASES = {aten.detach.default, aten.alias.default}


def _alias(func: Any, x: QuantizedTensor) -> QuantizedTensor:
    return x.like([own.each(func) for own in x.stored()])


def _same(func: Any, x: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    copies = [own.each(func) for own in x.sets()] if not kwargs else []
    return x.like(copies or [replace(own.each(func), codes=func(own.codes, **kwargs)) for own in x.sets()])


def _to_copy(func: Any, x: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, x.dtype):
        raise TypeError(
            f"a QuantizedTensor of {x.dtype} can't be cast to {dtype}, because its data is in a quantized format. "
            f"Call .dequantize({dtype}) for a plain tensor."
        )
    return x.like([own.each(lambda part: func(part, **kwargs)) for own in x.sets()])


def _whole(x: QuantizedTensor) -> QuantizedTensor:
    return _alias(aten.alias.default, x)


def _check_not_packed(func: Any, x: QuantizedTensor, own: Quantized) -> None:
    if own.codes.shape != x.shape:
        raise TypeError(
            f"{func} is not supported for a QuantizedTensor of {own.quantizer!r}, which stores several values per "
            f"byte: its data has shape {tuple(own.codes.shape)}, which can't be split or reshaped like "
            f"{tuple(x.shape)}. Call .dequantize() first."
        )


def _check_keeps_blocks(func: Any, x: QuantizedTensor, own: Quantized, *, keeps_bytes: bool = False) -> None:
    """Raise a TypeError if the view ``func`` of ``x`` can't keep the blocks of the codes ``own``.

    ``keeps_bytes`` says that the view never separates codes that share a byte, so that packed codes are allowed.
    """
    if not keeps_bytes or packed_dim(own.quantizer) is None:
        _check_not_packed(func, x, own)
    if x.cuts_of(own):
        raise TypeError(
            f"{func} is not supported for a QuantizedTensor whose first or last block spans several ranks: it is a "
            f"shard of sizes {x.sizes} along dim {x.shard_dim} with block {own.quantizer.block}. Call .all_gather() "
            "or .dequantize() first."
        )


# ---------------------------------------------------------------------------------- the order of dims


def _transpose(func: Any, x: QuantizedTensor, *dims: int) -> QuantizedTensor:
    """Run ``func`` (t, transpose): swap the two dims of a matrix, or of each stacked matrix."""
    if x.ndim < 2:
        return x.like([own.showing(func(own.codes, *dims)) for own in x.stored()])
    if x.ndim - x.batch != 2:
        raise TypeError(
            f"{func} of a QuantizedTensor requires a matrix, but this one has shape {tuple(x.shape)} and blocks "
            "over its flattened leading dims. Flatten them with .reshape, or call .dequantize() first."
        )
    swapped = {dim % x.ndim for dim in dims or (0, 1)}
    if x.batch and swapped != {x.ndim - 2, x.ndim - 1}:
        raise TypeError(no_meaning(func, x))
    sets = [own.showing(func(own.codes, *dims), func(own.scale, *dims)) for own in x.stored()]
    if len(swapped) == 1:
        return x.like(sets)
    sets = [
        replace(own, quantizer=own.quantizer.transposed(), has_scales_of_whole=own.has_scales_of_whole[::-1])
        for own in sets
    ]
    dim = x.shard_dim
    found = x.view_of(sets, 2 * x.ndim - 3 - dim if dim is not None and dim >= x.batch else dim)
    if found.shape != (*x.shape[:-2], x.shape[-1], x.shape[-2]):
        raise TypeError(
            f"{func} of a QuantizedTensor of shape {tuple(x.shape)}: the transposed() of {x.quantizer!r} returned "
            f"{found.quantizer!r}, whose values_shape gives shape {tuple(found.shape)} for the transposed data. Fix "
            "transposed() or values_shape of the quantizer."
        )
    return found


def _permute(func: Any, x: QuantizedTensor, dims: list[int]) -> QuantizedTensor:
    func(x.codes, dims)  # raises if dims are not a permutation
    if [dim % x.ndim for dim in dims] == list(range(x.ndim)):
        return _whole(x)
    if x.batch:
        raise TypeError(no_meaning(func, x))
    return _transpose(aten.t.default if x.ndim == 2 else func, x)  # raises if there are more dims than a matrix has


# ---------------------------------------------------------------------------------- shapes


def _dim_after(dim: int | None, before: Sequence[int], after: Sequence[int]) -> int | None:
    """Return the sharded dim of a view that reshapes ``before`` to ``after``; None if no dim of it is sharded.

    ``dim`` is the sharded dim of ``before``. Both shapes have the same last dim.
    """
    if dim is None or dim == len(before) - 1:
        return None if dim is None else len(after) - 1
    outer = math.prod(before[:dim])
    found = [each for each in range(len(after) - 1) if math.prod(after[:each]) == outer]
    same = [each for each in found if after[each] == before[dim]]
    return next(iter([*same, *found]), None)


def _reshaped(
    func: Any, x: QuantizedTensor, shape: torch.Size, codes_of: Callable[[Tensor], Tensor]
) -> QuantizedTensor:
    """Return a view of ``x`` with shape ``shape``; ``codes_of`` makes the view of codes."""
    if shape == x.shape:
        return x.like([own.showing(codes_of(own.codes)) for own in x.stored()])
    if x.batch:
        raise TypeError(no_meaning(func, x))
    keeps_last_dim = x.ndim > 0 and len(shape) > 0 and shape[-1] == x.shape[-1]
    if keeps_last_dim and len(shape) == 1 and 0 in x.shape[:-1]:
        keeps_last_dim = False  # no rows and no columns: a single row has a scale, which no row here has
    for own in x.stored():
        _check_keeps_blocks(func, x, own, keeps_bytes=True)
        if not (own.quantizer.block == (-1, -1) or keeps_last_dim):
            raise TypeError(
                f"{func} from {tuple(x.shape)} to {tuple(shape)} would move elements between blocks "
                f"{own.quantizer.block}. Keep the last dim unchanged, or call .dequantize() first."
            )
    sets = [own.showing(codes_of(own.codes), own.scale.view(own.quantizer.scale_shape(shape))) for own in x.stored()]
    return x.view_of(sets, _dim_after(x.shard_dim, x.shape, shape) if keeps_last_dim else None)


def _view(func: Any, x: QuantizedTensor, *args: Any) -> QuantizedTensor:
    if args and not isinstance(args[0], int) and tuple(args[0]) == tuple(x.shape):
        return _whole(x)
    if all(own.codes.shape == x.shape for own in x.stored()):  # no byte has several codes
        return _reshaped(func, x, func(x.codes, *args).shape, lambda codes: func(codes, *args))
    # codes share bytes along rows, so the rows have to stay whole; infer the shape from values, not from codes
    shape = func(torch.empty(x.shape, device="meta"), *args).shape
    for own in x.stored() if not x.batch else ():
        if packed_dim(own.quantizer) != -1 or not shape or shape[-1] != x.shape[-1]:
            _check_not_packed(func, x, own)
    return _reshaped(func, x, shape, lambda codes: codes.view(*shape[:-1], codes.shape[-1]))


def _as_strided(
    func: Any, x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> QuantizedTensor:
    """Run ``as_strided`` as transposes, slices and reshapes; raise a TypeError if none of them fit.

    AOTAutograd calls ``as_strided`` to rebuild a graph's outputs that are views of its inputs.
    """
    size, stride = tuple(size), tuple(stride)
    is_whole = size == tuple(x.shape) and stride == x.stride() and storage_offset in (None, x.storage_offset())
    if x.batch:
        if not is_whole:
            raise TypeError(no_meaning(func, x))
        return _whole(x)
    if _compat.TORCH_VERSION >= (2, 14) and x.storage_offset():
        raise TypeError(
            f"{func} is not supported for a QuantizedTensor view with a nonzero storage offset, because PyTorch "
            f"{torch.__version__} adds the offset twice when a compiled graph returns such a view. Call .clone() on "
            "it before passing it to the compiled function, or call .dequantize() first."
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
            return _whole(x)
    flat = torch.empty(size, device="meta")
    if offset == 0 and x.is_contiguous() and flat.numel() == x.numel() and flat.stride() == stride:
        return _view(aten.view.default, x, size)
    raise TypeError(
        f"{func} with size {size} and stride {stride} of a QuantizedTensor with shape {tuple(x.shape)} and stride "
        f"{tuple(x.stride())} is not a view that keeps its blocks. Call .dequantize() first."
    )


def _position(offset: Any, stride: Sequence[int]) -> list[int]:
    indices = [0] * len(stride)
    for dim in sorted(range(len(stride)), key=lambda d: -stride[d]):
        indices[dim], offset = divmod(offset, stride[dim]) if stride[dim] else (0, offset)
    return indices


# ---------------------------------------------------------------------------------- parts


def _block_along(x: QuantizedTensor, own: Quantized, dim: int) -> int:
    """Return how many elements along ``dim`` share a scale of the codes ``own``; -1 for all of them.

    Raises:
        TypeError: The scales can't be sliced along ``dim``, because blocks lie over flattened leading dims.
    """
    block = x.block_along(own, dim)
    if dim == x.ndim - 1 or block in (1, -1) or x.ndim - x.batch == 2:
        return block
    raise TypeError(
        f"a QuantizedTensor of shape {tuple(x.shape)} with block {own.quantizer.block} can't be split along dim "
        f"{dim}, because its blocks span flattened leading dims. Flatten them with .reshape, or call .dequantize() "
        "first."
    )


def _slice(
    func: Any, x: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    if not x.ndim:
        raise IndexError(
            f"{func} requires a QuantizedTensor with at least one dim, got shape (). Call .dequantize() first."
        )
    dim %= x.ndim
    if x.batch and step != 1:
        raise TypeError(no_meaning(func, x))
    if dim < x.batch:
        sets = [own.each(lambda part: func(part, dim, start, end)) for own in x.stored()]
        return x.view_of(sets, x.shard_dim, along_batch=True)
    may_cut = x.may_cut_blocks and x.ndim - x.batch == 2 and step == 1 and (x.batch > 0 or dim == 0)
    return x.view_of([_slice_of(func, x, own, dim, (start, end, step), may_cut) for own in x.stored()], x.shard_dim)


def _slice_of(func: Any, x: QuantizedTensor, own: Quantized, dim: int, where: Place, may_cut: bool) -> Quantized:
    """Slice the codes ``own`` of ``x`` and their scales along ``dim``.

    ``where`` is start, end and step; ``may_cut`` allows a slice that begins or ends within a block.
    """
    size, is_column = x.shape[dim], dim == x.ndim - 1
    first, last, step = slice(*where).indices(size)
    parameter: Any = x  # only a QuantizedParameter may be cut within blocks
    if may_cut and (own.has_all_scales or parameter.cuts_by(own, dim, first, last)):
        of_whole = (own.has_scales_of_whole[0] or not is_column, own.has_scales_of_whole[1] or is_column)
        return own.showing(_codes_slice(func, x, own, dim, where), has_scales_of_whole=of_whole)
    _check_keeps_blocks(func, x, own, keeps_bytes=True)
    block = _block_along(x, own, dim)
    # if blocks lie over several leading dims, the grid of scales still has two dims
    scale_dim = -1 if is_column else dim
    if block in (1, -1):
        scale = None if block == -1 else func(own.scale, scale_dim, *where)
        return own.showing(_codes_slice(func, x, own, dim, where), scale)
    if step != 1 or first % block or (last % block and last != size and not x.ends_in_padding):
        raise TypeError(
            f"{func} [{first}:{last}:{step}] along dim {dim} of {size} splits blocks of {block}. Split at multiples "
            f"of {block}, or {x.instead_of_cutting}"
        )
    scale = func(own.scale, scale_dim, first // block, -(-last // block), 1)
    return own.showing(_codes_slice(func, x, own, dim, where), scale)


def _codes_slice(func: Any, x: QuantizedTensor, own: Quantized, dim: int, where: Place) -> Tensor:
    """Return ``own.codes`` sliced along ``dim``; ``where`` is start, end and step, counted in values.

    Raise a TypeError if values along ``dim`` share a byte and the slice would separate them.
    """
    if own.codes.shape[dim] == x.shape[dim]:
        return func(own.codes, dim, *where)
    first, last, step = slice(*where).indices(x.shape[dim])
    per_byte = x.shape[dim] // own.codes.shape[dim]
    if step != 1 or first % per_byte or last % per_byte:
        raise TypeError(
            f"{func} [{first}:{last}:{step}] along dim {dim} splits bytes that store {per_byte} values each. Split "
            f"at even positions, or {x.instead_of_cutting}"
        )
    return func(own.codes, dim, first // per_byte, last // per_byte, 1)


def _select(func: Any, x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    dim %= x.ndim
    if x.batch:
        raise TypeError(no_meaning(func, x))
    sets = []
    for own in x.stored():
        _check_keeps_blocks(func, x, own)
        block = _block_along(x, own, dim)
        if dim == x.ndim - 1 or block not in (1, -1):
            raise TypeError(
                f"{func} along dim {dim} of a QuantizedTensor with block {own.quantizer.block} would not keep its "
                "blocks. Call .dequantize() first."
            )
        scale = func(own.scale, dim, index if block == 1 else 0)
        sets.append(own.showing(func(own.codes, dim, index), scale))
    return x.view_of(sets, None if x.shard_dim in (None, dim) else x.shard_dim - (x.shard_dim > dim))


def _split(func: Any, x: QuantizedTensor, sizes: int | list[int], dim: int = 0) -> list[QuantizedTensor]:
    size = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, max(size, 1), max(sizes, 1))]
    if sum(sizes) != size:
        raise RuntimeError(f"{func}: sizes {sizes} must sum to {size}, the size of dim {dim}.")
    parts, start = [], 0
    for length in sizes:
        parts.append(_slice(aten.slice.Tensor, x, dim, start, start + length))
        start += length
    return parts


HANDLERS.update(
    {
        aten.detach.default: _alias,
        aten.alias.default: _alias,
        aten.t.default: _transpose,
        aten.transpose.int: _transpose,
        aten.permute.default: _permute,
        aten.as_strided.default: _as_strided,
        aten.view.default: _view,
        aten.unsqueeze.default: _view,
        aten.slice.Tensor: _slice,
        aten.select.int: _select,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
    }
)
VIEWS.update(HANDLERS)
HANDLERS.update(
    {
        aten.clone.default: _same,
        aten._pin_memory.default: _same,  # as CPUOffloadPolicy of FSDP2 does
        aten.is_pinned.default: lambda func, x, *args: x.codes.is_pinned(),
        aten._unsafe_view.default: _view,
        aten._to_copy.default: _to_copy,
    }
)
