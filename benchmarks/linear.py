"""How fast is a compiled linear, forward and backward, against bfloat16 and torchao?

All contenders run in one process, in turns; the ratio is that of medians. On a CPU the sizes are tiny and the numbers
show only that the script works: FP8 is emulated there.

    python -m benchmarks.linear [--json] [--sizes 16384x8192x8192 ...] [--rounds 10] [--contenders rowwise ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.machine import machine
from benchmarks.mlp import contenders, converted, peer_of
from benchmarks.table import Row, emit
from benchmarks.timing import device, medians, where

__all__ = ["rows", "step_of"]

Size = tuple[int, int, int]
SIZES = {
    "cuda": ["16384x4096x4096", "16384x4096x14336", "16384x8192x4096", "16384x8192x8192", "16384x8192x14336"],
    "cpu": ["64x64x64"],
}


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Forward and backward of a model, compiled, with a gradient that is there already."""
    torch._dynamo.config.recompile_limit = 64  # all contenders are graphs of one forward
    compiled = machine().compile(model, dynamic=False)
    grad = torch.randn_like(compiled(x))
    return lambda: torch.autograd.grad(compiled(x), [x, *model.parameters()], grad)


def _linear(contender: str, size: Size) -> Callable[[], object]:
    m, k, n = size
    model = nn.Sequential(nn.Linear(k, n, bias=False, device=device(), dtype=torch.bfloat16))
    x = torch.randn(m, k, device=device(), dtype=torch.bfloat16, requires_grad=True)
    return step_of(converted(contender, model), x)


def rows(size: Size, names: list[str], rounds: int) -> list[Row]:
    """Medians of all contenders on one size (M, K, N)."""
    torch._dynamo.reset()
    found = medians({name: _linear(name, size) for name in names}, rounds)
    operations = 6 * size[0] * size[1] * size[2]
    return [
        {
            "size": "x".join(map(str, size)),
            "contender": name,
            "ms": median,
            "TFLOP/s": operations / median / 1e9,
            "speed to bf16": found["bf16"] / median,
            "to torchao": found.get(peer_of(name), float("nan")) / median,
        }
        for name, median in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiled forward and backward against bfloat16 and torchao.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", nargs="*", default=SIZES[device()], help="MxKxN")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--contenders", nargs="+", choices=contenders(), default=runnable())
    args = parser.parse_args()
    names = list(dict.fromkeys(["bf16", *args.contenders]))
    found = []
    for size in args.sizes:
        m, k, n = map(int, size.split("x"))
        found += rows((m, k, n), names, args.rounds)
    emit(f"A linear layer, forward and backward, compiled, bfloat16, {where()}", found, as_json=args.json)


def runnable() -> list[str]:
    """Contenders that the device at hand has the GEMMs of."""
    import fp8compile as f8
    from fp8compile.testing.explain.recipe_support import recipe_support

    def has_gemms(name: str) -> bool:
        with machine().target():
            support = recipe_support(f8.recipes.by_name(name), torch.device(device()))
        return all(gemm.kind != "none" for gemm in support)

    return [name for name in contenders() if name not in f8.recipes.names() or has_gemms(name)]


if __name__ == "__main__":
    main()
