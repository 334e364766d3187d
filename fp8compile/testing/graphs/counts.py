"""Counts what a test compiled: graphs, breaks and so on, which the pytest plugin compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8compile.testing.graphs.compiler_log import CompilerLog
from fp8compile.testing.graphs.report import GraphReport

__all__ = ["PROPERTIES", "Counts", "counts_of"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of graphs, breaks and so on in a test; fewer is better for each.

    Attributes:
        graphs: Number of compiled graphs; a forward and its backward count as one. 0 is not better than 1.
        breaks: Number of locations where a graph ended early.
        recompiles: Number of recompilations.
        bypasses: Number of graphs that caches can't store.
        saved_bytes: Bytes saved for backward passes, in the reports that the test's fixture made; None without a
            report.
        sent_bytes: Bytes sent between ranks, in the same reports; None without a report.
        launches: Kernels and library calls in the code for a GPU that the test's fixture ``gpu_kernels`` generated;
            None without it, as the next two.
        gemms: Calls of matrix products in the same code.
        gpu_bytes: Bytes that kernels and library calls read and write in the same code.
    """

    graphs: int
    breaks: int
    recompiles: int
    bypasses: int
    saved_bytes: int | None
    sent_bytes: int | None
    launches: int | None = None
    gemms: int | None = None
    gpu_bytes: int | None = None


PROPERTIES = ("graph_baseline", *(f"graph_{name}" for name in Counts.__dataclass_fields__))


def counts_of(log: CompilerLog, reports: Sequence[GraphReport], code: dict[str, int]) -> Counts:
    """Return the counts of a test.

    Args:
        log: The compiler's log during the test.
        reports: What the test's fixture ``graph_report`` has returned.
        code: Counts of the code that the fixture ``gpu_kernels`` has returned, by field; empty without it.
    """
    by_report = {bypass for report in reports for bypass in report.bypasses}
    return Counts(
        graphs=log.graphs,
        breaks=len(log.breaks),
        recompiles=len(log.recompiles),
        bypasses=len(by_report) if reports else len(log.bypasses),
        saved_bytes=sum(g.saved_bytes for report in reports for g in report.graphs) if reports else None,
        sent_bytes=sum(c.bytes for report in reports for c in report.collectives) if reports else None,
        **code,
    )
