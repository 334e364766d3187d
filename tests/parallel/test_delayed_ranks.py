"""Delayed scaling where ranks have parts of a model, or states of their own: pipelines, and checkpoints of ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fp8compile as f8

RECIPE = f8.recipes.delayed(history=8)
STATE = ("amax_history", "multiplier")


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def model_of(layers, group=None):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(layers)]
    return f8.convert(nn.Sequential(*blocks), RECIPE, amax_group=group)


def bits_of_state(model):
    return [t.view(torch.int32).tolist() for name, t in model.state_dict().items() if name.endswith(STATE)]


# ---------------------------------------------------------------------------------- pipelines


def states_in_a_pipeline(junk, *, given, compiled):
    """The states of this rank's stage after some steps; with shapes that are given, or found in memory of junk."""
    group = GROUPS["pair"]
    stage_of = group.rank()
    part = model_of(4)[2 * stage_of : 2 * stage_of + 2]
    x = torch.zeros(4, 64)
    options = {}
    if given:
        options = {"input_args": (x.clone().requires_grad_(stage_of == 1),), "output_args": (x.requires_grad_(),)}
    freed = [torch.full((4, 64), junk) for _ in range(64)]
    del freed  # what memory holds that the stage makes its tensors of
    run = torch.compile(part, backend="aot_eager", fullgraph=True) if compiled else part
    stage = PipelineStage(run, stage_of, 2, torch.device("cpu"), group=group, **options)
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=nn.functional.mse_loss)
    for step in range(2):
        batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        schedule.step(batch) if stage_of == 0 else schedule.step(target=batch)
    return bits_of_state(part)


def states_with_and_without_inference(compiled):
    expected = states_in_a_pipeline(0.0, given=True, compiled=compiled)
    found = [states_in_a_pipeline(junk, given=False, compiled=compiled) for junk in (1e30, float("nan"))]
    return [each == expected for each in found]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_pipeline_that_finds_out_about_shapes_leaves_no_trace_in_the_state(ranks, compiled):
    assert ranks.run(states_with_and_without_inference, compiled) == [[True, True]] * 4


# ---------------------------------------------------------------------------------- checkpoints


def said_at_the_save(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.state_dict()
    return [str(each.message) for each in caught if "amax_group" in str(each.message)]


def sharding(kind, group):
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    model = model_of(2, group)
    return fully_shard(model, mesh=mesh) if kind == "fsdp" else f8.parallel.graph_fsdp(model, mesh)


def train(model, steps):
    rank = dist.get_rank()
    for step in steps:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + 5 * rank)
        model(x).square().sum().backward()
        model.zero_grad()


def resumed_with_states_of_ranks(kind, folder):
    """As docs/delayed-scaling.md says: whether a run that is resumed is that run, on this rank."""
    model, rank = sharding(kind, None), dist.get_rank()
    train(model, range(2))
    own = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(STATE)}
    torch.save(own, f"{folder}/delayed-{rank}.pt")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{rank // 2}", process_group=GROUPS["pair"])
    train(model, range(2, 4))
    again = sharding(kind, None)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/{rank // 2}", process_group=GROUPS["pair"])
    again.load_state_dict(state)
    again.load_state_dict(torch.load(f"{folder}/delayed-{rank}.pt"), strict=False)
    train(again, range(2, 4))
    return bits_of_state(again) == bits_of_state(model)


def what_a_save_says(kind):
    group = GROUPS["pair"]
    return (
        said_at_the_save(sharding(kind, None)),
        said_at_the_save(sharding(kind, group)),
        said_at_the_save(model_of(1)),
    )


@pytest.mark.parametrize("kind", ["fsdp", "graph_fsdp"])
def test_a_save_says_that_each_rank_has_a_state_of_its_own(ranks, kind):
    for alone, together, plain in ranks.run(what_a_save_says, kind):
        assert len(alone) == 2
        assert (
            "a checkpoint keeps the state of only one rank. All ranks would continue with it, and training would"
            in alone[0]
        )
        assert together == plain == []


@pytest.mark.parametrize("kind", ["fsdp", "graph_fsdp"])
def test_a_run_that_is_resumed_with_the_states_of_ranks_is_that_run(ranks, kind, tmp_path):
    assert ranks.run(resumed_with_states_of_ranks, kind, str(tmp_path)) == [True] * 4
