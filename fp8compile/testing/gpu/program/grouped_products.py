"""Grouped GEMMs of generated code: a GPU library's requirements on operands, and the results.

Rows after the last group, and padding columns of groups, are not read. Elements that PyTorch leaves unwritten are NaN
here, so that reads of them are noticed.

Sources of the requirements: PyTorch's checks in `_grouped_mm` and `_scaled_grouped_mm`
(aten/src/ATen/native/cuda/GroupedBlas.cpp, aten/src/ATen/native/GroupedMMUtils.h); for four bits also the arguments
that MSLK's kernel computes from the operands (include/mslk/gemm/cutlass/grouped_common.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile.target import Target, pretend_target
from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.program.demands import (
    ALIGNMENT,
    E8M0,
    MX_BLOCK,
    TILE_BLOCKS,
    TILE_ROWS,
    demand,
    four_bit_values,
    tiled_values,
)
from fp8compile.testing.gpu.program.libraries import gates_of, operator_called

__all__ = ["grouped_blockwise_mm", "grouped_mm", "grouped_nvfp4_mm", "scaled_grouped_mm"]


def _spans(offs: Tensor, total: int, name: str) -> Iterator[tuple[int, int, int]]:
    demand(offs.dtype == torch.int32 and offs.ndim == 1 and offs.is_contiguous(), name, "offsets in int32, 1-D.")
    start = 0
    for group, end in enumerate(offs.tolist()):
        demand(start <= end <= total, name, f"offsets that never fall and end within {total}, not {offs.tolist()}.")
        yield group, start, end
        start = end


def _check_strides(x: Tensor, name: str) -> None:
    """Raise a ValueError unless one of the last two strides is 1, and rows begin at multiples of 16 bytes."""
    one, other = (x.stride(-1), x.stride(-2)) if x.stride(-1) == 1 else (x.stride(-2), x.stride(-1))
    demand(one == 1, name, f"matrices with rows or columns side by side, not strides {x.stride()}.")
    aligned = other * x.itemsize % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0
    demand(aligned, name, f"rows that begin at multiples of {ALIGNMENT} bytes, not strides {x.stride()} of {x.dtype}.")


def _multiplied(gpu: Gpu, a: Tensor, b: Tensor, offs: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Multiply each group in float64, rounded once to ``dtype``; what the GPU leaves unwritten is NaN.

    ``offs`` has the groups' ends: rows of ``a`` if ``b`` is (groups, k, n), else columns. ``name`` is for errors.
    """
    a, b = a.double(), b.double()
    if b.ndim == 3:
        result = torch.full((a.shape[0], b.shape[2]), torch.nan, dtype=dtype)
        for group, start, end in _spans(offs, a.shape[0], name):
            result[start:end] = (a[start:end].contiguous() @ b[group].contiguous()).to(dtype)
        return result
    result = torch.full((offs.shape[0], a.shape[0], b.shape[1]), torch.nan, dtype=dtype)
    for group, start, end in _spans(offs, b.shape[0], name):
        if end > start or gpu.major < 10:
            result[group] = (a[:, start:end].contiguous() @ b[start:end].contiguous()).to(dtype)
    return result


