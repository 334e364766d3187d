"""How much Python time does `f8.linear` cost a call in eager mode, over the same arithmetic by hand?

By hand means the same tensor operators, called one after the other with what was worked out before. Sizes are tiny,
gradients off, one thread: what remains is the time of calls. Contenders take turns, and of each
its fastest round counts.

    python -m benchmarks.overhead [--json] [--rounds 200] [--calls 20] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import fp8compile as f8
from benchmarks.table import Row, emit
from benchmarks.timing import fastest
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.selection import multiply
from fp8compile.quantizers import GEMMS, GemmConfig

__all__ = ["by_hand"]

CONFIG = GemmConfig()


def by_hand(recipe: f8.Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """The layer without the layer: quantizers' own steps and the product, and no op, check or autograd."""
    a, b = recipe.quantizers(GEMMS[0])

    def operand(x: Tensor, quantizer: f8.Quantizer) -> Quantized:
        multiplier = quantizer.multiplier(quantizer.amax(x))
        codes, scale = quantizer.cast(x, multiplier), quantizer.scale_of(multiplier)
        return Quantized(codes=codes, scale=scale, quantizer=quantizer)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return multiply(operand(x, a), operand(weight, b).t(), x.dtype, CONFIG)

    return layer


def _profile(call: Callable[[], object], calls: int) -> None:
    call()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description="Python time of f8.linear in eager mode.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="where the time of the first recipe goes, to stderr")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with torch.no_grad():
        x, weight = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(32, 32, dtype=torch.bfloat16)
        for name in ("tensorwise", "rowwise", "blockwise"):
            recipe = f8.recipes.by_name(name)
            layer, hand = f8.Linear(32, 32, bias=False, dtype=torch.bfloat16, recipe=recipe), by_hand(recipe)
            steps = {
                "hand": lambda hand=hand: hand(x, weight),
                "function": lambda recipe=recipe: f8.linear(x, weight, recipe=recipe),
                "module": lambda layer=layer: layer(x),
            }
            if args.profile and not rows:
                _profile(steps["function"], args.calls)
            us = {which: 1e3 * ms for which, ms in fastest(steps, args.rounds, args.calls).items()}
            rows.append(
                {
                    "recipe": name,
                    "by hand us": us["hand"],
                    "f8.linear us": us["function"],
                    "over hand us": us["function"] - us["hand"],
                    "f8.Linear us": us["module"],
                }
            )
    emit("A forward call in eager mode on a CPU", rows, as_json=args.json, digits=0)


if __name__ == "__main__":
    main()
