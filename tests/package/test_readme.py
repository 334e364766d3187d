"""The front page: short, its links lead somewhere as an index shows them, and its matrix is true."""

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


def tables() -> list[list[list[str]]]:
    """Cells of each table, links and code marks taken off."""
    text = re.sub(r"\[([^]]*)\]\[\w+\]", r"\1", README)
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip(" `") for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[row for row in table if set("".join(row)) - set("-: ")] for table in found if table]


(MATRIX,) = (table for table in tables() if table[0][0] == "recipe")
CELLS = {(row[0], column): cell for row in MATRIX[1:] for column, cell in zip(MATRIX[0][1:], row[1:], strict=True)}
COLUMNS = MATRIX[0][1:]


def test_it_is_short():
    assert len(README.splitlines()) <= 120


def test_links_are_absolute_and_files_of_the_repository():
    links = re.findall(r"\]\(([^)]+)\)|^\[\w+\]: (\S+)", README, re.MULTILINE)
    urls = [first or second for first, second in links]
    assert [url for url in urls if not url.startswith("https://")] == []
    ours = [url.removeprefix(base).partition("#")[0] for url in urls for base in (BLOB, RAW) if url.startswith(base)]
    assert len(ours) >= 15
    assert [path for path in ours if not (ROOT / path).is_file()] == []


def test_each_ready_recipe_has_a_row_and_each_cell_an_answer():
    assert [row[0] for row in MATRIX[1:]] == list(f8.recipes.names())
    assert set(CELLS.values()) == {"yes", "no"}


def dense(recipe):
    model = f8.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), recipe)
    model(torch.randn(32, 64)).sum().backward()
    assert model[0].weight.grad.any()


def experts(recipe):
    x, weight = torch.randn(64, 32), torch.randn(2, 64, 32, requires_grad=True)
    f8.grouped_linear(x, weight, torch.tensor([40, 64], dtype=torch.int32), recipe=recipe).sum().backward()
    assert weight.grad.any()


def parameters(recipe):
    model = f8.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), recipe, quantized_parameters=True)
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
    other = f8.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), recipe, quantized_parameters=True)
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


IN_ONE_PROCESS = {
    "dense": dense, "experts": experts, "parameters are codes": parameters, "saved as codes": saved_as_codes,
    "checkpoints": checkpoints,
}  # fmt: skip


@pytest.mark.parametrize("column", IN_ONE_PROCESS)
@pytest.mark.parametrize("name", f8.recipes.names())
def test_a_cell_of_one_process_is_what_happens(name, column):
    torch.manual_seed(0)
    if CELLS[name, column] == "yes":
        IN_ONE_PROCESS[column](f8.recipes.by_name(name))
    else:
        with pytest.raises((ValueError, TypeError, RuntimeError), match="no amax"):
            IN_ONE_PROCESS[column](f8.recipes.by_name(name))


ON_RANKS = {  # columns, and the rows of docs/results/pairs.md that try them on ranks
    "FSDP2 gathers codes": "fsdp_float8_all_gather, two ranks: nothing else",
    "FSDP as one graph": "graph_fsdp, two ranks: nothing else",
    "TP, SP": "tensor and sequence parallel: odd number of tokens",
    "EP": "expert parallel, codes travel: nothing else",
}


@pytest.mark.parametrize("column", ON_RANKS)
def test_a_cell_of_ranks_is_what_the_pairs_found(column):
    assert set(COLUMNS) == {*IN_ONE_PROCESS, *ON_RANKS}
    pairs = (ROOT / "docs" / "results" / "pairs.md").read_text().splitlines()
    (head,) = (line.strip("|").split("|") for line in pairs if line.startswith("| pair |"))
    (row,) = (line.strip("|").split("|") for line in pairs if line.startswith(f"| {ON_RANKS[column]} |"))
    found = {name.strip(): cell.strip() for name, cell in zip(head, row, strict=True)}
    outcome = {"alike": "yes", "refused": "no"}
    tried = {name: outcome[found[name].split(" (")[0]] for name in f8.recipes.names() if found[name] != "not run"}
    assert len(tried) >= 6
    assert tried == {name: CELLS[name, column] for name in tried}


@pytest.mark.slow
def test_what_explain_prints_is_on_the_front_page():
    pytest.importorskip("transformers", reason="examples/llama.py is a model of transformers, of the test extra")
    shown = README.split("$ fp8compile explain examples/llama.py\n")[1].split("```")[0].splitlines()
    command = [sys.executable, "-m", "fp8compile", "explain", "examples/llama.py", "--no-gpu"]
    environment = os.environ | {"COLUMNS": "100"}
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.DEVNULL)
    assert [line for line in shown if line not in printed.splitlines()] == []
