"""Which kernels take the time of a step on a GPU: those of `benchmarks.gpu_step`, by PyTorch's profiler.

On a CPU operators stand in for kernels, and the numbers show only that the script works.

    python -m benchmarks.gpu_kernels [--json] [--only layer experts optimizer] [--most 12]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_step import KINDS, PARTS, experts_steps, layer_step, optimizers, pairs_of
from benchmarks.linear import runnable
from benchmarks.machine import machine
from benchmarks.table import Row, emit
from benchmarks.timing import device, where

__all__ = ["kernel_rows"]


def kernel_rows(name: str, step: Callable[[], object], most: int) -> list[Row]:
    """The kernels of a step that take the most time, after all of them together."""
    step()
    on_gpu = device() == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        step()
        machine().seconds()  # after the GPU is done
    times: dict[str, tuple[float, int]] = {}
    for event in profiled.events() or ():
        total, calls = times.get(event.name, (0.0, 0))
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.name] = (total + spent / 1e3, calls + 1)
    slowest = sorted(times.items(), key=lambda item: -item[1][0])[:most]
    whole = sum(total for total, _ in times.values()), sum(calls for _, calls in times.values())
    return [
        {
            "contender": name,
            "ms": ms,
            "part": ms / whole[0] if whole[0] else 0.0,
            "calls": calls,
            "kernel": kernel[:80],
        }
        for kernel, (ms, calls) in [("all", whole), *slowest]
    ]


def _steps(parts: Sequence[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    if "layer" in parts:
        pairs = pairs_of(list(dict.fromkeys(["bf16", *runnable()])), KINDS)
        yield from ((", ".join(pair), layer_step(*pair)) for pair in pairs)
    if "experts" in parts:
        yield from experts_steps().items()
    if "optimizer" in parts:
        yield from ((name, optimizer.step) for name, optimizer in optimizers())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--most", type=int, default=12, help="kernels of each contender")
    args = parser.parse_args()
    for name, step in _steps(args.only):
        rows = kernel_rows(name, step, args.most)
        emit(f"Kernels of a step: {name}, {where()}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
