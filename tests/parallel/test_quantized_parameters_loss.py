"""Losses of FP8 parameters beside those of FP8 layers over bfloat16 weights with float32 masters.

Of masters that start from what weights were, they are the same numbers. Other ways to train codes differ by less than
bfloat16 training does from seed to seed. The numbers are printed (pytest -s), and stand in docs/results/parameters.md.
"""

from __future__ import annotations

import pytest
import torch
from masters import ByHand
from test_quantized_parameters_ranks import plain_model, train

import fp8compile as f8

SEEDS, STEPS, LAST, RATE = range(4), 60, 20, 3e-3
RECIPES = {"tensorwise": f8.recipes.tensorwise(), "blockwise": f8.recipes.blockwise()}
WAYS = {
    "masters of what weights were": {},
    "masters of the codes": {},
    "no masters, stochastic": {"keep": False, "rounding": "stochastic"},
}


def converted(model, recipe, **options):
    return f8.convert(model, RECIPES[recipe], filter=lambda *_: True, **options)


def final_loss(model, optimizer):
    return sum(train(model, optimizer, STEPS)[-LAST:]) / LAST


def of_values(seed, recipe=None):
    model = plain_model(144, seed)
    if recipe is not None:
        converted(model, recipe)
    return final_loss(model, ByHand(model, lr=RATE))


def of_codes(way, seed, recipe):
    keep_initial = way == "masters of what weights were"
    model = converted(plain_model(144, seed), recipe, weight_lifetime="parameter", keep_initial=keep_initial)
    return final_loss(model, f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=RATE, seed=seed, **WAYS[way]))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_differ_less_than_those_of_other_seeds(recipe):
    bf16, fp8 = [of_values(seed) for seed in SEEDS], [of_values(seed, recipe) for seed in SEEDS]
    spread = max(bf16) - min(bf16)
    print(f"\n{recipe}: bfloat16 {mean(bf16):.4f}, spread {spread:.4f}; FP8 layers over bfloat16 {mean(fp8):.4f}")
    for way in WAYS:
        found = [of_codes(way, seed, recipe) for seed in SEEDS]
        apart = max(abs(mine - other) for mine, other in zip(found, fp8, strict=True))
        print(f"  {way}: {mean(found):.4f}, at most {apart:.4f} apart at one seed")
        assert abs(mean(found) - mean(fp8)) < spread
        assert apart < spread
        if way == "masters of what weights were":
            assert found == fp8


def mean(numbers):
    return sum(numbers) / len(numbers)
