"""The pytest plugin of fp8compile: guards tests against graph breaks and recompiles, and runs programs of GPUs.

Pytest loads this file in every run, so it imports nothing heavy. PyTorch is imported by the first test that uses a
marker or a fixture; `fp8compile.testing.graphs.plugin` and `fp8compile.testing.gpu.program.plugin` implement them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

MARKER = "fullgraph(max_breaks=0, max_recompiles=0, own=None, max_bypasses=None, max_graphs=None)"
GPU_MARKER = "gpu_program(arch='h200', **options)"
USES_FIXTURE = pytest.StashKey[bool]()  # on a test: it has our fixture, and not another one of that name
# what a guarded test leaves in its report, and in JUnit's XML: `fp8compile.testing.graphs.plugin.PROPERTIES`, short
COUNTS = (
    "graphs", "breaks", "recompiles", "bypasses", "saved_bytes", "sent_bytes", "launches", "gemms", "gpu_bytes",
)  # fmt: skip
BASELINE = "graph_baseline"
# PyTorch's structured log has its content beside the message, and pytest prints thousands of empty messages
EMPTY = re.compile(r"^DEBUG +torch\.__trace:\S+[ \t]*$\n?", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command line options for baselines."""
    group = parser.getgroup("fp8compile", "graph breaks and recompiles")
    group.addoption("--graph-baseline", metavar="DIR", help="keep what each guarded test compiles; fail if it worsens")
    group.addoption("--graph-update", action="store_true", help="take what is better, or else, into the baseline")
    group.addoption("--graph-frozen", action="store_true", help="fail on a test that has no baseline yet, as in CI")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and check the options for baselines."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}: fail on graph breaks and recompiles in the test; with `own`, of the breaks only on those in that "
        "package, and on every recompile all the same; max_bypasses: graphs that no cache holds; max_graphs: all",
    )
    config.addinivalue_line(
        "markers",
        f"{GPU_MARKER}: run the test's fixture `gpu_program` for this GPU, or for each of a list of GPUs; options are "
        "those of fp8compile.testing.run_gpu_program",
    )
    given = config.getoption("--graph-baseline")
    update, frozen = config.getoption("--graph-update"), config.getoption("--graph-frozen")
    if given is None:
        if update or frozen:
            option = "--graph-update" if update else "--graph-frozen"
            raise pytest.UsageError(f"{option} takes --graph-baseline DIR: there is nothing to compare with")
        return
    if update and frozen:
        raise pytest.UsageError("--graph-update writes the baseline that --graph-frozen keeps: give one of them")
    # resolved now, because a test may change the working directory; a string, because xdist sends it to its workers
    folder = config.invocation_params.dir / given
    if folder.exists() and not folder.is_dir():
        raise pytest.UsageError(f"--graph-baseline {given} is a file; it is the folder of a file for each test")
    config.option.graph_baseline = str(folder)


