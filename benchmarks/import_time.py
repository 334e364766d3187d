"""How long does `import fp8compile` take on top of `import torch`? Median over fresh processes.

python -m benchmarks.import_time [--json] [--runs 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from benchmarks.table import emit

__all__ = ["import_seconds"]

PROGRAM = """
import time
start = time.perf_counter()
import torch
between = time.perf_counter()
import fp8compile
print(between - start, time.perf_counter() - between)
"""


def import_seconds(runs: int) -> list[tuple[float, float]]:
    """Seconds of `import torch` and, after it, of `import fp8compile`, a pair a fresh process."""
    pairs = []
    for _ in range(runs):
        out = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
        torch_seconds, own_seconds = map(float, out.split())
        pairs.append((torch_seconds, own_seconds))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of `import fp8compile` on top of `import torch`.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    import_seconds(1)  # writes bytecode and warms the disk cache
    columns = zip(*import_seconds(args.runs), strict=True)
    rows = [
        {"import": name, "median s": statistics.median(seconds), "min s": min(seconds), "max s": max(seconds)}
        for name, seconds in zip(("torch", "fp8compile, after torch"), columns, strict=True)
    ]
    emit(f"import time, {args.runs} fresh processes", rows, as_json=args.json)


if __name__ == "__main__":
    main()
