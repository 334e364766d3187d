"""What PyTorch does after each compilation for production, and processes of tests do without."""

from __future__ import annotations

import gc
import os

import torch._dynamo.guards

__all__ = ["make_compiles_cheap"]


def make_compiles_cheap() -> None:
    """Have this process compile for less: some tenth of the time of tests that compile, and nothing in what they get.

    Guards are not timed with cold caches, which takes 30 ms a graph. Garbage is not collected after each graph, and
    otherwise less often; never again looked at is what exists already.
    """
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # for processes that this one starts
    torch._dynamo.config.run_gc_after_compile = False
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
