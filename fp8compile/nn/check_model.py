"""Type variable and check for the ``model`` argument of functions that change a model and return it."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

__all__ = ["Model", "check_model"]

Model = TypeVar("Model", bound=nn.Module)


def check_model(function: str, model: object) -> None:
    """Raise a TypeError that names ``function``, the caller, unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: `model` is a {type(model).__name__}; it must be a torch.nn.Module.")
