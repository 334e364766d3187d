"""What does a program that `f8.export.program` makes weigh, is it equal, and how long does AOTInductor take?

Two linears (512 x 1024, 1024 x 512) in bfloat16, in eval, with a ReLU between them, which rounds nothing. Each program
is loaded by a process that can't import fp8compile; "differs" is the largest difference to the model's output. The
package is AOTInductor's, for this CPU.

    python -m benchmarks.exported [--json] [--recipes rowwise ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import fp8compile as f8
from benchmarks.table import Row, emit

__all__ = ["exported"]

WIDTHS = (512, 1024)
WAYS = ("values", "codes")
LOAD = """
import sys, torch
x, expected = torch.load(sys.argv[1])
program = torch.export.load(sys.argv[2]).module()
package = torch._inductor.aoti_load_package(sys.argv[3])
for run in (program, package):
    with torch.no_grad():
        print((run(x).float() - expected.float()).abs().max().item())
assert "fp8compile" not in sys.modules
"""


def _model(recipe: f8.Recipe | None) -> nn.Module:
    torch.manual_seed(0)
    narrow, wide = WIDTHS
    model = nn.Sequential(nn.Linear(narrow, wide), nn.ReLU(), nn.Linear(wide, narrow)).bfloat16().eval()
    return model if recipe is None else f8.convert(model, recipe, filter="*")


def _loaded_elsewhere(*paths: str) -> list[float]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-c", LOAD, *paths]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=elsewhere, env=environment)
    return [float(line) for line in done.stdout.split()]


def exported(name: str, way: str, folder: Path) -> Row:
    """One row: a recipe, or "bf16"; its weights as values, or as codes by `f8.freeze_weights`."""
    model = _model(None if name == "bf16" else f8.recipes.by_name(name))
    if way == "codes":
        f8.freeze_weights(model)
    x = torch.randn(32, WIDTHS[0]).bfloat16()
    start = time.perf_counter()
    with torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,)) if name == "bf16" else f8.export.program(model, (x,))
    seconds = time.perf_counter() - start
    tensors, file, package = (str(folder / each) for each in ("tensors.pt", "program.pt2", "package.pt2"))
    torch.save((x, expected), tensors)
    torch.export.save(program, file)
    start = time.perf_counter()
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    compiled = time.perf_counter() - start
    differences = _loaded_elsewhere(tensors, file, package)
    return {
        "recipe": name,
        "weights": way,
        "export s": seconds,
        "file KB": os.path.getsize(file) // 1024,
        "differs": str(differences[0]),
        "AOTInductor s": compiled,
        "package KB": os.path.getsize(package) // 1024,
        "package differs": str(differences[1]),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for recipe, way in [("bf16", "values"), *((each, way) for each in given.recipes for way in WAYS)]:
            rows.append(exported(recipe, way, Path(name)))
    emit("exported programs", rows, as_json=given.json, digits=2)


if __name__ == "__main__":
    main()
