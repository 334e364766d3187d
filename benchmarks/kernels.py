"""How many kernels, and how many bytes, does one block cost on a GPU? Answered without one.

Inductor generates code for forward and backward on fake tensors; its own count of bytes read and written is added up.
Bytes say how well casts fuse; they are no time. The GPU is an H200, for MX formats a B200. Needs Triton; torchao is
compared where it is installed.

    python -m benchmarks.kernels [--json] [--m 8192 --d 4096 --h 14336] [--contenders rowwise "torchao rowwise"]
"""

from __future__ import annotations

import argparse

from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.mlp import contenders, mlp
from benchmarks.table import Row, emit
from fp8compile.testing import gpu_kernels

__all__ = ["kernel_row"]


def arch_for(contender: str) -> str:
    """The GPU that a contender's code is made for: the first one that has its GEMM."""
    return "b200" if contender.startswith("mx") else "h200"


def kernel_row(contender: str, m: int, d: int, h: int) -> Row:
    """Kernels, GEMMs and GB of one contender."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = mlp(contender, m, d, h)
        forward, backward = gpu_kernels(model, x, arch=arch_for(contender))
    return {
        "block": contender,
        "GPU": arch_for(contender),
        "fwd kernels": len(forward.kernels),
        "fwd GEMMs": len(forward.gemms),
        "fwd GB": forward.bytes / 1e9,
        "bwd kernels": len(backward.kernels),
        "bwd GEMMs": len(backward.gemms),
        "bwd GB": backward.bytes / 1e9,
        "sum GB": (forward.bytes + backward.bytes) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels and bytes of one MLP block on a GPU, without one.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--m", type=int, default=8192, help="tokens")
    parser.add_argument("--d", type=int, default=4096, help="width of the residual stream")
    parser.add_argument("--h", type=int, default=14336, help="hidden width")
    parser.add_argument("--contenders", nargs="+", choices=contenders(), default=contenders())
    args = parser.parse_args()
    rows = [kernel_row(name, args.m, args.d, args.h) for name in args.contenders]
    emit(f"Generated code of RMSNorm, SwiGLU, residual: M={args.m} d={args.d} h={args.h}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
