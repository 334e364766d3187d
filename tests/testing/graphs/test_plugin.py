"""The pytest plugin, run by pytest on small test files: marker, fixture, baseline, with and without xdist."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile._compat import TORCH_VERSION
from fp8compile.testing import gpu_kernels, graph_report
from fp8compile.testing.graphs.plugin import guarded  # noqa: F401  as the runs below do

ROOT = Path(__file__).parents[3]

WHOLE = """
import pytest, torch

@pytest.mark.fullgraph
def test_whole():
    torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.ones(4))
"""

BROKEN = """
import pytest, torch

def model(x):
    x = x.sin()
    print("here")
    return x.cos()

@pytest.mark.fullgraph(max_breaks={allowed})
def test_broken():
    torch.compile(model, backend="aot_eager")(torch.ones(4))
"""

RECOMPILED = """
import pytest, torch

@pytest.mark.fullgraph(max_recompiles={allowed})
def test_recompiled():
    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager", dynamic=False)
    compiled(torch.ones(4)); compiled(torch.ones(5))
"""

REPORTED = """
import torch

def test_reported(graph_report):
    weight = torch.ones(4, requires_grad=True)
    report = graph_report(lambda x: {body}, weight)
    assert len(report.graphs) == 1
"""


needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Inductor generates a GPU's kernels in Triton"
)
NUMBERS_OF_CODE = ("launches", "gemms", "gpu_bytes")
KERNELS = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

def test_code(gpu_kernels):
    with FakeTensorMode():
        assert len(gpu_kernels(lambda x: {body}, torch.ones(64, 64))) == 1
"""


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Everything that the runs import is there before: pytester drops what came in a run, and PyTorch comes once."""

    def broken(x):
        x = x.exp()
        print("here")
        return x * 2

    assert len(graph_report(broken, torch.ones(4, requires_grad=True), calls=[torch.ones(5)]).breaks) == 1


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest on a test file, by this checkout's plugin."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("CI", "BUILD_NUMBER"):  # with one of them, pytest repeats each failure in its summary
        monkeypatch.delenv(name, raising=False)

    def run(source, *options, subprocess=False):
        pytester.makepyfile(source)
        # twice named is once loaded, where it is installed
        method = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return method("-p", "pytest_fp8compile", "-p", "no:cacheprovider", *options)

    return run


def baseline(pytester):
    (path,) = (pytester.path / "graphs").glob("torch-*/*.json")
    return json.loads(path.read_text())


# ------------------------------------------------------------------------------- the marker


def test_a_whole_graph_passes_and_is_summarized(run):
    result = run(WHOLE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*= graphs =*", "*::test_whole: 1 graph, 0 breaks, 0 recompiles, 0 bypasses*"])


def test_a_break_fails_with_its_place_and_a_hint(run):
    result = run(BROKEN.format(allowed=0))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*.py:5: 1 graph break, 0 allowed:", "graph break at *.py:5: Failed to trace builtin operator", "  hint: *"]
    )
    run(BROKEN.format(allowed=1)).assert_outcomes(passed=1)


def test_a_recompile_fails_with_the_guard(run):
    result = run(RECOMPILED.format(allowed=0))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*.py:*: 1 recompile, 0 allowed:", "  failed: *size mismatch at index 0*"])
    run(RECOMPILED.format(allowed=1)).assert_outcomes(passed=1)


def test_own_counts_only_breaks_in_that_package(run, pytester):
    for package in ("mine", "theirs"):
        pytester.mkpydir(package).joinpath("__init__.py").write_text(
            "def show(x):\n    x = x.sin()\n    print('here')\n    return x.cos()\n"
        )
    source = """
        import pytest, torch, mine, theirs

        @pytest.mark.fullgraph(own="mine")
        @pytest.mark.parametrize("package", [mine, theirs], ids=["mine", "theirs"])
        def test_show(package):
            torch.compile(package.show, backend="aot_eager")(torch.ones(4))
    """
    pytester.syspathinsert()
    result = run(source, "-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*test_show?mine? FAILED*", "*test_show?theirs? PASSED*", "mine*.py:3: 1 graph break in mine, 0 allowed:"]
    )


def test_a_test_that_compiles_nothing_is_no_proof(run):
    result = run("import pytest\n\n@pytest.mark.fullgraph\ndef test_nothing(): pass\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*nothing was compiled*"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("most=1", "got most; it accepts max_breaks, max_recompiles, own, max_bypasses, max_graphs."),
        ("max_break=0", "got max_break; it accepts max_breaks, max_recompiles, own, max_bypasses, max_graphs."),
        ("0, 0, None, 1, 1, 3", "got 3; it accepts max_breaks, max_recompiles, own, max_bypasses, max_graphs."),
        ("max_breaks='1'", "`max_breaks` is '1'; it must be the allowed number, an int of at least 0."),
        ("max_recompiles=-1", "`max_recompiles` is -1; it must be the allowed number, an int of at least 0."),
        ("max_graphs=True", "`max_graphs` is True; it must be the allowed number, an int of at least 0."),
        ("max_bypasses=-1", "`max_bypasses` is -1; it must be the allowed number, an int of at least 0."),
        ("own=['mine']", "`own` is ?'mine'?; it must be the name of one package, such as 'mypkg'."),
        ("own='nowhere'", "own='nowhere' can't be imported."),
        ("own='nope.x'", "own='nope.x' can't be imported (ModuleNotFoundError: *)."),
    ],
)
def test_a_wrong_marker_says_so(run, arguments, text):
    result = run(WHOLE.replace("fullgraph", f"fullgraph({arguments})"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"@pytest.mark.fullgraph: {text}"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*plugin.py*")


def test_other_tests_are_left_alone(run):
    """Neither PyTorch nor anything of this package is imported for a suite that does not use the plugin."""
    source = "import sys\n\ndef test_other(): assert not {'torch', 'fp8compile'} & sys.modules.keys()\n"
    result = run(source, "-p", "no:xdist", subprocess=True)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*= graphs =*")


def test_graphs_of_several_reports_are_all_counted(run):
    source = """
        import torch

        def test_reports(graph_report):
            for f in (torch.sin, torch.cos, torch.tan):
                graph_report(lambda x: f(x) + 1, torch.ones(3))
    """
    run(source).stdout.fnmatch_lines(["*test_reports: 3 graphs, 0 breaks, 0 recompiles*"])


def test_a_fixture_of_the_same_name_is_not_ours(run):
    source = """
        import pytest

        @pytest.fixture
        def graph_report(): return 3

        def test_mine(graph_report): assert graph_report == 3
    """
    result = run(source)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*= graphs =*")


def test_graphs_and_bypasses_have_limits_of_their_own(run):
    source = """
        import pytest, torch

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * 2

            @staticmethod
            def backward(ctx, grad): return grad * 2

        def model(x):
            x = x.sin()
            torch._dynamo.graph_break()
            return Twice.apply(x)

        @pytest.mark.fullgraph({limits})
        def test_limits(graph_report):
            graph_report(model, torch.ones(4, requires_grad=True))
    """
    result = run(source.format(limits="max_breaks=1, max_graphs=1, max_bypasses=0"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*.py:13: 1 cache bypass, 0 allowed:",
            "the AOTAutograd cache is bypassed at *",
            "2 graphs, 1 allowed:",
            "  model at *.py:10",
            "  torch_dynamo_resume_in_model_at_12 at *.py:12",
        ]
    )
    run(source.format(limits="max_breaks=1, max_graphs=2, max_bypasses=1")).assert_outcomes(passed=1)
    run(source.format(limits="max_breaks=1")).assert_outcomes(passed=1)


def test_the_line_of_a_failed_test_has_the_place(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = run(BROKEN.format(allowed=0))
    result.stdout.fnmatch_lines(["FAILED *::test_broken - Failed: *.py:5: 1 graph break, 0 allowed:"])
    result = run(RECOMPILED.format(allowed=0))
    result.stdout.fnmatch_lines(["FAILED *::test_recompiled - Failed: *.py:*: 1 recompile, 0 allowed:"])
    asserted = """
        import torch
        from fp8compile.testing import assert_fullgraph

        def model(x):
            x = x.sin()
            print("here")
            return x.cos()

        def test_asserted():
            assert_fullgraph(model, torch.ones(4))
    """
    result = run(asserted)
    result.stdout.fnmatch_lines(["FAILED *::test_asserted - AssertionError: *.py:6: 1 graph break:"])
    result.stdout.no_fnmatch_line("*_fail_if*")


LOGGED = """
import pytest, torch

