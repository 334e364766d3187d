"""The pytest plugin: counts what guarded tests compile, and fails tests beyond their limits or baseline."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fp8compile.testing.graphs.baseline import check_baseline
from fp8compile.testing.graphs.compiler_log import (
    NOTHING_HIDDEN,
    CacheBypass,
    CompilerLog,
    GraphBreak,
    listen,
    numbered,
    without_resumed,
)
from fp8compile.testing.graphs.counts import PROPERTIES, Counts, counts_of
from fp8compile.testing.graphs.report import (
    GraphReport,
    break_lines,
    bypass_lines,
    counted_at,
    graph_report,
    place_text,
    recompile_lines,
)

__all__ = ["CODE", "guarded", "recorded_graph_report", "without_compilers_log"]

# PyTorch's own handler writes "W1125 03:04:51.469000 26732 torch/_dynamo/...] ..." before each line
LOGGED = re.compile(r"[VDIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ (\S*/)?torch/")
# pytest's writes "WARNING  torch._dynamo.variables.tensor:tensor.py:1759 ..." before the first line of a record
RECORDS = re.compile(r"^(?=(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +\S+:\S+\.py:\d+ )", re.MULTILINE)
OF_TORCH = re.compile(r"[A-Z]+ +torch\.")
REPORTS = pytest.StashKey[list[GraphReport]]()
CODE = pytest.StashKey[dict[str, int]]()  # on a test: counts of the code that its fixture gpu_kernels generated
ASSERTIONS = Path(__file__).with_name("assertions.py")
OURS = pytest.StashKey[bool]()  # on a test: what failed is said by us, with all that PyTorch logs of it


# ---------------------------------------------------------------------------------- the marker


@dataclass(frozen=True)
class _Limits:
    """The arguments of ``@pytest.mark.fullgraph``."""

    max_breaks: int = 0
    max_recompiles: int = 0
    own: str | None = None
    max_bypasses: int | None = None
    max_graphs: int | None = None


def _limits(item: pytest.Item) -> _Limits | None:
    """Arguments of a test's ``fullgraph`` marker; None without a marker. Wrong arguments fail the test."""
    marker = item.get_closest_marker("fullgraph")
    if marker is None:
        return None
    given = {**dict(zip(_Limits.__dataclass_fields__, marker.args, strict=False)), **marker.kwargs}
    names = ", ".join(_Limits.__dataclass_fields__)
    if unknown := [*map(repr, marker.args[len(_Limits.__dataclass_fields__) :]), *(given.keys() - names.split(", "))]:
        _refuse_marker(f"got {', '.join(unknown)}; it accepts {names}.")
    for name in (name for name in given if name.startswith("max_")):
        if type(given[name]) is not int or given[name] < 0:
            _refuse_marker(f"`{name}` is {given[name]!r}; it must be the allowed number, an int of at least 0.")
    own = given.get("own")
    if not isinstance(own, str | None):
        _refuse_marker(f"`own` is {own!r}; it must be the name of one package, such as 'mypkg'.")
    if own is not None:
        _folders(own)
    return _Limits(**given)


def _refuse_marker(text: str) -> NoReturn:
    pytest.fail(f"@pytest.mark.fullgraph: {text}", pytrace=False)


def _folders(package: str) -> tuple[str, ...]:
    try:
        spec = importlib.util.find_spec(package)
    except Exception as error:  # find_spec imports the parent packages, which may raise anything
        _refuse_marker(f"own={package!r} can't be imported ({type(error).__name__}: {error}).")
    if spec is None:
        _refuse_marker(f"own={package!r} can't be imported.")
    folders = spec.submodule_search_locations
    return (str(spec.origin),) if folders is None else tuple(f"{folder}{os.sep}" for folder in folders)


def _owned(breaks: list[GraphBreak], own: str | None) -> list[GraphBreak]:
    if own is None:
        return breaks
    folders = _folders(own)
    return [found for found in breaks if found.file.startswith(folders)]


