"""docs/results/support.md says what the code answers: its GEMMs for each GPU, and placements on this PyTorch."""

from __future__ import annotations

import pytest

from benchmarks import gpu_gains, support
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.explain.roofline import PEAKS

VERSION = ".".join(map(str, TORCH_VERSION))


@pytest.mark.parametrize(("title", "grouped"), [("Linear layers", False), ("Experts", True)])
def test_the_table_of_gpus_is_that_of_the_gemms(title, grouped):
    assert f"\n\n{support.gpu_section(title, grouped=grouped)}\n\n" in support.PAGE.read_text()


def test_the_table_of_builds_is_that_of_the_gates():
    assert f"\n\n{support.build_section()}\n\n" in support.PAGE.read_text()


@pytest.mark.skipif(VERSION not in support.TRIED, reason="the page shows other versions of PyTorch")
def test_the_table_of_placements_is_what_this_pytorch_runs():
    assert f"\n\n{support.placement_section()}\n" in support.PAGE.read_text()


def test_the_page_has_each_version_once():
    heads = [line for line in support.PAGE.read_text().splitlines() if line.startswith("## Placements")]
    assert heads == [f"## Placements, PyTorch {version}" for version in support.TRIED]


def test_the_page_of_gains_has_those_of_the_code():
    (table, *_) = [part for part in gpu_gains.PAGE.read_text().split("\n\n") if part.startswith("| ")]
    lines = [line.split(" | ") for line in table.splitlines()]
    name = "`rowwise(by_mx=True)`"
    at, rows = lines[0].index(name), {cells[0].strip("| "): cells for cells in lines[2:]}
    found = gpu_gains.gains(gpu_gains.RECIPES[name])
    assert found["rtx5090"] > 1.5 * found["rtx4090"]
    for arch, gain in found.items():
        assert rows[PEAKS[arch].name][at] == ("-" if gain is None else f"{gain:.2f}"), arch