def _is_guarded(item: pytest.Item) -> bool:
    return item.get_closest_marker("fullgraph") is not None or item.stash.get(USES_FIXTURE, False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Count and compare what a test compiles, if it has the marker ``fullgraph`` or uses ``graph_report``."""
    if not _is_guarded(item):
        return (yield)
    from fp8compile.testing.graphs.plugin import guarded

    with guarded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remove lines of PyTorch's logs: empty ones, and those that repeat why a limit or a baseline fails a test."""
    report = yield
    report.sections = [
        (title, kept)
        for title, text in report.sections
        if (kept := EMPTY.sub("", text) if title.startswith("Captured log") else text)
    ]
    if report.failed and _is_guarded(item):
        from fp8compile.testing.graphs.plugin import without_compilers_log

        without_compilers_log(item, call, report)
    return report


@pytest.fixture
def graph_report(request: pytest.FixtureRequest) -> Callable:
    """A ``fp8compile.testing.graph_report`` whose reports also count for the test's baseline."""
    from fp8compile.testing.graphs.plugin import recorded_graph_report

    request.node.stash[USES_FIXTURE] = True
    return recorded_graph_report(request.node)


@pytest.fixture
def gpu_kernels(request: pytest.FixtureRequest) -> Callable:
    """A ``fp8compile.testing.gpu_kernels`` whose launches, GEMMs and bytes also count for the test's baseline."""
    from fp8compile.testing.gpu.program.plugin import recorded_gpu_kernels

    request.node.stash[USES_FIXTURE] = True
    return recorded_gpu_kernels(request.node)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the fixture ``gpu_program`` once for each GPU of its marker."""
    if "gpu_program" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("gpu_program")
    arch = "h200" if marker is None else marker.kwargs.get("arch", *marker.args[:1] or ("h200",))
    archs = [arch] if isinstance(arch, str) else arch
    if not isinstance(archs, (list, tuple)) or not archs or not all(isinstance(each, str) for each in archs):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: @pytest.mark.gpu_program: arch is {arch!r}; it is the name of a GPU such "
            "as 'h200' or 'sm_120', or a list of such names."
        )
    metafunc.parametrize("gpu_program", archs, indirect=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that has the marker ``gpu_program`` but not the fixture of this name: nothing would be run."""
    if item.get_closest_marker("gpu_program") is not None and "gpu_program" not in getattr(item, "fixturenames", ()):
        text = "@pytest.mark.gpu_program: take the fixture gpu_program, and call it: gpu_program(fn, *args)"
        pytest.fail(text, pytrace=False)


@pytest.fixture
def gpu_program(request: pytest.FixtureRequest) -> Callable:
    """A ``fp8compile.testing.run_gpu_program`` for the marker's GPU; a difference fails the test."""
    from fp8compile.testing.gpu.program.plugin import program_runner

    marker = request.node.get_closest_marker("gpu_program")
    options = {} if marker is None else {name: given for name, given in marker.kwargs.items() if name != "arch"}
    return program_runner(request.node, request.param, options)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Print a line with the counts of each guarded test, and a line for each baseline file without a test."""
    lines = list(_guarded_lines(terminalreporter))
    _count_faulty_baselines(terminalreporter)
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # else tests are missing that were to run
        lines += _stale_lines(terminalreporter)
    if lines:
        terminalreporter.section("graphs")
        for line in lines:
            terminalreporter.line(line)


def _reports(terminalreporter: pytest.TerminalReporter) -> Iterator[tuple[str, pytest.TestReport]]:
    """Reports of tests, each with the category that pytest counts it in, such as "passed" or "xfailed"."""
    for kind, reports in terminalreporter.stats.items():
        yield from ((kind, report) for report in reports if isinstance(report, pytest.TestReport))


def _guarded_lines(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    for kind, report in _reports(terminalreporter):
        shown = "" if kind in ("passed", "failed") else f" ({kind})"
        if report.when == "call" and (counts := _counts(report)):
            yield f"{report.nodeid}{shown}: {counts}"
        elif kind == "skipped" and "fullgraph" in report.keywords:
            yield f"{report.nodeid}{shown}: nothing was compiled"


def _counts(report: pytest.TestReport) -> str:
    found = dict(report.user_properties)
    parts = [_numbered(found[f"graph_{name}"], name) for name in COUNTS if f"graph_{name}" in found]
    # without counts, a property called BASELINE is the test's own
    return ", ".join([*parts, *([f"baseline {found[BASELINE]}"] if BASELINE in found else [])] if parts else [])


def _numbered(number: int, name: str) -> str:
    if number != 1:
        return f"{number} {name}"
    return f"1 {'bypass' if name == 'bypasses' else name.removesuffix('s')}"


def _count_faulty_baselines(terminalreporter: pytest.TerminalReporter) -> None:
    """Add to pytest's last line the number of baselines made with breaks, which nobody may have seen."""
    called = (report for _, report in _reports(terminalreporter) if report.when == "call")
    found = [dict(report.user_properties) | {"report": report} for report in called]
    made = [each for each in found if str(each.get(BASELINE, "")).startswith("made with ")]
    if breaks := sum(each["graph_breaks"] for each in made):
        with_breaks = [each["report"] for each in made if each["graph_breaks"]]
        noun = "baseline" if len(with_breaks) == 1 else "baselines"
        terminalreporter.stats.setdefault(f"{noun} made with {_numbered(breaks, 'breaks')}", []).extend(with_breaks)


def _stale_lines(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    """Yield a line for each baseline file whose test is gone, renamed, or no longer guarded."""
    config = terminalreporter.config
    folder = config.getoption("--graph-baseline")
    if folder is None:
        return
    # tests that were skipped or failed early may be guarded; if tests were selected, others may exist
    reports = [report for _, report in _reports(terminalreporter)]
    kept = {report.nodeid for report in reports if report.outcome != "passed" or _counts(report)}
    files = {report.nodeid.partition("::")[0] for report in reports}
    options = config.option
    selected = options.keyword or options.markexpr or options.maxfail or "deselected" in terminalreporter.stats
    selected = selected or any("::" in str(arg) for arg in config.args)
    for path in sorted([*Path(folder).glob("*.json"), *Path(folder).glob("torch-*/*.json")]):
        try:
            test = str(json.loads(path.read_text())["test"])
        except (ValueError, KeyError, TypeError):
            continue  # the file's own test fails and says that it is no baseline
        file = test.partition("::")[0]
        if test not in kept and (not (config.rootpath / file).exists() or (file in files and not selected)):
            yield f"{path.relative_to(folder)}: stale, no guarded test is called {test}; delete it"
