"""FSDP2's ``reshard_after_forward=2`` on four ranks, whose backward gathers what two of them have kept.

What trains as with ``True``: tests/pairs. Here are parameters that are codes themselves, and what is refused.
"""

from __future__ import annotations

import expert_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from masters import train
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.parallel import fsdp_float8_all_gather

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def losses_of_codes(recipe, after):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 145), nn.ReLU(), nn.Linear(145, 64)).bfloat16()
    f8.convert(model, models.recipe_of(recipe), weight_lifetime="parameter")
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=models.mesh_1d("all"), reshard_after_forward=after)
    fully_shard(model, mesh=models.mesh_1d("all"))
    return train(model, f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.02), 3)


def both_ways(recipe):
    return losses_of_codes(recipe, 2) == losses_of_codes(recipe, after=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_parameters_that_are_codes(ranks, recipe):
    assert ranks.run(both_ways, recipe) == [True] * 4


def sharded(after):
    model = fsdp_float8_all_gather(models.model_of("even", f8.recipes.rowwise()))
    return models.shard(model, models.mesh_1d("all"), models.BF16, reshard_after_forward=after)


def written_after_an_evaluation():
    """Losses after weights were changed behind an evaluation: expected, with reshard(), and the error without."""
    batch, found = models.batch(0, dist.get_rank()), []
    for after in (True, 2, 2):
        model = sharded(after)
        with torch.no_grad():
            model(batch)
            for module in model.modules() if len(found) < 2 else ():
                if isinstance(module, FSDPModule):
                    module.reshard()
            for parameter in model.parameters():
                parameter.mul_(1.5)
        try:
            found.append(model(batch).item())
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_weights_that_changed_after_a_forward_alone(ranks):
    for expected, resharded, error in ranks.run(written_after_an_evaluation):
        assert resharded == expected
        assert "weight was modified after a forward without a backward" in error
        assert "Call reshard() on the FSDP modules" in error


def cut_within_experts():
    model = fsdp_float8_all_gather(expert_models.mixture_of("torchtitan", 4, f8.recipes.blockwise()))
    options = {"mesh": models.mesh_1d("all"), "reshard_after_forward": 2}
    fully_shard(model.blocks[0], **options, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None)
    try:
        model.blocks[0](torch.randn(4, expert_models.DIM))
    except ValueError as error:
        return str(error)
    return "nothing is raised"


def test_experts_that_are_cut_within_their_matrices(ranks):
    for text in ranks.run(cut_within_experts):
        assert "reshard_after_forward=2: gate_up is sharded along dim 1" in text
        assert "Pass True or False for its module" in text
