"""docs/results/behaviour.md says what was recorded, of the same rows on each PyTorch."""

from __future__ import annotations

import pytest
from table import DOCUMENT, rendered
from ways import VERSIONS, recorded


def rows(version):
    return {(group, row) for group, rows in recorded(version).items() for row in rows}


def test_the_document_is_what_the_outcomes_make():
    assert DOCUMENT.read_text() == rendered(), "run python tests/behaviour/table.py --render"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_every_row(version):
    everywhere = set().union(*map(rows, VERSIONS))
    assert len(everywhere) > 200
    assert rows(version) == everywhere, "run python tests/behaviour/table.py on that version"
