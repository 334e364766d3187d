"""Tables of all FP8 layers, and of how forwards used the parameters of modules and cast their weights.

These are tables, and not attributes of modules, because Dynamo may guard on attributes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

__all__ = ["CONVERTED", "FORWARD_DTYPES", "USES"]

# All layers in FP8, whether they were constructed, converted, copied or loaded. Some may have been reverted since.
CONVERTED: WeakSet[nn.Module] = WeakSet()
# For each module, a set of `fp8compile.nn.parameter_uses.uses.Use` by the name of a parameter.
USES: WeakKeyDictionary[nn.Module, dict[str, set[Any]]] = WeakKeyDictionary()
# For each FP8 layer, the dtypes to which autocast cast its weights in forwards with gradients; None for no autocast.
FORWARD_DTYPES: WeakKeyDictionary[nn.Module, frozenset[torch.dtype | None]] = WeakKeyDictionary()
