"""snapshot: formats a report as a short text that changes only if the graphs change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fp8compile.testing.graphs.assertions import check_report
from fp8compile.testing.graphs.report import GraphReport

__all__ = ["snapshot"]


# views cost nothing, and which of them a graph has changes with PyTorch's version; so they are left out
VIEWS = frozenset(f"aten.{name}" for name in (
    "alias", "detach", "expand", "permute", "slice", "squeeze", "t", "transpose", "unsqueeze", "view",
))  # fmt: skip


def _ops(ops: Sequence[str]) -> list[str]:
    counts = Counter(op for op in ops if op.rpartition(".")[0] not in VIEWS)
    return [f"    {op}" + (f" x{counts[op]}" if counts[op] > 1 else "") for op in sorted(counts)]


def snapshot(report: GraphReport) -> str:
    """Format a report without paths, lines, sizes and views, which differ between machines and versions.

    In a test write ``expecttest.assert_expected_inline(snapshot(report), ...)``. Run the test with
    ``EXPECTTEST_ACCEPT=1`` to write the text into the test.

    Args:
        report: The report, from `graph_report`.

    Returns:
        The number of new graphs of each call. For each graph, its sorted operators with their counts, and its
        messages. Then the graph breaks, recompiles and cache bypasses.

    Raises:
        TypeError: ``report`` is not a `GraphReport`.
    """
    check_report(report, "snapshot")
    lines = [f"calls: {', '.join(f'{call.graphs} new' for call in report.calls)}"]
    for number, graph in enumerate(report.graphs):
        lines += [f"graph {number}: {graph.function}", "  forward:", *_ops(graph.forward)]
        if graph.backward is not None:
            lines += ["  backward:", *_ops(graph.backward)]
        lines += [f"  sends {c.dtype} by {c.op}" for c in graph.collectives]
    lines += [f"break: {found.reason}" for found in report.breaks]
    lines += [f"recompile: {found.function} for call {found.call}" for found in report.recompiles]
    lines += [f"bypass: {found.cache}" for found in report.bypasses]
    return "\n".join(lines)
