"""All layers of this process that are in FP8, wherever they come from: made, converted, copied or loaded."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

__all__ = ["CONVERTED"]

CONVERTED: WeakSet[nn.Module] = WeakSet()  # a layer that was reverted may be among them
