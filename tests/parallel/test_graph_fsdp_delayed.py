"""FSDP in the graph with delayed scaling: the bits of `fully_shard`, states too, by one message of amaxes a step."""

from __future__ import annotations

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from test_graph_fsdp import data_rank, differing, prepared
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.ops import collectives
from fp8compile.parallel import graph_fsdp

OWN = f8.CurrentScaling()
VALUE, GRAD = f8.DelayedScaling(history=3), f8.DelayedScaling(format="e5m2", history=3, margin=1)
RECIPES = {
    "delayed": f8.recipes.delayed(history=3),
    # the weight's codes need an amax before, those of activations none
    "weight by its own": f8.Recipe(input=VALUE, weight=OWN, grad_output=OWN, weight_for_grad_input=OWN),
    "weight alone": f8.Recipe(input=OWN, weight=VALUE, grad_output=GRAD, weight_for_grad_input=VALUE),
}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def model_of(recipe, mesh, group):
    """Converted, tensor parallel if so told; and the mesh to shard it over."""
    return prepared("uneven", RECIPES[recipe], mesh, amax_group=GROUPS[group] if group else None)


def whole(tensors):
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in tensors.items()
    }


def trained(model, run, steps, mesh):
    losses = models.trained(run, steps, data_rank(mesh), optimizer=models.adamw(model))
    return losses, whole(model.state_dict())


def graph_and_stock(recipe, policy, mesh, group, steps, backend=None):
    """What differs from `fully_shard`: losses, weights, histories and multipliers."""
    model, where = model_of(recipe, mesh, group)
    stock = models.shard(model, where, models.POLICIES[policy])
    expected = trained(stock, stock, steps, mesh)
    assert expected[1]["blocks.0.inner.down.multiplier"].tolist() != [1, 1, 1]
    model, where = model_of(recipe, mesh, group)
    model = graph_fsdp(model, where, mp_policy=models.POLICIES[policy])
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    found = trained(model, run, steps, mesh)
    differ = differing(expected[1], found[1])
    return differ if expected[0] == found[0] else [*differ, f"losses {expected[0]} {found[0]}"]


# recipe, dtypes, mesh, and whose amaxes become one: "cross" are the data parallel ranks beside tensor parallel ones
CASES = [
    ("delayed", "fp32", "1-D", "pair"),
    ("delayed", "bf16", "1-D", None),
    ("delayed", "bf16", "HSDP", "all"),
    ("delayed", "fp32", "HSDP", None),
    ("delayed", "bf16", "FSDP + TP", "cross"),
    ("weight by its own", "fp32", "1-D", "pair"),
    ("weight alone", "bf16", "1-D", "pair"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_fully_shard_does(ranks, case):
    assert not any(ranks.run(graph_and_stock, *case, 6, within=models.WITHIN[case[2]]))


def test_trains_as_fully_shard_does_in_one_graph(ranks):
    assert ranks.run(graph_and_stock, "delayed", "fp32", "1-D", "pair", 6, "aot_eager", within="pair") == [[]] * 2


# ---------------------------------------------------------------------------------- ways of training


class Net(nn.Module):
    """A layer that is called twice, one that is called once, and one in some steps only; checkpointed if so told."""

    def __init__(self, *, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 32)
        self.twice, self.once, self.seldom = (nn.Linear(32, 32) for _ in range(3))
        self.recompute, self.is_long = recompute, True

    def forward(self, symbols):
        x = self.embed(symbols)
        for layer in (self.twice, self.once, self.twice, *((self.seldom,) if self.is_long else ())):
            x = torch.relu(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x.float().square().mean()


WAYS = {
    "eager": {},
    "compiled, checkpointed": {"backend": "aot_eager", "recompute": True},
    "compiled, accumulated": {"backend": "aot_eager", "parts": 3},
    "forwards first": {"parts": 3, "forwards_first": True},
    # of a weight that is read twice `fully_shard` reduces one gradient, the sum; so one of them is always frozen
    "compiled, all frozen": {"backend": "aot_eager", "frozen": ("twice", "once")},
}


def net_trained(function, *, backend=None, recompute=False, parts=1, forwards_first=False, frozen=("twice",)):
    """Losses and states of some steps, an evaluation between them."""
    model = f8.convert(Net(recompute=recompute), RECIPES["delayed"], amax_group=GROUPS["pair"])
    for name in frozen:
        getattr(model, name).requires_grad_(requires_grad=False)
    function(model, mesh=models.mesh_1d("pair"), mp_policy=models.BF16)
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    optimizer, losses = models.adamw(model), []
    for step in range(4):
        model.is_long = step < 2
        pending = []
        for part in range(parts):
            pending.append(run(models.batch(10 * step + part, dist.get_rank())))
            losses.append(pending[-1].item())
            if not forwards_first:
                pending.pop().backward()
        for loss in pending:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(run(models.batch(99, dist.get_rank())).item())
    return losses, whole(model.state_dict())


def ways_differ(way):
    options = WAYS[way]
    expected = net_trained(models.fully_shard, **{**options, "backend": None, "recompute": False})
    found = net_trained(graph_fsdp, **options)
    assert expected[1]["seldom.amax_history"].any()
    differ = differing(expected[1], found[1])
    return differ if expected[0] == found[0] else [*differ, f"losses {expected[0]} {found[0]}"]


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_training(ranks, way):
    assert ranks.run(ways_differ, way, within="pair") == [[]] * 2


# ---------------------------------------------------------------------------------- messages


def messages(recipe, mesh, group):
    """How many amaxes a rank sends in each message of a step, and of an evaluation."""
    model, where = model_of(recipe, mesh, group)
    model = graph_fsdp(model, where, mp_policy=models.BF16)
    sent, original = [], collectives.all_reduce_amax

    def counted(amax, group):
        sent.append(amax.numel())
        return original(amax, group)

    collectives.all_reduce_amax = counted
    try:
        model(models.batch(0, dist.get_rank())).backward()
        step, sent[:] = sent[:], []
        with torch.no_grad():
            model(models.batch(0, dist.get_rank()))
    finally:
        collectives.all_reduce_amax = original
    return step, sent


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # six layers: that it ran, amaxes of x, grad_output and the weight
        (("delayed", "1-D", "pair"), ([24], [])),
        (("delayed", "HSDP", "all"), ([24], [])),
        (("delayed", "1-D", None), ([6], [])),  # ranks have scales of their own but for weights
        (("weight by its own", "1-D", "pair"), ([6, 24], [6])),  # amaxes of weights have to be known before
    ],
    ids=str,
)
def test_one_message_a_step_for_the_whole_model(ranks, case, expected):
    assert ranks.run(messages, *case) == [expected] * 4


# ---------------------------------------------------------------------------------- errors


def gradients_of_some():
    """Gradients of all parameters update states; of the embedding alone, they say that they can't."""
    model, where = model_of("delayed", "1-D", "pair")
    model = graph_fsdp(model, where, mp_policy=models.BF16)
    loss = model(models.batch(0, dist.get_rank()))
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    updated = model.blocks[0].inner["down"].amax_history.any().item()
    try:
        torch.autograd.grad(loss, [model.embed.weight])
    except RuntimeError as error:
        return updated, str(error)
    return updated, "nothing is raised"


def test_gradients_that_would_leave_states_behind_raise(ranks):
    for updated, text in ranks.run(gradients_of_some):
        assert updated
        assert "Also request the gradients of all trained parameters, call backward(), or compile the model." in text
