"""Baselines of tests that the pytest plugin guards: an earlier run's counts of graphs and breaks.

    DIR/torch-2.13/test_model_py_test_step.1a2b3c4d.json

Minor versions of PyTorch break graphs at different places, so each version has its own folder. Without a baseline, a
version is compared with the nearest version that has one.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.graphs.compiler_log import CompilerLog, GraphBreak, numbered, without_resumed
from fp8compile.testing.graphs.counts import Counts
from fp8compile.testing.graphs.report import break_lines, counted_at, recompile_lines

__all__ = ["check_baseline"]

VERSIONED = re.compile(r"torch-(\d+)\.(\d+)")
FAULTS = ("breaks", "recompiles", "bypasses")
FOLLOW_A_BREAK = ("graphs", "saved_bytes", "sent_bytes")  # numbers that a new break alone changes
TAKES = "takes it as it is"


def _file_name(nodeid: str) -> str:
    readable = re.sub(r"\W+", "_", nodeid).strip("_")[-80:]
    return f"{readable}.{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}.json"


def _folder_name(version: tuple[int, ...]) -> str:
    return f"torch-{'.'.join(map(str, version[:2]))}"


def _version(folder: Path) -> tuple[int, ...] | None:
    match = VERSIONED.fullmatch(folder.name)
    return (int(match[1]), int(match[2])) if match else None


def _nearest(folder: Path, name: str) -> tuple[Path, str] | None:
    """Find the baseline file that was made with the PyTorch version nearest to the running one.

    Returns the path, and a phrase for messages such as " of PyTorch 2.12"; None if there is no baseline.
    """
    own = TORCH_VERSION[0] * 1000 + TORCH_VERSION[1]
    found = []
    for path in folder.glob(f"torch-*/{name}"):
        if (version := _version(path.parent)) is not None:
            other = version[0] * 1000 + version[1]
            found.append((abs(other - own), other, path, f" of PyTorch {version[0]}.{version[1]}"))
    if found:
        _, _, path, whose = min(found)
        return path, whose
    # files had no version once
    return (folder / name, " of an unknown PyTorch") if (folder / name).exists() else None


def _portable(file: str, root: Path) -> str:
    path = Path(file)
    roots = [root, *sorted(map(Path, sys.path), key=lambda folder: -len(folder.parts))]
    return next((path.relative_to(folder).as_posix() for folder in roots if path.is_relative_to(folder)), file)


def _places(item: pytest.Item, log: CompilerLog) -> dict[str, list[GraphBreak]]:
    """Group graph breaks by file and reason, and not by line, because edits above a break change its line."""
    places: dict[str, list[GraphBreak]] = {}
    for found in log.breaks:
        places.setdefault(f"{_portable(found.file, item.config.rootpath)}: {found.reason}", []).append(found)
    return places


def _load(path: Path) -> tuple[Counts, dict[str, int]]:
    try:
        known = json.loads(path.read_text())
        places = {str(place): int(number) for place, number in known["places"].items()}
        return Counts(**{name: known[name] for name in Counts.__dataclass_fields__ if name in known}), places
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        pytest.fail(f"{path} is not a graph baseline ({error!r}). Delete it to create a new one.", pytrace=False)


def _store(path: Path, nodeid: str, counts: Counts, places: dict[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {"test": nodeid, **asdict(counts), "places": dict(sorted(places.items()))}
    path.write_text(json.dumps(held, indent=1) + "\n")


def _changes(known: Counts, counts: Counts) -> tuple[list[str], list[str]]:
    """Return counts that are worse than the baseline's, and counts that are better, each as "breaks 0 -> 1"."""
    worse: list[str] = []
    better: list[str] = []
    for name, now in asdict(counts).items():
        before = getattr(known, name)
        if now == before or None in (now, before):  # `_not_compared` has these
            continue
        if name == "saved_bytes" and counts.breaks < known.breaks:
            continue  # what lay between the graphs was saved too, by eager mode, and nobody counted it
        # a test that compiles nothing shows nothing
        grew = now > before or (name == "graphs" and now == 0)
        (worse if grew else better).append(f"{name} {before} -> {now}")
    return worse, better


