"""The pytest plugin's work on a guarded test: it counts what the test compiles, and compares with a baseline."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fp8compile.testing.graphs.compiler_log import NOTHING_HIDDEN, CompilerLog, GraphBreak, listen, numbered
from fp8compile.testing.graphs.report import GraphReport, break_lines, graph_report, recompile_lines

__all__ = ["Counts", "guarded", "recorded_graph_report"]

REPORTS = pytest.StashKey[list[GraphReport]]()


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a test compiled, in numbers. A smaller number is better, except 0 graphs, which prove nothing.

    Attributes:
        graphs: Number of compiled graphs; a forward and its backward count as one.
        breaks: Number of places where a graph ended early.
        recompiles: Number of recompilations.
        bypasses: Number of graphs that no cache can hold.
        saved_bytes: Bytes kept for backward passes in the fixture's reports; None without a report.
        sent_bytes: Bytes sent between ranks in the fixture's reports; None without a report.
    """

    graphs: int
    breaks: int
    recompiles: int
    bypasses: int
    saved_bytes: int | None
    sent_bytes: int | None


PROPERTIES = ("graph_baseline", *(f"graph_{name}" for name in Counts.__dataclass_fields__))


def _counts(log: CompilerLog, reports: list[GraphReport]) -> Counts:
    by_report = {bypass for report in reports for bypass in report.bypasses}
    return Counts(
        graphs=log.graphs,
        breaks=len(log.breaks),
        recompiles=len(log.recompiles),
        bypasses=len(by_report) if reports else len(log.bypasses),
        saved_bytes=sum(g.saved_bytes for report in reports for g in report.graphs) if reports else None,
        sent_bytes=sum(c.bytes for report in reports for c in report.collectives) if reports else None,
    )


# ---------------------------------------------------------------------------------- the marker


@dataclass(frozen=True)
class _Limits:
    """The arguments of ``@pytest.mark.fullgraph``."""

    max_breaks: int = 0
    max_recompiles: int = 0
    own: str | None = None


def _limits(item: pytest.Item) -> _Limits | None:
    """The arguments of a test's fullgraph marker, None without one; fails the test if they are wrong."""
    marker = item.get_closest_marker("fullgraph")
    if marker is None:
        return None
    given = {**dict(zip(_Limits.__dataclass_fields__, marker.args, strict=False)), **marker.kwargs}
    names = ", ".join(_Limits.__dataclass_fields__)
    if unknown := [*map(repr, marker.args[len(_Limits.__dataclass_fields__) :]), *(given.keys() - names.split(", "))]:
        _refuse_marker(f"is given {', '.join(unknown)}; it takes {names}.")
    for name in {"max_breaks", "max_recompiles"} & given.keys():
        if type(given[name]) is not int or given[name] < 0:
            _refuse_marker(f"{name} is {given[name]!r}; it is how many are allowed, an int from 0.")
    own = given.get("own")
    if not isinstance(own, str | None):
        _refuse_marker(f"own is {own!r}; it is the name of one package, such as 'mypkg'.")
    if own is not None:
        _folders(own)
    return _Limits(**given)


def _refuse_marker(text: str) -> NoReturn:
    pytest.fail(f"@pytest.mark.fullgraph: {text}", pytrace=False)


def _folders(package: str) -> tuple[str, ...]:
    """The file or the folders of a package's code; folders end in a separator."""
    try:
        spec = importlib.util.find_spec(package)
    except Exception as error:  # find_spec imports the parent packages, which may raise anything
        _refuse_marker(f"own={package!r} is no package that can be imported ({type(error).__name__}: {error}).")
    if spec is None:
        _refuse_marker(f"own={package!r} is no package that can be imported.")
    folders = spec.submodule_search_locations
    return (str(spec.origin),) if folders is None else tuple(f"{folder}{os.sep}" for folder in folders)


def _owned(breaks: list[GraphBreak], own: str | None) -> list[GraphBreak]:
    if own is None:
        return breaks
    folders = _folders(own)
    return [found for found in breaks if found.file.startswith(folders)]


def _check_limits(log: CompilerLog, limits: _Limits) -> None:
    breaks, lines = _owned(log.breaks, limits.own), []
    if len(breaks) > limits.max_breaks:
        where = f" in {limits.own}" if limits.own else ""
        lines.append(f"{numbered(len(breaks), 'graph breaks')}{where}, {limits.max_breaks} allowed:")
        lines += [line for each in breaks for line in break_lines(each)]
    if len(log.recompiles) > limits.max_recompiles:
        lines.append(f"{numbered(len(log.recompiles), 'recompiles')}, {limits.max_recompiles} allowed:")
        lines += [line for each in log.recompiles for line in recompile_lines(each)]
    if not log.graphs:
        lines.append("nothing was compiled in a test that is marked fullgraph.")
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


# ---------------------------------------------------------------------------------- the baseline


def _baseline_file(folder: Path, nodeid: str) -> Path:
    """The baseline file of a test. Its name is readable, and a hash makes it differ from those of all other tests."""
    readable = re.sub(r"\W+", "_", nodeid).strip("_")[-80:]
    return folder / f"{readable}.{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}.json"


