"""Assertions on a model's graphs under torch.compile; failures say what broke, where, how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fp8compile.testing.graphs.compiler_log import numbered
from fp8compile.testing.graphs.report import (
    Call,
    Collective,
    GraphReport,
    break_lines,
    bypass_lines,
    counted_at,
    graph_report,
    recompile_lines,
)

__all__ = ["assert_cacheable", "assert_comm", "assert_fullgraph", "assert_no_recompile", "assert_ops", "check_report"]


def _report(fn: Callable[..., Any] | GraphReport, args: tuple[Any, ...], options: dict[str, Any]) -> GraphReport:
    if isinstance(fn, GraphReport):
        if args or options:
            raise TypeError(
                "the first argument is a GraphReport, whose calls were already made, so no other arguments are "
                "allowed. Omit them, or pass the model instead of the report."
            )
        return fn
    return graph_report(fn, *args, **options)


def check_report(report: object, assertion: str) -> None:
    """Raise a TypeError unless ``report`` is a `GraphReport`; ``assertion`` is the caller's name."""
    if not isinstance(report, GraphReport):
        raise TypeError(
            f"{assertion} expects a GraphReport, got a {type(report).__name__}. Call graph_report(model, x) first."
        )


def _fail_if(lines: Iterable[str], what: str) -> None:
    __tracebackhide__ = True  # pytest then shows the caller's line, and not this one
    lines = list(lines)
    if lines:
        raise AssertionError("\n".join([what, *lines]))


def assert_fullgraph(fn: Callable[..., Any] | GraphReport, *args: Any, **options: Any) -> GraphReport:
    """Assert that at least one graph was compiled, without graph breaks.

    Breaks before the first and after the last tensor operation also count, although they do not add a graph.

    Args:
        fn: A module or function, or a report.
        args: Arguments of the first call, as for `graph_report`.
        options: Further arguments of `graph_report`.

    Returns:
        The report.

    Raises:
        AssertionError: There is a break, or nothing was compiled. The text has each break with its location and
            PyTorch's hints.
    """
    __tracebackhide__ = True
    report = _report(fn, args, options)
    _fail_if(
        (line for each in report.breaks for line in break_lines(each)),
        f"{counted_at(report.breaks, 'graph breaks')}:",
    )
    if not report.graphs:
        raise AssertionError("nothing was compiled: Dynamo skips this function, or it contains no tensor operation.")
    return report


def assert_no_recompile(
    fn: Callable[..., Any] | GraphReport,
    calls: Sequence[Call | tuple[Any, ...]] = (),
    *,
    allowed: int = 0,
    **options: Any,
) -> GraphReport:
    """Assert that every later call runs the graphs that the first call compiled.

    With ``dynamic=None``, PyTorch's default, a second size of a dim compiles a second graph, in which that dim is
    dynamic. Further sizes use that graph. So pass ``allowed=1`` if sizes differ.

    Args:
        fn: A module or function, or a report of such calls.
        calls: At least two tuples of arguments, or `Call` objects if modes differ too.
        allowed: Number of recompilations that are expected, such as 1 for eval in addition to train.
        options: Further arguments of `graph_report`.

    Returns:
        The report.

    Raises:
        AssertionError: There are more recompilations. The text has each, with its function and the failed guard.
        TypeError: ``calls`` is not a list of calls.
        ValueError: There are fewer than two calls, which can't show a recompilation.
    """
    __tracebackhide__ = True
    no_calls = isinstance(calls, Sequence) and not calls
    report = _report(fn, (), options if no_calls else options | {"calls": calls})
    if len(report.calls) < 2:
        raise ValueError(
            f"assert_no_recompile: {numbered(len(report.calls), 'calls')} made, but a recompile requires two. Pass "
            "more: graph_report(model, calls=[(x,), (y,)])."
        )
    if len(report.recompiles) > allowed:
        lines = (line for each in report.recompiles for line in recompile_lines(each))
        _fail_if(lines, f"{counted_at(report.recompiles, 'recompiles')}, {allowed} allowed:")
    return report


