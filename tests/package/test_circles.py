"""No file or folder imports one that imports it, directly or by others: a circle has no part that is read first."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8compile
from benchmarks.house_counts import ROOMS
from benchmarks.import_graph import circles, folder_circles, folder_imports, imports_of

PACKAGE = Path(fp8compile.__file__).parent


def test_files_import_in_no_circle():
    assert circles(PACKAGE) == []


def test_folders_import_in_no_circle():
    assert folder_circles(PACKAGE) == []


def test_what_a_quantizer_computes_knows_no_compiler():
    assert "fp8compile.inductor" not in folder_imports(PACKAGE)["fp8compile.quantizers"]


# the package's own list of names, what it imports when it is asked, and the command
MAY_IMPORT_ROOMS = {"fp8compile", "fp8compile.lazy", "fp8compile.__main__"}


def test_the_core_imports_no_room():
    rooms = {f"fp8compile.{name}" for name in ROOMS}

    def room(module):
        return ".".join(module.split(".")[:2])

    found = {
        (module, each)
        for module, imported in imports_of(PACKAGE).items()
        for each in imported
        if module not in MAY_IMPORT_ROOMS and room(module) not in rooms and room(each) in rooms
    }
    assert not found
    assert all((PACKAGE / name / "__init__.py").is_file() for name in ROOMS)


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


def test_folders_in_circles_are_found_and_an_init_may_export_what_its_folders_define(tmp_path):
    root = tmp_path / "package"
    files = {
        "__init__.py": "from package.above import name",
        "above/__init__.py": "from package.above.inner.file import name",
        "above/inner/__init__.py": "",
        "above/inner/file.py": "from package.above import base\nfrom package import other",
        "above/base.py": "",
        "other/__init__.py": "",
        "other/a.py": "def f():\n    from package.third.b import g",
        "third/__init__.py": "",
        "third/b.py": "from package.other import a",
    }
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    assert folder_imports(root)["package.above"] == set()
    assert folder_imports(root)["package.above.inner"] == {"package.above", "package.other"}
    assert folder_circles(root) == [frozenset({"package.other", "package.third"})]