def _portable(file: str, root: Path) -> str:
    """A path that is the same on other machines: relative to the project's root, or to a folder of ``sys.path``."""
    path = Path(file)
    roots = [root, *sorted(map(Path, sys.path), key=lambda folder: -len(folder.parts))]
    return next((path.relative_to(folder).as_posix() for folder in roots if path.is_relative_to(folder)), file)


def _places(item: pytest.Item, log: CompilerLog) -> dict[str, list[GraphBreak]]:
    """Graph breaks by file and reason. Lines are left out, because edits above a break move it."""
    places: dict[str, list[GraphBreak]] = {}
    for found in log.breaks:
        places.setdefault(f"{_portable(found.file, item.config.rootpath)}: {found.reason}", []).append(found)
    return places


def _load(path: Path) -> tuple[Counts, dict[str, int]]:
    try:
        known = json.loads(path.read_text())
        places = {str(place): int(number) for place, number in known["places"].items()}
        return Counts(**{name: known[name] for name in Counts.__dataclass_fields__}), places
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        pytest.fail(f"{path} is no graph baseline ({error!r}); delete it to make a new one.", pytrace=False)


def _store(path: Path, nodeid: str, counts: Counts, places: dict[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {"test": nodeid, **asdict(counts), "places": dict(sorted(places.items()))}
    path.write_text(json.dumps(held, indent=1) + "\n")


def _changes(known: Counts, counts: Counts) -> tuple[list[str], list[str]]:
    """Descriptions of the numbers that got worse, and of those that got better, such as "breaks 0 -> 1"."""
    worse: list[str] = []
    better: list[str] = []
    for name, now in asdict(counts).items():
        before = getattr(known, name)
        if now == before or None in (now, before):  # without a report there are no bytes to compare
            continue
        if name == "saved_bytes" and counts.breaks < known.breaks:
            continue  # code between graphs saved tensors too, in eager mode, and they were not counted
        # 0 graphs are worse: a test that compiles nothing shows nothing
        grew = now > before or (name == "graphs" and now == 0)
        (worse if grew else better).append(f"{name} {before} -> {now}")
    return worse, better


def _note(item: pytest.Item, text: str) -> None:
    item.user_properties.append(("graph_baseline", text))


def _check_baseline(item: pytest.Item, counts: Counts, log: CompilerLog) -> None:
    folder = item.config.getoption("--graph-baseline")
    if folder is None:
        return
    path, found = _baseline_file(Path(folder), item.nodeid), _places(item, log)
    places = {place: len(breaks) for place, breaks in found.items()}
    if not path.exists():
        if item.config.getoption("--graph-frozen"):
            pytest.fail(
                f"there is no graph baseline {path}, and --graph-frozen makes none. Run pytest --graph-baseline "
                f"{folder} without it, and commit the file.",
                pytrace=False,
            )
        _store(path, item.nodeid, counts, places)
        _note(item, "made")
        return
    known, known_places = _load(path)
    worse, better = _changes(known, counts)
    new = Counter(places) - Counter(known_places)
    gone = Counter(known_places) - Counter(places)
    if item.config.getoption("--graph-update"):
        if worse or better or new or gone:
            _store(path, item.nodeid, counts, places)
            _note(item, f"updated: {', '.join([*worse, *better]) or 'breaks are at other places'}")
    elif worse or new:
        lines = [f"worse than the graph baseline: {', '.join(worse) or 'a break at a new place'}"]
        lines += [f"better: {', '.join(better)}"] if better else []
        lines += [f"new: {number} more of {place}" for place, number in new.items() if known_places.get(place)]
        lines += [line for place in new for each in found[place] for line in break_lines(each)]
        lines += [f"gone: {place}" for place in gone]
        lines += [line for each in log.recompiles for line in recompile_lines(each)]
        pytest.fail("\n".join([*lines, "--graph-update takes it as it is."]), pytrace=False)
    elif better:
        _note(item, f"better: {', '.join(better)}; --graph-update takes it")


# ---------------------------------------------------------------------------------- around a test


@contextmanager
def guarded(item: pytest.Item) -> Iterator[None]:
    """Run a test, count what it compiles, and compare the counts with the marker's limits and the baseline.

    If the test itself fails, its counts are not compared.
    """
    limits = _limits(item)
    torch._dynamo.reset()
    with listen() as log, torch._dynamo.config.patch(NOTHING_HIDDEN):
        try:
            yield
        finally:
            counts = _counts(log, item.stash.get(REPORTS, []))
            # drop the counts of an earlier run of the same test
            item.user_properties[:] = [entry for entry in item.user_properties if entry[0] not in PROPERTIES]
            item.user_properties += [(f"graph_{name}", n) for name, n in asdict(counts).items() if n is not None]
    if limits is not None:
        _check_limits(log, limits)
    _check_baseline(item, counts, log)


def recorded_graph_report(item: pytest.Item) -> Callable[..., GraphReport]:
    """A ``graph_report`` for one test, which also keeps its reports for the test's counts."""
    reports = item.stash[REPORTS] = []

    def run(*args: Any, **options: Any) -> GraphReport:
        reports.append(graph_report(*args, **options))
        return reports[-1]

    return run
