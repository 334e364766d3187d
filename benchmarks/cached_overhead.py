"""What do the guards of cached weights cost the host: microseconds of a layer and call, beside layers without?

A chain of small layers, without gradients. "eager" is a forward; "graph" a call of one compiled graph that computes
nothing, so that guards and the gathering of inputs are what remains; "compiled" a call of Inductor's code. Both
models take turns, and each one's fastest round counts. Medians and rounds of a busy machine say less.

    python -m benchmarks.cached_overhead [--json] [--layers 64] [--width 32] [--rounds 30] [--only graph] [--profile]
        [--page]

``--page`` writes a section of docs/results/cached-weights.md.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

import fp8compile as f8
from benchmarks.cached_weights import PAGE
from benchmarks.table import Row, emit, replace_section
from benchmarks.timing import fastest

__all__ = ["WAYS", "us_a_layer"]

TOKENS = 16


def _computing_nothing(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend whose graph returns the same tensors in each call."""
    (outputs,) = graph.graph.output_node().args
    values: Any = fx.map_arg(outputs, lambda node: torch.empty(node.meta["example_value"].shape))
    return lambda *_: values


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "graph": lambda model: torch.compile(model, fullgraph=True, backend=_computing_nothing),
    "compiled": lambda model: torch.compile(model, fullgraph=True),
}


def _model(layers: int, width: int, *, cached: bool) -> nn.Module:
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(layers)))
    return f8.convert(chain, f8.recipes.rowwise(weight_lifetime="step" if cached else "call"), filter="*")


def us_a_layer(way: str, layers: int, width: int, rounds: int) -> dict[bool, float]:
    """Microseconds of a call, for each layer, without and with cached weights."""
    calls: dict[str, Callable[[], Tensor]] = {}
    x = torch.randn(TOKENS, width, dtype=torch.bfloat16)
    for cached in (False, True):
        torch._dynamo.reset()
        calls[str(cached)] = partial(WAYS[way](_model(layers, width, cached=cached)), x)
        with torch.no_grad():
            calls[str(cached)]()
    with torch.no_grad():
        found = fastest(calls, rounds, 3)
    return {cached: 1e3 * found[str(cached)] / layers for cached in (False, True)}


def _profile(way: str, layers: int, width: int) -> None:
    call, x = WAYS[way](_model(layers, width, cached=True)), torch.randn(TOKENS, width, dtype=torch.bfloat16)
    with torch.no_grad():
        call(x)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(20):
            call(x)
        profile.disable()
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


def _section(rows: list[Row], layers: int, width: int) -> list[str]:
    body = [
        f"| {each['call']} | {each['us a layer']:.1f} | {each['cached us']:.1f} | {each['ratio']:.2f} |"
        for each in rows
    ]
    return [
        f"Microseconds per layer and call, for a chain of {layers} layers of width {width}, {TOKENS} tokens,",
        "rowwise, without gradients. Other programs used the CPU too, so only ratios count. Layers are so small",
        "that this is host time: in eager mode, finding a cached weight costs less than quantizing it; a",
        'compiled call checks for each weight whether the cache is valid. A "graph" that computes nothing has',
        "only guards and inputs.",
        "`python -m benchmarks.cached_overhead --page` writes this section.",
        "",
        "| call | without | cached | ratio |",
        "|---|---|---|---|",
        *body,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of cached weights.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--page", action="store_true", help=f"write a section of {PAGE.name}")
    parser.add_argument("--profile", action="store_true", help="where the time of a call goes, to stderr")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for way in [args.only] if args.only else WAYS:
        if args.profile:
            _profile(way, args.layers, args.width)
        found = us_a_layer(way, args.layers, args.width, args.rounds)
        rows.append(
            {"call": way, "us a layer": found[False], "cached us": found[True], "ratio": found[True] / found[False]}
        )
    if args.page:
        replace_section(PAGE, "Host time", _section(rows, args.layers, args.width))
    emit(f"A forward of {args.layers} layers on a CPU, us a layer", rows, as_json=args.json, digits=2)


if __name__ == "__main__":
    main()
