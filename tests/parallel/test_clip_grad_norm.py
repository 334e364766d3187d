"""Gradients of models whose parameters lie on several meshes: their norm, their mean, and what FSDP leaves alone."""

from __future__ import annotations

import math

import expert_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import fp8compile as f8
from fp8compile import parallel
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.bits import difference

NORM_TYPES = (2.0, 1.0, 3.0, math.inf)
# PyTorch adds 177,024 elements in float32, on ranks in another order than in one process. Beside a norm in float64 one
# process was off by up to 2.4e-6 (norm type 3), ranks by up to 2.2e-6 (1); beside one another they were by 2.9e-6.
ORDER = 2.0**-17


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- one process


def with_gradients(model, scale=1.0):
    """The model with a gradient for each parameter, which depends on its name alone."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("foreach", [None, False])
def test_plain_gradients_are_clipped_as_pytorch_does(norm_type, dtype, foreach):
    one, other = (with_gradients(models.Model(32, 48).to(dtype)) for _ in range(2))
    one.head.weight.grad = other.head.weight.grad = None
    norm = parallel.clip_grad_norm_(one, 0.5, norm_type, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(other.parameters(), 0.5, norm_type, foreach=foreach)
    assert difference(norm, expected) is None
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert (mine.grad is theirs.grad is None) or difference(mine.grad, theirs.grad) is None


def test_a_gradient_of_a_frozen_parameter_is_clipped_too():
    one, other = (with_gradients(models.Model(32, 48)) for _ in range(2))
    one.embed.weight.requires_grad = False
    expected = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    assert difference(parallel.clip_grad_norm_(one, 0.5), expected) is None
    assert difference(one.embed.weight.grad, other.embed.weight.grad) is None


def test_norms_that_are_none_are_refused():
    model = with_gradients(nn.Linear(4, 4), scale=math.inf)
    assert not parallel.clip_grad_norm_(model, 1.0).isfinite()
    assert parallel.clip_grad_norm_(nn.Linear(4, 4), 1.0) == 0
    for given, options, error, words in (
        ([], {}, TypeError, "`model` is "),
        (model, {"max_norm": -1.0}, ValueError, "`max_norm` is -1.0"),
        (model, {"norm_type": 0}, ValueError, "`norm_type` must be a number above 0"),
        (with_gradients(model, math.nan), {"error_if_nonfinite": True}, RuntimeError, "of order 2.0 of all gradients"),
    ):
        with pytest.raises(error, match=words):
            parallel.clip_grad_norm_(given, **{"max_norm": 1.0, **options})


# ---------------------------------------------------------------------------------- on ranks


def mixture():
    return expert_models.mixture_of("Qwen3-MoE", 4, f8.recipes.rowwise(), dtype=torch.float32)


def spread_over(model, mesh):
    return parallelize_module(model, mesh, {"model.model.layers.*.mlp.experts": parallel.ExpertParallel()})


def placed(how):
    """A model whose parameters lie as ``how`` says."""
    mesh = models.mesh_2d("fsdp", "ep")
    model = mixture()
    if "TP" in how:
        plan = dict.fromkeys(("q_proj", "k_proj", "v_proj"), parallel.ColwiseParallel())
        plan = {f"model.model.layers.*.self_attn.{name}": style for name, style in plan.items()}
        parallelize_module(model, mesh["ep"], plan)
    if "EP" in how:
        spread_over(model, mesh["ep"])
    if "FSDP" in how:
        ignored = parallel.expert_parameters(model) if "beside" in how else set()
        fully_shard(model, mesh=mesh["fsdp"], ignored_params=ignored)
    if "graph" in how:
        parallel.graph_fsdp(model, mesh["fsdp"])
    return with_gradients(model)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def beside_one_process(how):
    """How far norms are from those of one process, and gradients after clipping, relative to the norm."""
    found = []
    for norm_type in NORM_TYPES:
        one, ranked = with_gradients(mixture()), placed(how)
        most = 0.25 * float(nn.utils.get_total_norm([each.grad for each in one.parameters()], norm_type))
        expected = nn.utils.clip_grad_norm_(one.parameters(), most, norm_type)
        norm = parallel.clip_grad_norm_(ranked, most, norm_type)
        assert (type(norm), norm.shape, norm.dtype) == (torch.Tensor, (), torch.float32)
        off = [abs(float(norm / expected) - 1)]
        for mine, theirs in zip(ranked.parameters(), one.parameters(), strict=True):
            off.append(float((whole(mine.grad) - theirs.grad).abs().max() / theirs.grad.abs().max()))
        found.append((max(off), float(norm)))
    return found


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a mesh of two dims beside experts needs PyTorch 2.12")
@pytest.mark.parametrize("how", ["EP", "EP + FSDP", "EP beside FSDP", "TP", "TP + FSDP", "TP + EP", "EP + graph"])
def test_norms_over_meshes_are_those_of_one_process(ranks, how):
    answers = ranks.run(beside_one_process, how)
    for off, _ in (each for found in answers for each in found):
        assert off <= ORDER
    assert len({tuple(norm for _, norm in found) for found in answers}) == 1  # of all ranks the same
    assert answers[0][-1][0] == 0  # a largest magnitude is no sum


def of_an_empty_part(norm_type):
    """The norm of a row that only the first rank has, and of sums that ranks have parts of, with a NaN or without."""
    mesh, rank = DeviceMesh.from_group(GROUPS["pair"], "cpu"), dist.get_rank()
    model = nn.Module()
    for name, placement in (("row", Shard(0)), ("sum", Replicate())):
        own = distribute_tensor(torch.zeros(1, 6), mesh, [placement], src_data_rank=None)
        setattr(model, name, nn.Parameter(own))
    model.row.grad = distribute_tensor(torch.arange(6.0).view(1, 6), mesh, [Shard(0)], src_data_rank=None)
    model.sum.grad = DTensor.from_local(torch.full((1, 6), 1.0 + rank), mesh, [Partial()])
    norm = parallel.clip_grad_norm_(model, 1e9, norm_type)
    model.sum.grad = None
    model.row.grad.to_local().fill_(math.nan)  # on the rank that has it
    return float(norm), float(parallel.clip_grad_norm_(model, 1e9, norm_type))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_parts_that_are_empty_sums_that_are_not_made_and_a_nan_of_one_rank(ranks, norm_type):
    together = torch.cat((torch.arange(6.0), torch.full((6,), 3.0)))
    for norm, bad in ranks.run(of_an_empty_part, norm_type, within="pair"):
        # sums of the ranks' parts are added in another order
        assert norm == pytest.approx(float(together.norm(norm_type)), rel=ORDER)
        assert math.isnan(bad)


# ---------------------------------------------------------------------------------- means


def averaged(recipe):
    """How gradients of this rank's experts differ from one process's, of the mean loss over both ranks' tokens."""
    mesh, rank = DeviceMesh.from_group(GROUPS["pair"], "cpu", mesh_dim_names=("ep",)), dist.get_rank()
    one = expert_models.mixture_of("Qwen3-MoE", 4, models.recipe_of(recipe), dtype=torch.bfloat16)
    ranked = expert_models.mixture_of("Qwen3-MoE", 4, models.recipe_of(recipe), dtype=torch.bfloat16)
    style = parallel.ExpertParallel(float8_dispatch=False)
    layer, others = ranked.blocks[0].mlp.experts, one.blocks[0].mlp.experts
    parallelize_module(layer, mesh, style)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, generator=generator).bfloat16()
    routing = torch.randint(4, (16, 2), generator=generator), torch.rand(16, 2, generator=generator).bfloat16()
    own = slice(8 * rank, 8 * rank + 8)
    layer(x[own], *(each[own] for each in routing)).float().square().mean().backward()
    others(x, *routing).float().square().mean().backward()
    before = [each.grad.to_local().clone() for each in layer.parameters()]
    parallel.average_expert_gradients(layer, 2)
    experts = slice(2 * rank, 2 * rank + 2)
    found = [each.grad.to_local() for each in layer.parameters()]
    expected = [each.grad[experts] for each in others.parameters()]
    return (
        [difference(mine, theirs) for mine, theirs in zip(found, expected, strict=True)],
        [torch.equal(mine, theirs) for mine, theirs in zip(before, expected, strict=True)],
    )


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_gradients_of_experts_become_those_of_the_mean_loss(ranks, recipe):
    for found, before in ranks.run(averaged, recipe, within="pair"):
        assert found == [None, None]  # halves are exact
        assert before == [False, False]


