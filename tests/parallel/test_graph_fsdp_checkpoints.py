"""Distributed checkpoints of FSDP in the graph: as many ranks, or others, go on with what was saved, to the bit."""

from __future__ import annotations

import io

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from test_graph_fsdp import differing
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8compile as f8
from fp8compile.parallel import graph_fsdp

RECIPES = ("rowwise", "delayed")


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def made(recipe, name, seed):
    """A model over the ranks of a group, and its optimizer."""
    recipe, group = f8.recipes.by_name(recipe), GROUPS[name]
    model = models.model_of("uneven", recipe, seed=seed, amax_group=group if recipe.history() else None)
    model = graph_fsdp(model, models.mesh_1d(name), mp_policy=models.BF16)
    return model, models.adamw(model)


def whole_state(model, optimizer):
    """Parameters, buffers, moments and steps, whole and plain, by name."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{kind}": value for kind, value in optimizer.state[parameter].items()}
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach() for name, each in found.items()
    }


def trained_and_saved(recipe, folder):
    """What was saved after three steps, and losses of three more and what they end in; by two ranks each."""
    model, optimizer = made(recipe, "pair", seed=0)
    rank = dist.get_rank() % 2
    models.trained(model, 3, rank, optimizer=optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if dist.get_rank() < 2:
        dcp.save(state, checkpoint_id=folder, process_group=GROUPS["pair"])
    file = io.BytesIO()
    torch.save(whole_state(model, optimizer), file)
    losses = models.trained(model, 3, rank, optimizer=optimizer, start=3)
    torch.save(whole_state(model, optimizer), ended := io.BytesIO())
    return file.getvalue(), losses, ended.getvalue()


def loaded(recipe, name, folder):
    """Another model, and its optimizer, with what was saved."""
    model, optimizer = made(recipe, name, seed=5)
    found, state = get_state_dict(model, optimizer)
    dcp.load({"model": found, "optimizer": state}, checkpoint_id=folder, process_group=GROUPS[name])
    set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=state)
    return model, optimizer


def resumed(recipe, folder, saved, losses, ended):
    """What differs from the run that was not killed."""
    model, optimizer = loaded(recipe, "pair", folder)
    found = differing(torch.load(io.BytesIO(saved)), whole_state(model, optimizer))
    again = models.trained(model, 3, dist.get_rank() % 2, optimizer=optimizer, start=3)
    found += differing(torch.load(io.BytesIO(ended)), whole_state(model, optimizer))
    return found if again == losses[dist.get_rank() % 2] else [*found, f"losses {again}, {losses}"]


def resumed_by_three(recipe, folder, saved):
    if dist.get_rank() == 3:
        return []
    model, optimizer = loaded(recipe, "three", folder)
    found = differing(torch.load(io.BytesIO(saved)), whole_state(model, optimizer))
    models.trained(model, 1, dist.get_rank(), optimizer=optimizer)
    return found


def unconverted_problems(saved):
    """A model that was never converted or sharded takes what was saved, and has no other keys."""
    plain = models.Model(*models.SIZES["uneven"])
    state = {name: value for name, value in torch.load(io.BytesIO(saved)).items() if name in plain.state_dict()}
    plain.load_state_dict(state)
    return differing(state, dict(plain.state_dict()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_two_ranks_saved_two_or_three_go_on_with(ranks, recipe, tmp_path):
    answers = ranks.run(trained_and_saved, recipe, str(tmp_path))
    (saved, _, ended), losses = answers[0], [own for _, own, _ in answers]
    assert unconverted_problems(saved) == []
    assert ranks.run(resumed, recipe, str(tmp_path), saved, losses, ended) == [[]] * 4
    assert ranks.run(resumed_by_three, recipe, str(tmp_path), saved) == [[]] * 4
