"""Names of the package that are imported at their first use: three submodules and two functions.

parallel    imports DTensor, which takes half a second
export      writes and reads files, which a training step does not need; has the function `load_quantized`
testing     imports the compilers; has the function `advise`
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from fp8compile import _compat

__all__ = ["FUNCTIONS", "LAZY"]

PACKAGE = __name__.partition(".")[0]
LAZY = ("parallel", "export", "testing")
RENAMED = {"renew_weight_codes": "invalidate_weight_cache"}
FUNCTIONS = {"advise": "testing", "load_quantized": "export"}  # names of the package too, each with its module


def __getattr__(name: str) -> Any:
    """Import and return the submodule ``name``, or the function ``name`` of its submodule."""
    if name in LAZY:
        return importlib.import_module(f"{PACKAGE}.{name}")
    if name in FUNCTIONS:
        return getattr(importlib.import_module(f"{PACKAGE}.{FUNCTIONS[name]}"), name)
    if name in RENAMED:
        warnings.warn(f"{name} was renamed to {PACKAGE}.{RENAMED[name]}.", FutureWarning, stacklevel=2)
        return getattr(sys.modules[PACKAGE], RENAMED[name])
    raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the package `fp8compile`, including those that are imported at their first use."""
    return sorted({*vars(sys.modules[PACKAGE]), *LAZY, *FUNCTIONS})


def _register_on_dtensors() -> None:
    from fp8compile.monitor import on_dtensors
    from fp8compile.parallel import register_dtensor_handlers

    on_dtensors.register()
    register_dtensor_handlers.register()


# our operators are registered with DTensor once it is imported
_compat.when_imported("torch.distributed.tensor", _register_on_dtensors)
