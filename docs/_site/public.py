"""What the reference shows of the package: names of ``__all__``, and no methods that Python calls by itself."""

from __future__ import annotations

from typing import Any

import griffe

__all__ = ["PublicNames"]

OF_INTEGRATIONS = ("conversion",)  # what they share; each other module there is a library's


class PublicNames(griffe.Extension):
    """Takes what no reader of a reference looks for out of it."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Hide ``__post_init__`` and others of that kind."""
        if func.name.startswith("__"):
            func.public = False

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Hide modules inside of a package that the package does not export, but for the integrations."""
        parent = mod.parent
        is_integration = parent is not None and parent.name == "integrations" and mod.name not in OF_INTEGRATIONS
        if parent is not None and mod.is_module and not is_integration:
            mod.public = False
