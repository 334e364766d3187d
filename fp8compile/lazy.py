"""What is imported when it is asked for.

parallel    stands on DTensor, whose import takes half a second
testing     stands on the compilers
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from fp8compile import _compat

__all__ = ["LAZY"]

PACKAGE = __name__.partition(".")[0]
LAZY = ("parallel", "testing")


def __getattr__(name: str) -> Any:
    """A module of the package that its ``__init__`` does not import."""
    if name in LAZY:
        return importlib.import_module(f"{PACKAGE}.{name}")
    raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What the package's ``__init__`` has, and the modules that it does not import."""
    return sorted({*vars(sys.modules[PACKAGE]), *LAZY})


def _register_on_dtensors() -> None:
    from fp8compile.parallel import dtensor

    dtensor.register()


# who has imported DTensor meets our operators there
_compat.when_imported("torch.distributed.tensor", _register_on_dtensors)
