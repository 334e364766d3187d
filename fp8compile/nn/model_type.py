"""The type of a model that a function changes in place and returns: of whichever class it was given."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

__all__ = ["Model"]

Model = TypeVar("Model", bound=nn.Module)
