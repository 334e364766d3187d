"""What statistics add to the bytes of generated code: the MLP block of Llama 3 8B, 8192 tokens, forward and backward.

Bytes are Inductor's count for generated code, each buffer once a kernel, with what opaque ops launch inside. "off" is
a step that is not read, "on" one that is. The mean is that of a run that reads every n-th step.

    python -m benchmarks.monitor [--json] [--recipes tensorwise ...] [--statistics amax ...] [--operands input ...]
"""

from __future__ import annotations

import argparse

from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.blocks import SHAPES, block
from benchmarks.kernels import arch_for
from benchmarks.table import Row, emit
from fp8compile.testing import gpu_kernels

__all__ = ["monitor_row"]

TOKENS = 8192
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")
EVERY = (10, 100)


def _generated(recipe: str, statistics: tuple[str, ...], operands: tuple[str, ...] | None) -> tuple[float, int]:
    """Bytes in GB, and the number of generated kernels."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = block("mlp", recipe, TOKENS, SHAPES["llama3-8b"])
        if statistics:
            f8.Monitor(model, statistics, operands=operands)
        codes = gpu_kernels(model, x, arch=arch_for(recipe))
    return sum(code.bytes for code in codes) / 1e9, sum(len(code.kernels) for code in codes)


def monitor_row(recipe: str, statistics: tuple[str, ...], operands: tuple[str, ...] | None) -> Row:
    """A row of the table."""
    (off, kernels_off), (on, kernels_on) = (_generated(recipe, each, operands) for each in ((), statistics))
    means = {f"every {n}": round((on + (n - 1) * off) / (n * off), 4) for n in EVERY}
    kernels = {"kernels off": kernels_off, "kernels on": kernels_on}
    return (
        {"recipe": recipe, "off GB": round(off, 3), "on GB": round(on, 3), "ratio": round(on / off, 4)}
        | means
        | kernels
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--statistics", nargs="+", default=("amax", "saturation", "underflow"))
    parser.add_argument("--operands", nargs="+")
    args = parser.parse_args()
    operands = tuple(args.operands) if args.operands else None
    emit(
        "bytes of generated code",
        [monitor_row(recipe, tuple(args.statistics), operands) for recipe in args.recipes],
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
