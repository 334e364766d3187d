"""Compilations: how many graphs were made, and why a second one."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters, get_compilation_metrics

__all__ = ["Compiles"]


class Compiles:
    """Counts graphs from its making, or from the last look, on."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self._seen = 0
        self.new()

    def new(self) -> int:
        """Graphs compiled since the last call."""
        graphs = counters["stats"]["unique_graphs"]
        new, self._seen = graphs - self._seen, graphs
        return new

    def assert_new(self, expected: int, what: str) -> None:
        """Assert how many graphs were compiled since the last look; the failure names the guards that failed."""
        new = self.new()
        assert new == expected, f"{what}: {new} graphs compiled, expected {expected}\n{self.why()}"

    def assert_at_most(self, limit: int, what: str) -> int:
        """As above, with a limit; returns the number."""
        new = self.new()
        assert new <= limit, f"{what}: {new} graphs compiled, expected {limit} at most\n{self.why()}"
        return new

    @staticmethod
    def why() -> str:
        """The guards that failed, oldest first, and the graph breaks."""
        failed = [
            f"  {metrics.compile_id}: {metrics.recompile_reason}"
            for metrics in get_compilation_metrics()
            if metrics.recompile_reason
        ]
        return "\n".join([*dict.fromkeys(failed), f"  graph breaks: {dict(counters['graph_break'])}"])
