"""What people do with quantized parameters under FSDP2: the bits of one process, each time."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from test_quantized_parameters_ranks import OPTIMIZERS, converted, differences, plain_model, quantized, sharded, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile import _compat
from fp8compile._compat import local_itself

pytestmark = pytest.mark.skipif(
    _compat.TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def gradients(model, step):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
    loss = (model(x).float() - x.float()).square().mean()
    loss.backward()
    return loss.item()


def accumulated(model, optimizer, *, syncs_all=True):
    """A step for every two backwards; without syncs_all, ranks send gradients in the second one alone."""
    losses = []
    for step in range(6):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(syncs_all or step % 2 == 1)
        losses.append(gradients(model, step))
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def clipped(model, optimizer):
    """By the largest gradient, which is one number whatever the order that ranks are asked in."""
    losses = []
    for step in range(4):
        losses.append(gradients(model, step))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf"))
        losses.append(getattr(norm, "full_tensor", lambda norm=norm: norm)().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def evaluated(model, optimizer):
    losses = train(model, optimizer, 2)
    with torch.no_grad():
        losses.append(model(torch.ones(4, 64).bfloat16()).sum().item())
    return losses + train(model, optimizer, 2, first=2)


def recomputed(model, optimizer):
    for block in model:
        block.forward = _recomputed(block.forward)
    return train(model, optimizer, 3)


def _recomputed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def frozen(model, optimizer):
    before = [each.codes.clone() for each in quantized(model)]
    losses = train(model, optimizer, 3)
    changed = [not torch.equal(old, each.codes) for old, each in zip(before, quantized(model), strict=True)]
    return [*losses, changed == [False, True, True, True]]


WAYS = {
    "offloaded": (lambda m, o: train(m, o, 3), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "kept after forward": (lambda m, o: train(m, o, 3), {"reshard_after_forward": False}),
    "accumulated": (accumulated, {}),
    "accumulated before it is sent": (lambda m, o: accumulated(m, o, syncs_all=False), {}),
    "clipped": (clipped, {}),
    "evaluated": (evaluated, {}),
    "recomputed": (recomputed, {}),
    "frozen": (frozen, {}),
}


def trains_alike(optimizer, name):
    """Losses and bits of a way of training over two ranks and in one process, rows uneven."""
    use, options = WAYS[name]
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    models = [converted(145), converted(145)]
    for model in models:
        model[0][0].weight.requires_grad = name != "frozen"
    sharded(models[1], mesh, **options)
    losses = [use(model, OPTIMIZERS[optimizer](model.parameters())) for model in models]
    return losses[0] == losses[1], differences(models[1], models[0], mesh.get_local_rank(), 2)


def copy_learns_nothing():
    """FSDP2 gathers a copy of a shard that it keeps on the CPU: it is the shard that has to know its ranks."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    layer = sharded(converted(145), mesh)[0][0]
    local = local_itself(layer.weight)
    local.clone().fsdp_pre_all_gather(mesh, layer.weight.shape, (64, 1), layer, None)
    return local.group is mesh.get_group()


STATES = {"by shards": {}, "whole": {"full_state_dict": True}}


def resumed(optimizer, options, order):
    """Whether training goes on with the same losses and bits after its states went by name to a fresh start."""
    mesh, options = DeviceMesh.from_group(GROUPS["all"], "cpu"), StateDictOptions(**STATES[options])
    models = [sharded(converted(145, seed=seed), mesh) for seed in (0, 7)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    train(models[0], optimizers[0], 2)
    states = {
        "model": get_model_state_dict(models[0], options=options),
        "optimizer": get_optimizer_state_dict(models[0], optimizers[0], options=options),
    }
    states = copy.deepcopy(states)
    expected = train(models[0], optimizers[0], 2, first=2)
    f8.parallel.share_scales(models[1])
    setters = {
        "model": lambda: set_model_state_dict(models[1], states["model"], options=options),
        "optimizer": lambda: set_optimizer_state_dict(models[1], optimizers[1], states["optimizer"], options=options),
    }
    for name in order:
        setters[name]()
    losses = train(models[1], optimizers[1], 2, first=2)
    same = all(
        torch.equal(mine.codes, other.codes) and torch.equal(mine.scale, other.scale)
        for mine, other in zip(*map(quantized, models), strict=True)
    )
    return losses == expected, same


def values_by_name(options):
    """What differs after a state dict of values, which rank 0 alone has or all, went to a model of codes."""
    mesh = DeviceMesh.from_group(GROUPS["all"], "cpu")
    whole, model = converted(145), sharded(converted(145, seed=7), mesh)
    f8.parallel.share_scales(model)
    state = plain_model(145).state_dict() if "broadcast_from_rank0" not in options or dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, **options))
    return differences(model, whole, mesh.get_local_rank(), mesh.size())


def codes_from_rank_0():
    """What is said of a state dict of codes that rank 0 alone has: PyTorch sends what parameters and buffers are."""
    model = sharded(converted(145), DeviceMesh.from_group(GROUPS["all"], "cpu"))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    try:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    except RuntimeError as error:
        return str(error)
    return "no error"


def early_optimizer_state(name):
    """What is said where a state by name is set before shards know their ranks: PyTorch takes a step for it."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    model = sharded(converted(145), mesh)
    optimizer = OPTIMIZERS[name](model.parameters())
    try:
        get_optimizer_state_dict(model, optimizer)
    except RuntimeError as error:
        return str(error)
    return "no error"


# ---------------------------------------------------------------------------------- what they answer


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("optimizer", ["AdamW, masters", "AdamW, fused"])
def test_ways_of_training_have_the_bits_of_one_process(ranks, optimizer, name):
    assert ranks.run(trains_alike, optimizer, name, within="pair") == [(True, [])] * 2


def test_a_shard_of_which_a_copy_is_gathered_knows_its_ranks(ranks):
    assert ranks.run(copy_learns_nothing) == [True] * 4


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize(
    ("optimizer", "order"),
    [
        ("AdamW, masters", ("model", "optimizer")),
        ("AdamW, masters", ("optimizer", "model")),
        ("AdamW, fused", ("model", "optimizer")),
        ("SGD, masters", ("model", "optimizer")),
    ],
)
def test_states_by_name_resume_to_the_bit(ranks, optimizer, options, order):
    assert ranks.run(resumed, optimizer, options, order, seconds=40) == [(True, True)] * 4


@pytest.mark.parametrize("options", [{}, {"broadcast_from_rank0": True}], ids=["all", "rank 0"])
def test_values_by_name_are_quantized(ranks, options):
    assert ranks.run(values_by_name, options) == [[]] * 4


def test_codes_that_rank_0_alone_has_are_missed_by_the_others(ranks):
    for text in ranks.run(codes_from_rank_0)[1:]:
        assert "Missing key" in text
        assert "0.0.weight" in text


def test_optimizer_state_by_name_before_a_forward_says_what_to_call(ranks):
    for text in ranks.run(early_optimizer_state, "AdamW, fused"):
        assert "Call fp8compile.parallel.share_scales(model) after fully_shard" in text
    # masters are made of shards, and say whose they are
    assert set(ranks.run(early_optimizer_state, "AdamW, masters")) == {"no error"}
