"""Fusion of pointwise code into the Triton kernel that reads its result; Inductor does so only for its own GEMMs.

    kernel called as an op    silu(gate) * up --> y in memory --> kernel reads y, writes codes of y
    kernel as a template      gate, up --> kernel computes y a tile at a time, writes codes of y

The template is made from the source of the handwritten kernel. Values are rounded to the dtype of y as if they came
from memory, so the op and the template give the same bits. The template also writes y to memory if other nodes read y.
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
    """Let Inductor call ``op`` or, on a GPU, fuse the pointwise code of the op's matrix into the op's kernel.

    Args:
        op: The operator. Its first argument is the matrix that the kernel reads, or a list of matrices of one shape.
            It returns one tensor or several.
        launch: Takes the operator's arguments, as fake tensors, and returns the launch of its kernel, or None to call
            the operator. Called only if the matrix has elements. The other tensors are contiguous at the launch.
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
