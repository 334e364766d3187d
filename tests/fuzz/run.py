"""Runs a property over drawn cases and counts them: for CI with one seed, for a long run with any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from properties import Property

__all__ = ["run"]

MANY_GRAPHS = 10_000  # a property compiles for many recipes and dtypes; Dynamo would give up at 8 of one function


def run(prop: Property, cases: int, same: Callable[..., None], seed: int | None = None) -> Counter[str]:
    """Draw cases of a property until one fails, which is raised in its smallest form, or all have passed.

    Args:
        prop: The property.
        cases: How many.
        same: Bit-exact comparison.
        seed: Of the draws; None for the one fixed seed of each property.

    Returns:
        How many cases passed: under "cases", and under each class that they belong to.
    """
    counts: Counter[str] = Counter()

    @settings(
        max_examples=cases,
        deadline=None,  # compiling takes as long as it takes
        database=None,
        derandomize=seed is None,
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
        # a case may compile, and is large: slow by nature
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(prop.cases)
    def holds(case: object) -> None:
        classes = prop.holds(case, same)
        counts.update(("cases", *set(classes)))

    with torch._dynamo.config.patch(recompile_limit=MANY_GRAPHS, accumulated_recompile_limit=MANY_GRAPHS):
        (holds if seed is None else seeded(seed)(holds))()
    return counts
