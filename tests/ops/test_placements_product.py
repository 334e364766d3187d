"""Walks the table of placements: eager bits and kept bytes of every cell, and graphs for a GPU."""

from __future__ import annotations

import pytest
from table_of_placements import CALLS, CELLS, KINDS, LISTED, PLACES, has_graph, outcome

from fp8compile._compat import TORCH_VERSION
from fp8compile.ops.layer.layer_sharding import LayerSharding

GRAPHS = [cell for cell in CELLS if has_graph(cell)]
# kept codes and all gradients of what the layer quantizes itself; `make test-full` looks at the others too
FIRST = [
    cell
    for cell in GRAPHS
    if cell.source == "own amax" and cell.optimisation in ("all gradients", "kept weight codes")
]


def test_every_sharding_has_a_row():
    shardings = {cls.__name__ for cls in (LayerSharding, *LayerSharding.__subclasses__())}
    assert shardings == {"LayerSharding", "OverGroup", "OverFsdp"}
    assert {place for place, _, _ in CALLS} == set(PLACES)


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_cell_is_as_whole_tensors_or_listed(place, kind):
    cells = [cell for cell in CELLS if cell[:2] == (place, kind)]
    found = {cell: outcome(cell, graph=False) for cell in cells}
    assert not {cell: words for cell, (words, is_right) in found.items() if not is_right}


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
