"""Gradients of what the forward's codes stand for, and experts in four bits, on ranks: the bits of one process."""

from __future__ import annotations

from dataclasses import replace

import fsdp_models as models
import pytest
import test_expert_parallel
import test_tensor_parallel
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from test_fsdp import differing
from torch._dynamo.utils import counters

import fp8compile as f8
from fp8compile.parallel import graph_fsdp

RECIPES = {
    # codes of the weight for the output and others for grad_input; of the input those of the forward alone
    "two sets": replace(f8.recipes.rowwise_bf16_wgrad(), dequantized_gradients=True),
    "nvfp4": f8.recipes.nvfp4(backward="dequantized"),
}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def graph_fsdp_and_one_process(name, sizes, backend):
    """What differs after three steps over two ranks, in words."""
    losses, weights = models.one_process(models.model_of(sizes, RECIPES[name]), "bf16", 3)
    model = graph_fsdp(models.model_of(sizes, RECIPES[name]), models.mesh_1d("pair"), mp_policy=models.BF16)
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    own = models.trained(run, 3, dist.get_rank() % 2, optimizer=models.adamw(model))
    return differing(weights, models.weights_of(model)) + [f"losses {own}, not {losses}"] * (own != losses)


@pytest.mark.parametrize(
    ("name", "sizes", "backend"),
    [
        ("two sets", "uneven", None),
        ("nvfp4", "uneven", None),
        ("nvfp4", "even", "aot_eager"),
        pytest.param("two sets", "even", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_fsdp_in_the_graph(ranks, name, sizes, backend):
    assert ranks.run(graph_fsdp_and_one_process, name, sizes, backend, within="pair") == [[]] * 2


def on_dtensors(name, *cases):
    """What differs from one process in each case, in words, by the bounds of test_tensor_parallel.py."""
    test_tensor_parallel.RECIPES[name] = RECIPES[name]
    found = []
    for case in cases:
        torch._dynamo.reset()
        counters.clear()  # of graphs, which each case counts
        found.append(test_tensor_parallel.layer_on_ranks(name, *case))
    return found


LAYERS = [
    ("colwise", "batches of tokens", None, 2),
    ("SP to colwise", "cut blocks", "aot_eager", 2),
    ("rowwise", "nothing divides", None, 2),
    ("rowwise to SP", "cut blocks", "aot_eager", 2),
]


@pytest.mark.parametrize("name", RECIPES)
def test_layers_on_dtensors(ranks, name):
    for found in ranks.run(on_dtensors, name, *LAYERS)[:2]:
        assert found == [{}] * len(LAYERS)


@pytest.mark.parametrize(("routing", "tokens", "capacity"), [("any", "uneven", None), ("empty experts", "even", 64)])
def test_experts_in_four_bits_over_ranks(ranks, routing, tokens, capacity):
    """Their rows travel as values: groups have outer scales of their own, which no row has before it is in one."""
    case = "pair", 2, "nvfp4", capacity, True, routing, tokens
    for beside_one, beside_plain in ranks.run(beside_one_process, *case, within="pair"):
        assert beside_one == [None] * 4
        assert beside_plain == [None] * 4


def beside_one_process(*case):
    return test_expert_parallel.beside_one_process(*case, None)
