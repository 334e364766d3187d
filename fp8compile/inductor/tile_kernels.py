"""TileKernel and TileLaunch: descriptions of kernels that read a matrix a tile at a time, and of their launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TileKernel", "TileLaunch"]


@dataclass(frozen=True)
class TileKernel:
    """A ``triton.jit`` kernel that reads a whole matrix with `values`, a tile at a time.

    Attributes:
        function: The kernel. Its first parameter is ``x_ptr``; it returns nothing.
        inputs: Names of the pointers to the op's input tensors, without the matrix.
        outputs: Names of the pointers to the op's results. If ``writes``, without the first result.
        sizes: Names of the numbers that are known when the kernel is launched.
        tile: Names of the constants that give a tile's rows and columns.
        added_to: Names of the pointers among the outputs whose tensors have to be zeros before the launch.
        writes: Whether the kernel stores its first result with `write`. If not, other nodes read the matrix too.
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
    """A launch of a `TileKernel`.

    Attributes:
        kernel: The kernel to launch.
        grid: Numbers of programs along three axes, int or SymInt.
        sizes: A value for each name in ``TileKernel.sizes``, int or SymInt.
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
