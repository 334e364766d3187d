"""What is imported when it is asked for: what stands on DTensor, whose import takes half a second."""

from __future__ import annotations

import importlib
from typing import Any

from fp8compile import _compat

__all__ = ["LAZY"]

LAZY = ("parallel",)


def __getattr__(name: str) -> Any:
    """A module of the package that its ``__init__`` does not import."""
    if name in LAZY:
        return importlib.import_module(f"fp8compile.{name}")
    raise AttributeError(f"module 'fp8compile' has no attribute {name!r}")


def _register_on_dtensors() -> None:
    from fp8compile.parallel import dtensor

    dtensor.register()


# who has imported DTensor meets our operators there
_compat.when_imported("torch.distributed.tensor", _register_on_dtensors)
