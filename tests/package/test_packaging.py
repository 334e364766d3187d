"""The wheel: what is in it, what it says, and that it installs and imports by itself."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import fp8compile as f8

pytest.importorskip("hatchling", reason="needs hatchling 1.25 or later (the extra fp8compile[test] has it)")
requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[2]


def python(*arguments, **kwargs):
    """Run this Python; its output, or an error with all it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False, **kwargs
    )
    assert done.returncode == 0, f"{arguments} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def names(wheel):
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(path).decode())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that the wheel alone was installed into."""
    folder = tmp_path_factory.mktemp("installed")
    python("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet", "--target", folder, wheel)
    return folder


def test_wheel_holds_every_module_and_the_type_marker(names):
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "fp8compile").rglob("*.py")}
    assert sources <= set(names)
    assert "fp8compile/py.typed" in names


def test_wheel_holds_nothing_but_the_package(names):
    top = {name.split("/")[0] for name in names}
    assert top == {"fp8compile", "pytest_fp8compile.py", f"fp8compile-{f8.__version__}.dist-info"}
    odd = [
        name
        for name in names
        if name.rpartition("/")[2].startswith("test_") or "__pycache__" in name or name.endswith((".pyc", ".so"))
    ]
    assert odd == []


def test_wheel_is_for_every_python_3_and_platform(wheel):
    assert wheel.name == f"fp8compile-{f8.__version__}-py3-none-any.whl"


def test_metadata_has_the_version_of_the_package(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("fp8compile", f8.__version__)
    assert metadata["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_requirements_admit_the_installed_torch_and_cap_none(metadata):
    needed = [requirements.Requirement(text) for text in metadata.get_all("Requires-Dist")]
    plain = {need.name: need for need in needed if need.marker is None}
    assert set(plain) == {"torch", "numpy"}
    assert plain["torch"].specifier.contains(torch.__version__, prereleases=True)
    assert not plain["torch"].specifier.contains("2.10.9")
    for version in ("2.11.0", "2.13.0+cpu", "2.15.0+cu130", "3.0.0"):
        assert plain["torch"].specifier.contains(version), version


def test_command_is_declared_and_its_function_exists(wheel):
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    declared = configparser.ConfigParser()
    declared.read_string(archive.read(path).decode())
    assert {section: dict(declared[section]) for section in declared.sections()} == {
        "console_scripts": {"fp8compile": "fp8compile.cli:main"},
        "pytest11": {"pytest_fp8compile": "pytest_fp8compile"},
    }
    python("-c", "from fp8compile.cli import main; assert callable(main)", cwd=ROOT)


def test_install_brings_the_package_alone(installed):
    top = {path.name for path in installed.iterdir() if path.name != "__pycache__"}
    assert top == {"fp8compile", "pytest_fp8compile.py", f"fp8compile-{f8.__version__}.dist-info", "bin"}


def test_installed_package_imports_from_there_with_the_torch_that_is_there(installed, tmp_path):
    program = """
import json, torch, fp8compile as f8
ones = torch.ones(16, 32, dtype=torch.bfloat16)
y = f8.linear(ones[:2], ones, recipe=f8.recipes.rowwise())
print(json.dumps([f8.__file__, f8.__version__, torch.__file__, torch.__version__, y.sum().item()]))
"""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    printed = python("-W", "error", "-c", program, cwd=tmp_path, env=environment)
    file, version, torch_file, torch_version, total = json.loads(printed)
    assert Path(file).is_relative_to(installed)
    assert version == f8.__version__
    assert (torch_file, torch_version) == (torch.__file__, torch.__version__)
    assert total == 2 * 16 * 32
