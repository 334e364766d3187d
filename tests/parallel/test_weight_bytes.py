"""The table of docs/results/weight-bytes.md, counted: bytes of a weight in memory and in the messages of each pass."""

from __future__ import annotations

import pytest
from gloo_ranks import GROUPS, shared_ranks
from torch.distributed.device_mesh import DeviceMesh

from fp8compile._compat import TORCH_VERSION

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
ELEMENTS = 1024 * 1024  # of two weights' shards on one of two ranks
ROW = COLUMN = 4 * 2 * 1024  # a float32 a row of both weights, or a column
AS_BFLOAT16, CODES, MX = 2.0, 1.0, 1 / 32
FOUR_BITS = CODES / 2 + 1 / 16  # codes, and a scale for 16
OF_EXPERTS = FOUR_BITS + 4 / 512**2  # and one of each matrix
EXPECTED = {
    # memory, forward, backward
    (None, "values"): (AS_BFLOAT16, AS_BFLOAT16, AS_BFLOAT16),
    ("tensorwise", "parameters"): (CODES, CODES, CODES),
    ("rowwise", "parameters"): (2 * CODES + (ROW / 2 + COLUMN) / ELEMENTS, *[CODES + ROW / 2 / ELEMENTS] * 2),
    ("rowwise", "kept"): (None, 2 * CODES + ROW / 2 / ELEMENTS, 0.0),
    ("mxfp8", "parameters"): (2 * (CODES + MX), CODES + MX, CODES + MX),
    ("delayed", "gathered"): (None, CODES, CODES),
    ("nvfp4", "parameters"): (CODES / 2 + 1 / 256,) * 3,
    ("nvfp4 1x16", "parameters"): (2 * FOUR_BITS, FOUR_BITS, FOUR_BITS),
    ("nvfp4 1x16", "gathered"): (AS_BFLOAT16, FOUR_BITS, FOUR_BITS),
    ("nvfp4 1x16", "kept"): (AS_BFLOAT16, 2 * FOUR_BITS, 0.0),
    ("nvfp4 1x16", "parameters", "experts"): (2 * OF_EXPERTS, OF_EXPERTS, OF_EXPERTS),
    ("nvfp4 1x16", "gathered", "experts"): (AS_BFLOAT16, OF_EXPERTS, OF_EXPERTS),
    ("nvfp4 1x16", "kept", "experts"): (None, 2 * OF_EXPERTS, 0.0),
}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def counted(case):
    from benchmarks.weight_bytes import weight_bytes

    recipe, way, *layer = case
    row = weight_bytes(recipe, way, DeviceMesh.from_group(GROUPS["pair"], "cpu"), *layer)
    return row["memory"], row["forward"], row["backward"], row["amaxes"]


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: " ".join(map(str, case)))
def test_bytes_are_those_of_codes_and_scales(ranks, case):
    memory, *passes = EXPECTED[case]
    for *found, amaxes in ranks.run(counted, case, within="pair"):
        assert found[1:] == passes
        if case[0] == "nvfp4 1x16":  # of linears the outer amax of each set of both weights
            assert amaxes == (0 if "experts" in case else 4 * 2 * 2 / ELEMENTS)
        # scalars beside it: a scale of the whole, what a step counts
        assert memory is None or memory <= found[0] < memory + 1e-3
