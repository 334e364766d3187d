"""The front page: it is short, its links lead somewhere, and what it says of recipes is true."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8compile as f8

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOB = "https://github.com/fp8compile/fp8compile/blob/main/"
RAW = "https://raw.githubusercontent.com/fp8compile/fp8compile/main/"


def test_it_is_short():
    assert len(README.splitlines()) <= 120


def test_links_are_absolute_and_files_of_the_repository():
    links = re.findall(r"\]\(([^)]+)\)|^\[\w+\]: (\S+)", README, re.MULTILINE)
    urls = [first or second for first, second in links]
    assert [url for url in urls if not url.startswith("https://")] == []
    ours = [url.removeprefix(base).partition("#")[0] for url in urls for base in (BLOB, RAW) if url.startswith(base)]
    assert len(ours) >= 15
    assert [path for path in ours if not (ROOT / path).is_file()] == []


def dense(recipe):
    model = f8.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), recipe)
    model(torch.randn(32, 64)).sum().backward()
    assert model[0].weight.grad.any()


def experts(recipe):
    x, weight = torch.randn(64, 32), torch.randn(2, 64, 32, requires_grad=True)
    f8.grouped_linear(x, weight, torch.tensor([40, 64], dtype=torch.int32), recipe=recipe).sum().backward()
    assert weight.grad.any()


def parameters(recipe):
    model = f8.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), recipe, weight_lifetime="parameter")
    assert isinstance(model[0].weight, f8.QuantizedTensor)
    optimizer = f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
    before = model[0].weight.dequantize()
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.dequantize(), before)
    return model


def checkpoints(recipe):
    model, file = parameters(recipe), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = f8.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), recipe, weight_lifetime="parameter")
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other[0].weight.dequantize(), model[0].weight.dequantize())


def saved_as_codes(recipe):
    kinds = []
    linear = torch.nn.Linear(64, 64)
    model = f8.convert(torch.nn.Sequential(torch.nn.RMSNorm(64), linear, torch.nn.SiLU()), recipe)
    with f8.saved_as_codes(filter=lambda tensor: kinds.append(tensor.kind) or True):
        y = model(torch.randn(32, 64))
    y.sum().backward()
    assert "activation" in kinds
    assert linear.weight.grad is None or linear.weight.grad.any()


@pytest.mark.parametrize("works", [dense, experts, parameters, checkpoints, saved_as_codes], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", f8.recipes.names())
def test_every_recipe_works_but_for_one_exception(name, works):
    assert "Every recipe supports dense layers, experts (except `delayed`)" in README
    torch.manual_seed(0)
    if (name, works) == ("delayed", experts):
        with pytest.raises(ValueError, match="no amax"):
            works(f8.recipes.delayed())
    else:
        works(f8.recipes.by_name(name))


@pytest.mark.slow
def test_what_explain_prints_is_on_the_front_page():
    pytest.importorskip("transformers", reason="examples/llama.py is a model of transformers, of the test extra")
    shown = README.split("$ fp8compile explain examples/llama.py\n")[1].split("```")[0].splitlines()
    command = [sys.executable, "-m", "fp8compile", "explain", "examples/llama.py", "--no-gpu"]
    environment = os.environ | {"COLUMNS": "110"}  # the first line is wider than 100
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.DEVNULL)
    assert [line for line in shown if line not in printed.splitlines()] == []
