"""Layers over ranks beside plain layers of the same local shapes: what they keep, and what generated code moves."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
from processes import fake_rank

from benchmarks.placements import PLACEMENTS, RECIPES, WITHOUT, placement_row

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
]
# A scale or amax a block is float32 where it stands in a message and less where a kernel makes it.
SCALARS = 1024
# What a message between amax and cast costs. A row or column that several ranks have is read for its amax, and again
# for its codes, once all ranks know it; and PyTorch leaves messages in their order, so casts of the gradients of gate
# and up, of which one reads what the other reads, are no longer one kernel.
MESSAGES = {"tensorwise": 1.05, "rowwise": 1.22, "delayed": 1.01}
# Codes are gathered row by row, and grad_input's GEMM reads them column by column: they are turned once gathered. The
# plain layer of delayed scaling keeps what it has turned in the forward.
TURNED = {"rowwise": 1.03, "delayed": 1.04}
MOST = {"functions": MESSAGES, "DTensor": MESSAGES, "FSDP in the graph": TURNED}


CASES = [pair for pair in itertools.product(PLACEMENTS, RECIPES) if pair not in WITHOUT]


@pytest.fixture(scope="module")
def elsewhere():
    """Runs a function in a process with a group that isn't there: PyTorch keeps meshes beyond their group."""
    with fake_rank(0, 2) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.mark.parametrize(("placement", "recipe"), CASES)
def test_a_shard_keeps_and_moves_no_more_than_a_plain_layer(elsewhere, placement, recipe):
    row = elsewhere(placement_row, placement, recipe)
    assert row["kept MB"] * 1e6 <= row["plain kept MB"] * 1e6 + SCALARS, row
    assert row["to plain"] <= MOST[placement].get(recipe, 1.0005), row
