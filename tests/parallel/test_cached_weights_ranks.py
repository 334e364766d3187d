"""Cached codes of weights on ranks: shards of FSDP2 make theirs once a step, to the bit; what keeps none raises."""

from __future__ import annotations

from dataclasses import replace

import expert_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from test_fsdp import data_rank, differing, sharded
from test_fsdp_use import counted
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION, local_itself, plain_alias
from fp8compile.parallel import fsdp_float8_all_gather, graph_fsdp
from fp8compile.parallel.fsdp2 import sharded_weight

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)
MICRO_BATCHES, STEPS = 2, 3


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def rank():
    return dist.get_rank() % 2


def model_of(kind, recipe):
    if kind == "dense":
        return models.model_of("uneven", recipe)
    return expert_models.mixture_of("gpt-oss" if kind == "turned" else "torchtitan", 3, recipe)


def trained(model, *, keeps):
    """Losses, and how often a shard's codes were cast in each step."""
    optimizer, losses, casts = models.adamw(model), [], []
    model.set_reshard_after_backward(not keeps)
    for step in range(STEPS):
        with counted(sharded_weight, "cast_part") as calls:
            for micro in range(MICRO_BATCHES):
                model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
                loss = model(models.batch(MICRO_BATCHES * step + micro, rank()))
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        casts.append(len(calls))
        if step == 1:  # by hand, in place
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
    return losses, casts


def with_and_without(kind, name, reshard, backend):
    """What differs, and the casts in each step, with and without."""
    losses, weights, casts = {}, {}, {}
    for cached in (False, True):
        model = model_of(kind, replace(models.recipe_of(name), weight_lifetime="step" if cached else "call"))
        model = fsdp_float8_all_gather(model)
        how = {"backend": backend, "reshard_after_forward": reshard}
        model = models.shard(model, models.mesh_1d("pair"), models.BF16, **how)
        losses[cached], casts[cached] = trained(model, keeps=False)
        weights[cached] = models.weights_of(model)
    same = losses[False] == losses[True]
    return differing(weights[False], weights[True]), same, casts[False], casts[True]


def on_a_mesh(name, mesh):
    """What differs with cached weights on a mesh of two dims, in words."""
    found = []
    for cached in (False, True):
        model = models.model_of(
            "uneven", replace(models.recipe_of(name), weight_lifetime="step" if cached else "call")
        )
        model = sharded(model, mesh, models.BF16, on=True)
        optimizer, losses = models.adamw(model), []
        for step in range(2):
            for micro in range(MICRO_BATCHES):
                loss = model(models.batch(MICRO_BATCHES * step + micro, data_rank(mesh)))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, models.weights_of(model)))
    (one, weights), (other, again) = found
    return [*differing(weights, again), *(["losses"] if one != other else [])]


class Kernel(torch.optim.SGD):
    """Writes as kernels do that are given an address: no version counts it."""

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            local = plain_alias(local_itself(p))
            with torch.autograd._unsafe_preserve_version_counter(local):
                local.mul_(0.5)


STEPS_OF = {
    "kernels": lambda params: Kernel(params, lr=0.1),
    "eager": lambda params: f8.optim.AdamW(params, lr=0.1, backend=None),
    "compiled": lambda params: f8.optim.AdamW(params, lr=0.1, backend="aot_eager"),
}


def stepped(name, ways):
    """The losses of each way of a step, without and with cached weights; all have to be equal."""
    found = []
    for cached in (False, True):
        for way in ways:
            model = models.model_of(
                "uneven", replace(models.recipe_of(name), weight_lifetime="step" if cached else "call")
            )
            model = models.shard(fsdp_float8_all_gather(model), models.mesh_1d("pair"), models.BF16)
            optimizer, losses = STEPS_OF[way](model.parameters()), []
            for step in range(3):
                loss = model(models.batch(step, rank()))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append(losses)
    return found


def two_linears(seed, recipe):
    torch.manual_seed(seed)
    return f8.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16(), recipe)


def broadcast(backend):
    """Whether a model multiplies by what was broadcast to it, and whether a backward of older weights raises."""
    sent, x = two_linears(0, f8.recipes.rowwise()), torch.randn(32, 64, dtype=torch.bfloat16)
    model = two_linears(rank(), f8.recipes.rowwise(weight_lifetime="step"))
    call = torch.compile(model, backend=backend) if backend else model
    call(x).float().sum().backward()  # makes codes
    y = call(x)
    f8.parallel.broadcast_parameters(model, group=GROUPS["pair"])
    same = torch.equal(call(x), sent(x))
    try:
        y.float().sum().backward()
    except RuntimeError as error:
        return same, "has been modified by an inplace operation" in str(error)
    return same, False


def sets_of(kind, name):
    """The sets of codes of all weights that travel as codes."""
    weights = {"dense": 6, "turned": 4, "experts": 4}[kind]
    return weights * (1 if models.recipe_of(name).shares_weight_codes() else 2)


def refused():
    """The errors of placements that keep no codes."""
    texts, recipe = [], replace(f8.recipes.rowwise(), weight_lifetime="step")
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")

    def text_of(call):
        try:
            call()
        except ValueError as error:
            texts.append(str(error))

    x = torch.randn(32, 64)
    block = f8.convert(nn.Sequential(nn.Linear(64, 128)), recipe)
    parallelize_module(block, mesh, {"0": f8.parallel.ColwiseParallel()})
    text_of(lambda: block(x))
    plain = models.shard(models.model_of("even", recipe), mesh, models.BF16)
    text_of(lambda: plain(models.batch(0, rank())))
    text_of(lambda: graph_fsdp(models.model_of("even", recipe), mesh))
    return texts


# ---------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    ("kind", "recipe", "backend"),
    [
        ("dense", "rowwise", None),
        ("dense", "tensorwise", "aot_eager"),
        ("dense", models.FOUR_BITS, None),
        ("dense", "mxfp8", None),
        ("turned", "rowwise", None),
        ("experts", "blockwise", None),
    ],
)
def test_shards_make_their_codes_once_a_step_and_have_the_same_bits(ranks, kind, recipe, backend, reshard):
    for different, same, without, cached in ranks.run(with_and_without, kind, recipe, reshard, backend, within="pair"):
        assert (different, same) == ([], True)
        assert min(without) > max(cached)
        # behind the edit by hand between steps, which is before the next one, codes are made once too
        assert cached == [sets_of(kind, recipe)] * STEPS


@pytest.mark.parametrize(("recipe", "ways"), [("rowwise", ["kernels"]), ("tensorwise", ["eager", "compiled"])])
def test_what_a_step_writes_is_seen_though_no_version_counts_it(ranks, recipe, ways):
    for found in ranks.run(stepped, recipe, ways, within="pair"):
        assert found == found[:1] * len(found)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_parameters_that_were_broadcast_have_codes_of_their_own(ranks, backend):
    assert ranks.run(broadcast, backend, within="pair") == [(True, True)] * 2


@pytest.mark.parametrize(("recipe", "mesh"), [("rowwise", "FSDP + TP"), ("blockwise", "HSDP")])
def test_shards_of_parts_and_of_replicas(ranks, recipe, mesh):
    assert ranks.run(on_a_mesh, recipe, mesh, within="all") == [[]] * 4


def test_placements_that_keep_no_codes_say_so(ranks):
    for texts in ranks.run(refused, within="pair"):
        assert [each.partition(":")[0] for each in texts] == [
            "weight_lifetime='step'",
            "weight_lifetime='step'",
            "graph_fsdp",
        ]
        assert "it is a DTensor" in texts[0]
        assert "FSDP all-gathers it in high precision" in texts[1]
