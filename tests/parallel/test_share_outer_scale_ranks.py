"""Layers that share an outer scale have the bits of one process under tensor parallelism and FSDP2."""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.bits import difference

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups of ranks in a subclass need PyTorch 2.12")

GROUP = ("q_proj", "k_proj", "v_proj")
RECIPES = {"tensorwise": f8.recipes.tensorwise(), "nvfp4": f8.recipes.nvfp4()}


class Projections(nn.Module):
    """Layers of one input; the largest weight is in the last rows of the last layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for index, name in enumerate(GROUP):
            setattr(self, name, nn.Linear(64, 48 + 16 * index, bias=False))
        with torch.no_grad():
            self.v_proj.weight[-1, -1] = 3.0

    def forward(self, x):
        return [self.get_submodule(name)(x) for name in GROUP]


def converted(recipe):
    return f8.convert(Projections().bfloat16(), RECIPES[recipe], filter="*", share_outer_scale=[GROUP])


def tokens():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def step(model):
    """Outputs before and after a step; the second ones need the amaxes of changed weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = model(tokens())
    sum(each.float().square().sum() for each in found).mul(2**-10).backward()
    optimizer.step()
    return [*found, *model(tokens())]


def placed(recipe, way):
    model, mesh = converted(recipe), DeviceMesh.from_group(GROUPS["pair"], "cpu")
    if way == "tp":
        # local outputs are rows of the whole ones
        return parallelize_module(model, mesh, dict.fromkeys(GROUP, ColwiseParallel()))
    if way == "codes":
        f8.parallel.fsdp_float8_all_gather(model)
    return fully_shard(model, mesh=mesh)


def differences(recipe, way):
    whole, model = step(converted(recipe)), placed(recipe, way)
    rank, found = GROUPS["pair"].rank(), step(model)
    if way == "tp":
        whole = [each.chunk(2, -1)[rank] for each in whole]
    wrong = [said for pair in zip(found, whole, strict=True) if (said := difference(*pair)) is not None]
    again = converted(recipe)
    step(again)
    exported = dict(f8.export.tensors(again, "compressed-tensors"))
    stream = dict(f8.export.tensors(model, "compressed-tensors"))
    wrong += [name for name in exported if not torch.equal(*(x[name].view(torch.uint8) for x in (exported, stream)))]
    return wrong


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["tp", "fsdp", "codes"])
def test_outputs_and_exports_have_the_bits_of_one_process(recipe, way):
    assert shared_ranks().run(differences, recipe, way, within="pair") == [[]] * 2


def refusals():
    model, mesh = converted("nvfp4"), DeviceMesh.from_group(GROUPS["pair"], "cpu")
    for name in GROUP:
        fully_shard(model.get_submodule(name), mesh=mesh)
    said = []
    for run in (
        lambda: fully_shard(model, mesh=mesh)(tokens()),
        lambda: f8.parallel.graph_fsdp(converted("nvfp4"), mesh),
    ):
        try:
            run()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return ["into the same fully_shard unit" in said[0], "which graph_fsdp does not support" in said[1]]


def test_layers_in_several_units_and_graph_fsdp_are_refused():
    assert shared_ranks().run(refusals, within="pair") == [[True, True]] * 2
