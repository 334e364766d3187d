"""Layers on DTensors of the meta device, on a mesh that has no process groups: only the layout of the result is asked.

spmd_types, the type checker of torchtitan, asks this way.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fp8compile as f8

LAYOUTS = {
    "column": (Replicate(), Shard(0)),
    "row": (Shard(2), Shard(1)),
    "batch": (Shard(0), Replicate()),
    "sequence": (Shard(1), Replicate()),
    "whole": (Replicate(), Replicate()),
}


@pytest.fixture(scope="module")
def mesh():
    return DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)


def placed(mesh, shape, placement):
    return DTensor.from_local(torch.empty(shape, device="meta", dtype=torch.bfloat16), mesh, [placement])


def layer(mesh, x, weight, recipe):
    state = None
    if recipe.history():
        own = f8.DelayedState.initial(recipe, device="meta")
        placed_state = (DTensor.from_local(each, mesh, [Replicate()]) for each in own[:2])
        state = f8.DelayedState(*placed_state)
    return f8.linear(x, weight, recipe=recipe, state=state)


@pytest.mark.parametrize("name", [name for name in f8.recipes.names() if name != "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_result_lies_as_that_of_a_plain_layer(mesh, layout, name):
    x, weight = (placed(mesh, shape, p) for shape, p in zip([(2, 16, 32), (64, 32)], LAYOUTS[layout], strict=True))
    expected, found = F.linear(x, weight), layer(mesh, x, weight, f8.recipes.by_name(name))
    assert found.is_meta
    assert (found.shape, found.placements, found.dtype) == (expected.shape, expected.placements, expected.dtype)
    assert found.to_local().shape == expected.to_local().shape


def test_a_layer_that_would_gather_says_so(mesh):
    x, weight = placed(mesh, (2, 16, 32), Shard(1)), placed(mesh, (64, 32), Shard(0))
    with pytest.raises(RuntimeError, match=r"would have to be gathered, and its mesh has no process groups"):
        f8.linear(x, weight, recipe=f8.recipes.rowwise())
