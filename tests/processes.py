"""Processes that tests start: each is forked from one that has imported the package, which alone takes seconds.

The process that is forked starts together with the first of them and keeps the environment of that moment. It has
imported and computed nothing else.
"""

from __future__ import annotations

from typing import Any

from torch import multiprocessing

__all__ = ["process_context"]


def process_context() -> Any:
    """What `multiprocessing.get_context` gives, to make a Process, a Pipe or a ProcessPoolExecutor with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fp8compile", "fp8compile.parallel", "fp8compile.testing"])
    return context
