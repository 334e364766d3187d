"""Do models of Hugging Face train in FP8 as they are? Each is tiny and random, and trained for 50 steps.

The models are those of zoo.py and mixtures.py in tests/behaviour. FP8 is compiled, bf16 eager. Losses are the first
and the mean of the last 10; "spread" is how far the last of bf16 lie apart over three seeds of weights and data.
Shares are those of the operations of a training step that FP8 GEMMs do: of all products (attention, experts and
convolutions too), and of linear layers, as the graphs say before Inductor takes our ops apart.

    python -m benchmarks.models [--json] [--models Llama T5] [--backend inductor] [--recipe rowwise]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters

import fp8compile as f8
from benchmarks.table import Row, emit
from fp8compile.testing import GemmShare, Recording, gemm_share

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "behaviour"))

from mixtures import HELD_OTHERWISE, MIXTURES
from zoo import STEPS, ZOO, Zoo, bf16_model, tail, train

__all__ = ["model_row"]

SEEDS = (0, 1, 2)
MODELS = ZOO | MIXTURES | HELD_OTHERWISE


def share_of(zoo: Zoo, model: nn.Module) -> GemmShare:
    """Products of one training step; trains it."""
    torch._dynamo.reset()
    recording = Recording()
    train(zoo, model, torch.compile(model, fullgraph=True, backend=recording), steps=1)
    return gemm_share(*recording.traced)


def not_converted(model: nn.Module) -> str:
    """What multiplies and isn't converted, and why."""
    rows = [row for row in f8.conversion_report(model).rows if not row.converted]
    found = Counter(f"{row.module}: {row.reason}" for row in rows)
    return "; ".join(f"{count} of {text}" for text, count in found.items()) or "-"


def model_row(zoo: Zoo, recipe: f8.Recipe, backend: str) -> Row:
    """Train one model in bf16 and in FP8."""
    bf16 = []
    for seed in SEEDS:
        model = bf16_model(zoo, seed=seed)
        bf16.append(train(zoo, model, model, seed=seed))
    ends = [tail(losses) for losses in bf16]
    share = share_of(zoo, f8.convert(bf16_model(zoo), recipe))
    model = f8.convert(bf16_model(zoo), recipe)
    torch._dynamo.reset()
    counters.clear()
    losses = train(zoo, model, torch.compile(model, fullgraph=True, backend=backend))
    return {
        "model": zoo.name,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "bf16 first": bf16[0][0],
        "FP8 first": losses[0],
        "bf16 last": ends[0],
        "FP8 last": tail(losses),
        "spread": max(ends) - min(ends),
        "FP8 % of all": 100 * share.share,
        "of linears": 100 * share.linear_share,
        "FP8 GEMMs": share.fp8,
        "GEMMs": share.total,
        "not converted": not_converted(model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Models of Hugging Face in FP8, as they are.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--recipe", choices=f8.recipes.names(), default="rowwise")
    args = parser.parse_args()
    recipe = f8.recipes.by_name(args.recipe)
    rows = [model_row(MODELS[name], recipe, args.backend) for name in args.models]
    title = f"{STEPS} steps, {args.recipe}, {args.backend}, transformers {version('transformers')}"
    emit(title, rows, as_json=args.json)


if __name__ == "__main__":
    main()
