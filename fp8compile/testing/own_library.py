"""Registers this package's operators and its table of GEMMs with `testing.gpu.program.libraries`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8compile.ops.gemms.gpu_support import gates_of
from fp8compile.ops.registry import OPS
from fp8compile.testing.gpu.program.libraries import Library, make_known

__all__ = ["OWN"]


def _operator(name: str) -> Callable[..., Any] | None:
    return OPS[name].impl if name in OPS else None


OWN = Library(_operator, gates_of)
make_known(OWN)
