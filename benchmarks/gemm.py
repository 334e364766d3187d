"""How fast are the GEMMs of each recipe, with and without casts, beside the bf16 GEMM and the machine's own speed?

"GEMM" is the product of operands that are quantized already, "with casts" quantizes both first, compiled. The peak is
the fastest bf16 product among the sizes; a copy of x gives the speed of memory. On a CPU tiny: FP8 is emulated there.

    python -m benchmarks.gemm [--json] [--sizes 8192x4096x14336 ...] [--rounds 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import fp8compile as f8
from benchmarks.linear import runnable
from benchmarks.machine import machine
from benchmarks.table import Row, emit
from benchmarks.timing import device, medians, where
from fp8compile.quantizers import GEMMS

__all__ = ["rows"]

SIDES = {"cuda": (4096, 8192, 14336), "cpu": (64,)}
TOKENS = {"cuda": (4096, 16384), "cpu": (64,)}


def _steps(m: int, k: int, n: int, recipe: f8.Recipe) -> tuple[Callable, Callable]:
    a, b = recipe.quantizers(GEMMS[0])
    x, weight = (torch.randn(rows, k, device=device(), dtype=torch.bfloat16) for rows in (m, n))
    # dynamic=False: scales of another recipe have another shape, and the second graph would be one for any
    multiply = machine().compile(lambda x, w: f8.scaled_mm(x, w.t(), out_dtype=torch.bfloat16), dynamic=False)
    whole = machine().compile(
        lambda x, w: f8.scaled_mm(f8.quantize(x, a), f8.quantize(w, b).t(), out_dtype=torch.bfloat16), dynamic=False
    )
    left, right = f8.quantize(x, a), f8.quantize(weight, b)
    return lambda: multiply(left, right), lambda: whole(x, weight)


def rows(m: int, k: int, n: int, names: list[str], rounds: int) -> list[Row]:
    """One size: bf16, then each recipe, alone and with casts."""
    torch._dynamo.reset()
    x, weight = (torch.randn(rows, k, device=device(), dtype=torch.bfloat16) for rows in (m, n))
    target = torch.empty_like(x)
    steps: dict[str, Callable] = {"copy": lambda: target.copy_(x), "bf16": lambda: x @ weight.t()}
    for name in names:
        alone, whole = _steps(m, k, n, f8.recipes.by_name(name))
        steps |= {f"{name}": alone, f"{name}, with casts": whole}
    found = medians(steps, rounds)
    copied = found.pop("copy")
    return [
        {
            "size": f"{m}x{k}x{n}",
            "what": name,
            "ms": median,
            "TFLOP/s": 2 * m * k * n / median / 1e9,
            "speed to bf16": found["bf16"] / median,
            "copy GB/s": 2 * x.nbytes / copied / 1e6,
        }
        for name, median in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="GEMMs of each recipe, with and without casts.")
    parser.add_argument("--json", action="store_true")
    grid = [f"{m}x{k}x{n}" for m in TOKENS[device()] for k in SIDES[device()] for n in SIDES[device()]]
    parser.add_argument("--sizes", nargs="*", default=grid, help="MxKxN")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    # a scale that was known before times as one that was not: delayed is tensorwise here, less its amax
    names = [name for name in runnable() if name in f8.recipes.names() and name != "delayed"]
    found: list[Row] = []
    for size in args.sizes:
        m, k, n = map(int, size.split("x"))
        found += rows(m, k, n, names, args.rounds)
    peak = max(row["TFLOP/s"] for row in found if row["what"] == "bf16")
    for row in found:
        row["of bf16 peak"] = row["TFLOP/s"] / peak
    emit(f"GEMMs, {where()}", found, as_json=args.json)


if __name__ == "__main__":
    main()
