"""Which kernel multiplies e4m3 by e4m3 on a CPU fast enough to train with? Medians, one thread, PyTorch 2.13 or later.

python -m benchmarks.cpu_gemm [--json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.table import Row, emit

__all__ = ["measure"]

SHAPES = ((128, 64, 64), (1024, 64, 64))  # (m, k, n); the reference loop takes seconds beyond these


def _milliseconds(product: Callable[[], torch.Tensor]) -> float:
    product()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        product()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def measure(m: int, k: int, n: int) -> Row:
    """One shape: `_scaled_mm` with one scale, with a scale a row, the float64 emulation; and whether bits agree."""
    torch.manual_seed(0)
    a = torch.randn(m, k).to(torch.float8_e4m3fn)
    b = torch.randn(n, k).to(torch.float8_e4m3fn).t()
    one, rows, columns = torch.tensor(0.5), torch.full((m, 1), 0.5), torch.full((1, n), 0.5)

    def one_scale() -> torch.Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    def row_scales() -> torch.Tensor:
        return torch._scaled_mm(a, b, rows, columns, out_dtype=torch.bfloat16)

    def emulated() -> torch.Tensor:
        return ((a.double() * 0.5) @ (b.double() * 0.5)).bfloat16()

    return {
        "m x k x n": f"{m} x {k} x {n}",
        "one scale, ms": _milliseconds(one_scale),
        "a scale a row, ms": _milliseconds(row_scales),
        "float64, ms": _milliseconds(emulated),
        "outputs that differ": int((one_scale() != row_scales()).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels for e4m3 by e4m3 on a CPU.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    emit("e4m3 by e4m3 on a CPU", [measure(*shape) for shape in SHAPES], as_json=arguments.json)


if __name__ == "__main__":
    main()
