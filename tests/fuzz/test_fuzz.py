"""Any shape, layout, dtype, value and recipe: right and the same compiled, or our error. One fixed seed.

A long run with other seeds: `python tests/fuzz/long_run.py --cases 10000 --seed 1`.
"""

from __future__ import annotations

import pytest
from properties import PROPERTIES
from run import run


@pytest.mark.parametrize("name", [name for name, prop in PROPERTIES.items() if prop.in_ci])
def test_property_holds(name, assert_bits_equal):
    prop = PROPERTIES[name]
    assert run(prop, prop.in_ci, assert_bits_equal)["cases"] >= prop.in_ci