def model(x):
    x = x.sin()
    x.sum().item()
    return x.cos()

@pytest.mark.fullgraph
def test_logged(graph_report):
    import logging, sys
    logging.getLogger("mine").warning("my own line")
    print("my own text", file=sys.stderr)
    {test}
"""
BY_LIMIT = 'torch.compile(model, backend="aot_eager")(torch.ones(4))'
BY_ASSERTION = "from fp8compile.testing import assert_fullgraph; assert_fullgraph(graph_report(model, torch.ones(4)))"


@pytest.mark.parametrize("test", [BY_LIMIT, BY_ASSERTION], ids=["limit", "assertion"])
def test_pytorch_does_not_say_the_same_twice_more(run, test):
    result = run(LOGGED.format(test=test), subprocess=True)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert text.count("graph break at ") >= 1
    assert "Graph break from `Tensor.item()`" not in text
    assert "my own line" in text
    assert "my own text" in text


def test_what_pytorch_logs_stays_where_the_test_itself_failed(run):
    result = run(LOGGED.format(test=f"{BY_LIMIT}; assert 1 == 2"), subprocess=True)
    result.assert_outcomes(failed=1)
    assert "Graph break from `Tensor.item()`" in result.stdout.str()


def test_own_is_a_package_and_not_a_prefix(run, pytester):
    for package in ("mine", "mine_extra"):
        pytester.mkpydir(package).joinpath("__init__.py").write_text(
            "def show(x):\n    x = x.sin()\n    print('here')\n    return x.cos()\n"
        )
    pytester.syspathinsert()
    run("""
        import pytest, torch, mine_extra

        @pytest.mark.fullgraph(own="mine")
        def test_show():
            torch.compile(mine_extra.show, backend="aot_eager")(torch.ones(4))
    """).assert_outcomes(passed=1)


# ------------------------------------------------------------------------------- the baseline


WORSE = BROKEN.format(allowed=9).replace("return x.cos()", "x = x.cos()\n    print('there')\n    return x * 2")
BETTER = BROKEN.format(allowed=9).replace('    print("here")\n', "")
MADE = "*test_broken: 2 graphs, 1 break, 0 recompiles, 0 bypasses, baseline made with 1 break"
WORSENED = "*.py:*: * new break*, worse than the graph baseline: breaks 1 -> 2"


def test_baseline_is_made_worsened_bettered_and_updated(run, pytester):
    options = ("--graph-baseline", "graphs", "-p", "no:xdist")
    result = run(BROKEN.format(allowed=9), *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([MADE])
    made = baseline(pytester)
    assert (made["graphs"], made["breaks"], made["recompiles"]) == (2, 1, 0)

    run(BROKEN.format(allowed=9), *options).assert_outcomes(passed=1)
    assert baseline(pytester) == made

    result = run(WORSE, *options)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([WORSENED])
    assert baseline(pytester) == made

    result = run(BETTER, *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*baseline better: graphs 2 -> 1, breaks 1 -> 0; --graph-update takes it"])
    assert baseline(pytester) == made

    run(BETTER, *options, "--graph-update").assert_outcomes(passed=1)
    assert baseline(pytester)["breaks"] == 0


def test_a_worker_of_xdist_makes_a_baseline_compares_with_it_and_updates_it(run, pytester):
    options = ("--graph-baseline", "graphs", "-n", "1")  # of one test a second worker gets nothing
    run(BROKEN.format(allowed=9), *options, subprocess=True).stdout.fnmatch_lines([MADE])
    made = baseline(pytester)
    result = run(WORSE, *options, subprocess=True)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([WORSENED])
    assert baseline(pytester) == made
    run(BETTER, *options, "--graph-update", subprocess=True).assert_outcomes(passed=1)
    assert baseline(pytester)["breaks"] == 0


def test_bytes_saved_for_the_backward_are_part_of_the_baseline(run):
    run(REPORTED.format(body="x * 2"), "--graph-baseline", "graphs").assert_outcomes(passed=1)
    result = run(REPORTED.format(body="(x + 1).exp() * 2"), "--graph-baseline", "graphs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*worse than the graph baseline: saved_bytes 0 -> 16"])


@needs_triton
@pytest.mark.filterwarnings("ignore")
def test_launches_gemms_and_bytes_of_gpu_code_are_part_of_the_baseline(run, pytester):
    with FakeTensorMode():
        gpu_kernels(torch.sin, torch.ones(4))  # what it imports is there before, too

    def run_with(body, *options):
        return run(KERNELS.format(body=body), "--graph-baseline", "graphs", "-W", "ignore", *options)

    run_with("x @ x").assert_outcomes(passed=1)
    made = baseline(pytester)
    assert (made["launches"], made["gemms"], made["gpu_bytes"]) == (1, 1, 2 * 64 * 64 * 4)
    result = run_with("(x @ x) @ x")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*worse than the graph baseline: launches 1 -> 2, gemms 1 -> 2, gpu_bytes * -> *"])
    # a file from before these numbers
    (path,) = (pytester.path / "graphs").glob("torch-*/*.json")
    path.write_text(json.dumps({name: number for name, number in made.items() if name not in NUMBERS_OF_CODE}))
    names = ", ".join(NUMBERS_OF_CODE)
    result = run_with("x @ x")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*baseline not compared: {names}; --graph-update takes it"])
    run_with("x @ x", "--graph-update").stdout.fnmatch_lines([f"*baseline updated: {names}"])
    assert baseline(pytester) == made


FOLLOWED = """
import pytest, torch

