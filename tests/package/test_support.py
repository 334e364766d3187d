"""docs/results/support.md says what the code answers: its GEMMs for each GPU, and placements on this PyTorch."""

from __future__ import annotations

import pytest

from benchmarks import support
from fp8compile._compat import TORCH_VERSION

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
