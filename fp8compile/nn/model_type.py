"""A type variable for functions that change a model in place and return it, so that the model's class is kept."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

__all__ = ["Model"]

Model = TypeVar("Model", bound=nn.Module)
