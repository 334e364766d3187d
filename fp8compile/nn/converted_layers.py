"""What this process knows of modules, beside them: a graph may be guarded by attributes of their own."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

__all__ = ["CONVERTED", "USES"]

# All layers in FP8: made, converted, copied or loaded. One that was reverted may be among them.
CONVERTED: WeakSet[nn.Module] = WeakSet()
# By name of a parameter, what forwards do with it: a `fp8compile.nn.parameter_uses.uses.Use`.
USES: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