def test_parts_are_a_number():
    with pytest.raises(ValueError, match="`parts` is 0; it must be an int of at least 1"):
        parallel.average_expert_gradients(nn.Linear(2, 2), 0)


# ---------------------------------------------------------------------------------- FSDP over the same ranks


def forgotten():
    """The errors of FSDP over the ranks of the experts; and that it takes a model with what they say to pass."""
    meshes = models.mesh_2d("fsdp", "ep")
    alone = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("ep",))
    said = []
    for function, mesh, over in (
        (parallel.fsdp_float8_all_gather, alone, None),
        (parallel.graph_fsdp, alone, alone),
        (parallel.graph_fsdp, alone, DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("fsdp",))),
        (parallel.graph_fsdp, meshes["ep"], DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("fsdp",))),
    ):
        model = spread_over(mixture(), mesh)
        given = () if over is None else (over,)
        with pytest.raises(ValueError, match="sharded over ranks by") as error:
            function(model, *given)
        said.append(str(error.value))
        function(model, *given, ignored_params=parallel.expert_parameters(model))
    parallel.fsdp_float8_all_gather(spread_over(mixture(), meshes["ep"]))  # another dim is left
    assert not parallel.expert_parameters(mixture())
    return said


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="FSDP beside experts needs PyTorch 2.12")
def test_fsdp_over_the_ranks_of_experts_says_what_to_pass(ranks):
    first = "model.model.layers.0.mlp.experts.gate_up_proj and 3 more parameters are sharded over ranks"
    for said in ranks.run(forgotten):
        names = ["fsdp_float8_all_gather", *["graph_fsdp"] * 3]
        assert [each.partition(" are ")[0] for each in said] == [
            f"{name}: {first}".partition(" are ")[0] for name in names
        ]
        assert all("ignored_params=fp8compile.parallel.expert_parameters(model)" in each for each in said)
