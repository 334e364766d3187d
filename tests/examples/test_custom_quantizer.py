"""The example package in examples/custom_quantizer, from outside: what it imports, installed, over ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from public_names import imported, private

import fp8compile as f8
from fp8compile import _compat
from fp8compile.quantizers import entry_points

ROOT = Path(__file__).parents[2] / "examples" / "custom_quantizer"
FILES = sorted((ROOT / "swiglu8").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_uses_public_names_only(path):
    assert not private(imported(path.read_text()))


def test_its_tests_use_public_names_only():
    for path in (ROOT / "tests").glob("*.py"):
        assert not private(imported(path.read_text())), path


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from fp8compile.quantizers import Quantizer", {"fp8compile.quantizers:Quantizer"}),
        ("from fp8compile.library import salt_with", {"fp8compile.library:salt_with"}),
        ("import fp8compile._compat", {"fp8compile._compat:"}),
        ("import fp8compile as f8\nf8.tensor", {"fp8compile:tensor"}),
        ("import fp8compile as f8\nf8.parallel.placed", {"fp8compile.parallel:placed"}),
        ("import fp8compile as f8\nf8.ops.amax", set()),
        ("import fp8compile as f8\nf8.parallel.ExpertParallel()", set()),
    ],
)
def test_a_private_name_is_found(source, found):
    assert private(imported(source)) == found


# ---------------------------------------------------------------------------------- installed

PROGRAM = """
import sys
import fp8compile as f8

assert not any(name.startswith("swiglu8") for name in sys.modules)
recipe = f8.recipes.by_name("swiglu8")
import swiglu8

assert recipe == f8.library.recipe(swiglu8.Ceil8()), recipe
assert f8.recipes.by_name("swiglu8-inference") == swiglu8.inference_recipe()
assert set(f8.library.quantizers()) >= {"swiglu8", "swiglu8-inference"}
print(swiglu8.__file__)
"""


def run_installed(folder) -> Path:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT.parents[1])])}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="needs hatchling, of the extra fp8compile[test]")
def test_installed_its_recipe_is_found_by_name(tmp_path):
    options = [
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--no-compile",
        "--quiet",
        "--target",
        tmp_path / "site",
    ]
    command = [sys.executable, "-m", "pip", "install", *map(str, options), str(ROOT)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert run_installed(tmp_path / "site").is_relative_to(tmp_path / "site")


def test_with_the_metadata_of_an_installation_its_recipe_is_found_by_name(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "swiglu8-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    entries = [f"{name} = {value}" for name, value in project["entry-points"][entry_points.GROUP].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{entry_points.GROUP}]", *entries]))
    (tmp_path / "swiglu8").symlink_to(ROOT / "swiglu8")
    assert run_installed(tmp_path).is_relative_to(tmp_path)


# ---------------------------------------------------------------------------------- over ranks


def amaxes_of_a_rank():
    """In a rank: the amax of its own shard and the one that the scale is made of, as Watch saw them."""
    sys.path.insert(0, str(ROOT))
    import swiglu8

    swiglu8.clear()
    x = torch.full((4, 64), torch.distributed.get_rank() + 1.0)
    f8.quantize(x, swiglu8.watch(f8.CurrentScaling(), "shard"), group=GROUPS["all"], shard_dim=0)
    found = swiglu8.seen()["shard"]
    return found.amax, found.group_amax


@pytest.mark.skipif(
    _compat.TORCH_VERSION < (2, 12), reason=f"groups on tensors need PyTorch 2.12, not {torch.__version__}"
)
def test_the_debug_quantizer_sees_the_amax_before_and_after_the_reduction_over_ranks():
    assert shared_ranks().run(amaxes_of_a_rank) == [(1.0, 4.0), (2.0, 4.0), (3.0, 4.0), (4.0, 4.0)]
