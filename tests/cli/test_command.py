"""The command itself: its version, what it imports, and what it says of a subcommand that is elsewhere now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fp8compile as f8
from fp8compile.cli import main

ROOT = Path(__file__).parents[2]


def one_line(capsys):
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    return complaint


@pytest.mark.parametrize("words", [["train"], ["train", "--recipe", "rowwise"], ["train", "--help"]])
def test_train_says_where_it_went(capsys, words):
    assert main(words) == 2
    said = one_line(capsys)
    assert said.startswith("fp8compile train: training the example is not part of the package.")
    for place in ("examples/train/", "make train", "python -m examples.train --recipe rowwise --compare bf16"):
        assert place in said
    assert (ROOT / "examples" / "train" / "__main__.py").exists()


def test_the_process_says_it_too():
    done = subprocess.run([sys.executable, "-m", "fp8compile", "train"], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"examples/train/" in done.stderr


@pytest.mark.parametrize("words", [["explain", "x.py", "--gpux", "h200"], ["explain"], ["explan"], []])
def test_what_the_parser_refuses_is_one_line(capsys, words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    one_line(capsys)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["explain", "x.py", "--no-gup"], "--no-gpu"),
        (["explain", "x.py", "--recip", "rowwise"], "--recipe"),
        (["explain", "x.py", "--gpu", "h20"], "h200"),
        (["explian", "x.py"], "explain"),
        (["--verson"], None),
        (["explain", "x.py", "--something-else"], None),
    ],
)
def test_a_typo_is_asked_about(capsys, words, meant):
    with pytest.raises(SystemExit):
        main(words)
    complaint = one_line(capsys)
    assert (f"Did you mean {meant}?" in complaint) if meant else "Did you mean" not in complaint
    assert complaint.rstrip().endswith(" --help")


def test_importing_the_command_loads_neither_rich_nor_matplotlib_nor_inductor():
    program = "import fp8compile.cli, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert not loaded & {"rich", "matplotlib", "torch._inductor.compile_fx", "fp8compile.cli.target"}


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"fp8compile {f8.__version__}\n")


def test_help_names_every_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert ", ".join(f8.recipes.names()) in " ".join(capsys.readouterr().out.split())