def grouped_mm(
    gpu: Gpu, a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute `torch._grouped_mm`, or raise a ValueError if a GPU would refuse the operands.

    ``offs`` has the end of each group. If ``b`` has three dims, each group's rows of ``a`` are multiplied by the
    group's matrix. If ``b`` has two dims, each group's columns of ``a`` are multiplied by the group's rows of ``b``.
    """
    name = f"_grouped_mm {tuple(a.shape)} x {tuple(b.shape)}"
    demand(bias is None and a.ndim == 2, name, "no bias, and a left operand of two dims here.")
    demand(a.dtype == b.dtype == torch.bfloat16, name, f"bfloat16, not {a.dtype} and {b.dtype}.")
    for each in (a, b):
        _check_strides(each, name)
    return _multiplied(gpu, a, b, offs, out_dtype or a.dtype, name)


def _mx_rows(scale: Tensor, rows: int, k: int, offs: Tensor, name: str) -> Tensor:
    """Expand MX scales to the elements of codes (rows, k) with grouped rows, in float64.

    Scales are in tiles; each group begins with a new tile. ``offs`` has the groups' ends, ``name`` is for errors.
    """
    blocks = k // MX_BLOCK
    width = -(-blocks // TILE_BLOCKS) * TILE_BLOCKS
    demand(scale.ndim == 2 and scale.shape[1] == width, name, f"scales of rows in {width} columns of tiles.")
    values, first = torch.ones(rows, k, dtype=torch.float64), 0
    for _, start, end in _spans(offs, rows, name):
        tall = -(-(end - start) // TILE_ROWS) * TILE_ROWS
        demand(first + tall <= scale.shape[0], name, f"scales of {first + tall} rows and more, groups in whole tiles.")
        own = tiled_values(scale[first : first + tall], end - start, blocks)
        values[start:end] = own.repeat_interleave(MX_BLOCK, 1)
        first += tall
    return values


def _mx_tokens(scale: Tensor, features: int, columns: int, offs: Tensor, name: str) -> Tensor:
    """Expand MX scales to the elements of codes (features, columns) with grouped columns, in float64.

    Scales are in tiles; each group has tiles of its own. ``offs`` has the groups' ends, ``name`` is for errors.
    """
    tall = -(-features // TILE_ROWS) * TILE_ROWS
    demand(scale.ndim == 2 and scale.shape[0] == tall, name, f"scales of {tall} features in whole tiles.")
    flat, first = scale.contiguous().reshape(-1), 0
    values = torch.ones(features, columns, dtype=torch.float64)
    for _, start, end in _spans(offs, columns, name):
        demand((end - start) % MX_BLOCK == 0, name, f"groups of multiples of {MX_BLOCK} columns.")
        blocks = (end - start) // MX_BLOCK
        size = tall * -(-blocks // TILE_BLOCKS) * TILE_BLOCKS
        demand(first + size <= flat.numel(), name, "scales of all groups, each in whole tiles.")
        own = tiled_values(flat[first : first + size], features, blocks)
        values[:, start:end] = own.repeat_interleave(MX_BLOCK, 1)
        first += size
    return values


def _mx(scale: Tensor, shape: torch.Size, offs: Tensor, *, over_tokens: bool, name: str) -> Tensor:
    if len(shape) == 3:
        groups, rows, k = shape
        size = -(-rows // TILE_ROWS) * TILE_ROWS * (-(-(k // MX_BLOCK) // TILE_BLOCKS) * TILE_BLOCKS)
        demand(tuple(scale.shape) == (groups, size), name, f"scales of matrices in shape ({groups}, {size}).")
        return torch.stack([tiled_values(s, rows, k // MX_BLOCK).repeat_interleave(MX_BLOCK, 1) for s in scale])
    if over_tokens:
        return _mx_tokens(scale, shape[0], shape[1], offs, name)
    return _mx_rows(scale, shape[0], shape[1], offs, name)


def _rowwise(scale: Tensor, shape: torch.Size, offs: Tensor, *, over_tokens: bool, name: str) -> Tensor:
    groups = offs.shape[0]
    demand(scale.dtype == torch.float32 and scale.is_contiguous(), name, "contiguous scales in float32 or E8M0.")
    if over_tokens:
        features, columns = shape
        demand(tuple(scale.shape) == (groups * features,), name, f"a scale a group and feature, {groups * features}.")
        values = torch.ones(features, columns, dtype=torch.float64)
        for group, start, end in _spans(offs, columns, name):
            values[:, start:end] = scale.view(groups, features)[group].double()[:, None]
        return values
    demand(tuple(scale.shape) == tuple(shape[:-1]), name, f"a scale a row, {tuple(shape[:-1])}.")
    return scale.double().unsqueeze(-1)


def scaled_grouped_mm(
    gpu: Gpu, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `torch._scaled_grouped_mm`, or raise a ValueError if a GPU would refuse the operands.

    The sum is over dim -2 of ``b``. The arguments after ``gpu`` are those of the operator.
    """
    name = f"_scaled_grouped_mm {tuple(a.shape)} x {tuple(b.shape)}, strides {a.stride()} and {b.stride()}"
    demand(bias is None and scale_result is None and a.ndim == 2, name, "two operands without a bias here.")
    demand(a.dtype == b.dtype == torch.float8_e4m3fn, name, f"e4m3 by e4m3, not {a.dtype} and {b.dtype}.")
    demand(out_dtype == torch.bfloat16, name, f"bfloat16 as its result, not {out_dtype}.")
    demand(a.stride(1) == 1 and b.stride(-2) == 1, name, "a row-major left and a column-major right operand.")
    for each in (a, b):
        _check_strides(each, name)
    over_tokens, is_mx = b.ndim == 2, scale_a.dtype == scale_b.dtype == E8M0
    product, where = ("mx groups", "10.0 and 10.3") if is_mx else ("rowwise groups", "9.0: its kernel traps on others")
    demand(bool(gates_of(product, gpu.target)), name, f"compute capability {where}.")
    if over_tokens:
        demand(all(end % ALIGNMENT == 0 for end in offs.tolist()), name, f"groups from multiples of {ALIGNMENT}.")
    demand(
        a.shape[1] % (MX_BLOCK if is_mx and not over_tokens else ALIGNMENT) == 0, name, "another length of the sum."
    )
    values = _mx if is_mx else _rowwise
    turned = b.transpose(-2, -1)
    left = a.double() * values(scale_a, a.shape, offs, over_tokens=over_tokens, name=name)
    right = turned.double() * values(scale_b, turned.shape, offs, over_tokens=over_tokens, name=name)
    return _multiplied(gpu, left, right.transpose(-2, -1), offs, torch.bfloat16, name)


def grouped_blockwise_mm(
    gpu: Gpu | None, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, *rest: object,
    interpret: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `fp8compile::grouped_blockwise_mm` by its CPU kernel; raise a ValueError if a GPU would refuse.

    ``rest`` has the operator's other arguments. With block scales, the kernel adds in float32, in its own order. Other
    GEMMs in this file are summed in float64. With ``interpret``, the GPU's Triton kernel runs in the active
    interpreter.
    """
    name = f"grouped_blockwise_mm {tuple(a.shape)} x {tuple(b.shape)}"
    demand(gpu is None or bool(gates_of("blockwise groups", gpu.target)), name, "compute capability 8.9 to 12.1.")
    for _ in _spans(offsets, a.shape[0 if b.ndim == 3 else 1], name):
        pass
    with pretend_target(gpu.target if interpret and gpu is not None else Target("cpu")):
        multiply: Any = operator_called("fp8compile::grouped_blockwise_mm")
        return multiply(a, b, a_scale, b_scale, offsets, *rest)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _own_tiles(codes: Tensor, scale: Tensor, first: int, name: str) -> tuple[Tensor, int]:
    """Decode a group's four-bit codes (rows, columns / 2), with scales from byte ``first`` of ``scale``.

    ``name`` names the GEMM in errors.

    Returns:
        The values in float64, and the offset of the next group's scales.
    """
    size = _round_up(codes.shape[0], TILE_ROWS) * _round_up(codes.shape[1] // 8, TILE_BLOCKS)
    demand(first + size <= scale.numel(), name, f"scales of all groups in whole tiles, {first + size} bytes and more.")
    return four_bit_values(codes, scale.view(-1)[first : first + size], name), first + size


def grouped_nvfp4_mm(
    gpu: Gpu, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_outer: Tensor, b_outer: Tensor, offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `fp8compile::grouped_nvfp4_mm`, or raise a ValueError if a GPU would refuse the operands.

    On a GPU, the operator calls `torch._scaled_grouped_mm_v2` on four-bit codes. The result of a group without columns
    to sum over, which the GPU leaves unwritten, is NaN here.
    """
    name, groups, half = f"grouped_nvfp4_mm {tuple(a.shape)} x {tuple(b.shape)}", offs.shape[0], a.shape[1]
    demand(bool(gates_of("nvfp4 groups", gpu.target)), name, "compute capability 10.0 or 10.3.")
    demand(out_dtype == torch.bfloat16, name, f"bfloat16 as its result, not {out_dtype}.")
    demand(half == b.shape[-1] and half % ALIGNMENT == 0, name, f"rows of one length, in {ALIGNMENT} bytes.")
    demand(b.shape[-2] % ALIGNMENT == 0, name, f"columns of the result in multiples of {ALIGNMENT}.")
    for each in (a, b, a_scale, b_scale):
        laid = each.dtype == torch.uint8 and each.is_contiguous() and each.data_ptr() % ALIGNMENT == 0
        demand(laid, name, f"contiguous bytes from an address of a multiple of {ALIGNMENT} on.")
    for outer in (a_outer, b_outer):
        laid = outer.dtype == torch.float32 and outer.is_contiguous() and tuple(outer.shape) == (groups,)
        demand(laid, name, "a float32 scale of each group.")
    demand(groups <= 1024, name, "1024 groups at most.")
    outer = a_outer.double() * b_outer.double()
    multiply = _four_bit_rows if b.ndim == 3 else _four_bit_tokens
    return multiply(a, b, a_scale, b_scale, outer, offs, out_dtype, name)


def _four_bit_rows(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, outer: Tensor, offs: Tensor, dtype: torch.dtype, name: str
) -> Tensor:
    _, n, half = b.shape
    width = _round_up(half // 8, TILE_BLOCKS)
    demand(a_scale.ndim == 2 and a_scale.shape[1] == width, name, f"scales of rows in {width} columns of tiles.")
    demand(a_scale.shape[0] >= a.shape[0], name, "scales of as many rows as there are, or more.")
    shape = (b.shape[0], _round_up(n, TILE_ROWS) * width)
    demand(tuple(b_scale.shape) == shape, name, f"scales of matrices in shape {shape}.")
    result, first = torch.full((a.shape[0], n), torch.nan, dtype=dtype), 0
    for group, start, end in _spans(offs, a.shape[0], name):
        left, first = _own_tiles(a[start:end], a_scale, first, name)
        right = four_bit_values(b[group], b_scale[group], name)
        result[start:end] = ((left @ right.t()) * outer[group]).to(dtype)
    return result


def _four_bit_tokens(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, outer: Tensor, offs: Tensor, dtype: torch.dtype, name: str
) -> Tensor:
    for codes, scale in ((a, a_scale), (b, b_scale)):
        demand(scale.ndim == 2 and scale.shape[0] >= codes.shape[0], name, "scales of all features, in two dims.")
    result = torch.full((offs.shape[0], a.shape[0], b.shape[0]), torch.nan, dtype=dtype)
    left_first = right_first = 0
    for group, start, end in _spans(offs, a.shape[1] * 2, name):
        demand((end - start) % (2 * ALIGNMENT) == 0, name, f"groups of multiples of {2 * ALIGNMENT} columns.")
        left, left_first = _own_tiles(a[:, start // 2 : end // 2], a_scale, left_first, name)
        right, right_first = _own_tiles(b[:, start // 2 : end // 2], b_scale, right_first, name)
        if end > start:
            result[group] = ((left @ right.t()) * outer[group]).to(dtype)
    return result