def model(x):
    x = x.sin()
    {between}
    return x.cos()

@pytest.mark.fullgraph(max_graphs=1, max_recompiles={recompiles})
def test_followed():
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    for size in (4, 5)[: 1 + {recompiles}]: compiled(torch.ones(size))

@pytest.mark.fullgraph
def test_without_a_graph():
    def loops(x):
        for _ in range(2):
            {between}
            x = x + 1
        return x
    torch.compile(loops, backend="aot_eager")(torch.ones(4))
"""


def test_what_only_follows_a_break_is_not_listed_beside_it(run):
    result = run(FOLLOWED.format(between="torch._dynamo.graph_break()", recompiles=0))
    result.assert_outcomes(failed=2)
    result.stdout.no_fnmatch_line("*graphs, 1 allowed*")
    result.stdout.no_fnmatch_line("nothing was compiled*")
    assert result.stdout.str().count("graph break at") == 2
    sizes = FOLLOWED.replace("max_recompiles={recompiles}", "max_recompiles=0")
    text = run(sizes.format(between="torch._dynamo.graph_break()", recompiles=1)).stdout.str()
    assert text.count("recompile of ") == 1
    assert "recompile of model at" in text


def test_records_of_pytorch_without_a_message_are_in_no_captured_log(run):
    source = """
        import logging, pytest, torch

        @pytest.fixture
        def compiled():
            torch.compile(torch.sin, backend="aot_eager")(torch.ones(4))
            logging.getLogger("mine").warning("my own line")
            yield

        def test_fails(compiled):
            torch.compile(torch.cos, backend="aot_eager")(torch.ones(4))
            assert False
    """
    result = run(source, subprocess=True)
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*torch.__trace*")
    result.stdout.fnmatch_lines(["*my own line*"])


def test_pytests_last_line_counts_baselines_that_were_made_with_breaks(run):
    result = run(BROKEN.format(allowed=9), "--graph-baseline", "graphs")
    assert "1 passed, 1 baseline made with 1 break in" in result.outlines[-1]
    assert "baseline" not in run(BROKEN.format(allowed=9), "--graph-baseline", "graphs").outlines[-1]
    assert "baseline" not in run(WHOLE, "--graph-baseline", "graphs").outlines[-1]


def test_a_baseline_is_that_of_the_minor_version_or_of_the_nearest(run, pytester):
    major, minor = TORCH_VERSION[:2]
    options = ("--graph-baseline", "graphs")
    run(BROKEN.format(allowed=9), *options)
    folder = pytester.path / "graphs" / f"torch-{major}.{minor}"
    far, near, other = (folder.with_name(f"torch-{major}.{minor + step}") for step in (-3, 2, -2))
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    folder.rename(near)
    for path, breaks in ((far, 7), (other, 1)):
        path.mkdir()
        (path / file.name).write_text(json.dumps(kept | {"breaks": breaks}))

    result = run(BROKEN.format(allowed=9), *options, "--graph-frozen")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*1 break*, baseline of PyTorch {major}.{minor - 2}"])  # as near, and older
    assert not folder.exists()

    result = run(WORSE, *options)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"*new break*, worse than the graph baseline of PyTorch {major}.{minor - 2}: breaks 1 -> 2",
            f"--graph-update keeps it as the baseline of PyTorch {major}.{minor}.",
        ]
    )
    run(WORSE, *options, "--graph-update").assert_outcomes(passed=1)
    assert json.loads((folder / file.name).read_text())["breaks"] == 2
    assert json.loads((near / file.name).read_text()) == kept
    run(WORSE, *options).assert_outcomes(passed=1)
    run(BROKEN.format(allowed=9), *options).stdout.fnmatch_lines(["*baseline better: graphs 3 -> 2, *"])


def test_a_baseline_from_before_versions_is_compared_with(run, pytester):
    options = ("--graph-baseline", "graphs")
    run(BROKEN.format(allowed=9), *options)
    (file,) = (pytester.path / "graphs").glob("torch-*/*.json")
    file.rename(pytester.path / "graphs" / file.name)
    file.parent.rmdir()
    result = run(WORSE, *options)
    result.stdout.fnmatch_lines(["*worse than the graph baseline of an unknown PyTorch: breaks 1 -> 2"])
    run(BROKEN.format(allowed=9), *options, "--graph-frozen").assert_outcomes(passed=1)


def test_a_damaged_baseline_is_named(run, pytester):
    run(WHOLE, "--graph-baseline", "graphs")
    (path,) = (pytester.path / "graphs").glob("torch-*/*.json")
    path.write_text("{")
    result = run(WHOLE, "--graph-baseline", "graphs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*is not a graph baseline*Delete it*"])


def test_update_without_a_baseline_is_refused(run):
    result = run(WHOLE, "--graph-update")
    result.stderr.fnmatch_lines(["*--graph-update takes --graph-baseline DIR*"])


def test_the_compilers_log_stays_out_of_a_failing_tests_report(run):
    """Pytest hangs its handler on the logger itself, and by default prints what that captured."""
    result = run(BROKEN.format(allowed=0) + "    assert False\n")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*torch.__trace*")
    result.stdout.no_fnmatch_line("*Captured log*")


def test_a_relative_baseline_is_that_of_where_pytest_was_started(run, pytester):
    source = BROKEN.format(allowed=9).replace(
        "test_broken():", "test_broken(monkeypatch, tmp_path):\n    monkeypatch.chdir(tmp_path)"
    )
    run(source, "--graph-baseline", "graphs").assert_outcomes(passed=1)
    assert baseline(pytester)["breaks"] == 1
    run(
        source.replace("return x.cos()", "print(1)\n    return x.cos()"), "--graph-baseline", "graphs"
    ).assert_outcomes(failed=1)


def test_a_file_is_no_folder_of_baselines(run, pytester):
    pytester.path.joinpath("graphs").write_text("")
    result = run(WHOLE, "--graph-baseline", "graphs")
    result.stderr.fnmatch_lines(["*--graph-baseline graphs is a file; it is the folder of a file for each test*"])


TWICE = """
import pytest, torch

