"""TileKernel and TileLaunch: a Triton kernel that reads a matrix a tile at a time, and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["COUNTS", "TileKernel", "TileLaunch", "TileMatrix", "with_counts"]

COUNTS = "counts_ptr"  # the parameter of a kernel that also counts its codes, None if it does not


@dataclass(frozen=True)
class TileKernel:
    """A ``triton.jit`` kernel, with its arguments, that loads a matrix by tiles with `fp8compile.kernels.values`.

    With this description, Inductor can make a template of the kernel (`fp8compile.inductor.prologue_fusion`).
    """

    function: Any  # The kernel. Its first parameter is ``x_ptr``; it returns nothing.
    inputs: tuple[str, ...]  # names of the pointers to the op's input tensors, without the matrix
    outputs: tuple[str, ...]  # Names of the pointers to the op's results. If ``writes``, without the first result.
    sizes: tuple[str, ...]  # names of the numbers that are known when the kernel is launched
    tile: tuple[str, str] = ("TILE", "TILE")  # names of the constants that give a tile's rows and columns
    # names of the pointers among the outputs whose tensors have to be zeros before the launch
    added_to: tuple[str, ...] = ()
    # Whether the kernel stores its first result with `write`. If not, other nodes read the matrix too.
    writes: bool = True
    # Names of the constants that each of several matrices has of its own, if a template may repeat the kernel's code.
    of_matrix: tuple[str, ...] = ()


@dataclass(frozen=True)
class TileMatrix:
    """One matrix of a `TileLaunch` that reads several, for each of which a template repeats part of the kernel."""

    constants: Mapping[str, Any]  # compile-time arguments that are this matrix's own
    left_out: tuple[str, ...] = ()  # names of the pointers among the outputs that this matrix does not have


def with_counts(kernel: TileKernel) -> TileKernel:
    """Return a copy of the kernel with one more output, for statistics (amax, underflows, saturations) of groups.

    The output must be zeros before the launch, because the kernel adds to it.
    """
    return replace(kernel, outputs=(*kernel.outputs, COUNTS), added_to=(*kernel.added_to, COUNTS))


@dataclass(frozen=True)
class TileLaunch:
    """A `TileKernel` with the grid, sizes and compile-time constants of one launch."""

    kernel: TileKernel  # the kernel to launch
    grid: tuple[Any, ...]  # numbers of programs along three axes, int or SymInt
    sizes: Mapping[str, Any]  # a value for each name in ``TileKernel.sizes``, int or SymInt
    constants: Mapping[str, Any]  # compile-time arguments
    warps: int  # number of warps, of 32 threads each
    # The matrices of a template that reads several; all have one shape. Empty: one matrix, with ``constants`` alone.
    matrices: tuple[TileMatrix, ...] = ()

    def __call__(self, x: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Launch the kernel on the matrix ``x``; ``tensors`` are the other inputs, then the outputs."""
        has_counts = COUNTS in self.kernel.outputs
        *others, last = tensors
        given, counts = (others, {COUNTS: last}) if has_counts else (tensors, {})
        self.kernel.function[self.grid](
            x, *given, **self.sizes, **self.constants, **counts, stride_m=x.stride(0), stride_k=x.stride(1),
            num_warps=self.warps,
        )  # fmt: skip
