"""Register the handlers with which DTensor runs the ops of this and other libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fp8compile import _compat
from fp8compile.ops.registry import Op, for_every_op
from fp8compile.parallel.dtensor_layer import HANDLERS
from fp8compile.parallel.dtensor_ops import dispatch_by_rule

__all__ = ["register"]


def _register(op: Op) -> None:
    handler: Any = HANDLERS.get(op.name)

    def dispatch(*call: Any) -> Any:
        args = call[-2]
        return handler(*args) if handler is not None else dispatch_by_rule(op, args)

    torch.library.register_torch_dispatch(op.overload, DTensor, dispatch)


def register() -> None:
    """Register a DTensor handler for each op, including ops that are registered later."""
    _compat.tell_apart_by_local_tensors()
    for_every_op(_register)
