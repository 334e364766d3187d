"""Hand-written Triton kernels that compute their input: the pointwise code before them becomes a part of them.

    as an op           y = silu(gate) * up --memory--> kernel: codes of y         what any library's kernel gets
    as a template      gate, up --> kernel: y, a tile at a time, codes of y       what this file makes of it

Inductor does the same to its matrix products (prologue fusion), for inputs that are not larger than the prologue's
result, and kernels with one output. Here the template is the kernel's own source. Two of its lines are replaced:

    x = values(x_ptr, m, k, is_inside, stride_m, stride_k)     the code that makes these elements
    write(codes_ptr, m, k, codes, is_inside, stride)           Inductor's store of the template's output

Values are rounded to the input's dtype, as in memory, so the op and the template have the same bits. Where others read
the input too, the template writes it, and they read that: it is the template's output where a kernel has no `write`,
such as one that finds amaxes. `fp8compile._compat.tile_templates` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8compile._compat.inductor import register_fallback, when_imported

__all__ = ["TileKernel", "TileLaunch", "register_tile_kernel"]


@dataclass(frozen=True)
class TileKernel:
    """A kernel under ``triton.jit`` that reads a matrix by `values`, a tile at a time, and all of it.

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
        kernel: Which one.
        grid: Numbers of programs, three.
        sizes: Of ``TileKernel.sizes``; int or SymInt, as those of the grid.
        constants: What it is compiled for.
        warps: Of 32 threads each.
    """

    kernel: TileKernel
    grid: tuple[Any, ...]
    sizes: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int

    def __call__(self, x: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Launch the kernel as it is, on the input, the other inputs and the outputs."""
        self.kernel.function[self.grid](
            x, *tensors, **self.sizes, **self.constants, stride_m=x.stride(0), stride_k=x.stride(1),
            num_warps=self.warps,
        )  # fmt: skip


def register_tile_kernel(op: torch._ops.OpOverload, launch: Callable[..., TileLaunch | None]) -> None:
    """Let Inductor call ``op``, and on a GPU make the pointwise code that its matrix comes from a part of its kernel.

    Args:
        op: The operator. Its first argument is the matrix that it reads, its results are one tensor or several.
        launch: How its kernel is launched for the operator's arguments, fake tensors among them, of which the matrix
            is not empty and the others will be contiguous; None where there is none.
    """
    register_fallback(op)

    def register() -> None:
        from torch._inductor import lowering

        call = lowering.lowerings[op]

        def lower(*args: Any) -> Any:
            from fp8compile._compat.tile_templates import lower_computing

            result = lower_computing(launch, *args)
            return call(*args) if result is None else result

        lowering.register_lowering(op, type_promotion_kind=None)(lower)

    when_imported("torch._inductor.lowering", register)