def model(x):
    x = x.sin()
    print("here")
    x = x.cos()
    print("there")
    return x.tan()

@pytest.mark.fullgraph(max_breaks=9)
def test_broken():
    torch.compile(model, backend="aot_eager")(torch.ones(4))
"""


def test_a_break_of_a_reason_that_is_known_already_is_named(run):
    run(BROKEN.format(allowed=9), "--graph-baseline", "graphs").assert_outcomes(passed=1)
    result = run(TWICE, "--graph-baseline", "graphs")
    result.assert_outcomes(failed=1)
    place = "*test_a_break_of_a_reason_that_is_known_already_is_named.py: Failed to trace builtin operator"
    result.stdout.fnmatch_lines([f"new: 1 more of {place}", "graph break at *.py:7: Failed to trace builtin operator"])


def test_a_break_that_became_another_is_worse(run):
    run(BROKEN.format(allowed=9), "--graph-baseline", "graphs").assert_outcomes(passed=1)
    other = BROKEN.format(allowed=9).replace('print("here")', "torch._dynamo.graph_break()")
    result = run(other, "--graph-baseline", "graphs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*.py:5: 1 new break, worse than the graph baseline: a break at a new place",
            "graph break at *.py:5: Call to `torch._dynamo.graph_break()`",
            "gone: *.py: Failed to trace builtin operator",
        ]
    )
    moved = BROKEN.format(allowed=9).replace("import pytest, torch", "import pytest, torch\n\n# a comment")
    run(moved, "--graph-baseline", "graphs").assert_outcomes(passed=1)


def test_files_of_one_name_are_two_places(run, pytester):
    for package in ("mine", "theirs"):
        pytester.mkpydir(package).joinpath("layer.py").write_text(
            "def show(x):\n    x = x.sin()\n    print('here')\n    return x.cos()\n"
        )
    pytester.syspathinsert()
    source = """
        import torch
        from {package} import layer

        def test_show(graph_report):
            graph_report(layer.show, torch.ones(4))
    """
    run(source.format(package="mine"), "--graph-baseline", "graphs").assert_outcomes(passed=1)
    result = run(source.format(package="theirs"), "--graph-baseline", "graphs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["gone: mine/layer.py: Failed to trace builtin operator"])


def test_no_graph_at_all_is_worse(run):
    source = REPORTED.replace("    assert len(report.graphs) == 1\n", "")
    run(source.format(body="x * 2"), "--graph-baseline", "graphs").assert_outcomes(passed=1)
    result = run(source.format(body="x"), "--graph-baseline", "graphs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["worse than the graph baseline: graphs 1 -> 0"])


def test_what_got_better_is_told_beside_what_got_worse(run):
    source = """
        import pytest, torch

        @pytest.mark.fullgraph(max_breaks=9, max_recompiles=9)
        def test_both():
            def model(x):
                {first}
                return x.sin()
            compiled = torch.compile(model, backend="aot_eager", dynamic=False)
            for size in {sizes}: compiled(torch.ones(size))
    """
    run(source.format(first="x = x + 1; print(1)", sizes=[4]), "--graph-baseline", "graphs").assert_outcomes(passed=1)
    result = run(source.format(first="pass", sizes=[4, 5, 6]), "--graph-baseline", "graphs")
    result.stdout.fnmatch_lines(["worse*: graphs 2 -> 3, recompiles 0 -> 2", "better: breaks 1 -> 0"])
    result.stdout.no_fnmatch_line("*for call*")


def test_bytes_are_not_held_against_a_test_with_fewer_breaks(run):
    source = """
        import torch

        def model(x):
            x = x.exp()
            {between}
            return x.exp() * 2

        def test_saved(graph_report):
            graph_report(model, torch.ones(4, requires_grad=True))
    """
    apart = "torch._dynamo.graph_break()\n            x = torch.compiler.disable(lambda x: x.exp().exp().exp())(x)"
    run(source.format(between=apart), "--graph-baseline", "graphs").assert_outcomes(passed=1)
    whole = "x = x.exp().exp().exp()"
    run(source.format(between=whole), "--graph-baseline", "graphs").assert_outcomes(passed=1)


def test_bytes_are_unknown_without_a_report(run, pytester):
    result = run(WHOLE, "--graph-baseline", "graphs")
    assert baseline(pytester)["saved_bytes"] is baseline(pytester)["sent_bytes"] is None
    result.stdout.no_fnmatch_line("*[0-9] *_bytes*")
    run(WHOLE, "--graph-baseline", "graphs").assert_outcomes(passed=1)


def test_a_frozen_baseline_makes_no_file(run, pytester):
    result = run(WHOLE, "--graph-baseline", "graphs", "--graph-frozen")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["there is no graph baseline */graphs/*.json, and --graph-frozen does not create one.*"]
    )
    assert not (pytester.path / "graphs").exists()
    run(WHOLE, "--graph-baseline", "graphs")
    run(WHOLE, "--graph-baseline", "graphs", "--graph-frozen").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--graph-frozen"], "*--graph-frozen takes --graph-baseline DIR*"),
        (["--graph-baseline", "graphs", "--graph-update", "--graph-frozen"], "*give one of them*"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, options, text):
    run(WHOLE, *options).stderr.fnmatch_lines([text])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_baseline_of_no_test_is_reported_as_stale(run, pytester, workers):
    alone = ["--graph-baseline", "graphs", "-p", "no:xdist"]
    options = [*alone[:2], "-n", str(workers)] if workers else alone
    two = WHOLE + WHOLE.replace("test_whole", "test_other")
    run(two, *alone).assert_outcomes(passed=2)
    result = run(two, *options, "-k", "whole", subprocess=workers > 0)
    result.stdout.no_fnmatch_line("*: stale, *")  # the other one was not asked for
    result = run(WHOLE, *options, subprocess=workers > 0)
    result.stdout.fnmatch_lines(["*.json: stale, no guarded test is called *::test_other; delete it"])
    assert "test_whole; delete" not in str(result.stdout)


def test_errors_that_dynamo_would_suppress_fail_a_guarded_test(run, pytester):
    pytester.makeconftest("import torch._dynamo\ntorch._dynamo.config.suppress_errors = True")
    source = """
        import pytest, torch

        def backend(graph, inputs):
            if any(node.target is torch.cos for node in graph.graph.nodes): raise RuntimeError("no cos here")
            return graph

        @pytest.mark.fullgraph
        def test_suppressed():
            torch.compile(torch.sin, backend=backend)(torch.ones(4))
            torch.compile(lambda x: x.cos() * torch.cos(x), backend=backend)(torch.ones(4))
    """
    try:
        result = run(source)
    finally:
        torch._dynamo.config.suppress_errors = False
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no cos here*"])


def test_properties_of_the_tests_own_stay(run, pytester):
    source = WHOLE.replace("test_whole():", "test_whole(record_property):\n    record_property('graph_of_mine', 3)")
    run(source, "--junit-xml=out.xml", "-o", "junit_family=legacy").assert_outcomes(passed=1)
    tree = xml.etree.ElementTree.parse(pytester.path / "out.xml")
    assert {"graph_of_mine", "graph_graphs"} <= {p.get("name") for p in tree.iter("property")}


def test_skipped_and_xfailed_tests_are_summarized(run):
    source = """
        import pytest, torch

        @pytest.mark.fullgraph
        def test_skipped_inside():
            torch.compile(torch.sin, backend="aot_eager")(torch.ones(4))
            pytest.skip("no reason")

        @pytest.mark.skip
        @pytest.mark.fullgraph
        def test_skipped(): pass

        @pytest.mark.xfail
        @pytest.mark.fullgraph
        def test_xfailed(): assert False
    """
    run(source).stdout.fnmatch_lines_random(
        [
            "*::test_skipped_inside (skipped): 1 graph, 0 breaks*",
            "*::test_skipped (skipped): nothing was compiled",
            "*::test_xfailed (xfailed): 0 graphs, 0 breaks*",
        ]
    )


def test_many_recompiles_give_a_guard_each(run):
    source = RECOMPILED.format(allowed=0).replace(
        "compiled(torch.ones(5))", "[compiled(torch.ones(n)) for n in range(5, 16)]"
    )
    result = run(source)
    lines = [line for line in result.outlines if line.startswith("  failed: ")]
    assert len(lines) == 11
    result.stdout.no_fnmatch_line("*for call*")


def test_junit_has_the_numbers(run, pytester):
    run(WHOLE, "--junit-xml=out.xml")
    tree = xml.etree.ElementTree.parse(pytester.path / "out.xml")
    properties = {p.get("name"): p.get("value") for p in tree.iter("property")}
    assert properties["graph_graphs"] == "1"
    assert properties["graph_breaks"] == "0"


# ------------------------------------------------------------------------------- a model of others


def test_a_hugging_face_llama_as_it_is(run):
    source = """
        import os
        os.environ["HF_HUB_OFFLINE"] = "1"
        import pytest, torch, transformers

        def llama():
            config = transformers.LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, use_cache=False)
            return transformers.LlamaForCausalLM(config)

        @pytest.mark.fullgraph(own="transformers")
        def test_llama(graph_report):
            ids = torch.arange(16).view(1, 16)
            report = graph_report(llama(), input_ids=ids, labels=ids)
            assert report.graphs[0].backward
    """
    result = run(source, "--graph-baseline", "graphs", subprocess=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_llama: 1 graph, 0 breaks, 0 recompiles, 0 bypasses*"])
