"""Walks the table of pairs: a handful of its cells, and all of them by ``make test-full``."""

from __future__ import annotations

import pytest
from table_of_pairs import CELLS, CHEAP, is_left_out, outcome

from fp8compile._compat import TORCH_VERSION

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")


@pytest.mark.parametrize(
    ("row", "column"),
    [
        pytest.param(*case, id=f"{case[0]}; {case[1]}", marks=[] if case in CHEAP else pytest.mark.slow)
        for case in CELLS
        if not is_left_out(*case)
    ],
)
def test_a_pair_is_as_its_parts(row, column, tmp_path):
    words, is_right = outcome(row, column, str(tmp_path))
    assert is_right, words
