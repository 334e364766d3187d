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
    """Runs callbacks right after a module was imported for the first time.

    Inductor's decomposition table costs a second to import, which `import fp8compile` must not pay. And no compile may
    see the table without our entries. So they are added right when the table is made.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.callbacks: list[Callable[[], object]] = []
        self.searching = threading.local()  # an import in another thread must still meet this finder

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != self.name or getattr(self.searching, "now", False):
            return None
        self.searching.now = True  # ask the finders behind this one; to look for a spec is not to import
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
        return getattr(self.loader, name)  # who asks the spec's loader for source gets it

    def exec_module(self, module: Any) -> None:
        # the module gets its own loader back: what it says of itself is as if we had not been here
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)  # if it fails or is interrupted, this stays for the next attempt
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for callback in self.callbacks:
            callback()


_PENDING: dict[str, _AfterImport] = {}


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call ``callback`` now if module ``name`` is there, else right after its first import."""
    if name in sys.modules and name not in _PENDING:
        callback()
        return
    if name not in _PENDING:
        hook = _PENDING[name] = _AfterImport(name)
        hook.callbacks.append(functools.partial(_PENDING.pop, name, None))
        sys.meta_path.insert(0, hook)
    _PENDING[name].callbacks.append(callback)
