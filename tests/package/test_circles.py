"""No file imports another that imports it, directly or by others: a circle has no part that is read first."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8compile
from benchmarks.import_graph import circles, imports_of

PACKAGE = Path(fp8compile.__file__).parent


def test_files_import_in_no_circle():
    assert not circles(PACKAGE)


FILES = {
    "a.py": "from package import b",
    "b.py": "def f():\n    from package.c import g",
    "c.py": "import package.a",
    "d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import package.e\nelse:\n import package.c",
    "e.py": "from package import d",
    "inner/__init__.py": "from package.inner.f import F",
    "inner/f.py": "from . import g",
    "inner/g.py": "from ..a import thing\nfrom . import F",
}


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "package"
    (root / "inner").mkdir(parents=True)
    for name, source in {"__init__.py": "", **FILES}.items():
        (root / name).write_text(source)
    return root


def test_circles_are_found_also_by_imports_in_functions_and_not_by_those_of_types(package):
    inner = {"package.inner", "package.inner.f", "package.inner.g"}
    assert circles(package) == [frozenset({"package.a", "package.b", "package.c"}), frozenset(inner)]


def test_an_import_names_a_module_or_what_is_in_one(package):
    found = imports_of(package)
    assert found["package.inner.g"] == {"package.a", "package.inner"}
    assert found["package.inner.f"] == {"package.inner.g"}
    assert found["package.d"] == {"package.c"}
