"""Tensor and sequence parallelism beside checkpointing, odd numbers of tokens, and codes of other libraries.

Where sums over ranks round nothing (`exact_sums`) all is as in one process, to the bit, but gradients of norms, which
sequence parallel ranks add in another order. Other recipes: outputs are close, and checkpointing changes no bit.
"""

from __future__ import annotations

import exact_sums
import fsdp_models as models
import torch
from recipes_of_pairs import recipe_of

from fp8compile.testing.bits import difference

__all__ = ["ROWS", "alike"]

ROWS = {
    "odd number of tokens": (7, False, None),
    "activation checkpointing": (32, True, None),
    "odd number of tokens, checkpointed": (7, True, None),
    "odd number of tokens, compiled": (7, False, "aot_eager"),
    "odd number of tokens, checkpointed, compiled": (7, True, "aot_eager"),
}
SUM = 2.0**-16  # float32 sums of 32 terms in another order, through two blocks; a code that flips is 2**-4 of a value


def on_ranks(recipe, x, *, checkpointed, backend):
    model = exact_sums.spread(exact_sums.made(recipe), models.mesh_1d("pair"), sequence=True)
    model.is_checkpointed = checkpointed
    run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    return exact_sums.gradients(model, exact_sums.cut_tokens(x, models.mesh_1d("pair")), run=run)


def alike(recipe, row):
    """What differs from one process, and from ranks without checkpointing, in words."""
    tokens, checkpointed, backend = ROWS[row]
    exact = recipe in exact_sums.RECIPES
    recipe = exact_sums.RECIPES[recipe] if exact else recipe_of(recipe)
    x = torch.randn(2, tokens, exact_sums.DIM, generator=torch.Generator().manual_seed(3))
    found = on_ranks(recipe, x, checkpointed=checkpointed, backend=backend)
    problems = []
    if checkpointed:
        kept = on_ranks(recipe, x, checkpointed=False, backend=backend)
        problems += [f"{name} checkpointed: {text}" for name in kept if (text := difference(found[name], kept[name]))]
    whole = exact_sums.gradients(exact_sums.made(recipe), x)
    if exact:
        names = [name for name in whole if "norm" not in name]
        problems += [f"{name}: {text}" for name in names if (text := difference(found[name], whole[name]))]
    else:
        apart = ((found["y"] - whole["y"]).norm() / whole["y"].norm()).item()
        problems += [f"y is {apart} of its norm apart"] if apart > SUM else []
    return problems
