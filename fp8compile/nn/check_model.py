"""The type of a ``model`` argument that a function changes in place and returns, and its check."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

__all__ = ["Model", "check_model"]

Model = TypeVar("Model", bound=nn.Module)


def check_model(function: str, model: object) -> None:
    """Raise a TypeError that names ``function``, the caller, unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model is a {type(model).__name__}; it is a torch.nn.Module.")
