"""`fp8compile explain`: its exit code for every way in which a target can end. 0 is a yes, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from fp8compile.cli import main

# What the code does, the exit code, what the line of complaint says.
ENDINGS = {
    "sys.exit(0)": ("import sys; sys.exit(0)", 2, "it called sys.exit(0), which would end this command too"),
    "sys.exit()": ("import sys; sys.exit()", 2, "it called sys.exit()"),
    "sys.exit of a number": ("import sys; sys.exit(3)", 2, "it called sys.exit(3)"),
    "sys.exit of a text": ("import sys; sys.exit('done')", 2, "it called sys.exit('done')"),
    "quit": ("raise SystemExit", 2, "it called sys.exit()"),
    "os._exit(0)": ("import os; os._exit(0)", 2, "it called os._exit(0), which would end this command too"),
    "os.execv": ("import os; os.execv('/bin/true', ['true'])", 2, "it called os.execv('/bin/true', ['true'])"),
    "os.execvp": ("import os; os.execvp('true', ['true'])", 2, "it called os.execv"),
    "an exception": ("raise ValueError('no')", 2, "ValueError: no"),
    "StopIteration": ("raise StopIteration", 2, "StopIteration"),
    "a BaseException": ("class Own(BaseException): pass\nraise Own('bye')", 2, "Own: bye"),
    "GeneratorExit": ("raise GeneratorExit", 2, "GeneratorExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", 130, "stopped by Ctrl-C"),
}
MODEL = """
import torch
import fp8compile as f8
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = f8.Linear(32, 32, recipe=f8.recipes.rowwise())
    def forward(self, x):
{forward}
        return self.layer(x)

def example():
{function}
    return Own(), torch.randn(16, 32)

{module}
"""


def written(path, **code):
    """A file with a converted model and some code in the places named."""
    indents = {"module": "", "function": "    ", "forward": "        "}
    places = {place: textwrap.indent(code.get(place, ""), indent) for place, indent in indents.items()}
    path.write_text(MODEL.format(**places))
    return path


def explained(capsys, *words):
    """Exit code, standard output, and standard error without the lines that say what is being done."""
    code = main(["explain", "--no-gpu", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, [line for line in err.splitlines() if not line.endswith(" ...")]


@pytest.fixture(autouse=True)
def _imports_forgotten(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("target", "places", "explained_main"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["module", "function", "forward"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_target_that_ends_the_process_is_one_line_and_no_yes(tmp_path, capsys, ending, place):
    source, expected, complaint = ENDINGS[ending]
    code, out, err = explained(capsys, written(tmp_path / "target.py", **{place: source}))
    assert (code, out, len(err)) == (expected, "", 1)
    assert err[0].startswith("fp8compile explain: ")
    assert complaint in err[0]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("ends", "loading it failed: it called sys.exit(0)"),
        ("Model", "calling it without arguments failed: it called sys.exit(0)"),
        ("inputs", "example_inputs(): calling it without arguments failed: it called sys.exit(0)"),
        ("backward", "compiling the model and running it failed: "),  # by way of the compiler, which traces it
    ],
)
def test_every_other_place_where_the_targets_code_runs_is_watched_too(tmp_path, capsys, monkeypatch, name, complaint):
    (tmp_path / "places.py").write_text(
        textwrap.dedent("""
        import sys
        import torch
        from torch import nn

        class Model(nn.Linear):
            def __init__(self):
                super().__init__(32, 32)
                sys.exit(0)

        class Inputs(nn.Linear):
            def example_inputs(self):
                sys.exit(0)

        class Ends(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, g):
                sys.exit(0)

        class Backward(nn.Linear):
            def forward(self, x):
                return Ends.apply(super().forward(x))

        def __getattr__(name):
            sys.exit(0) if name == "ends" else None
            raise AttributeError(name)

        inputs = Inputs(32, 32)
        backward = lambda: (Backward(32, 32), torch.randn(4, 32))
        """)
    )
    monkeypatch.chdir(tmp_path)
    code, out, (line,) = explained(capsys, f"places:{name}")
    assert (code, out) == (2, "")
    assert complaint in line


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        ("return nn.Module(), ()", None),  # it has no forward
        ("return nn.Identity(), torch.randn(4)", "NO: the model has no linear layer"),
        ("return nn.Sequential(), torch.randn(4)", "NO: the model has no linear layer"),
        ("return nn.Conv1d(4, 4, 1), torch.randn(1, 4, 4)", "NO: the model has no linear layer"),
        ("return nn.Linear(32, 32), torch.randn(4, 32)", "NO: none of the 1 linear layers is converted"),
        ("return f8.revert(Own()), torch.randn(4, 32)", "NO: none of the 1 linear layers is converted"),
        ("return f8.Linear(32, 32, recipe=f8.Recipe()), torch.randn(4, 32)", "NO: no recipe uses it"),
        ("yield Own(), torch.randn(4, 32)", None),
        ("return None", None),
    ],
)
def test_a_model_without_fp8_is_a_no_and_what_is_no_model_is_no_answer(tmp_path, capsys, function, verdict):
    code, out, (line,) = explained(capsys, written(tmp_path / "target.py", function=function), "--json")
    if verdict is None:
        assert (code, out) == (2, "")
        return
    assert code == 1
    assert json.loads(out)["verdict"].startswith(verdict)
    assert line.startswith(f"fp8compile explain: {verdict}")


def test_a_target_that_does_not_end_the_process_is_explained(tmp_path, capsys):
    main_guard = 'import sys\nif __name__ == "__main__":\n    sys.exit(0)'
    forks = "import os\nchild = os.fork()\nif not child:\n    os._exit(0)\nassert os.waitpid(child, 0)[1] == 0"
    for name in ("target.py", "__main__.py"):
        path = written(tmp_path / name, module=main_guard, function=forks)
        code, out, err = explained(capsys, path, "--json")
        assert (code, err) == (0, [])
        assert json.loads(out)["verdict"].startswith("YES")


def unread():
    """The writing end of a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    return open("/dev/full", "w")


@pytest.mark.parametrize(("opened", "expected"), [(unread, 1), (full, 2)])
def test_an_answer_that_can_not_be_printed_is_no_yes(tmp_path, monkeypatch, opened, expected):
    path = written(tmp_path / "target.py")
    with opened() as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["explain", "--no-gpu", "--json", str(path)]) == expected


@pytest.mark.parametrize(
    ("redirection", "function", "complaint"),
    [
        ("", "import os; os._exit(0)", "it called os._exit(0)"),
        (">&-", "", "To discard it, redirect standard output to /dev/null."),
    ],
)
def test_the_process_itself_has_these_exit_codes(tmp_path, redirection, function, complaint):
    path = written(tmp_path / "target.py", function=function)
    command = f"exec {sys.executable} -m fp8compile explain --no-gpu {path} {redirection}"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert complaint in ended.stderr.splitlines()[-1]
