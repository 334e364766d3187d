"""Stochastic rounding, two levels of scales and transforms on shards: codes, and so bits, are those of the whole.

The noise of an element is a hash of its index in the whole tensor, the outer amax is the maximum of all ranks.
"""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks

import fp8compile as f8
from fp8compile import parallel
from fp8compile.testing.bits import difference, sum_difference

LAYERS = {"column": parallel.column_parallel_linear, "row": parallel.row_parallel_linear}
GROUP_NAMES = {2: "pair", 3: "three"}
RECIPES = {
    "nvfp4": f8.recipes.nvfp4(),
    "nvfp4, weights 1x16, no transform": f8.recipes.nvfp4(weight_block=(1, 16), hadamard=(), seed=3),
    "tensorwise": f8.recipes.tensorwise(grad_rounding="stochastic"),
    "rowwise": f8.recipes.rowwise(grad_rounding="stochastic"),
    "blockwise": f8.recipes.blockwise(grad_rounding="stochastic"),
    "mxfp8": f8.recipes.mxfp8(grad_rounding="stochastic"),
}
# of each rank along the sequence, of two batches, and of features; a transform takes sixteen tokens at a time
TOKENS = {2: (32, 16), 3: (16, 16, 16)}
FEATURES = {2: ((48, 48), (56, 24)), 3: ((32, 32, 32), (40, 40, 16))}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def _tensors(n, k, tokens):
    generator = torch.Generator().manual_seed(n + k)
    shapes = ((2, tokens, k), (n, k), (2, tokens, n))
    return [
        (torch.randn(s, generator=generator) * torch.rand(s, generator=generator).exp2()).bfloat16() for s in shapes
    ]


def _run(layer, x, weight, grad, **options):
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    y = layer(x, weight, None, **options)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]


def problems(name, layer, features, sequence_dim, backend):
    """What differs from the whole: outputs and gradients that no rank sums, to the bit; sums within roundings."""
    torch._dynamo.reset()
    size = len(features)
    if GROUP_NAMES[size] not in GROUPS:
        return []
    group, recipe, tokens = GROUPS[GROUP_NAMES[size]], RECIPES[name], TOKENS[size]
    wide, column = sum(features), layer == "column"
    whole = _tensors(*((wide, 40) if column else (40, wide)), sum(tokens))

    def of_features(tensor, dim):
        return tensor.split(features, dim)[group.rank()]

    def of_tokens(tensor):
        return tensor if sequence_dim is None else tensor.split(tokens, sequence_dim)[group.rank()]

    x, weight, grad = whole
    if column:
        own = of_tokens(x), of_features(weight, 0), of_features(grad, -1)
    else:
        own = of_features(x, -1), of_features(weight, 1), of_tokens(grad)
    function = LAYERS[layer] if backend is None else torch.compile(LAYERS[layer], fullgraph=True, backend=backend)
    sizes = {} if sequence_dim is None else {"sequence_sizes": tokens}
    options = {"recipe": recipe, "group": group, "sequence_dim": sequence_dim, "feature_sizes": features, **sizes}
    found = _run(function, *own, **options)
    y, grad_x, grad_weight = _run(f8.linear, *whole, recipe=recipe)
    if column:
        checks = [(difference, of_features(y, -1)), (sum_difference, of_tokens(grad_x))]
        checks.append((difference, of_features(grad_weight, 0)))
    else:
        checks = [(sum_difference, of_tokens(y)), (difference, of_features(grad_x, -1))]
        checks.append((difference, of_features(grad_weight, 1)))
    texts = [check(got, want.contiguous()) for got, (check, want) in zip(found, checks, strict=True)]
    what = f"{name} {layer} {features} {sequence_dim} {backend}"
    return [f"{which}: {text}; {what}" for which, text in zip(("y", "dx", "dw"), texts, strict=True) if text]


def every_problem(name, size, backends):
    return [
        problem
        for layer in LAYERS
        for features in FEATURES[size]
        for sequence_dim in (None, 1)
        for backend in backends
        for problem in problems(name, layer, features, sequence_dim, backend)
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_layers_on_ranks_have_the_codes_of_the_whole(ranks, name, size):
    for found in ranks.run(every_problem, name, size, (None, "aot_eager") if "nvfp4" in name else (None,)):
        assert found == []
