"""The faults of `mutations.py` can still be planted; that tests find them, a run of it says."""

from __future__ import annotations

import pytest
from mutations import MUTATIONS, ROOT, stale


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_the_sources_have_what_a_fault_replaces(mutation):
    assert stale(mutation, ROOT) is None
