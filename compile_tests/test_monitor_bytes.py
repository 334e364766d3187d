"""What a step that a `fp8compile.Monitor` reads adds to the bytes of generated code; docs/monitor.md has the table."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.monitor import monitor_row

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
]
STATISTICS = ("amax", "saturation", "underflow")
MOST = {
    "mlp": {"tensorwise": 1.005, "delayed": 1.005, "rowwise": 1.08, "blockwise": 1.10, "mxfp8": 1.14, "nvfp4": 2.15},
    "experts": {"tensorwise": 1.005, "rowwise": 1.60, "blockwise": 2.10, "mxfp8": 1.92, "nvfp4": 1.84},
}
CASES = [(block, recipe) for block, recipes in MOST.items() for recipe in recipes]


@pytest.mark.slow
@pytest.mark.parametrize(("block", "recipe"), CASES)
def test_a_reading_adds_few_bytes(block, recipe):
    found = monitor_row(recipe, STATISTICS, kind=block)
    assert found["ratio"] <= MOST[block][recipe], found
