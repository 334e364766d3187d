"""How fast is a compiled decoder block, forward and backward, against bfloat16 and torchao? And how much memory?

Feed-forward and attention at the shapes of Llama 3 8B and Qwen3 8B, one sequence of 8192 tokens; on a CPU tiny, where
the numbers show only that the script works.

    python -m benchmarks.block [--json] [--shapes llama3-8b ...] [--m 8192] [--rounds 10] [--contenders rowwise ...]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.blocks import SHAPES, Shape, block
from benchmarks.linear import runnable, step_of
from benchmarks.mlp import contenders, peer_of
from benchmarks.table import Row, emit
from benchmarks.timing import device, medians, where

__all__ = ["rows"]

DEFAULTS = {"cuda": (["llama3-8b", "qwen3-8b"], 8192), "cpu": (["tiny"], 64)}


def rows(kind: str, m: int, name: str, shape: Shape, names: list[str], rounds: int) -> list[Row]:
    """Medians of all contenders on one block."""
    torch._dynamo.reset()
    steps = {contender: step_of(*block(kind, contender, m, shape, device())) for contender in names}
    found = medians(steps, rounds)
    return [
        {
            "block": kind,
            "shape": name,
            "contender": contender,
            "ms": median,
            "speed to bf16": found["bf16"] / median,
            "to torchao": found.get(peer_of(contender), float("nan")) / median,
        }
        for contender, median in found.items()
    ]


def main() -> None:
    shapes, m = DEFAULTS[device()]
    parser = argparse.ArgumentParser(description="A compiled decoder block against bfloat16 and torchao.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=shapes)
    parser.add_argument("--m", type=int, default=m, help="tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--contenders", nargs="+", choices=contenders(), default=runnable())
    args = parser.parse_args()
    names = list(dict.fromkeys(["bf16", *args.contenders]))
    found = [
        row
        for name in args.shapes
        for kind in ("mlp", "attention")
        for row in rows(kind, args.m, name, SHAPES[name], names, args.rounds)
    ]
    emit(f"A block, forward and backward, compiled, M={args.m}, {where()}", found, as_json=args.json)


if __name__ == "__main__":
    main()
