"""Experts on ranks beside FSDP of another dim of the mesh: each pair of ranks shares the rows of what both have."""

from __future__ import annotations

import expert_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8compile as f8
from fp8compile import parallel
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.bits import bits

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def spread(kind, recipe, policy, *, in_graph=False, as_codes=False, **options):
    """A mixture whose experts are cut over two ranks, and whose parameters over two others."""
    mesh = models.mesh_2d("fsdp", "ep")
    model = expert_models.mixture_of(kind, 4, models.recipe_of(recipe))
    plan = {name: parallel.ExpertParallel(**options) for name, _ in model.named_modules() if name.endswith("experts")}
    assert plan
    parallelize_module(model, mesh["ep"], plan)
    if in_graph:
        return parallel.graph_fsdp(model, mesh["fsdp"], mp_policy=models.POLICIES[policy])
    model = parallel.fsdp_float8_all_gather(model) if as_codes else model
    return fully_shard(model, mesh=mesh["fsdp"], mp_policy=models.POLICIES[policy], reshard_after_forward=True)


def in_the_graph_and_not(kind, recipe, policy, options, backend):
    """Losses of both ways, and weights of this rank that differ."""
    found = []
    for in_graph in (True, False):
        model = spread(kind, recipe, policy, in_graph=in_graph, **options)
        call = torch.compile(model, fullgraph=True, backend=backend) if backend and in_graph else model
        losses = models.trained(call, 4, dist.get_rank(), optimizer=models.adamw(model))
        found.append((losses, {name: p.to_local().detach() for name, p in model.named_parameters()}))
    (losses, own), (expected, others) = found
    return losses, expected, [name for name in own if not torch.equal(bits(own[name]), bits(others[name]))]


# aot_eager takes norms of transformers apart, which rounds otherwise than eager mode: compiled, a model without them
@pytest.mark.parametrize(
    ("kind", "recipe", "policy", "options", "backend"),
    [
        ("Qwen3-MoE", "rowwise", "bf16", {}, None),
        ("Qwen3-MoE", "blockwise", "bf16", {"capacity": 64}, None),
        ("gpt-oss", "tensorwise", "fp32", {"float8_dispatch": False}, None),
        ("gpt-oss", "rowwise", "bf16", {}, "aot_eager"),
        pytest.param("gpt-oss", "mxfp8", "bf16", {"capacity": 64}, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_the_graph_trains_as_fully_shard_does(ranks, kind, recipe, policy, options, backend):
    for losses, expected, unlike in ranks.run(in_the_graph_and_not, kind, recipe, policy, options, backend):
        assert losses == expected
        assert unlike == []


def as_codes_and_not(kind, recipe):
    """Losses and this rank's weights, of a gather of codes and of one of values, and what the report says of both."""
    found, said = [], []
    for as_codes in (False, True):
        model = spread(kind, recipe, "bf16", as_codes=as_codes)
        losses = models.trained(model, 3, dist.get_rank())
        found.append((losses, *(bits(p.to_local().detach()).tolist() for p in model.parameters())))
        said += {row.gathered for row in f8.conversion_report(model).rows if row.experts}
    return found[0] == found[1], said


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (models.FOUR_BITS, "quantized data, separate for each pass"),
        pytest.param("blockwise", "quantized data", marks=pytest.mark.slow),
    ],
)
def test_experts_of_each_rank_are_gathered_as_codes(ranks, recipe, said):
    assert ranks.run(as_codes_and_not, "gpt-oss", recipe) == [(True, ["", said])] * 4


def grouped_directly():
    """The error of a product of rows that no rank sent to their experts."""
    model = spread("Qwen3-MoE", "rowwise", "bf16", in_graph=True)
    experts = model.blocks[0].mlp.experts
    experts.forward = lambda *_: f8.grouped_linear(
        torch.zeros(4, 64).bfloat16(), experts.gate_up_proj, torch.arange(4, dtype=torch.int32), recipe=experts.recipe
    )
    try:
        model(models.batch(0, 0))
    except TypeError as error:
        return str(error)


def test_a_product_of_rows_that_nobody_sent_is_refused(ranks):
    for text in ranks.run(grouped_directly):
        assert "experts of `weight` are sharded over ranks" in text
        assert "expert_routes" in text
