"""`fp8compile run-gpu` and the pytest fixture `gpu_program`: equal, different, faulty and unknown programs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fp8compile.cli import main
from fp8compile.testing.gpu.gpus import GPUS, gpu_called
from fp8compile.testing.gpu.program import run as program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
CASES = """
import torch

def fused(x, y):
    return x * y + x

def case():
    generator = torch.Generator().manual_seed(0)
    return fused, (torch.randn(64, generator=generator), torch.randn(64, generator=generator))

def zeros():
    return fused, (torch.zeros(4), torch.tensor([1.0, torch.inf, 0.0, 2.0]))

def of_a_cpu():
    import own_kernels

    return own_kernels.by_a_cpu, (torch.ones(4), torch.ones(4))

def number():
    return 3

def one():
    return torch.sin, torch.ones(4)

def failing():
    raise KeyError("x")
"""


@pytest.fixture
def cases(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "kernels.py"
    path.write_text(CASES)
    return path


def test_a_program_with_the_bits_of_its_graphs(cases, capsys):
    assert main(["run-gpu", f"{cases}:case", "--arch", "sm_120", "--arch", "h200"]) == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[-1] for line in out.splitlines() if line.startswith(("sm_120 ", "h200 "))] == [
        "identical to its graphs, bit for bit"
    ] * 2
    assert "NVIDIA GeForce RTX 5090" in out
    assert out.count("1 generated kernels launched, 0 GEMMs") == 2


def test_where_a_nan_comes_from_is_a_line_of_the_report(cases, capsys):
    assert main(["run-gpu", f"{cases}:zeros"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "NaN: in the forward triton_poi__0 makes the first one, triton_poi__0_0.py" in out
    assert ", of 0.0 and inf; stored to out_ptr0, element 1" in out


def test_a_program_that_differs_is_a_failure_of_junit(cases, capsys, tmp_path):
    report = tmp_path / "report.xml"
    assert main(["run-gpu", f"{cases}:case", "--contract", "--junit", str(report)]) == 1
    out = capsys.readouterr().out
    assert "1 tensors DIFFER" in out
    assert "elements differ, the first at" in " ".join(out.split())
    suite = ElementTree.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "1", "0")
    (case,) = suite
    assert (case.get("classname"), case.get("name")) == (f"{cases}:case", "h200")
    assert "elements differ" in case.find("failure").get("message")


def test_a_program_that_is_not_known_is_not_run_and_an_error_of_junit(cases, capsys, tmp_path):
    report = tmp_path / "report.xml"
    assert main(["run-gpu", f"{cases}:of_a_cpu", "--junit", str(report)]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "NotImplementedError: run_gpu_program: generated code calls fp8compile_tests.of_a_cpu.default" in out
    (case,) = ElementTree.parse(report).getroot()
    assert case.find("error") is not None


def test_what_a_kernel_must_not_do_is_a_fault(cases, capsys, monkeypatch):
    def out_of_bounds(*args, **kwargs):
        raise IndexError("triton_poi__0 reads 64 of in_ptr0, which has 64 elements")

    monkeypatch.setattr(program, "run_gpu_program", out_of_bounds)
    assert main(["run-gpu", f"{cases}:one", "--arch", "b200"]) == 1
    out = capsys.readouterr().out
    assert "FAULT" in out
    assert "IndexError: triton_poi__0 reads 64 of in_ptr0" in out


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("", (), "does not name a function. Pass FILE.py:function"),
        (":nothing", (), "has no 'nothing'"),
        (":number", (), "returned a int; it must return (function, args)"),
        (":failing", (), "loading it failed: KeyError: 'x'"),
        (":case", ("--arch", "sm_12"), "`arch` is 'sm_12'; it must be one of h200"),
        (":case", ("--arch", "mi355x"), "run-gpu supports only NVIDIA GPUs"),
    ],
)
def test_what_cannot_be_run_is_refused(target, options, said, cases, capsys):
    assert main(["run-gpu", f"{cases}{target}" if target else "kernels.py", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_gpu_is_named_by_its_architecture_too():
    assert gpu_called("sm_90") is GPUS["h200"]
    assert gpu_called("sm_120") is GPUS["rtx5090"]
    assert gpu_called("gfx950") is GPUS["mi355x"]


TESTS = """
import pytest, torch

def fused(x, y):
    return x * y + x

def args():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, generator=generator), torch.randn(64, generator=generator)

@pytest.mark.gpu_program(arch=["h200", "sm_120"])
def test_equal(gpu_program):
    run = gpu_program(fused, *args())
    assert run.outputs[0].shape == (64,)

@pytest.mark.gpu_program(contract=True)
def test_different(gpu_program):
    gpu_program(fused, *args())

@pytest.mark.gpu_program
def test_forgetful():
    pass
"""


def test_a_marked_test_runs_once_for_each_gpu(pytester):
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parents[2]}\n")
    path = pytester.makepyfile(TESTS)
    result = pytester.inline_run(path, "-p", "pytest_fp8compile", "-p", "no:cacheprovider", "--junitxml=report.xml")
    result.assertoutcome(passed=2, failed=2)
    said = {
        r.nodeid.split("::")[1]: str(r.longrepr) for r in result.getreports("pytest_runtest_logreport") if r.failed
    }
    assert said["test_different[h200]"].startswith("the program of h200 differs from its graphs:\n")
    assert "elements differ, the first at" in said["test_different[h200]"]
    assert "take the fixture gpu_program" in said["test_forgetful"]
    case = ElementTree.parse(pytester.path / "report.xml").find(".//testcase[@name='test_equal[sm_120]']")
    found = {each.get("name"): each.get("value") for each in case.iter("property")}
    assert found == {"gpu_program_arch": "sm_120", "gpu_program_launches": "1", "gpu_program_differences": "0"}


def test_a_marker_without_names_of_gpus_is_refused(pytester):
    pytester.makepyfile(TESTS.replace('["h200", "sm_120"]', "120"))
    result = pytester.runpytest_inprocess("-p", "pytest_fp8compile", "-p", "no:cacheprovider", "--collect-only")
    assert result.ret != 0
    said = result.stdout.str() + result.stderr.str()
    assert "@pytest.mark.gpu_program: arch is 120; it is the name of a GPU such as 'h200' or 'sm_120'" in said
