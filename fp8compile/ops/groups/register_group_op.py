"""register_group_op: `register_op` for ops over rows that are sorted by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8compile import inductor
from fp8compile.inductor import TileLaunch
from fp8compile.ops.registry import Samples, register_op

__all__ = ["register_group_op"]


def register_group_op(
    name: str,
    impl: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    portable: Callable[..., Any] | str,
    samples: Samples,
    launch: Callable[..., TileLaunch | None] | None = None,
) -> torch._ops.OpOverload:
    """Register an operator over groups of rows: a kernel on a GPU, a loop over groups on a CPU.

    The op stays one call in compiled code. It has no derivative and no sharding rule. With ``launch``, Inductor may
    fuse the computation of the input into the kernel; ``launch`` returns the kernel's `TileLaunch`, or None. The other
    arguments have the same meaning as in `register_op`.
    """
    op = register_op(
        name, impl, fake=fake, backward=None, decompose=None, portable=portable, sharding=None, samples=samples
    )
    if launch is None:
        inductor.register_fallback(op)
    else:
        inductor.register_tile_kernel(op, launch)
    return op
