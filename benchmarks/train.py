"""How many tokens a second does a model of 1 to 2 billion parameters train, and in how much memory?

The model of `examples/train`, a byte-level Llama, with AdamW, on random bytes: bf16 parameters, compiled whole, with
bf16, our recipes and torchao's, each made anew. Between any two bf16 runs again, and each is compared with the bf16
before and after it: machines change speed. On a CPU it is tiny, and there is no peak memory.

    python -m benchmarks.train [--json] [--steps 10] [--contenders bf16 tensorwise ...]
"""

from __future__ import annotations

import argparse
import gc
import statistics

import torch

from benchmarks.linear import runnable
from benchmarks.machine import machine
from benchmarks.mlp import contenders, converted
from benchmarks.table import Row, emit
from benchmarks.timing import device, where
from examples.train.model import ByteLlama, ModelShape

__all__ = ["train_row"]

SHAPES = {
    # 1.5 billion parameters: 24 layers of width 2048
    "cuda": (ModelShape(dim=2048, layers=24, heads=16, kv_heads=8, hidden=8192, seq=4096), 4),
    "cpu": (ModelShape(dim=32, layers=1, heads=2, kv_heads=1, hidden=64, seq=16), 1),
}


def train_row(contender: str, steps: int) -> Row:
    """Train a few steps; the first two, which compile, don't count."""
    torch._dynamo.reset()
    gc.collect()
    machine().forget_peak()
    shape, batch = SHAPES[device()]
    torch.manual_seed(0)
    model = converted(contender, ByteLlama(shape, seed=0).to(device(), torch.bfloat16))
    compiled = machine().compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device() == "cuda")
    tokens = torch.randint(256, (batch, shape.seq + 1), device=device())
    times = []
    for _ in range(steps + 2):
        began = machine().seconds()
        compiled(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(machine().seconds() - began)
    return {
        "contender": contender,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens/s": batch * shape.seq / statistics.median(times[2:]),
        "peak GB": machine().peak_bytes() / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second and peak memory of a training.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=10 if device() == "cuda" else 3)
    parser.add_argument("--contenders", nargs="+", choices=contenders(), default=runnable())
    args = parser.parse_args()
    of_bf16, others = [train_row("bf16", args.steps)], []
    for name in dict.fromkeys(args.contenders):
        if name == "bf16":
            continue
        row = train_row(name, args.steps)
        of_bf16.append(train_row("bf16", args.steps))
        row["speed to bf16"] = row["tokens/s"] / statistics.mean(each["tokens/s"] for each in of_bf16[-2:])
        others.append(row)
    fastest = max(of_bf16, key=lambda row: row["tokens/s"])
    slowest = min(row["tokens/s"] for row in of_bf16)
    emit(
        f"Training, {where()}; bf16 from {slowest:.0f} to {fastest['tokens/s']:.0f} tokens/s",
        [{**fastest, "speed to bf16": 1.0}, *others],
        as_json=args.json,
        digits=2,
    )


if __name__ == "__main__":
    main()
