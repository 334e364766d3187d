"""snapshot: a report as a short text that stays the same until the graphs change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fp8compile.testing.graphs.assertions import check_report
from fp8compile.testing.graphs.report import GraphReport

__all__ = ["snapshot"]


# other views of the same bytes: which of them a graph has changes with PyTorch, and costs nothing
VIEWS = frozenset(f"aten.{name}" for name in (
    "alias", "detach", "expand", "permute", "slice", "squeeze", "t", "transpose", "unsqueeze", "view",
))  # fmt: skip


def _ops(ops: Sequence[str]) -> list[str]:
    counts = Counter(op for op in ops if op.rpartition(".")[0] not in VIEWS)
    return [f"    {op}" + (f" x{counts[op]}" if counts[op] > 1 else "") for op in sorted(counts)]


def snapshot(report: GraphReport) -> str:
    """A report without what changes from machine to machine: paths, lines, sizes, views; for expecttest.

    ``expecttest.assert_expected_inline(snapshot(report), ...)``; run the test with ``EXPECTTEST_ACCEPT=1`` to write
    the text into it.

    Args:
        report: What `graph_report` returned.

    Returns:
        Lines: new graphs of each call; of each graph its operators, sorted, with their number, and what it sends; then
        breaks, recompiles and bypasses by their reasons.

    Raises:
        TypeError: ``report`` is something else.
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
