"""What the reference shows of the package: names of ``__all__``, and no methods that Python calls by itself."""

from __future__ import annotations

from typing import Any

import griffe

__all__ = ["PublicNames"]


class PublicNames(griffe.Extension):
    """Takes what no reader of a reference looks for out of it."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Hide ``__post_init__`` and others of that kind."""
        if func.name.startswith("__"):
            func.public = False

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Hide modules inside of a package that the package does not export, but for the integrations."""
        parent = mod.parent
        if parent is not None and mod.is_module and parent.name != "integrations":
            mod.public = False
