"""The examples: what they import, and how much there is to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from public_names import imported, private

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").rglob("*.py"))
MAX_LINES = 1800  # of the trainer: what a reader takes in


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_uses_public_names_only(path):
    assert not private(imported(path.read_text()))


def test_the_trainer_is_short():
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "examples" / "train").rglob("*.py"))
    assert lines <= MAX_LINES


def test_the_package_imports_no_example():
    for path in (ROOT / "fp8compile").rglob("*.py"):
        assert "import examples" not in path.read_text(), path
        assert "from examples" not in path.read_text(), path
