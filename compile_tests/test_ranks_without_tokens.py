"""FP8 layers of a rank without tokens send what the others send, in the same order: they would wait for its messages.

Of no elements everything is constant, and compilers merge equal constants, and drop what no gradient depends on.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from processes import fake_rank
from test_graph_fsdp_graphs import compiled_model
from torch import nn

import fp8compile as f8

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "nvfp4", "delayed")
WIDTH, HIDDEN = 64, 128
RANKS = 2


@pytest.fixture(scope="module")
def ranks():
    """Runs a function as each of two ranks, which never meet, and returns both results."""
    with fake_rank(0, RANKS) as first, fake_rank(1, RANKS) as second:
        pools = (first, second)
        yield lambda *call: [each.result() for each in [pool.submit(*call) for pool in pools]]


# ---------------------------------------------------------------------------------- there


def layers(recipe):
    """Two blocks, so that inner layers get empty tensors from layers."""
    blocks = [nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH), nn.SiLU()]
    blocks += [nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH)]
    group = torch.distributed.group.WORLD if recipe == "delayed" else None
    recipe = f8.recipes.nvfp4(hadamard=()) if recipe == "nvfp4" else f8.recipes.by_name(recipe)
    return f8.convert(nn.Sequential(*blocks), recipe, filter="*", amax_group=group)


def mesh():
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(RANKS))


def messages(recipe):
    """What this rank sends in its forward and in its backward; only the first rank has a token."""
    from torch.distributed.tensor import DTensor, Shard, distribute_module

    model = distribute_module(layers(recipe).bfloat16(), mesh())
    tokens = 1 - torch.distributed.get_rank()
    x = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    placed = DTensor.from_local(x, mesh(), [Shard(0)], shape=(1, WIDTH), stride=(WIDTH, 1))
    return compiled_model(model, x=placed)[:2]


def refusal(tokens, *, trains):
    """What a compiled model that is sharded in its graph raises for as many tokens; empty if nothing."""
    model = f8.parallel.graph_fsdp(layers("tensorwise").bfloat16(), mesh())
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        with torch.set_grad_enabled(trains):
            run(torch.randn(tokens, WIDTH, dtype=torch.bfloat16))
    except Exception as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------- here


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_sends_what_the_others_send(ranks, recipe):
    first, second = ranks(messages, recipe)
    assert first == second


def test_fsdp_in_the_graph_refuses_inputs_without_elements(ranks):
    """The partitioner keeps other activations there, and the backward would gather other parameters again."""
    trains, infers = partial(refusal, trains=True), partial(refusal, trains=False)
    assert all("no input of the compiled model has an element" in text for text in ranks(trains, 0))
    assert ranks(trains, 1) == ["", ""]
    assert ranks(infers, 0) == ["", ""]
