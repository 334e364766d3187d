"""Names that the documents mention exist, and the policy promises the ones that it lists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import fp8compile as f8
from benchmarks.house_counts import over_budget

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "integrations").glob("*.md")])
NAME = re.compile(r"(?<![\w./-])(?:fp8compile|f8)((?:\.[A-Za-z_]\w*)+)(?!\w*[:/])")
NO_NAMES = {"quantizers"}  # of the entry points of other packages, `fp8compile.quantizers`


def _resolve(dotted: str) -> None:
    """Look up ``fp8compile`` and the attributes after it; raises AttributeError if one is missing.

    A module that needs a library that is not installed is not looked into.
    """
    found, module = f8, "fp8compile"
    for part in dotted.split("."):
        module = f"{module}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(module)
            except ImportError as error:
                if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("fp8compile"):
                    raise AttributeError(f"there is no {module}") from None
                return


def _names(text: str) -> set[str]:
    return {found.removeprefix(".") for found in NAME.findall(text)} - NO_NAMES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_a_page_exist(page):
    missing = []
    for name in sorted(_names(page.read_text())):
        try:
            _resolve(name)
        except AttributeError as error:
            missing.append(f"{name}: {error}")
    assert not missing


def test_a_name_that_is_missing_is_found():
    assert _names("`f8.recipes.rowwise()` and fp8compile.library.Elements, not `fp8compile/nn.py`") == {
        "recipes.rowwise",
        "library.Elements",
    }
    with pytest.raises(AttributeError, match=r"recipes\.rowise"):
        _resolve("recipes.rowise")


@pytest.mark.parametrize("module", [f8, f8.library], ids=lambda module: module.__name__)
def test_promised_names_exist(module):
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


def test_a_core_above_its_line_budget_is_told(monkeypatch):
    monkeypatch.setattr("benchmarks.house_counts.BUDGET", {"core: lines": 10})
    (told,) = over_budget(ROOT)
    assert "the budget is 10" in told