def _over(
    found: Sequence[Any], noun: str, most: int | None, lines: Callable[[Any], Iterable[str]], *, inside: str = ""
) -> list[str]:
    """Return error lines, the first location first, if ``found`` has more than ``most`` entries; else [].

    ``noun`` names a finding, ``lines`` formats it, and ``inside`` is added to the first line.
    """
    if most is None or len(found) <= most:
        return []
    return [f"{counted_at(found, noun)}{inside}, {most} allowed:", *(line for each in found for line in lines(each))]


def _graph_lines(log: CompilerLog) -> Iterator[str]:
    for function, file, line in log.graph_functions():
        yield f"  {function} at {place_text(file, line)}"


def _check_limits(log: CompilerLog, limits: _Limits, counts: Counts, bypasses: Sequence[CacheBypass]) -> None:
    inside = f" in {limits.own}" if limits.own else ""
    lines = _over(_owned(log.breaks, limits.own), "graph breaks", limits.max_breaks, break_lines, inside=inside)
    broken = bool(lines)
    recompiles = without_resumed(log.recompiles) if broken else log.recompiles
    lines += _over(recompiles, "recompiles", limits.max_recompiles, recompile_lines)
    lines += _over(bypasses, "cache bypasses", limits.max_bypasses, bypass_lines)
    if not broken and limits.max_graphs is not None and counts.graphs > limits.max_graphs:
        lines += [f"{numbered(counts.graphs, 'graphs')}, {limits.max_graphs} allowed:", *_graph_lines(log)]
    if not broken and not log.graphs:
        lines.append("nothing was compiled in a test that is marked fullgraph.")
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


# ---------------------------------------------------------------------------------- around a test


@contextmanager
def guarded(item: pytest.Item) -> Iterator[None]:
    """Context that counts what a test compiles; at exit fails the test beyond its limits or its baseline.

    If the test itself fails, its counts are not compared.
    """
    limits = _limits(item)
    torch._dynamo.reset()
    with listen() as log, torch._dynamo.config.patch(NOTHING_HIDDEN):
        try:
            yield
        finally:
            reports = item.stash.get(REPORTS, [])
            counts = counts_of(log, reports, item.stash.get(CODE, {}))
            # a test that is run again starts from nothing
            item.user_properties[:] = [entry for entry in item.user_properties if entry[0] not in PROPERTIES]
            item.user_properties += [(f"graph_{name}", n) for name, n in asdict(counts).items() if n is not None]
    item.stash[OURS] = True
    if limits is not None:
        by_report = [bypass for report in reports for bypass in report.bypasses]
        _check_limits(log, limits, counts, list(dict.fromkeys(by_report)) if reports else log.bypasses)
    check_baseline(item, counts, log)
    item.stash[OURS] = False


def _is_our_assertion(call: pytest.CallInfo[None]) -> bool:
    error = call.excinfo
    return error is not None and error.errisinstance(AssertionError) and error.traceback[-1].path == ASSERTIONS


def without_compilers_log(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Remove PyTorch's log lines from a test's report if one of the plugin's own checks failed the test.

    These lines would repeat the check's text. If the test itself failed, all lines stay.
    """
    if not (item.stash.get(OURS, False) or _is_our_assertion(call)):
        return
    kept = []
    for title, text in report.sections:
        if title.startswith("Captured stderr"):
            text = "".join(line for line in text.splitlines(keepends=True) if not LOGGED.match(line))
        elif title.startswith("Captured log"):
            text = "".join(record for record in RECORDS.split(text) if not OF_TORCH.match(record))
        if text.strip():
            kept.append((title, text))
    report.sections[:] = kept


def recorded_graph_report(item: pytest.Item) -> Callable[..., GraphReport]:
    """Make a `graph_report` for a test; each report that it makes is also stored for the test's counts."""
    reports = item.stash[REPORTS] = []

    def run(*args: Any, **options: Any) -> GraphReport:
        reports.append(graph_report(*args, **options))
        return reports[-1]

    return run
