"""The pytest plugin of fp8compile: guards tests against graph breaks and recompiles.

Pytest loads this file in every run, so it imports nothing heavy: PyTorch comes with the first test that uses the
marker or the fixture. What they do is in `fp8compile.testing.plugin`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

MARKER = "fullgraph(max_breaks=0, max_recompiles=0, own=None)"
USES_FIXTURE = pytest.StashKey[bool]()  # on a test: it has our fixture, and not another one of that name
PROPERTY = "graph_"  # what a test leaves in its report, and in JUnit's XML, begins with this


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the baseline."""
    group = parser.getgroup("fp8compile", "graph breaks and recompiles")
    group.addoption("--graph-baseline", metavar="DIR", help="keep what each guarded test compiles; fail if it worsens")
    group.addoption("--graph-update", action="store_true", help="take what is better, or else, into the baseline")


def pytest_configure(config: pytest.Config) -> None:
    """The marker; options that go together."""
    config.addinivalue_line(
        "markers", f"{MARKER}: fail on graph breaks and recompiles in the test, or only on breaks in package `own`"
    )
    if config.getoption("--graph-update") and config.getoption("--graph-baseline") is None:
        raise pytest.UsageError("--graph-update takes --graph-baseline DIR: there is nothing to update")


def _is_guarded(item: pytest.Item) -> bool:
    return item.get_closest_marker("fullgraph") is not None or item.stash.get(USES_FIXTURE, False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch the tests that ask for it, and no other."""
    if not _is_guarded(item):
        return (yield)
    from fp8compile.testing.plugin import guarded

    with guarded(item):
        return (yield)


@pytest.fixture
def graph_report(request: pytest.FixtureRequest) -> Callable:
    """``fp8compile.testing.graph_report``, whose reports also go into the test's baseline."""
    from fp8compile.testing.plugin import recorded_graph_report

    request.node.stash[USES_FIXTURE] = True
    return recorded_graph_report(request.node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each guarded test: what it compiled."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    lines = [f"{report.nodeid}: {counts}" for report in reports if (counts := _counts(report))]
    if lines:
        terminalreporter.section("graphs")
        for line in lines:
            terminalreporter.line(line)


def _counts(report: pytest.TestReport) -> str:
    if report.when != "call":
        return ""
    found = (
        (name.removeprefix(PROPERTY), value) for name, value in report.user_properties if name.startswith(PROPERTY)
    )
    return ", ".join(f"{value} {name}" for name, value in found)
