"""How long do kernels take in `run_gpu_program`, programs together beside one program at a time?

The feed-forward block of a transformer, 256 x 512 with 256 tokens, forward and backward, with a rowwise
recipe and with a blockwise one, on an H200 that need not be here. Both ways run in one process on the same programs.
The ratio is what counts; seconds depend on the machine. Compilation and collections of garbage are left out;
compilation is shown in the last line.

    python -m benchmarks.interpreted [--json]
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks.mlp import Mlp, converted
from benchmarks.table import Row, emit
from fp8compile.testing import run_gpu_program
from fp8compile.testing.gpu.program.batches import ELEMENTS
from fp8compile.testing.gpu.program.interpreter import Interpreter

KINDS = {"triton_poi": "elementwise", "triton_per": "reduction of a row", "triton_red": "reduction in a loop"}


def _kind(name: str) -> str:
    return next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), re.sub(r"_\d+$", "", name))


def measured(recipe: str, elements: int) -> tuple[dict[str, float], float]:
    """Seconds in each kind of kernel, and seconds in all, with this bound of elements of programs together."""
    torch.manual_seed(0)
    model = converted(recipe, Mlp(256, 512))
    x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    seconds: dict[str, float] = defaultdict(float)
    plain: Callable[..., None] = Interpreter.launch

    def launch(interpreter: Interpreter, name: str, *args: Any) -> None:
        interpreter.elements = elements
        gc.collect()
        gc.disable()  # a collection goes through all that Inductor has made, in whichever kernel it happens to begin
        start = time.perf_counter()
        plain(interpreter, name, *args)
        seconds[_kind(name)] += time.perf_counter() - start
        gc.enable()

    start = time.perf_counter()
    with mock.patch.object(Interpreter, "launch", launch):
        run = run_gpu_program(model, x)
    whole = time.perf_counter() - start
    if run.differences:
        raise RuntimeError(str(run.differences))
    return seconds, whole


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of interpreted kernels, programs together and alone.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args()
    rows: list[Row] = []
    for recipe in ("rowwise", "blockwise"):
        (alone, _), (together, in_all) = measured(recipe, 1), measured(recipe, ELEMENTS)
        rows += [_row(recipe, kind, alone[kind], together[kind]) for kind in alone]
        rows.append(_row(recipe, "all kernels", sum(alone.values()), sum(together.values())))
        rows.append(_row(recipe, "compilation", in_all - sum(together.values()), in_all - sum(together.values())))
    emit("seconds of interpreted kernels", rows, as_json=parsed.json, digits=2)


def _row(recipe: str, kind: str, alone: float, together: float) -> Row:
    return {"recipe": recipe, "kernels": kind, "alone s": alone, "together s": together, "ratio": alone / together}


if __name__ == "__main__":
    main()
