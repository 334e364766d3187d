"""Callbacks that run when a module of PyTorch is imported for the first time."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["when_imported"]


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that runs callbacks right after the first import of a module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.callbacks: list[Callable[[], object]] = []
        self.searching = threading.local()  # an import in another thread must still meet this finder

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != self.name or getattr(self.searching, "now", False):
            return None
        self.searching.now = True  # ask the finders after this one; looking for a spec does not import the module
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching.now = False
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    loader: importlib.abc.Loader

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)  # so that tools can ask the spec's loader for source

    def exec_module(self, module: Any) -> None:
        # the module gets its own loader back, so that its attributes are the same as without this finder
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)  # if it fails or is interrupted, this finder stays for the next attempt
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for callback in self.callbacks:
            callback()


_PENDING: dict[str, _AfterImport] = {}


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` now if the module ``name`` is imported, otherwise right after its first import."""
    if name in sys.modules and name not in _PENDING:
        callback()
        return
    if name not in _PENDING:
        hook = _PENDING[name] = _AfterImport(name)
        hook.callbacks.append(functools.partial(_PENDING.pop, name, None))
        sys.meta_path.insert(0, hook)
    _PENDING[name].callbacks.append(callback)
