"""Moments as codes on ranks: the bits of one process, saved on two ranks and loaded on three and on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import GROUPS, shared_ranks
from moment_steps import gradient
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fp8compile as f8
from fp8compile import _compat
from fp8compile.testing.bits import difference

pytestmark = pytest.mark.skipif(_compat.TORCH_VERSION < (2, 12), reason="FSDP2 as these tests use it needs 2.12")
OPTIMIZERS = {
    "AdamW": lambda p: f8.optim.AdamW(p, lr=1e-2, backend=None, bf16_stochastic_round=True),
    "AdamW, compiled": lambda p: f8.optim.AdamW(p, lr=1e-2, backend="aot_eager"),
    "Muon": lambda p: f8.optim.Muon([each for each in p if each.ndim == 2], lr=1e-2, backend=None),
    "AdamW, masters": lambda p: f8.MasterWeights(f8.optim.AdamW, p, lr=1e-2, backend=None),
}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


class Parameters(nn.Module):
    """A matrix, a vector, trailing dims that are one row of moments, a stack, one row, a bfloat16 matrix."""

    def __init__(self):
        super().__init__()
        shapes = [(145, 160), (7,), (33, 15, 3, 3), (5, 8, 136), (1, 5000)]
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.parts.append(nn.Parameter(torch.randn(64, 136).bfloat16()))


def made(seed=0):
    torch.manual_seed(seed)
    return Parameters()


def train(model, optimizer, first, last):
    for step in range(first, last):
        for p in model.parameters():
            whole = torch.empty(p.shape, dtype=p.dtype)
            grad = gradient(whole, step)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()


def differences(model, optimizer, whole, other):
    """What differs between parameters and states of a sharded model and of one in one process."""
    found = []
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        states = optimizer.state.get(mine, {}), other.state.get(theirs, {})
        assert list(states[0]) == list(states[1])
        for own, expected in [(mine, theirs), *((states[0][key], states[1][key]) for key in states[0])]:
            own = own.full_tensor() if isinstance(own, DTensor) else own
            found.append(difference(own.detach(), expected.detach()))
    return [words for words in found if words is not None]


def steps_of(name, group):
    mesh = DeviceMesh.from_group(GROUPS[group], "cpu")
    whole, model = made(), fully_shard(made(), mesh=mesh)
    other, optimizer = OPTIMIZERS[name](whole.parameters()), OPTIMIZERS[name](model.parameters())
    for each, own in ((whole, other), (model, optimizer)):
        train(each, own, 0, 3)
    return differences(model, optimizer, whole, other)


def cut_twice():
    """Rows that tensor parallelism cuts and FSDP2 cuts again, and columns at multiples of a block."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        models = []
        for sharded in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(512, 24, bias=False)
            if sharded:
                model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [placement]))
                fully_shard(model, mesh=mesh["fsdp"])
            models.append(model)
        optimizers = [OPTIMIZERS["AdamW"](each.parameters()) for each in models]
        for step in range(2):
            grad = gradient(models[0].weight, step)
            models[0].weight.grad = grad
            own = distribute_tensor(grad, mesh["tp"], [placement])
            p, row = models[1].weight, mesh.get_local_rank("fsdp")
            local = torch.chunk(own.to_local(), 2)[row]
            p.grad = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            [each.step() for each in optimizers]
        found += differences(models[1], optimizers[1], models[0], optimizers[0])
    return found


def refused():
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    weight = nn.Parameter(distribute_tensor(torch.randn(64, 192), mesh, [Shard(1)]))
    try:
        f8.optim.AdamW([weight], backend=None)
    except ValueError as error:
        refused = str(error)
    group = {"params": [weight], "exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32}
    f8.optim.AdamW([group], backend=None)  # values may be cut anywhere
    return refused


def saved_and_loaded(folder, name):
    """DCP: saved on two ranks, loaded on three and on one; what differs there, then and a step later."""
    rank = dist.get_rank()
    if rank < 2:
        model = fully_shard(made(), mesh=DeviceMesh.from_group(GROUPS["pair"], "cpu"))
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, 0, 2)
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder, process_group=GROUPS["pair"])
    dist.barrier()
    if rank == 3:
        return None
    whole = made()
    other = OPTIMIZERS[name](whole.parameters())
    train(whole, other, 0, 2)
    model = fully_shard(made(seed=1), mesh=DeviceMesh.from_group(GROUPS["three"], "cpu"))
    optimizer = OPTIMIZERS[name](model.parameters())
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder, process_group=GROUPS["three"])
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    found = differences(model, optimizer, whole, other)
    train(model, optimizer, 2, 3)
    if rank == 0:
        alone = made(seed=2)
        own = OPTIMIZERS[name](alone.parameters())
        state = {"model": alone.state_dict(), "optimizer": get_optimizer_state_dict(alone, own)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        alone.load_state_dict(state["model"])
        set_optimizer_state_dict(alone, own, state["optimizer"])
        found += differences(alone, own, whole, other)
    train(whole, other, 2, 3)
    return found + differences(model, optimizer, whole, other)


@pytest.mark.parametrize(
    ("name", "group"), [("AdamW", "pair"), ("AdamW", "three"), ("AdamW, compiled", "pair"), ("Muon", "pair")]
)
def test_steps_on_ranks_have_the_bits_of_one_process(ranks, name, group):
    answers = ranks.run(steps_of, name, group, within=group)
    assert answers == [[]] * len(answers)


def test_rows_that_are_cut_twice_and_columns_have_the_bits_of_one_process(ranks):
    assert ranks.run(cut_twice) == [[]] * 4


def test_columns_that_cut_a_block_are_refused(ranks):
    for text in ranks.run(refused, within="pair"):
        assert text.startswith(
            "FP8 optimizer states: rows of 192 values are sharded as (96, 96), so a block of 128 would span two ranks"
        )


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_checkpoint_of_two_ranks_loads_on_three_and_on_one(ranks, tmp_path, name):
    assert ranks.run(saved_and_loaded, str(tmp_path), name) == [[], [], [], None]
