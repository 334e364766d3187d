"""register_group_op: `register_op` for ops over rows that are sorted by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.ops.by_launch import by_launch
from fp8compile.ops.registry import register_op

__all__ = ["register_group_op"]


def register_group_op(
    name: str,
    impl: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    portable: Callable[..., Any] | str,
    launch: Callable[..., Any] | None = None,
    strided: tuple[int, ...] = (0,),
) -> OpOverload:
    """Register an operator over groups of rows: a kernel on a GPU, a loop over groups on a CPU.

    With ``launch``, ``impl`` is the loop, otherwise it is for all devices; for ``launch`` and ``strided`` see
    `fp8compile.ops.by_launch`. The op stays one node in compiled code. It has no derivative and no sharding rule. The
    other arguments have the same meaning as in `register_op`.
    """
    if launch is not None:
        impl = by_launch(impl, fake=fake, launch=launch, strided=strided)
    op = register_op(name, impl, fake=fake, backward=None, decompose=None, portable=portable, sharding=None)
    if launch is None:
        inductor.register_fallback(op)
    else:
        inductor.register_launch(op, launch, strided=strided)
    return op
