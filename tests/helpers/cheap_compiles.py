"""Processes of tests do without what PyTorch does after each compilation for production's sake."""

from __future__ import annotations

import gc
import os

import torch._dynamo.guards

__all__ = ["make_compiles_cheap"]


def make_compiles_cheap() -> None:
    """Have this process compile in less time, to the same code.

    Guards are not timed with cold caches, which takes 30 ms or more a graph. Garbage is not collected after each
    graph; it is collected less often, and never looked for among the objects that exist now.
    """
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # for processes that this one starts
    torch._dynamo.config.run_gc_after_compile = False
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
