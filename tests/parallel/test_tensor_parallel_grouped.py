"""Experts of whose matrices each rank has a part: the bits of one process that has whole ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from test_explicit_groups import GRAD_INPUT, OUTPUT, sum_problem, summands
from torch._dynamo.utils import counters

import fp8compile as f8
from fp8compile import parallel
from fp8compile.testing.bits import difference, sum_difference

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "blockwise_bf16_wgrad", "mxfp8")
LAYERS = {"column": parallel.column_parallel_grouped_linear, "row": parallel.row_parallel_grouped_linear}
NAMES = {2: "pair", 3: "three"}
# what each rank has: parts end where blocks of 128 and of 32 end, or within them
FEATURES = {2: ((128, 128), (256, 72), (72, 56)), 3: ((128, 128, 40), (40, 136, 8))}
OFFSETS = {"even": (8, 16, 24), "empty": (0, 20, 20), "one has all, NaN behind": (0, 0, 17)}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def tensors(offsets, n, k):
    """x, weight, bias and grad_output of whole experts, the same on every rank; magnitudes differ everywhere."""
    generator = torch.Generator().manual_seed(n + k)
    shapes = {"x": (24, k), "weight": (len(offsets), n, k), "bias": (len(offsets), n), "grad": (24, n)}
    found = {}
    for name, shape in shapes.items():
        scale = torch.randn(shape, generator=generator).mul(2).exp()
        found[name] = (torch.randn(shape, generator=generator) * scale).bfloat16()
    found["x"][offsets[-1] :] = torch.nan
    return found


def run(function, x, weight, bias, grad, offsets, **options):
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    y = function(leaves[0], leaves[1], offsets, leaves[2], **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def parts_of(whole, features, rank, layer):
    """What one rank has: x, weight, bias, grad."""

    def part(tensor, dim):
        return tensor.split(features, dim)[rank].clone()

    x, weight, bias, grad = (whole[name] for name in ("x", "weight", "bias", "grad"))
    if layer == "column":
        return x, part(weight, 1), part(bias, 1), part(grad, 1)
    return part(x, 1), part(weight, 2), bias, grad


def problems(layer, recipe_name, features, offsets, backend):
    group = GROUPS[NAMES[len(features)]]
    recipe, rank, ends = f8.recipes.by_name(recipe_name), group.rank(), torch.tensor(offsets, dtype=torch.int32)
    n, k = (sum(features), 64) if layer == "column" else (64, sum(features))
    whole = tensors(offsets, n, k)
    sizes = {} if len(set(features)) == 1 else {"feature_sizes": features}
    function = LAYERS[layer]
    if backend:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend=backend)
    if layer == "row":
        whole["bias"].zero_()  # the sum itself is compared
    own = parts_of(whole, features, rank, layer)
    y, grad_x, grad_weight, grad_bias = run(function, *own, ends, recipe=recipe, group=group, **sizes)
    alone = run(f8.grouped_linear, *(whole[name] for name in ("x", "weight", "bias", "grad")), ends, recipe=recipe)
    rows, gemm = ("grad", GRAD_INPUT) if layer == "column" else ("x", OUTPUT)
    summed = parts_of_sum(gemm, whole[rows], whole["weight"], offsets, features, recipe)
    if layer == "column":
        checks = {
            "y": difference(y, alone[0].split(features, 1)[rank]),
            "grad_weight": difference(grad_weight, alone[2].split(features, 1)[rank]),
            "grad_bias": sum_difference(grad_bias, alone[3].split(features, 1)[rank]),
            "grad_x": sum_problem(grad_x, summed),
        }
    else:
        checks = {
            "y": sum_problem(y, summed),
            "grad_x": difference(grad_x, alone[1].split(features, 1)[rank]),
            "grad_weight": difference(grad_weight, alone[2].split(features, 2)[rank]),
            "grad_bias": sum_difference(grad_bias, alone[3]),
        }
    return [f"{name}: {text}; {layer}, {features}, {offsets}" for name, text in checks.items() if text]


def parts_of_sum(gemm, rows, weight, offsets, features, recipe):
    """What each rank adds to a product that sums over features, group by group; zeros behind the last group."""
    found = [torch.zeros(rows.shape[0], weight.shape[1 if gemm.b_transposed else 2]).bfloat16() for _ in features]
    for group, (start, end) in enumerate(zip((0, *offsets), offsets, strict=False)):
        if start < end:
            for part, own in zip(found, summands(gemm, rows[start:end], weight[group], features, recipe), strict=True):
                part[start:end] = own
    return found


def check_eager(recipe, size):
    if NAMES[size] not in GROUPS:
        return []
    cases = itertools.product(LAYERS, FEATURES[size], OFFSETS.values())
    return [text for layer, features, offsets in cases for text in problems(layer, recipe, features, offsets, None)]


def check_compiled(recipe, backend):
    counters.clear()
    found = [text for layer in LAYERS for text in problems(layer, recipe, (256, 72), OFFSETS["empty"], backend)]
    return found, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_of_a_group_have_the_bits_of_one_process(ranks, recipe):
    for size in NAMES:
        for found in ranks.run(check_eager, recipe, size, within=NAMES[size]):
            assert found == []


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_they_are_one_graph_with_the_same_bits(ranks, recipe, backend):
    for found, graphs in ranks.run(check_compiled, recipe, backend, within="pair"):
        assert found == []
        assert graphs == len(LAYERS)
