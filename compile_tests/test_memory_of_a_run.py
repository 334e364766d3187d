"""memory_report beside a real run on a CPU, whose allocations PyTorch's profiler tells."""

from __future__ import annotations

import pytest

import fp8compile as f8
from benchmarks.memory_report import CACHED, RUN, real_peaks, run_row, small_block


@pytest.mark.parametrize(("kind", "recipe"), [(kind, recipe) for kind, recipes in RUN.items() for recipe in recipes])
def test_the_largest_moments_are_those_of_a_run(kind, recipe):
    """To the byte, because the same wrappers allocate and free the same tensors in the same order."""
    row = run_row(kind, recipe)
    assert row["report forward"] == row["forward"]
    # the loss's gradient, 4 bytes, is held by autograd to the end, and by the wrapper until it is read
    assert row["backward"] - row["report backward"] in (0, 4)


@pytest.mark.parametrize("recipe", [CACHED, "tensorwise(weight_lifetime='step')"])
def test_codes_from_micro_batch_to_micro_batch_are_those_that_are_held(recipe):
    call, args = small_block("mlp", recipe)
    report = f8.testing.memory_report(call, *args, arch="cpu")
    _, _, _, held = real_peaks(lambda: f8.invalidate_weight_cache(call))
    assert report.weight_codes_bytes == held == report.forward.weight_codes == report.backward.weight_codes
    assert [each.parameter for each in report.weight_codes] == [
        f"module.{name}.weight" for name in ("gate", "up", "down")
    ]
    assert sum(each.sets * each.shape[0] * each.shape[1] for each in report.weight_codes) <= held
