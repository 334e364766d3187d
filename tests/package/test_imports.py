"""Who imports whom, and what an import costs."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8compile

PACKAGE = Path(fp8compile.__file__).parent
# Each may import those before it, and itself. The package's own __init__ stands above all but the command.
LAYERS = {
    "_compat": 0,
    "target": 1,
    "formats": 2,
    "scale_layouts": 2,
    "tables": 2,
    "inductor": 3,
    "quantizers": 4,
    "layout": 5,
    "kernels": 6,
    "ops": 7,
    "tensor": 8,
    "recipes": 9,
    "saved_tensors": 9,
    "nn": 10,
    "optim": 11,
    "parallel": 11,
    "export": 12,
    "monitor": 12,
    "library": 13,
    "lazy": 14,
    "fp8compile": 15,
    "integrations": 16,
    "testing": 16,
    "cli": 17,
    "__main__": 18,
}
FILES = sorted(PACKAGE.rglob("*.py"))
NOT_LOADED = (
    "transformers",
    "torchtitan",
    "triton",
    "torch._inductor.decomposition",
    "torch._inductor.lowering",
    "torch.distributed.tensor",
)
CHECK_MODULES = f"import sys, fp8compile; print(*(n for n in {NOT_LOADED!r} if n in sys.modules))"
CHECK_CUDA = """
import torch, fp8compile
assert not torch.cuda.is_initialized()
x = torch.ones(2, 32)
fp8compile.linear(x, x, recipe=fp8compile.recipes.rowwise())
assert not torch.cuda.is_initialized()
"""


def layer(name):
    """The layer of a dotted module name of the package."""
    parts = name.split(".")
    return "fp8compile" if len(parts) == 1 else parts[1]


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path, source=None):
    """Modules of the package that a file imports anywhere in it, also inside functions."""
    tree = ast.parse(path.read_text() if source is None else source)
    known = {module_name(file) for file in FILES}
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            submodules = {f"{base}.{alias.name}" for alias in node.names}
            inside = submodules & known
            found |= inside
            if inside != submodules:
                found.add(base)
    return {name for name in found if name.split(".")[0] == "fp8compile"}


def upward(path, source=None):
    own = layer(module_name(path))
    return {name for name in imported(path, source) if layer(name) != own and LAYERS[layer(name)] >= LAYERS[own]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_layers_below(path):
    if module_name(path).startswith("fp8compile.testing"):
        assert not {name for name in imported(path) if layer(name) == "cli"}
    else:
        assert not upward(path), f"{path} imports {upward(path)}"


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("ops/cast.py", "import fp8compile.nn.linear", {"fp8compile.nn.linear"}),
        ("ops/cast.py", "def f():\n    from fp8compile import tensor", {"fp8compile.tensor"}),
        ("ops/cast.py", "from fp8compile import linear", {"fp8compile"}),
        ("ops/cast.py", "from .. import recipes", {"fp8compile.recipes"}),
        ("ops/__init__.py", "from .cast import cast", set()),
        ("target.py", "from fp8compile import formats", {"fp8compile.formats"}),
        ("nn/layer/linear.py", "from fp8compile.quantizers import Recipe", set()),
        ("nn/layer/linear.py", "if x:\n    from fp8compile.cli import main", {"fp8compile.cli"}),
    ],
)
def test_an_import_from_above_is_found(file, source, found):
    assert upward(PACKAGE / file, source) == found


# rooms of testing/, each with those that it may import; bits, which compares tensors, is everyone's
ROOMS = {
    "graphs": {"_compat", "tables"},
    "contracts": {"graphs", "bits"},
    "gpu": {"graphs", "bits", "_compat", "target"},
    "explain": {"graphs", "gpu"},
    "memory": {"graphs", "gpu", "explain"},
    "numerics": {"graphs", "gpu", "explain", "bits"},
}


def room(name):
    """The room of a module of testing/; of any other, its package."""
    parts = name.split(".")
    return parts[2] if parts[1:2] == ["testing"] and len(parts) > 2 else ".".join(parts[1:2])


@pytest.mark.parametrize("path", [p for p in FILES if room(module_name(p)) in ROOMS], ids=lambda p: p.stem)
def test_a_room_of_testing_imports_through_no_other_door(path):
    own = room(module_name(path))
    found = {room(name) for name in imported(path)} - {own}
    assert found & {*ROOMS, "testing", "bits"} <= ROOMS[own]
    if own in ("graphs", "gpu"):
        assert found <= ROOMS[own], "what torch.compile makes of any model needs nothing of FP8"


def test_every_file_has_a_layer():
    assert {layer(module_name(path)) for path in FILES} <= set(LAYERS)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_package_inits_hold_no_logic(path):
    docstring, *body = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    others = [node for node in body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [target.id for node in others if isinstance(node, ast.Assign) for target in node.targets]
    assert len(names) == len(others), f"{path} does more than import and name"
    assert set(names) <= {"__all__", "__version__"}


def run(program, **environment):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_the_import_loads_nothing_heavy():
    result = run(CHECK_MODULES)
    assert result.returncode == 0, result.stderr
    assert not result.stdout.split(), f"loaded: {result.stdout}"


def test_what_the_import_leaves_out_exists():
    """Else the test above would pass for a misspelt name."""
    extras = ("triton", "torchtitan")  # these may be missing: one has no wheel everywhere, one is an extra of its own
    names = [name for name in NOT_LOADED if name not in extras or importlib.util.find_spec(name)]
    result = run(f"import sys, {', '.join(names)}; assert set({names}) <= set(sys.modules)")
    assert result.returncode == 0, result.stderr


CHECK_LAZY = """
import sys, fp8compile as f8
names = {"parallel", "testing"}
assert names | set(f8.__all__) <= set(dir(f8))
assert not {f"fp8compile.{name}" for name in names} & set(sys.modules), "dir imported them"
assert f8.testing.check_op and f8.parallel.ColwiseParallel and f8.advise is f8.testing.advise
assert not hasattr(f8, "tsting")
"""


def test_modules_that_the_import_leaves_out_are_attributes_and_are_imported_by_need():
    result = run(CHECK_LAZY)
    assert result.returncode == 0, result.stderr


def test_it_works_where_no_gpu_is_visible():
    result = run(CHECK_CUDA, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr


def test_no_environment_variable_is_read_outside_the_command():
    """Options are arguments; the command may read the environment, the compiler's versions live in _compat."""
    readers = [
        path
        for path in FILES
        if layer(module_name(path)) != "cli"
        and any(
            isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")
            for n in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert not readers
