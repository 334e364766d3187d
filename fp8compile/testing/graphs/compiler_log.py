"""Parses graph breaks, recompilations and bypassed caches from PyTorch's structured log.

`fullgraph=True` stops at the first break, and PyTorch's counters lack locations. The structured log, which
`TORCH_TRACE` writes to files, has everything with the user's file and line. Here the records are read in memory.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "FRAME",
    "NOTHING_HIDDEN",
    "TORCH",
    "CacheBypass",
    "CompilerLog",
    "GraphBreak",
    "Recompile",
    "listen",
    "numbered",
    "one_line",
    "without_resumed",
]

BREAK = re.compile(
    r"Graph break in user code at (?P<file>.*):(?P<line>\d+)\n"
    r"Graph Break Reason: (?P<reason>.*?)"
    r"(?:\n\s*User code traceback:\n(?P<stack>.*))?\Z",
    re.DOTALL,
)
# text before the reason itself: which bytecode was traced, or that the rest of the function won't be compiled
PREFIX = re.compile(
    r"\A\s*((Encountered graph break|Failed to handle graph break)[^\n]*?(Graph break encountered:\s*|\n)|"
    r"Graph break encountered:\s*)"
)
GIVES_UP = re.compile("skipping", re.IGNORECASE)
LINK = re.compile(r"https?://\S*?/(gb\d+)\.html")
SECTION = re.compile(r"^ {2}(Explanation|Hint): ", re.MULTILINE)
FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)
TORCH = str(Path(torch.__file__).parent) + os.sep
OWN = str(Path(__file__).parents[1]) + os.sep  # all of testing/, whose frames are not the user's
RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>.*)_at_(?P<line>\d+)")
# beyond these limits, and after suppressed errors, Dynamo would go on without a graph and log nothing
NOTHING_HIDDEN: dict[str, int | bool] = {
    "recompile_limit": 1 << 20,
    "accumulated_recompile_limit": 1 << 20,
    "suppress_errors": False,
}
BYPASSES = {
    "aotautograd_cache_bypass": "AOTAutograd",
    "fx_graph_cache_bypass": "FX graph",
    "dynamo_cache_bypass": "Dynamo",
}


@dataclass(frozen=True, kw_only=True)
class GraphBreak:
    """A location where one graph ends and the Python interpreter continues.

    Breaks with the same file, line and reason count as one.

    Attributes:
        reason: The reason, in one line.
        explanation: PyTorch's explanation; may be empty.
        hints: PyTorch's hints.
        code: PyTorch's number for this kind of break, such as "gb0059"; may be empty.
        url: PyTorch's page about this kind of break; may be empty.
        file: File of the user's code.
        line: Line in that file.
        gives_up: Whether PyTorch runs whole functions without a graph because of this break.
        without_graph: Names of the functions (perhaps also callers) that run without a graph, with file and line.
        stack: The user's frames at the first such break, outermost first, each ``file:line in function``.
    """

    reason: str
    explanation: str
    hints: tuple[str, ...]
    code: str
    url: str
    file: str
    line: int
    gives_up: bool
    stack: tuple[str, ...]
    without_graph: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recompile:
    """A function that was compiled again because guards of its earlier graphs failed.

    Attributes:
        function: Name of the function.
        file: File that defines the function.
        line: First line of the function.
        guards: Conditions that failed; those of the newest graph come first.
        call: Index, from 0, of the call in ``graph_report`` that caused the recompilation; None elsewhere, as in a
            test that is marked ``fullgraph``.
    """

    function: str
    file: str
    line: int
    guards: tuple[str, ...]
    call: int | None


@dataclass(frozen=True, kw_only=True)
class CacheBypass:
    """A graph that an on-disk cache can't store, so that every process compiles it again.

    Attributes:
        cache: The cache: "AOTAutograd", "FX graph" (Inductor's) or "Dynamo".
        reason: PyTorch's reason.
        file: File of the code that causes it; empty if unknown.
        line: Line in that file; 0 if unknown.
    """

    cache: str
    reason: str
    file: str = ""
    line: int = 0


@dataclass
class CompilerLog:
    """Findings from the compiler's log, in order.

    Attributes:
        breaks: Graph breaks; each file, line and reason once, even if the function was compiled several times.
        bypasses: Graphs that a cache can't store; the log has no locations for them.
        functions: Name, file and first line of each compiled function, by compilation id.
        recompiles: Recompilations; a function that was compiled three times has two.
        graphs: Number of compiled graphs.
        call: Index of the current call, which the caller sets; None if calls are not counted.
    """

    breaks: list[GraphBreak] = field(default_factory=list)
    bypasses: list[CacheBypass] = field(default_factory=list)
    functions: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    recompiles: list[Recompile] = field(default_factory=list)
    graphs: int = 0
    call: int | None = None
    _attempts: dict[str, int] = field(default_factory=dict)
    # for compilations that have not ended: guards and call of a recompile; index in `breaks` of a break that gives up
    _pending: dict[str, tuple[tuple[str, ...], int | None]] = field(default_factory=dict)
    _given_up: dict[str, int] = field(default_factory=dict)

    def hear(self, metadata: dict[str, Any], payload: str) -> None:
        """Parse one record of PyTorch's structured log, and update the fields.

        ``metadata`` is the record's dict, which tells its kind; ``payload`` is its text.
        """
        compile_id = f"{metadata.get('frame_id')}/{metadata.get('frame_compile_id')}"
        name = metadata.get("artifact", {}).get("name")
        if name == "dynamo_graph_break_reason":
            self._hear_break(compile_id, payload)
        elif name == "recompile_reasons":
            reasons = _json_or_text(payload)
            guards = reasons if isinstance(reasons, list) else [str(reasons)]
            self._pending[compile_id] = (tuple(map(_guard, guards)), self.call)
        elif name in BYPASSES:
            reason = _json_or_text(payload)
            reason = reason.get("cache_bypass_reason", reason) if isinstance(reason, dict) else reason
            self.bypasses.append(CacheBypass(cache=BYPASSES[name], reason=one_line(str(reason))))
        elif "dynamo_output_graph" in metadata:
            # a restarted compilation logs its graph again, in a later attempt; after a reset numbers restart
            attempt = metadata.get("attempt", 0)
            self.graphs += attempt <= self._attempts.get(compile_id, attempt)
            self._attempts[compile_id] = attempt
        elif "compilation_metrics" in metadata:
            metrics = metadata["compilation_metrics"]
            code = (metrics["co_name"], metrics["co_filename"], metrics["co_firstlineno"])
            self.functions[metrics["compile_id"]] = code
            self._hear_compiled(metrics["compile_id"], *code)

    def graph_functions(self) -> list[tuple[str, str, int]]:
        """Name, file and first line of each function that produced a graph."""
        return [self.functions[number] for number in self._attempts if number in self.functions]

    def _hear_compiled(self, compile_id: str, function: str, file: str, line: int) -> None:
        if compile_id in self._pending:
            guards, call = self._pending.pop(compile_id)
            found = Recompile(function=function, file=file, line=line, guards=guards, call=call)
            self.recompiles.append(found)
        if compile_id in self._given_up:
            number, shown = self._given_up.pop(compile_id), f"{_function(function)} at {file}:{line}"
            known = self.breaks[number].without_graph
            self.breaks[number] = replace(self.breaks[number], without_graph=tuple(dict.fromkeys((*known, shown))))

    def _hear_break(self, compile_id: str, text: str) -> None:
        found = parse_break(text)
        places = [(other.file, other.line, other.reason) for other in self.breaks]
        if (found.file, found.line, found.reason) not in places:
            places.append((found.file, found.line, found.reason))
            self.breaks.append(found)
        if found.gives_up:
            number = places.index((found.file, found.line, found.reason))
            self.breaks[number] = replace(self.breaks[number], gives_up=True)
            self._given_up[compile_id] = number


def _function(name: str) -> str:
    resumed = RESUMED.fullmatch(name)
    return f"the rest of `{resumed['function']}` after line {resumed['line']}" if resumed else f"`{name}`"


def without_resumed(recompiles: Sequence[Recompile]) -> list[Recompile]:
    """Leave out recompilations of the rests of functions, which are there only because of a graph break."""
    return [each for each in recompiles if not RESUMED.fullmatch(each.function)]


def numbered(number: int, noun: str) -> str:
    """Format a number with its noun, given in the plural: "1 graph", "2 graphs"."""
    one = noun.removesuffix("es") if noun.endswith("sses") else noun.removesuffix("s")
    return f"{number} {one if number == 1 else noun}"


def one_line(text: str) -> str:
    """Join a text to one line; each run of white space becomes one space."""
    return " ".join(text.split())


def _json_or_text(payload: str) -> Any:
    try:
        return json.loads(payload)
    except json.JSONDecodeError:
        return payload


def _guard(text: str) -> str:
    condition, _, trace = text.partition("\n")
    # PyTorch appends the user's source line as a comment, and then the end of the file's path
    condition, *comments = re.split(r"\s+# ", re.sub(r"^\d+/\d+: ", "", condition))
    places = [*(f"{m['file']}:{m['line']}" for m in FRAME.finditer(trace)), *comments[:1]]
    return one_line(f"{condition} [{places[0]}]" if places else condition)


def _user_frames(trace: str) -> Iterator[str]:
    for frame in FRAME.finditer(trace):
        if not frame["file"].startswith((TORCH, OWN)):
            yield f"{frame['file']}:{frame['line']} in {frame['function']}"


def parse_break(text: str) -> GraphBreak:
    """Parse PyTorch's log text for a graph break; in an unknown format, line 1 is the reason."""
    match = BREAK.match(text)
    if match is None:
        reason = one_line(text.partition("\n")[0])
        return GraphBreak(
            reason=reason, explanation=text, hints=(), code="", url="", file="", line=0, gives_up=False, stack=()
        )
    body = match["reason"].strip()
    prefix = PREFIX.match(body)
    body = PREFIX.sub("", body)
    link = LINK.search(body)
    body = re.split(r"\n\s*(?:Developer debug context|For more details)", body)[0]
    title, *sections = SECTION.split(body)
    parts = list(zip(sections[::2], sections[1::2], strict=True))
    return GraphBreak(
        reason=one_line(title) or "unknown",
        explanation=" ".join(one_line(t) for kind, t in parts if kind == "Explanation"),
        hints=tuple(one_line(t) for kind, t in parts if kind == "Hint"),
        code=link[1] if link else "",
        url=link[0] if link else "",
        file=match["file"],
        line=int(match["line"]),
        gives_up=prefix is not None and GIVES_UP.search(prefix[0]) is not None,
        stack=tuple(_user_frames(match["stack"] or "")),
    )


class _Listener(logging.Handler):
    def __init__(self, log: CompilerLog) -> None:
        super().__init__(level=logging.DEBUG)
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None)
        if metadata is not None:
            self.log.hear(metadata, getattr(record, "payload", None) or "")


def _wants_everything(handler: logging.Handler) -> bool:
    return isinstance(handler, _Listener) or any(
        cls.__module__.partition(".")[0] == "torch" for cls in type(handler).__mro__
    )


@contextmanager
def listen() -> Iterator[CompilerLog]:
    """Context that parses the compiler's log records into a `CompilerLog`, which it yields."""
    logger = logging.getLogger("torch.__trace")  # PyTorch sets it up when imported
    level, propagate, log = logger.level, logger.propagate, CompilerLog()
    listener = _Listener(log)
    # handlers that capture logs, such as pytest's, would get thousands of lines, from here or from the root logger
    others = [handler for handler in logger.handlers if not _wants_everything(handler)]
    for handler in others:
        logger.removeHandler(handler)
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield log
    finally:
        logger.removeHandler(listener)
        for handler in others:
            logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
