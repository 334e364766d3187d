"""docs/results/serving.md has a row for each model and format, none with a difference, and rows that a run repeats."""

from __future__ import annotations

import pytest
from table_of_round_trips import CELLS, EQUAL, NO_READER, PAGE, Cell, row, rows_of


def test_the_page_has_every_cell_without_a_difference():
    found = rows_of(PAGE.read_text())
    assert list(found) == CELLS
    assert {value for values in found.values() for value in values} == {EQUAL, NO_READER, "0"}


@pytest.mark.parametrize(
    "cell",
    [
        Cell("gpt_oss", "fine_grained_fp8", "block"),
        Cell("llama4", "modelopt", "nvfp4"),
        Cell("llama", "compressed-tensors", "channel"),
        Cell("deepseek_v3", "fine_grained_fp8", "tensor"),
        Cell("qwen3_moe", "modelopt", "channel"),
    ],
    ids=" ".join,
)
def test_a_run_finds_what_the_page_says(cell, tmp_path):
    assert row(cell, tmp_path) == rows_of(PAGE.read_text())[cell]
