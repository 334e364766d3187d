"""Outcomes of the same rows are recorded on each PyTorch."""

from __future__ import annotations

import pytest
from ways import VERSIONS, recorded


def rows(version):
    return {(group, row) for group, rows in recorded(version).items() for row in rows}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_every_row(version):
    everywhere = set().union(*map(rows, VERSIONS))
    assert len(everywhere) > 200
    assert rows(version) == everywhere, "run python tests/behaviour/table.py on that version"
