"""Tables of all FP8 layers, and of how forwards used the parameters of modules.

These are tables, and not attributes of modules, because Dynamo may guard on attributes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

__all__ = ["CONVERTED", "USES"]

# All layers in FP8, whether they were constructed, converted, copied or loaded. Some may have been reverted since.
CONVERTED: WeakSet[nn.Module] = WeakSet()
# For each module, a `fp8compile.nn.parameter_uses.uses.Use` by the name of a parameter.
USES: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
