"""Weights that a model on several ranks multiplies past their layer: gathered ones, and DTensors, are seen too."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import shared_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.parallel import fsdp_float8_all_gather

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="its FSDP2 gives no module to the ranks of a part")


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


class Block(nn.Module):
    def __init__(self, *, calls, checkpoints=False):
        super().__init__()
        self.a, self.b, self.calls, self.checkpoints = nn.Linear(32, 64), nn.Linear(64, 32), calls, checkpoints

    def second(self, x):
        return self.b(x) if self.calls else F.linear(x, self.b.weight.to(x.dtype), self.b.bias)

    def forward(self, x):
        x = self.a(x).relu()
        return checkpoint(self.second, x, use_reentrant=False) if self.checkpoints else self.second(x)


def told(way):
    """Names of layers that the first forward of a model tells of, and those that the report has then."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    blocks = [Block(calls=index != 1, checkpoints=way == "checkpointed") for index in range(3)]
    model = f8.convert(nn.Sequential(*blocks), f8.recipes.rowwise(), filter="*")
    if way == "tensor parallel":
        for index in range(3):
            plan = {"a": ColwiseParallel(), "b": RowwiseParallel()} if index != 1 else {}
            parallelize_module(model[index], mesh, plan)
        spread = nn.Parameter(DTensor.from_local(model[1].b.weight.detach(), mesh))
        model[1].a.bias, model[1].b.bias, model[1].b.weight = None, None, spread
        model[1].second = lambda x: F.linear(DTensor.from_local(x, mesh), spread).to_local()
    else:
        for block in model:
            if way == "blocks are compiled":
                block.compile(backend="aot_eager")
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    with warnings.catch_warnings(record=True) as every:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(8, 32)).sum().backward()
    said = [str(each.message) for each in every if "without calling the layer's forward: 1.b" in str(each.message)]
    rows = f8.conversion_report(model).rows
    hooks = sum(len(module._forward_hooks) for module in model.modules() if type(module) is Block)
    return len(said), [row.fqn for row in rows if row.past_forward], hooks


WAYS = ("eager", "checkpointed", "blocks are compiled", "tensor parallel")


@pytest.mark.parametrize("way", WAYS)
def test_the_first_forward_tells_of_a_weight_that_ranks_share(ranks, way):
    assert ranks.run(told, way) == [(1, ["1.b"], 0)] * 4


def refused():
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = f8.convert(nn.Sequential(Block(calls=False)), f8.recipes.rowwise(), filter="*")
    fsdp_float8_all_gather(model)
    fully_shard(model, mesh=mesh)
    with pytest.raises(TypeError, match="is not supported for a weight with two sets of quantized data"):
        model(torch.randn(8, 32))
    return torch._C._len_torch_dispatch_stack()


def test_gathered_codes_are_multiplied_by_nobody_else(ranks):
    assert ranks.run(refused) == [0] * 4
