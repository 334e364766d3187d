"""A rank without tokens sends what the others send, in the same order: they would wait for its messages.

Of no elements everything is constant, and compilers merge equal constants, and drop what no gradient depends on.
"""

from __future__ import annotations

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


def graph_fsdp(recipe):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return f8.parallel.graph_fsdp(layers(recipe), mesh(), mp_policy=policy), lambda x: x


def data_parallel(recipe):
    from torch.distributed.tensor import DTensor, Shard, distribute_module

    model = distribute_module(layers(recipe).bfloat16(), mesh())
    return model, lambda x: DTensor.from_local(x, mesh(), [Shard(0)], shape=(1, WIDTH), stride=(WIDTH, 1))


PLACEMENTS = {"FSDP in the graph": graph_fsdp, "data parallel": data_parallel}


def messages(placement, recipe):
    """What this rank sends in its forward and in its backward; only the first rank has a token."""
    model, placed = PLACEMENTS[placement](recipe)
    tokens = 1 - torch.distributed.get_rank()
    x = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    forward, backward, _ = compiled_model(model, x=placed(x))
    return forward, backward


# ---------------------------------------------------------------------------------- here


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_it_sends_what_the_others_send(ranks, placement, recipe):
    first, second = ranks(messages, placement, recipe)
    assert first == second
