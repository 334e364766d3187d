"""The Triton kernels beside their twins in PyTorch, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from golden_cases import CASES
from torch import Tensor

import fp8compile as f8
from fp8compile.kernels.both_directions import both_directions
from fp8compile.kernels.group_quantize_rows import rows_of_groups
from fp8compile.kernels.quantize_weight import square_blocks
from fp8compile.ops.cast_transpose import empty_outputs, two_casts
from fp8compile.ops.quantize_weight import step_by_step

RULES = ("fp32", "pow2", "e8m0_rceil", "e8m0_floor")
INPUTS = (((1, 1), torch.float32), ((1, 100), torch.float16), ((257, 5), torch.bfloat16), ((129, 130), torch.float32))


def values(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Magnitudes over many powers of two, with a NaN, an infinity, and blocks of zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    x[: shape[0] // 2, shape[1] // 2 :] = 0
    x[0, 0], x[-1, -1] = torch.nan, -torch.inf
    return x.to(dtype)


def every_bfloat16() -> Tensor:
    """All of them, in rows of 128."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 128)


def kernel(x: Tensor, rows: f8.CurrentScaling, columns: f8.CurrentScaling) -> tuple[Tensor, ...]:
    outputs = empty_outputs(x, rows, columns)
    both_directions(x, rows, columns, outputs)()
    return outputs


def columns_kernel(x: Tensor, rows: f8.CurrentScaling, columns: f8.CurrentScaling) -> tuple[Tensor, ...]:
    outputs = empty_outputs(x, rows, columns)[2:]
    both_directions(x, None, columns, (None, None, *outputs))()
    return outputs


def weight_kernel(x: Tensor, first: f8.CurrentScaling, again: f8.CurrentScaling) -> tuple[Tensor, ...]:
    outputs = tuple(torch.full_like(each, 77) for each in step_by_step(x, first, again))
    (rows_of_groups(x, None, first, outputs) if first.block == (1, -1) else square_blocks(x, first, outputs))()
    return outputs


def weight_pairs() -> Iterator[tuple[f8.CurrentScaling, f8.CurrentScaling]]:
    for rule in RULES:
        for format, eps in (("e4m3", 0.0), ("e5m2", 1e-3)):
            first = f8.CurrentScaling(format=format, block=(1, -1), scale=rule, eps=eps)
            yield first, f8.CurrentScaling(block=(-1, 1))
            for n in (16, 128):
                square = f8.CurrentScaling(format=format, block=(n, n), scale=rule, eps=eps)
                yield square, square


def layout(x: Tensor) -> tuple:
    """Dtype, shape, and the strides that say where elements are."""
    return x.dtype, x.shape, [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def differing(got: Tensor, expected: Tensor) -> int:
    """How many elements have other bits; a NaN is a NaN. All of them if dtypes, shapes or strides differ."""
    if layout(got) != layout(expected):
        return max(1, got.numel())
    got, expected = got.contiguous(), expected.contiguous()
    if got.dtype != torch.float32:
        return int((got != expected).sum())
    both_nan = got.isnan() & expected.isnan()
    return int(((got.view(torch.int32) != expected.view(torch.int32)) & ~both_nan).sum())


def compared(name: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> tuple[str, list[int]]:
    return name, list(map(differing, got, expected))


def pairs() -> Iterator[tuple[f8.CurrentScaling, f8.CurrentScaling]]:
    for n in (16, 32, 128):
        for number, rule in enumerate(RULES):
            for format, eps in (("e4m3", 0.0), ("e5m2", 1e-3)):
                rows = f8.CurrentScaling(format=format, block=(1, n), scale=rule, eps=eps)
                # the two directions have nothing but the block in common
                columns = f8.CurrentScaling(block=(n, 1), scale=RULES[number - 1])
                yield rows, columns


def comparisons() -> Iterator[tuple[str, list[int]]]:
    """For each comparison its name, and how many elements of each output differ."""
    for rows, columns in pairs():
        for shape, dtype in INPUTS:
            x = values(shape, dtype)
            yield compared(f"{rows} {columns} {shape} {dtype}", kernel(x, rows, columns), two_casts(x, rows, columns))
        if rows.scale == RULES[0]:
            x = values((420, 130), torch.bfloat16).view(3, 140, 130)  # blocks end with each matrix
            yield compared(f"stack {rows} {columns}", kernel(x, rows, columns), two_casts(x, rows, columns))
            yield compared(f"columns {columns}", columns_kernel(x, rows, columns), two_casts(x, rows, columns)[2:])
    for first, again in weight_pairs():
        for shape, dtype in INPUTS:
            x = values(shape, dtype)
            yield compared(
                f"weight {first} {shape} {dtype}", weight_kernel(x, first, again), step_by_step(x, first, again)
            )
    for n in (32, 128):
        rows, columns = f8.CurrentScaling(block=(1, n)), f8.CurrentScaling(block=(n, 1), format="e5m2")
        x = every_bfloat16()
        yield compared(f"every bfloat16 {n}", kernel(x, rows, columns), two_casts(x, rows, columns))
    for case in CASES:
        q, x, n = case.quantizer, case.x.contiguous(), max(case.quantizer.block)
        if n not in (32, 128) or sorted(q.block) != [1, n]:
            continue
        along_rows = q.block == (1, n)
        outputs = kernel(x, q, q.transposed()) if along_rows else kernel(x, q.transposed(), q)
        codes, scale = (t.contiguous() for t in (outputs[:2] if along_rows else outputs[2:]))
        yield compared(f"golden {case.name}", (codes, scale), (case.codes.contiguous(), case.scale.contiguous()))
    rows, columns = next(pairs())
    x = values((200, 300), torch.bfloat16)
    first, again = next(weight_pairs())
    other = replace(first, scale="pow2"), f8.CurrentScaling(block=(-1, 1))
    yield compared("planted in weights", weight_kernel(x, first, again)[:2], step_by_step(x, *other)[:2])
    yield compared(
        "planted", kernel(x, rows, columns), two_casts(x, replace(rows, scale="pow2"), replace(columns, eps=1.0))
    )
