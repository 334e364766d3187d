"""Experts on ranks, whose rows travel as codes, beside checkpointing and compilation: the bits of one process."""

from __future__ import annotations

from functools import partial

import test_expert_parallel as experts
import torch
from gloo_ranks import GROUPS
from recipes_of_pairs import recipe_of
from torch.utils.checkpoint import checkpoint

from fp8compile import parallel
from fp8compile.testing.bits import difference

__all__ = ["ROWS", "alike"]

ROWS = {
    "nothing else": (False, None, None),
    "activation checkpointing": (True, None, None),
    "a capacity, checkpointed": (True, None, 64),
    "compiled": (False, "aot_eager", None),
    "compiled, checkpointed": (True, "aot_eager", None),
    "compiled, a capacity, checkpointed": (True, "aot_eager", 64),
}


def alike(recipe, row):
    """What differs on this rank of two from one process, in words: y and the gradients of rows and both stacks."""
    checkpointed, backend, capacity = ROWS[row]
    group, recipe = GROUPS["pair"], recipe_of(recipe)
    rank, tokens, count = group.rank(), (40, 3), 4
    rows, up, down, grad = experts.tensors(sum(tokens), count)
    expert = experts.chosen(sum(tokens), count, "any")
    own, mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1])), slice(2 * rank, 2 * rank + 2)

    def routes_of(expert):
        counts = torch.zeros(count, dtype=torch.int64).index_add(0, expert, torch.ones_like(expert))
        return parallel.expert_routes(counts, group=group, capacity=capacity)

    layer = experts.experts_layer
    layer = partial(checkpoint, layer, use_reentrant=False) if checkpointed else layer
    layer = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    found = experts.results(layer, rows[own], expert[own], up[mine], down[mine], grad[own], routes_of, recipe, recipe)

    def whole_routes(expert):
        return experts.on_one_rank(torch.bincount(expert, minlength=count), capacity)

    one = experts.results(experts.experts_layer, rows, expert, up, down, grad, whole_routes, recipe, recipe)
    right = one[0][own], one[1][own], one[2][mine], one[3][mine]
    names = "y", "gradient of rows", "gradient of up", "gradient of down"
    return [f"{n}: {text}" for n, a, b in zip(names, found, right, strict=True) if (text := difference(a, b))]
