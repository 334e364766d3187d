"""`fp8compile advise`: the table of a target, JSON, converted targets, and arguments that can't be."""

from __future__ import annotations

import json
import textwrap

import pytest

from fp8compile.cli import main

TARGET = """
import torch
from torch import nn

import fp8compile as f8


def plain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).bfloat16()
    return model, (torch.randn(32, 64).bfloat16(),)


def converted():
    model, args = plain()
    return f8.convert(model, f8.recipes.rowwise()), args


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, (self.x,) = plain()

    def forward(self, x):
        return self.inner(x).float().square().mean()

    def example_inputs(self):
        return (self.x,)
"""


@pytest.fixture
def target(tmp_path):
    file = tmp_path / "target.py"
    file.write_text(textwrap.dedent(TARGET))
    return lambda name: f"{file}:{name}"


def test_it_prints_a_row_a_layer_and_says_what_it_rests_on(target, capsys):
    assert main(["advise", target("WithLoss"), "--gpu", "b200", "--rows-factor", "512"]) == 0
    shown = capsys.readouterr().out
    assert "Errors were measured on one batch: 32 rows per layer, of 32." in shown
    assert "mean square" not in shown
    assert "NVIDIA B200 SXM, with 512 times these rows" in shown.replace("\n  ", " ")
    assert "inner.0" in shown


def test_a_target_without_a_loss_and_a_converted_one_are_said(target, capsys):
    assert main(["advise", target("converted"), "--recipes", "rowwise,nvfp4", "--sqnr", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["layers"]] == ["0", "2"]
    assert found["layers"][0]["sqnr"].keys() == {"rowwise", "nvfp4", "unconverted"}
    assert found["budget"] == {"sqnr": 20.0}
    assert [note.split()[0] for note in found["notes"]] == ["TARGET", "TARGET"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipes", "rowwize"], "rowwize"),
        (["--time", "0.001"], "the fastest recipes take"),
        (["--sample", "0"], "`sample` must be an int of at least 1"),
    ],
)
def test_what_cant_be_is_one_line_and_exit_code_2(target, capsys, words, said):
    assert main(["advise", target("plain"), *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fp8compile advise: ")
    assert said in error
