"""Kernels that read a matrix a tile at a time, and their launches, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TileKernel", "TileLaunch"]


@dataclass(frozen=True)
class TileKernel:
    """A kernel under ``triton.jit`` that reads a whole matrix by `values`, a tile at a time.

    Attributes:
        function: The kernel. Its first parameter is ``x_ptr``; it returns nothing.
        inputs: Names of pointers to the op's tensors but the first one.
        outputs: Names of pointers to the op's results, but the first one where that is stored by `write`.
        sizes: Names of numbers that are known when it is launched.
        tile: Names of the constants that are a tile's rows and columns.
        added_to: Names of pointers among the outputs that have to begin as zeros.
        writes: Whether it stores its first result by `write`. If not, others read the matrix too.
    """

    function: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[str, ...]
    tile: tuple[str, str] = ("TILE", "TILE")
    added_to: tuple[str, ...] = ()
    writes: bool = True


@dataclass(frozen=True)
class TileLaunch:
    """A launch of a kernel of tiles.

    Attributes:
        kernel: The kernel to launch.
        grid: Numbers of programs along three axes.
        sizes: A value for each name in ``TileKernel.sizes``; int or SymInt, as in the grid.
        constants: Compile-time arguments.
        warps: Number of warps, of 32 threads each.
    """

    kernel: TileKernel
    grid: tuple[Any, ...]
    sizes: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int

    def __call__(self, x: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Launch the kernel on the matrix, the other inputs and the outputs."""
        self.kernel.function[self.grid](
            x, *tensors, **self.sizes, **self.constants, stride_m=x.stride(0), stride_k=x.stride(1),
            num_warps=self.warps,
        )  # fmt: skip
