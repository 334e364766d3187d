"""Walks the table of placements: eager bits and kept bytes of every cell, graphs for a GPU, and what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from table_of_placements import CALLS, CELLS, KINDS, LISTED, OPTIMISATIONS, PLACES, has_graph, outcome

from fp8compile._compat import TORCH_VERSION
from fp8compile.ops.layer import layer_ops

PAGE = Path(__file__).parents[2] / "docs" / "results" / "placements.md"
GRAPHS = [cell for cell in CELLS if has_graph(cell)]
# kept codes and all gradients of what the layer quantizes itself; `make test-full` looks at the others too
FIRST = [
    cell
    for cell in GRAPHS
    if cell.source == "own amax" and cell.optimisation in ("all gradients", "kept weight codes")
]


def on_the_page():
    """What the committed table says of each cell."""
    found = {}
    for line in PAGE.read_text().splitlines():
        row = [each.strip() for each in line.strip("|").split("|")]
        if row[0] in PLACES:
            found |= {(*row[:4], name): said for name, said in zip(OPTIMISATIONS, row[4:], strict=True) if said}
    return found


def test_every_layer_has_a_row():
    called = {layer.output for layer, _ in CALLS.values() if layer is not None}
    assert called == {layer.output for layer in layer_ops.LAYERS}


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_cell_is_as_whole_tensors_or_listed(place, kind):
    cells = [cell for cell in CELLS if cell[:2] == (place, kind)]
    found = {cell: outcome(cell, graph=False) for cell in cells}
    assert not {cell: words for cell, (words, is_right) in found.items() if not is_right}
    page = on_the_page()
    assert {cell: words for cell, (words, _) in found.items()} == {cell: page.get(cell) for cell in cells}


def test_the_page_has_no_other_cells():
    assert on_the_page().keys() == set(CELLS)


def test_what_is_listed_is_a_cell():
    assert not [each.reason for each in LISTED if not any(each.has(cell) for cell in CELLS)]


def graph_is_right(cell):
    words, is_right = outcome(cell)
    assert is_right, words


@pytest.mark.parametrize("cell", FIRST, ids=", ".join)
def test_a_graph_is_that_of_whole_tensors(cell):
    graph_is_right(cell)


@pytest.mark.parametrize("cell", [cell for cell in GRAPHS if cell not in FIRST], ids=", ".join)
def test_a_graph_of_other_cells_is_that_of_whole_tensors(cell):
    graph_is_right(cell)
