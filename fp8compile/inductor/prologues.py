"""Fuses the pointwise code that computes an input into the hand-written Triton kernel that reads this input.

    kernel called as an op    silu(gate) * up --> y in memory --> kernel reads y, writes codes of y
    kernel as a template      gate, up --> kernel computes y a tile at a time, writes codes of y

Inductor does the same for its matrix products (prologue fusion), but only for inputs that are not larger than the
prologue's result, and for kernels with one output. Here the template is the kernel's own source, with two lines
replaced:

    x = values(x_ptr, m, k, is_inside, stride_m, stride_k)     by the code that computes these elements
    write(codes_ptr, m, k, codes, is_inside, stride)           by Inductor's store of the template's output

Values are rounded to the input's dtype as if they came from memory, so the op and the template give the same bits. If
other nodes read the input too, the template also writes the input to memory for them. If a kernel has no `write`, such
as a kernel that finds amaxes, the input is the template's output. `fp8compile.inductor.tile_templates` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8compile._compat import when_imported
from fp8compile.inductor.registration import register_fallback
from fp8compile.inductor.tile_kernels import TileLaunch

__all__ = ["register_tile_kernel"]


def register_tile_kernel(op: torch._ops.OpOverload, launch: Callable[..., TileLaunch | None]) -> None:
    """Let Inductor call ``op``; on a GPU, fuse the pointwise code that computes its matrix into its kernel.

    Args:
        op: The operator. Its first argument is the matrix that it reads; it returns one tensor or several.
        launch: Takes the operator's arguments, as fake tensors, and returns the launch of its kernel, or None to call
            the operator. The matrix is not empty, and the other tensors will be contiguous.
    """
    register_fallback(op)

    def register() -> None:
        from torch._inductor import lowering

        call = lowering.lowerings[op]

        def lower(*args: Any) -> Any:
            from fp8compile.inductor.tile_templates import lower_computing

            result = lower_computing(launch, *args)
            return call(*args) if result is None else result

        lowering.register_lowering(op, type_promotion_kind=None)(lower)

    when_imported("torch._inductor.lowering", register)