def _not_compared(known: Counts, counts: Counts) -> str:
    """Return the names of numbers that only the baseline or only the test has, because a fixture came or went."""
    now = asdict(counts)
    return ", ".join(name for name, before in asdict(known).items() if (before is None) != (now[name] is None))


def _without_follow_ups(changes: list[str]) -> list[str]:
    return [each for each in changes if each.partition(" ")[0] not in FOLLOW_A_BREAK]


def _note(item: pytest.Item, text: str) -> None:
    item.user_properties.append(("graph_baseline", text))


def _made_with(counts: Counts) -> str:
    faults = [numbered(getattr(counts, name), name) for name in FAULTS if getattr(counts, name)]
    return f"made with {', '.join(faults)}" if faults else "made"


def check_baseline(item: pytest.Item, counts: Counts, log: CompilerLog) -> None:
    """Fail a test if its counts are worse than its baseline; store a baseline if there is none.

    With ``--graph-frozen``, a test without a baseline fails. With ``--graph-update``, changes are stored instead.

    Args:
        item: The test; a note is added to its properties.
        counts: The numbers of graphs, breaks and so on that the test compiled.
        log: The records of the compiler's log during the test.
    """
    given = item.config.getoption("--graph-baseline")
    if given is None:
        return
    folder, name = Path(given), _file_name(item.nodeid)
    path, whose = folder / _folder_name(TORCH_VERSION) / name, ""
    found = _places(item, log)
    places = {place: len(breaks) for place, breaks in found.items()}
    compared = (path, whose) if path.exists() else _nearest(folder, name)
    if compared is None:
        if item.config.getoption("--graph-frozen"):
            pytest.fail(
                f"there is no graph baseline {path}, and --graph-frozen does not create one. Run pytest "
                f"--graph-baseline {folder} without it, and commit the file.",
                pytrace=False,
            )
        _store(path, item.nodeid, counts, places)
        _note(item, _made_with(counts))
        return
    known_path, whose = compared
    known, known_places = _load(known_path)
    worse, better = _changes(known, counts)
    new = Counter(places) - Counter(known_places)
    gone = Counter(known_places) - Counter(places)
    unknown = _not_compared(known, counts)
    if item.config.getoption("--graph-update"):
        if worse or better or new or gone or unknown:
            _store(path, item.nodeid, counts, places)
            _note(item, f"updated: {', '.join([*worse, *better]) or unknown or 'breaks are at other places'}")
    elif worse or new:
        added = [each for place in new for each in found[place]]
        if added:
            worse, better = map(_without_follow_ups, (worse, better))
        at = f"{counted_at(added, 'new breaks')}, " if added else ""
        lines = [f"{at}worse than the graph baseline{whose}: {', '.join(worse) or 'a break at a new place'}"]
        lines += [f"better: {', '.join(better)}"] if better else []
        lines += [f"new: {number} more of {place}" for place, number in new.items() if known_places.get(place)]
        lines += [line for each in added for line in break_lines(each)]
        lines += [f"gone: {place}" for place in gone]
        recompiles = without_resumed(log.recompiles) if added else log.recompiles
        lines += [line for each in recompiles for line in recompile_lines(each)]
        takes = f"keeps it as the baseline of PyTorch {'.'.join(map(str, TORCH_VERSION[:2]))}" if whose else TAKES
        pytest.fail("\n".join([*lines, f"--graph-update {takes}."]), pytrace=False)
    elif better or unknown:
        says = [f"better: {', '.join(better)}"] if better else []
        says += [f"not compared: {unknown}"] if unknown else []
        _note(item, f"{whose.strip()} {', '.join(says)}; --graph-update takes it".strip())
    elif whose:
        _note(item, whose.strip())
