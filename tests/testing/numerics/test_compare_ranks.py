"""f8.testing.compare_ranks on two processes: nothing is found where nothing is wrong, and planted faults are named."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from unittest import mock

import fsdp_models as models
import pytest
import torch
from gloo_ranks import shared_ranks
from torch import nn

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.numerics.rank_findings import RankFinding, merged

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="what differs is shown on one version before the last")
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "rowwise_bf16_wgrad", "delayed")


@pytest.fixture(scope="module")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def build(mesh, recipe, sequence, fault):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    layers = {"up": nn.Linear(64, 128), "act": nn.SiLU(), "down": nn.Linear(128, 64)}
    model = nn.Sequential(OrderedDict(layers))
    model = f8.convert(model.bfloat16(), f8.recipes.by_name(recipe))
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    if mesh is None:
        return model, (x,)
    if fault == "weight":
        with torch.no_grad():
            model[2].weight[3, 5] += 1
    if sequence:
        from torch.distributed.tensor import Shard

        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        x = x.detach().chunk(2, dim=1)[mesh.get_local_rank()].requires_grad_()
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    if fault == "activation":
        model[1].register_forward_hook(lambda module, args, y: -y)
    return model, (x,)


def build_sharded(mesh, how):
    """Every rank has the whole batch, so that gradients are those of one process."""
    from torch.distributed.fsdp import fully_shard

    model = models.model_of("even", f8.recipes.blockwise()).bfloat16()
    tokens = torch.randint(models.NUM_SYMBOLS, (4, 17), generator=torch.Generator().manual_seed(1))
    if how == "graph_fsdp" and mesh is not None:
        f8.parallel.graph_fsdp(model, mesh)
    elif mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, tokens


def loss(y):
    return y.float().square().mean()


def amax_of_the_local_shard():
    """The fault of titan#3109: each rank takes the amax of its own part for that of the whole."""
    from fp8compile.ops.layer import quantize_over_ranks

    return mock.patch.object(quantize_over_ranks, "all_reduce_amax", lambda amax, group: amax)


def compared(recipe, fault=None, sequence=None):
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        return None
    with amax_of_the_local_shard() if fault == "amax" else contextlib.nullcontext():
        made = functools.partial(build, recipe=recipe, sequence=sequence, fault=fault)
        found = f8.testing.compare_ranks(made, mesh, loss=loss)
    return [(each.layer, each.op, each.operand, each.what, each.ranks) for each in found.findings], str(found)


def compared_sharded(how):
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        return None
    return str(f8.testing.compare_ranks(functools.partial(build_sharded, how=how), mesh))


# ---------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_that_compute_what_one_process_does_have_no_findings(ranks, recipe):
    one, other, *_ = ranks.run(compared, recipe)
    assert one == other == ([], "2 ranks compute the same as one process: 6 GEMMs, each with its operands")


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_ranks_that_share_the_tokens_too_have_no_findings(ranks, recipe):
    one, other, *_ = ranks.run(compared, recipe, None, "sequence")
    assert one == other == ([], "2 ranks compute the same as one process: 6 GEMMs, each with its operands")


@pytest.mark.parametrize("how", ["fully_shard", "graph_fsdp"])
def test_weights_that_fsdp_gathers_are_compared_too(ranks, how):
    found = ranks.run(compared_sharded, how)[0]
    assert found == "2 ranks compute the same as one process: 18 GEMMs, each with its operands"


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_an_amax_of_the_local_shard_is_named_by_layer_product_and_operand(ranks, recipe):
    one, other, *_ = ranks.run(compared, recipe, "amax")
    assert one == other, "every rank has the findings of all"
    layer, op, operand, what, _ = one[0][0]
    # down's input is what ranks cut along its features, so it is the first tensor with an amax over ranks
    assert (layer, op, operand) == ("down", "output", "input")
    assert what == ("global scale" if recipe == "nvfp4" else "scale")
    assert one[1].startswith(f"2 ranks first differ from one process at down, output, {what} of input on rank")


def test_faults_outside_of_the_products_are_told_from_those_within(ranks):
    found, _ = ranks.run(compared, "rowwise", "weight")[0]
    assert found[0] == ("down", "output", "weight", "values", (0, 1))
    found, _ = ranks.run(compared, "rowwise", "activation")[0]
    assert found[0] == ("down", "output", "input", "values", (0, 1))


def test_findings_of_ranks_are_merged_in_the_order_of_execution():
    def finding(order, what):
        return RankFinding(order=order, layer="up", op="output", operand="input", what=what, detail=what)

    found = merged([(0, [finding(1, "scale"), finding(4, "codes")]), (1, [finding(0, "values"), finding(1, "scale")])])
    assert [(each.order, each.what, each.ranks) for each in found] == [
        (0, "values", (1,)), (1, "scale", (0, 1)), (4, "codes", (0,)),
    ]  # fmt: skip
