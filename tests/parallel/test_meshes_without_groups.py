"""Layers on DTensors of the meta device, on a mesh that has no process groups: only the layout of the result is asked.

spmd_types, the type checker of torchtitan, asks this way.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fp8compile as f8

# of x, of the weight, and of the result, which is where F.linear's would be
LAYOUTS = {
    "column": (Replicate(), Shard(0), Shard(2)),
    "row": (Shard(2), Shard(1), Partial()),
    "batch": (Shard(0), Replicate(), Shard(0)),
    "sequence": (Shard(1), Replicate(), Shard(1)),
    "whole": (Replicate(), Replicate(), Replicate()),
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
    *operands, expected = LAYOUTS[layout]
    x, weight = (placed(mesh, shape, p) for shape, p in zip([(2, 16, 32), (64, 32)], operands, strict=True))
    found = layer(mesh, x, weight, f8.recipes.by_name(name))
    assert found.is_meta
    assert (found.placements, found.dtype) == ((expected,), torch.bfloat16)
    assert found.shape == (*x.shape[:-1], weight.shape[0])
    local = list(found.shape)
    if isinstance(expected, Shard):
        local[expected.dim] //= mesh.size()
    assert list(found.to_local().shape) == local


def test_a_layer_that_would_gather_says_so(mesh):
    x, weight = placed(mesh, (2, 16, 32), Shard(1)), placed(mesh, (64, 32), Shard(0))
    with pytest.raises(RuntimeError, match="would have to be all-gathered, but its mesh has no process groups"):
        f8.linear(x, weight, recipe=f8.recipes.rowwise())
