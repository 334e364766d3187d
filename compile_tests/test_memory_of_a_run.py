"""memory_report beside a real run on a CPU, whose allocations PyTorch's profiler tells."""

from __future__ import annotations

import pytest

from benchmarks.memory_report import RUN, run_row


@pytest.mark.parametrize(("kind", "recipe"), [(kind, recipe) for kind, recipes in RUN.items() for recipe in recipes])
def test_the_largest_moments_are_those_of_a_run(kind, recipe):
    """To the byte, because the same wrappers allocate and free the same tensors in the same order."""
    row = run_row(kind, recipe)
    assert row["report forward"] == row["forward"]
    # the loss's gradient, 4 bytes, is held by autograd to the end, and by the wrapper until it is read
    assert row["backward"] - row["report backward"] in (0, 4)
