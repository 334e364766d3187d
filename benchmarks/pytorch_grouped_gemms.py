"""Registers and spilled bytes of the FP8 grouped GEMMs in PyTorch's CUDA library, without a GPU.

    python -m benchmarks.pytorch_grouped_gemms [--cuobjdump PATH]

prints a row for each kernel of `torch._scaled_grouped_mm` for compute capability 9.0. It needs a PyTorch with CUDA,
whose library it reads by the `cuobjdump` that Triton brings, or another one. Bytes of stack in these kernels, which
call nothing, are spilled registers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

from benchmarks.table import Row, lines

__all__ = ["rows_of"]

KERNEL = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)")
SCHEDULE = re.compile(r"KernelPtrArrayTmaWarpSpecialized(Cooperative|Pingpong)(FP8FastAccum)?E+NS\w_IJ(.*)")
SIZE = re.compile(r"NS\w_ILi(\d+)EE|(S\w_)")


def _tile(text: str) -> str:
    """The three sizes at the beginning of a mangled tuple; a substitution stands for the size before."""
    sizes: list[str] = []
    while len(sizes) < 3 and (match := SIZE.search(text)):
        sizes.append(match[1] or sizes[-1])
        text = text[match.end() :]
    return " x ".join(sizes)


def rows_of(usage: str) -> Iterator[Row]:
    """A row for each FP8 grouped GEMM in what ``cuobjdump -res-usage`` prints."""
    for name, registers, stack in KERNEL.findall(usage):
        schedule = SCHEDULE.search(name)
        if schedule is None or "float_e4m3_t" not in name:
            continue
        yield {
            "tile": _tile(schedule[3]),
            "schedule": schedule[1].lower(),
            "accumulation": "fast" if schedule[2] else "in float32",
            "registers": int(registers),
            "bytes spilled": int(stack),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pytorch_grouped_gemms", description=__doc__.splitlines()[0]
    )
    brought = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    parser.add_argument("--cuobjdump", type=Path, default=brought, help="of a CUDA as new as the library's")
    args = parser.parse_args()
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not library.exists():
        raise SystemExit(
            f"pytorch_grouped_gemms: PyTorch {torch.__version__} has no {library.name}. Install one with CUDA."
        )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([args.cuobjdump, "-xelf", "sm_90a", library], cwd=folder, check=True, capture_output=True)
        rows = [row for path in sorted(Path(folder).glob("*.cubin")) for row in rows_of(_usage(args.cuobjdump, path))]
    if not rows:
        raise SystemExit(
            f"pytorch_grouped_gemms: {args.cuobjdump} finds no FP8 grouped GEMM in {library}. "
            "Give a newer one with --cuobjdump, such as that of a newer Triton."
        )
    print(f"PyTorch {torch.__version__}, compute capability 9.0")
    print("\n".join(lines(sorted(rows, key=lambda row: (str(row["accumulation"]), str(row["tile"]))))))


def _usage(cuobjdump: Path, path: Path) -> str:
    return subprocess.run([cuobjdump, "-res-usage", path], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
