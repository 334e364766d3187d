"""`make gpu`, tried without a GPU: its script, and each command that it gives, on a CPU that plays an H200.

`make gpu-rehearsal` runs all of it with the GPU's programs, in minutes; here are the traced graphs, and one program.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.machine import Rehearsal

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_all.sh"
MINUTES = 30
STEPS = dict(re.findall(r"^step (\w+) (\d+) ", SCRIPT.read_text(), re.MULTILINE))
BENCHMARKS = [name for name in STEPS if name not in ("doctor", "tests")]
# Python, as far as the script asks: it notes what it is called with
STAND_IN = """#!/usr/bin/env bash
printf '%s\\x1f' "$@" >>"$RECORD"; echo >>"$RECORD"
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """``commands(*options)``: what the script calls Python with, by the name of the step."""
    folder = tmp_path_factory.mktemp("commands")
    python = folder / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    @functools.cache
    def called(*options):
        record = folder / f"record {len(options)}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FP8COMPILE")}
        environment |= {"PYTHON": str(python), "RECORD": str(record)}
        subprocess.run(["bash", SCRIPT, *options, folder / "logs"], env=environment, check=True, capture_output=True)
        lines = (line.split("\x1f")[:-1] for line in record.read_text().splitlines() if line)
        modules = [line[1:] for line in lines if line[:1] == ["-m"] and line[1] != "pip"]
        return dict(zip(STEPS, modules, strict=True))

    return called


def run(module, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    importlib.import_module(module).main()
    return capsys.readouterr().out


def test_the_steps_end_within_the_time_that_a_machine_is_lent_for():
    assert sum(map(int, STEPS.values())) < MINUTES * 60


def test_a_rehearsal_calls_what_the_script_calls(commands):
    real, rehearsed = commands(), commands("--rehearse")
    assert {name: command[0] for name, command in real.items()} == {
        name: command[0] for name, command in rehearsed.items()
    }
    benchmarks = [f"benchmarks.{name}" for name in BENCHMARKS]
    assert [command[0] for command in real.values()] == ["fp8compile", "pytest", *benchmarks]
    assert (real["doctor"][1:], rehearsed["doctor"][1:]) == (["doctor"], ["doctor", "--gpu", "h200", "--products"])
    assert real["tests"][1:4] == ["tests/package/test_gpu.py", "-m", "gpu"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_knows_the_arguments_that_it_is_called_with(commands, name, monkeypatch, capsys):
    module, *arguments = commands()[name]
    with pytest.raises(SystemExit) as exit:
        run(module, [*arguments, "--help"], monkeypatch, capsys)  # arguments before it are checked
    assert exit.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_runs_and_says_that_it_is_a_rehearsal(commands, name, monkeypatch, capsys):
    module, *arguments = commands("--rehearse")[name]
    if name == "linear" and torch.__version__.startswith("2.11") and importlib.util.find_spec("torchao"):
        pytest.skip("torchao's rowwise layer needs a product that PyTorch 2.11 has on a GPU only")
    monkeypatch.setenv("FP8COMPILE_REHEARSAL", "eager")
    printed = run(module, arguments, monkeypatch, capsys)
    assert printed.startswith("REHEARSAL, its numbers mean nothing: ")
    assert len(printed.splitlines()) >= 3


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter")
def test_a_layer_is_rehearsed_by_the_program_of_the_gpu(monkeypatch, capsys):
    monkeypatch.setenv("FP8COMPILE_REHEARSAL", "program")
    printed = run("benchmarks.linear", ["--rounds", "1", "--contenders", "rowwise"], monkeypatch, capsys)
    assert "a CPU that plays an H200" in printed
    assert [line.split()[1:3] for line in printed.splitlines()[2:]] == [["bf16", "1.000"], ["rowwise", "1.000"]]


def test_a_kind_of_rehearsal_that_is_not_known_raises():
    with pytest.raises(ValueError, match="FP8COMPILE_REHEARSAL is 'aloud'; it is 'program' or 'eager', or not set"):
        Rehearsal("aloud")


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter")
def test_what_decides_which_kernels_to_change_is_tried_without_a_gpu(tmp_path, capsys, monkeypatch):
    """`make gpu-decide`: a part that lacks something fails alone, and each line is also in the file."""
    from benchmarks import gpu_decide

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "results" / "gpu_decide.txt"
    chosen = ["--parts", "spike", "casts", "--spikes", str(tmp_path), "--out", str(out), "--dry-run"]
    assert gpu_decide.main(chosen) == 1
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    first, *lines = printed.splitlines()
    assert first == "DRY RUN, its numbers mean nothing"
    assert "No module named 'gpu_micro'" in printed
    assert [line.split(" after")[0] for line in lines if "exit status" in line] == [
        "== spike: exit status 1",
        "== casts: exit status 0",
    ]
    timed = [line for line in lines if " ms " in line]
    assert len(timed) == 8, printed
    assert not any("Error" in line for line in lines[lines.index("== casts") :])


def test_a_call_that_fails_is_a_line_of_its_own(capsys):
    from benchmarks.gpu_decide import line

    line("a kernel", lambda: 1 / 0)
    assert capsys.readouterr().out.split() == ["a", "kernel", "ZeroDivisionError:", "division", "by", "zero"]
