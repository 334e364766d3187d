"""Linears by another name under FSDP: a transposed weight, gathered as codes or as it is, has one process's bits."""

from __future__ import annotations

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from torch import nn

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.parallel import fsdp_float8_all_gather, graph_fsdp
from fp8compile.testing.bits import bits

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def with_conv1d(recipe, **options):
    """A model whose linears in blocks are transformers' Conv1D."""
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = models.Model(*models.SIZES["uneven"])
    for block in model.blocks:
        for name, linear in block.inner.items():
            conv = block.inner[name] = Conv1D(linear.out_features, linear.in_features)
            nn.init.normal_(conv.weight, std=0.1)
    return f8.convert(model, models.recipe_of(recipe), filter=lambda _, fqn: fqn != "head", **options)


def ways_of_training(recipe, policy, ways):
    losses, weights = models.one_process(with_conv1d(recipe), policy, 4)
    assert len(set(losses)) == 4
    found = []
    for way in ways:
        model, mesh = with_conv1d(recipe), models.mesh_1d("pair")
        if way == "graph":
            model = graph_fsdp(model, mesh, mp_policy=models.POLICIES[policy])
        else:
            if way == "codes":
                fsdp_float8_all_gather(model)
                rows = [row for row in f8.conversion_report(model).rows if row.converted]
                assert len(rows) == 6
                assert not any("param_dtype:" in row.gathered for row in rows)
            model = models.shard(model, mesh, models.POLICIES[policy])
        own = models.trained(model, 4, dist.get_rank() % 2)
        after = models.weights_of(model)
        found += [f"{way}: {name}" for name in weights if not torch.equal(bits(weights[name]), bits(after[name]))]
        found += [f"{way}: losses {own}, not {losses}"] * (own != losses)
    return found


EVERY = ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", models.FOUR_BITS]
CI = ["rowwise", "blockwise"]


@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=() if each in CI else pytest.mark.slow) for each in EVERY]
)
def test_trains_as_one_process_does(ranks, recipe):
    assert ranks.run(ways_of_training, recipe, "bf16", ("codes", "graph"), within="pair") == [[]] * 2
