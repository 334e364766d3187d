"""How fast is a compiled linear, and a compiled block, forward and backward, against bfloat16 and torchao?

All contenders run in one process, in turns, so that a machine that slows down slows them all; the ratio is that of
medians. On a CPU the sizes are tiny and the numbers show only that the script works: FP8 is emulated there.

    python -m benchmarks.linear [--json] [--sizes 16384x8192x8192 ...] [--mlp 8192x4096x14336] [--rounds 10]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.mlp import contenders, converted, mlp
from benchmarks.table import Row, emit

__all__ = ["rows"]

Size = tuple[int, int, int]
SIZES = {"cuda": ["8192x4096x4096", "8192x4096x14336", "8192x14336x4096", "16384x8192x8192"], "cpu": ["64x64x64"]}
MLP = {"cuda": "8192x4096x14336", "cpu": "64x64x128"}
CALLS = {"cuda": 10, "cpu": 2}  # a round, so that its time is well above the clock's and the launch's


def _size(text: str) -> Size:
    m, k, n = (int(part) for part in text.split("x"))
    return m, k, n


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    grad = torch.randn_like(compiled(x))

    def step() -> None:
        torch.autograd.grad(compiled(x), [x, *model.parameters()], grad)

    return step


def _linear(contender: str, size: Size, device: str) -> Callable[[], None]:
    m, k, n = size
    model = nn.Sequential(nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16))
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    return _step(converted(contender, model), x)


def _block(contender: str, size: Size, device: str) -> Callable[[], None]:
    return _step(*mlp(contender, *size, device=device))


def _milliseconds(step: Callable[[], None], device: str) -> float:
    """Of one call, over a round of them."""
    calls = CALLS[device]
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls
    began = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - began) * 1e3 / calls


def _medians(steps: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, float]:
    for step in steps.values():
        _milliseconds(step, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_milliseconds(step, device))
    return {name: statistics.median(values) for name, values in times.items()}


def rows(what: str, size: Size, names: list[str], rounds: int, device: str) -> list[Row]:
    """Medians of all contenders on one size of ``"linear"`` (M, K, N) or ``"mlp"`` (M, d, h)."""
    torch._dynamo.reset()
    make = _linear if what == "linear" else _block
    medians = _medians({name: make(name, size, device) for name in names}, rounds, device)
    gemms = 3 if what == "linear" else 9
    operations = 2 * gemms * size[0] * size[1] * size[2]
    return [
        {
            "what": what,
            "size": "x".join(map(str, size)),
            "contender": name,
            "ms": median,
            "TFLOP/s": operations / median / 1e9,
            "speed to bf16": medians["bf16"] / median,
        }
        for name, median in medians.items()
    ]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Compiled forward and backward against bfloat16 and torchao.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", nargs="*", default=SIZES[device], help="linears, MxKxN")
    parser.add_argument("--mlp", nargs="*", default=[MLP[device]], help="blocks, Mxdxh")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--contenders", nargs="+", choices=contenders(), default=contenders())
    args = parser.parse_args()
    names = list(dict.fromkeys(["bf16", *args.contenders]))
    found = [row for size in args.sizes for row in rows("linear", _size(size), names, args.rounds, device)]
    found += [row for size in args.mlp for row in rows("mlp", _size(size), names, args.rounds, device)]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    emit(f"forward and backward, compiled, bfloat16, {where}", found, as_json=args.json)


if __name__ == "__main__":
    main()
