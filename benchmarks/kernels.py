"""How many kernels, and how many bytes, does one block cost on a GPU? Answered without one.

Inductor generates code for forward and backward on fake tensors; its own count of bytes read and written is added up,
with what our opaque ops launch inside. The last column is a bound, no measurement: the time that the GPU needs at
least, by its published peaks (benchmarks/roofline.py), for the products and, one after the other, for the bytes of all
other kernels. The GPU is an H200, for MX formats and NVFP4 a B200. Needs Triton; torchao is compared where it is
installed.

    python -m benchmarks.kernels [--json] [--m 8192] [--shape llama3-8b] [--block mlp] [--contenders rowwise ...]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.blocks import SHAPES, Shape, block
from benchmarks.mlp import VARIANTS, contenders
from benchmarks.roofline import bound_ms
from benchmarks.table import Row, emit
from fp8compile.testing import gpu_kernels
from fp8compile.testing.gpu.kernels import GpuCode

__all__ = ["kernel_row"]


def _unit(gemm: str) -> str:
    """Which units of a GPU do a product: the name of their peak."""
    return "fp4" if gemm == "nvfp4_mm" else "fp8" if "scaled" in gemm else "bf16"


def _operations(codes: Sequence[GpuCode], model: torch.nn.Module, m: int) -> Counter[str]:
    """Operations by unit. Each layer has as many products of a unit as each other layer."""
    shapes = [layer.weight.shape for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    of_all_layers = sum(2.0 * m * rows * columns for rows, columns in shapes)
    found: Counter[str] = Counter()
    for gemm in (gemm for code in codes for gemm in code.gemms):
        found[_unit(gemm)] += of_all_layers / len(shapes)
    return found


def _bound(codes: Sequence[GpuCode], model: torch.nn.Module, m: int, arch: str) -> float:
    beside = sum(each.bytes_read + each.bytes_written for c in codes for each in c.launches if each.kind != "gemm")
    return bound_ms(beside, _operations(codes, model, m), arch)


def arch_for(contender: str) -> str:
    """The GPU that a contender's code is made for: the first one that has its GEMM."""
    return "b200" if contender.startswith(("mx", "nv")) else "h200"


@cache
def kernel_row(contender: str, m: int, shape: Shape, kind: str = "mlp") -> Row:
    """Kernels, GEMMs and bytes of one contender."""
    arch = arch_for(contender)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = block(kind, contender, m, shape)
        forward, backward = gpu_kernels(model, x, arch=arch)
    return {
        "block": contender,
        "GPU": arch,
        "fwd kernels": len(forward.kernels),
        "fwd GEMMs": len(forward.gemms),
        "fwd GB": forward.bytes / 1e9,
        "bwd kernels": len(backward.kernels),
        "bwd GEMMs": len(backward.gemms),
        "bwd GB": backward.bytes / 1e9,
        "sum GB": (forward.bytes + backward.bytes) / 1e9,
        "bound ms": _bound((forward, backward), model, m, arch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels and bytes of one block on a GPU, without one.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--m", type=int, default=8192, help="tokens")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--block", choices=("mlp", "attention"), default="mlp")
    choices = [*contenders(), *VARIANTS]
    parser.add_argument("--contenders", nargs="+", choices=choices, default=choices)
    args = parser.parse_args()
    rows = [kernel_row(name, args.m, SHAPES[args.shape], args.block) for name in args.contenders]
    emit(f"Generated code of the {args.block} block of {args.shape}: M={args.m}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
