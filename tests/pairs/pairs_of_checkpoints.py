"""Checkpoints of FP8 parameters that three ranks save, and two or four load: the same codes and scales, and losses."""

from __future__ import annotations

import fsdp_models as models
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS
from recipes_of_pairs import recipe_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import fp8compile as f8
from fp8compile.testing.bits import difference

__all__ = ["ROWS", "alike"]

ROWS = {"three ranks to two": "pair", "three ranks to four": "all", "three ranks to three": "three"}


def made(recipe, name, seed, hidden):
    """A model of FP8 parameters over the ranks of a group, or of one process."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64)).bfloat16()
    model = f8.convert(model, recipe, weight_lifetime="parameter", filter=lambda *_: True)
    if name:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=models.mesh_1d(name))
        fully_shard(model, mesh=models.mesh_1d(name))
        f8.parallel.share_scales(model)
    return model


def batch():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def whole_of(model):
    state = get_model_state_dict(model)
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}


def save(recipe, folder, hidden):
    """Train and save, and put down what was saved and what comes of it."""
    model = made(recipe, "three", 0, hidden)
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.02)
    for _ in range(2):
        model(batch()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/saved", process_group=GROUPS["three"])
    y, state = model(batch()).detach(), whole_of(model)
    if dist.get_rank() == 0:
        torch.save({"y": y, **state}, f"{folder}/whole.pt")


def alike(recipe, row, folder):
    """What differs in the codes, scales and outputs of what was loaded from what was saved, in words."""
    hidden = 144 if "nvfp4" in recipe or "packed" in recipe else 145  # pairs of codes; rows of three ranks are uneven
    recipe = recipe_of(recipe)
    try:
        if GROUPS.get("three") is not None:
            save(recipe, folder, hidden)
    finally:
        dist.barrier()  # after an error too: the fourth rank waits
    if GROUPS.get(ROWS[row]) is None or (ROWS[row] == "pair" and dist.get_rank() > 1):
        return []
    other = made(recipe, ROWS[row], 5, hidden)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=f"{folder}/saved", process_group=GROUPS[ROWS[row]])
    set_model_state_dict(other, state)
    right = torch.load(f"{folder}/whole.pt")
    found = {"y": other(batch()).detach(), **whole_of(other)}
    if found.keys() != right.keys():
        return [f"keys {sorted(found.keys() ^ right.keys())}"]
    return [f"{name}: {text}" for name in right if (text := difference(found[name], right[name]))]
