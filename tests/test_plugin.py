"""The pytest plugin, run by pytest on small test files: marker, fixture, baseline, with and without xdist."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

from fp8compile.testing import graph_report
from fp8compile.testing.plugin import guarded  # noqa: F401  as the runs below do

ROOT = Path(__file__).parents[1]

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

    def run(source, *options, subprocess=False):
        pytester.makepyfile(source)
        # twice named is once loaded, where it is installed
        method = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return method("-p", "pytest_fp8compile", "-p", "no:cacheprovider", *options)

    return run


def baseline(pytester):
    (path,) = (pytester.path / "graphs").glob("*.json")
    return json.loads(path.read_text())


# ------------------------------------------------------------------------------- the marker


def test_a_whole_graph_passes_and_is_summarized(run):
    result = run(WHOLE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*= graphs =*", "*::test_whole: 1 graphs, 0 breaks, 0 recompiles, 0 bypasses*"])


def test_a_break_fails_with_its_place_and_a_hint(run):
    result = run(BROKEN.format(allowed=0))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["1 graph breaks, 0 allowed:", "graph break at *.py:5: Failed to trace builtin operator", "  hint: *"]
    )
    run(BROKEN.format(allowed=1)).assert_outcomes(passed=1)


def test_a_recompile_fails_with_the_guard(run):
    result = run(RECOMPILED.format(allowed=0))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["1 recompiles, 0 allowed:", "  failed: *size mismatch at index 0*"])
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
    result.stdout.fnmatch_lines(["*test_show?mine? FAILED*", "*test_show?theirs? PASSED*", "1 graph breaks in mine*"])


def test_a_test_that_compiles_nothing_is_no_proof(run):
    result = run("import pytest\n\n@pytest.mark.fullgraph\ndef test_nothing(): pass\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*nothing was compiled*"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("most=1", "*takes max_breaks, max_recompiles and own*"), ("own='nowhere'", "*'nowhere' is no package*")],
)
def test_a_wrong_marker_says_so(run, arguments, text):
    result = run(WHOLE.replace("fullgraph", f"fullgraph({arguments})"))
    result.stdout.fnmatch_lines([text])
    assert result.ret != 0


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


@pytest.mark.parametrize("workers", [0, 2])
def test_baseline_is_made_worsened_bettered_and_updated(run, pytester, workers):
    options = ("--graph-baseline", "graphs", *(("-n", str(workers)) if workers else ("-p", "no:xdist")))
    subprocess = workers > 0

    result = run(BROKEN.format(allowed=9), *options, subprocess=subprocess)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_broken: *made baseline*"])
    made = baseline(pytester)
    assert (made["graphs"], made["breaks"], made["recompiles"]) == (2, 1, 0)

    run(BROKEN.format(allowed=9), *options, subprocess=subprocess).assert_outcomes(passed=1)
    assert baseline(pytester) == made

    worse = BROKEN.format(allowed=9).replace("return x.cos()", "x = x.cos()\n    print('there')\n    return x * 2")
    result = run(worse, *options, subprocess=subprocess)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*worse than the graph baseline: graphs 2 -> 3, breaks 1 -> 2"])
    assert baseline(pytester) == made

    better = BROKEN.format(allowed=9).replace('    print("here")\n', "")
    result = run(better, *options, subprocess=subprocess)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*better: graphs 2 -> 1, breaks 1 -> 0; --graph-update takes it*"])
    assert baseline(pytester) == made

    run(better, *options, "--graph-update", subprocess=subprocess).assert_outcomes(passed=1)
    assert baseline(pytester)["breaks"] == 0


def test_bytes_saved_for_the_backward_are_part_of_the_baseline(run):
    run(REPORTED.format(body="x * 2"), "--graph-baseline", "graphs").assert_outcomes(passed=1)
    result = run(REPORTED.format(body="(x + 1).exp() * 2"), "--graph-baseline", "graphs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*worse than the graph baseline: saved_bytes 0 -> 16"])


def test_a_damaged_baseline_is_named(run, pytester):
    run(WHOLE, "--graph-baseline", "graphs")
    (path,) = (pytester.path / "graphs").glob("*.json")
    path.write_text("{")
    result = run(WHOLE, "--graph-baseline", "graphs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*is no graph baseline*delete it*"])


def test_update_without_a_baseline_is_refused(run):
    result = run(WHOLE, "--graph-update")
    result.stderr.fnmatch_lines(["*--graph-update takes --graph-baseline DIR*"])


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
    result.stdout.fnmatch_lines(["*test_llama: 1 graphs, 0 breaks, 0 recompiles, 0 bypasses*"])
