"""Hand-written Triton kernels that compute their input: the pointwise code before them becomes a part of them.

    as an op           y = silu(gate) * up --memory--> kernel: codes of y         what any library's kernel gets
    as a template      gate, up --> kernel: y, a tile at a time, codes of y       what this file makes of it

Inductor does the same to its matrix products (prologue fusion), for inputs that are not larger than the prologue's
result, and kernels with one output. Here the template is the kernel's own source. Two of its lines are replaced:

    x = values(x_ptr, m, k, is_inside, stride_m, stride_k)     the code that makes these elements
    write(codes_ptr, m, k, codes, is_inside, stride)           Inductor's store of the template's output

Values are rounded to the input's dtype, as in memory, so the op and the template have the same bits. Where others read
the input too, the template writes it, and they read that: it is the template's output where a kernel has no `write`,
such as one that finds amaxes. `fp8compile.inductor.tile_templates` does it.
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
        op: The operator. Its first argument is the matrix that it reads, its results are one tensor or several.
        launch: Takes the operator's arguments, as fake tensors, and returns how its kernel is launched, or None. The
            matrix is not empty, and the other tensors will be contiguous.
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