def assert_cacheable(fn: Callable[..., Any] | GraphReport, *args: Any, **options: Any) -> GraphReport:
    """Assert that PyTorch's on-disk compile caches can store every graph.

    Args:
        fn: A module or function, or a report.
        args: Arguments of the first call.
        options: Further arguments of `graph_report`.

    Returns:
        The report.

    Raises:
        AssertionError: A graph can't be cached. The text has each reason with its location.
    """
    __tracebackhide__ = True
    report = _report(fn, args, options)
    lines = (line for each in report.bypasses for line in bypass_lines(each))
    _fail_if(lines, f"{counted_at(report.bypasses, 'cache bypasses')}:")
    return report


def _matching(name: str, ops: Sequence[str]) -> list[str]:
    name = name.replace("::", ".")
    return [op for op in ops if op == name or op.startswith(f"{name}.")]


def assert_ops(report: GraphReport, *, contains: Iterable[str] = (), absent: Iterable[str] = ()) -> None:
    """Assert that operators are in the graphs, forward or backward, or that they are in none.

    Args:
        report: The report, from `graph_report`.
        contains: Names of required operators, in full or up to a dot: "fp8compile::linear", "aten.mm",
            "_c10d_functional".
        absent: Names of forbidden operators, in the same form.

    Raises:
        AssertionError: A required operator is missing, or a forbidden operator is in a graph.
        TypeError: ``report`` is not a `GraphReport`.
    """
    __tracebackhide__ = True
    check_report(report, "assert_ops")
    contains, absent = ([names] if isinstance(names, str) else list(names) for names in (contains, absent))
    present = sorted(set(report.ops))
    lines = [f"  {name} is missing" for name in contains if not _matching(name, present)]
    lines += [f"  {name} was found: {', '.join(found)}" for name in absent if (found := _matching(name, present))]
    _fail_if([*lines, f"  the graphs have {', '.join(present)}"] if lines else [], "operators are not as expected:")


def _comm_line(found: Collective) -> str:
    where = f"{found.file}:{found.line}" if found.file else "an unknown place"
    pass_ = "backward" if found.backward else "forward"
    return f"  {found.bytes} bytes of {found.dtype} by {found.op} in the {pass_}, from {where}"


def assert_comm(
    report: GraphReport,
    *,
    op: str | None = None,
    dtype: torch.dtype | Iterable[torch.dtype] | None = None,
    max_bytes: int | None = None,
) -> None:
    """Assert that collectives send only some dtypes, and at most some number of bytes.

    Args:
        report: The report, from `graph_report`.
        op: Name of the collectives to check, in full or up to a dot, such as
            "_c10d_functional.all_gather_into_tensor"; None for all.
        dtype: The dtype, or several, that these collectives may send; None for any.
        max_bytes: Maximum total bytes that these collectives may send on one rank; None for any.

    Raises:
        AssertionError: There is no such collective, one sends another dtype, or all together send more bytes.
        TypeError: ``report`` is not a `GraphReport`, or ``dtype`` is not a dtype.
    """
    __tracebackhide__ = True
    check_report(report, "assert_comm")
    dtypes = [] if dtype is None else [dtype] if isinstance(dtype, (torch.dtype, str)) else list(dtype)
    if not all(isinstance(each, torch.dtype) for each in dtypes):
        raise TypeError(
            f"assert_comm: `dtype` is {dtype!r}; it must be a torch.dtype, such as torch.uint8, or a list of them."
        )
    found = [c for c in report.collectives if op is None or _matching(op, [c.op])]
    if not found:
        sent = ", ".join(sorted({c.op for c in report.collectives})) or "none"
        raise AssertionError(f"no collective{f' {op}' if op else ''} in the graphs; found: {sent}")
    if dtype is not None:
        names = {str(each).removeprefix("torch.") for each in dtypes}
        wrong = [c for c in found if c.dtype not in names]
        _fail_if(map(_comm_line, wrong), f"not {', '.join(sorted(names))}:")
    total = sum(c.bytes for c in found)
    if max_bytes is not None and total > max_bytes:
        _fail_if(map(_comm_line, found), f"{total} bytes, {max_bytes} allowed:")
