"""What the pytest plugin does with a test that it guards: listen, count, compare with the baseline."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8compile.testing.compiler_log import NO_LIMIT, CompilerLog, GraphBreak, listen
from fp8compile.testing.report import GraphReport, break_lines, graph_report, recompile_lines

__all__ = ["Counts", "guarded", "recorded_graph_report"]

REPORTS = pytest.StashKey[list[GraphReport]]()


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a test compiled; fewer is better, of each.

    Attributes:
        graphs: Compiled, forward and backward of one as one.
        breaks: Places where a graph ended early.
        recompiles: Functions compiled again.
        bypasses: Graphs that no cache holds.
        saved_bytes: Kept for backward passes, by the reports of the fixture.
        sent_bytes: Sent between ranks, by these.
    """

    graphs: int
    breaks: int
    recompiles: int
    bypasses: int
    saved_bytes: int
    sent_bytes: int


def _counts(log: CompilerLog, reports: list[GraphReport]) -> Counts:
    by_report = {bypass for report in reports for bypass in report.bypasses}
    return Counts(
        graphs=log.graphs,
        breaks=len(log.breaks),
        recompiles=len(log.recompiles),
        bypasses=len(by_report) if reports else len(log.bypasses),
        saved_bytes=sum(graph.saved_bytes for report in reports for graph in report.graphs),
        sent_bytes=sum(c.bytes for report in reports for c in report.collectives),
    )


# ---------------------------------------------------------------------------------- the marker


@dataclass(frozen=True)
class _Limits:
    """The marker's arguments."""

    max_breaks: int = 0
    max_recompiles: int = 0
    own: str | None = None


def _limits(item: pytest.Item) -> _Limits | None:
    marker = item.get_closest_marker("fullgraph")
    if marker is None:
        return None
    try:
        return _Limits(*marker.args, **marker.kwargs)
    except TypeError as error:
        raise pytest.UsageError(
            f"{item.nodeid}: @pytest.mark.fullgraph takes max_breaks, max_recompiles and own; {error}"
        ) from None


def _folders(package: str) -> tuple[str, ...]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of a package around it
        spec = None
    if spec is None:
        raise pytest.UsageError(f"@pytest.mark.fullgraph: own={package!r} is no package that can be imported.")
    folders = spec.submodule_search_locations
    return (spec.origin,) if folders is None else tuple(f"{folder}{os.sep}" for folder in folders)


def _owned(breaks: list[GraphBreak], own: str | None) -> list[GraphBreak]:
    if own is None:
        return breaks
    folders = _folders(own)
    return [found for found in breaks if found.file.startswith(folders)]


def _check_limits(log: CompilerLog, limits: _Limits) -> None:
    breaks, lines = _owned(log.breaks, limits.own), []
    if len(breaks) > limits.max_breaks:
        where = f" in {limits.own}" if limits.own else ""
        lines.append(f"{len(breaks)} graph breaks{where}, {limits.max_breaks} allowed:")
        lines += [line for each in breaks for line in break_lines(each)]
    if len(log.recompiles) > limits.max_recompiles:
        lines.append(f"{len(log.recompiles)} recompiles, {limits.max_recompiles} allowed:")
        lines += [line for each in log.recompiles for line in recompile_lines(each)]
    if not log.graphs:
        lines.append("nothing was compiled in a test that is marked fullgraph.")
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


# ---------------------------------------------------------------------------------- the baseline


def _baseline_file(folder: Path, nodeid: str) -> Path:
    """A file for a test: readable, and never that of another test whose name reads the same."""
    readable = re.sub(r"\W+", "_", nodeid).strip("_")[-80:]
    return folder / f"{readable}.{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}.json"


def _load(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
        return {name: known[name] for name in (*Counts.__dataclass_fields__, "where")}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        pytest.fail(f"{path} is no graph baseline ({error!r}); delete it to make a new one.", pytrace=False)


def _store(path: Path, nodeid: str, counts: Counts, log: CompilerLog) -> None:
    where = sorted({f"{Path(found.file).name}: {found.reason}" for found in log.breaks})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"test": nodeid, **asdict(counts), "where": where}, indent=1) + "\n")


def _changes(known: dict[str, Any], counts: Counts) -> tuple[list[str], list[str]]:
    """What got worse and what got better, each as "breaks 0 -> 1"."""
    worse, better = [], []
    for name, now in asdict(counts).items():
        if now != known[name]:
            (worse if now > known[name] else better).append(f"{name} {known[name]} -> {now}")
    return worse, better


def _check_baseline(item: pytest.Item, counts: Counts, log: CompilerLog) -> None:
    folder = item.config.getoption("--graph-baseline")
    if folder is None:
        return
    path, update = _baseline_file(Path(folder), item.nodeid), item.config.getoption("--graph-update")
    if not path.exists():
        _store(path, item.nodeid, counts, log)
        item.user_properties.append(("graph_baseline", "made"))
        return
    known = _load(path)
    worse, better = _changes(known, counts)
    if (worse or better) and update:
        _store(path, item.nodeid, counts, log)
        item.user_properties.append(("graph_baseline", f"updated: {', '.join(worse + better)}"))
    elif worse:
        new = [b for b in log.breaks if f"{Path(b.file).name}: {b.reason}" not in known["where"]]
        lines = [f"worse than the graph baseline: {', '.join(worse)}", *(x for b in new for x in break_lines(b))]
        lines += [line for each in log.recompiles for line in recompile_lines(each)]
        pytest.fail("\n".join([*lines, "--graph-update takes it as it is."]), pytrace=False)
    elif better:
        item.user_properties.append(("graph_baseline", f"better: {', '.join(better)}; --graph-update takes it"))


# ---------------------------------------------------------------------------------- around a test


@contextmanager
def guarded(item: pytest.Item) -> Iterator[None]:
    """Run a test, count what it compiles, hold it against the marker's limits and the baseline.

    What a test that fails by itself compiled is counted and not judged.
    """
    limits = _limits(item)
    if limits is not None and limits.own is not None:
        _folders(limits.own)  # a wrong name is known before the test runs
    torch._dynamo.reset()
    with listen() as log, torch._dynamo.config.patch(NO_LIMIT):
        try:
            yield
        finally:
            counts = _counts(log, item.stash.get(REPORTS, []))
            # a test that is run again starts from nothing
            item.user_properties[:] = [entry for entry in item.user_properties if not entry[0].startswith("graph_")]
            item.user_properties += [(f"graph_{name}", number) for name, number in asdict(counts).items()]
    if limits is not None:
        _check_limits(log, limits)
    _check_baseline(item, counts, log)


def recorded_graph_report(item: pytest.Item) -> Callable[..., GraphReport]:
    """``graph_report`` for a test: its reports are kept."""
    reports = item.stash[REPORTS] = []

    def run(*args: Any, **options: Any) -> GraphReport:
        reports.append(graph_report(*args, **options))
        return reports[-1]

    return run
