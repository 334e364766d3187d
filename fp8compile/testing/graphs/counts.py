"""Counts what a test compiled: graphs, breaks and so on, which the pytest plugin compares."""

from __future__ import annotations

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
    """

    graphs: int
    breaks: int
    recompiles: int
    bypasses: int
    saved_bytes: int | None
    sent_bytes: int | None


PROPERTIES = ("graph_baseline", *(f"graph_{name}" for name in Counts.__dataclass_fields__))


def counts_of(log: CompilerLog, reports: list[GraphReport]) -> Counts:
    """Return the counts of a test, by the compiler's log and by the reports of the fixture ``graph_report``."""
    by_report = {bypass for report in reports for bypass in report.bypasses}
    return Counts(
        graphs=log.graphs,
        breaks=len(log.breaks),
        recompiles=len(log.recompiles),
        bypasses=len(by_report) if reports else len(log.bypasses),
        saved_bytes=sum(g.saved_bytes for report in reports for g in report.graphs) if reports else None,
        sent_bytes=sum(c.bytes for report in reports for c in report.collectives) if reports else None,
    )
