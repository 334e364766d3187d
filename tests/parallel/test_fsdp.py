"""Stock FSDP2 with an FP8 all-gather trains as it does without, bit for bit: weights, codes, scales, losses.

Against one process, the gradients' sum over ranks is the only other arithmetic: of two ranks, in float32, it is one
addition and a division by two, which one process does as well, so there the bits are the same, too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import parallel

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.ops import collectives
from fp8compile.parallel import fsdp_float8_all_gather
from fp8compile.parallel.fsdp2 import weight_scales
from fp8compile.testing.bits import bits

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)
RECIPES = {"tensorwise": f8.recipes.tensorwise, "blockwise": f8.recipes.blockwise}
SCALES = ("fp32", "pow2")
MESHES = ("1-D", "three", "HSDP", "FSDP + TP")
SQUARES = {models.SQUARES: partial(f8.recipes.mxfp8, weight_block=(32, 32))}
EVERYTHING = list(product(RECIPES, SCALES, models.POLICIES, models.SIZES, MESHES))
# each value of each with each of the others
PAIRWISE = [
    (recipe, scale, policy, sizes, mesh)
    for index, (mesh, recipe) in enumerate(product(MESHES, RECIPES))
    for scale, policy, sizes in [
        (SCALES[index % 2], ("bf16", "fp32")[index // 2 % 2], ("uneven", "even")[index // 4 % 2]),
        (SCALES[1 - index % 2], ("bf16", "fp32")[(index + 1) // 2 % 2], ("even", "uneven")[index // 4 % 2]),
    ]
]
PAIRWISE += [
    (models.SQUARES, "e8m0_rceil", "bf16", "uneven", "1-D"),
    (models.SQUARES, "e8m0_rceil", "bf16", "even", "three"),
    (models.SQUARES, "e8m0_floor", "fp32", "uneven", "HSDP"),
    (models.SQUARES, "e8m0_floor", "fp32", "even", "FSDP + TP"),
]


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def recipe_of(name, scale="fp32"):
    return (RECIPES | SQUARES)[name](scale=scale)


def sharded(model, mesh, policy, *, on, tp=False, **options):
    """The model as the user shards it; None on a rank that is in no group of the mesh.

    ``on`` is whether codes are gathered, or the arguments of what asks for that.
    """
    if mesh == "three" and dist.get_rank() == 3:
        return None
    where = models.mesh_1d({"1-D": "pair", "three": "three"}[mesh]) if mesh in ("1-D", "three") else None
    if mesh == "HSDP":
        where = models.mesh_2d("replicate", "shard")
    if mesh == "FSDP + TP":
        both = models.mesh_2d("dp", "tp")
        where, tensor_parallel = both["dp"], both["tp"]  # once: graphs are guarded by which object a mesh is
        for block in model.blocks:
            plan = {f"inner.{name}": parallel.ColwiseParallel(use_local_output=False) for name in ("gate", "up")}
            down = {"inner.down": parallel.RowwiseParallel()}
            parallel.parallelize_module(block, tensor_parallel, plan | down)
    if on is not False:
        fsdp_float8_all_gather(model, **({} if on is True else on))
    return models.shard(model, where, policy, **options)


def data_rank(mesh):
    """Whose batch a rank reads: ranks of one tensor-parallel group read the same."""
    return dist.get_rank() // 2 if mesh == "FSDP + TP" else dist.get_rank()


def differing(one, other):
    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


def on_and_off(recipe, scale, policy, sizes, mesh, steps):
    """What differs between the two, in words."""
    losses, weights = {}, {}
    for on in (False, True):
        model = models.model_of(sizes, recipe_of(recipe, scale))
        model = sharded(model, mesh, models.POLICIES[policy], on=on)
        if model is None:
            return []
        losses[on] = models.trained(model, steps, data_rank(mesh))
        weights[on] = models.weights_of(model)
    found = differing(weights[False], weights[True])
    return found if losses[False] == losses[True] else [*found, f"losses {losses}"]


@pytest.mark.parametrize("case", PAIRWISE, ids=" ".join)
def test_all_gather_on_and_off(ranks, case):
    assert not any(ranks.run(on_and_off, *case, 5, within=models.WITHIN[case[-1]]))


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYTHING, ids=" ".join)
def test_all_gather_on_and_off_everywhere(ranks, case):
    assert not any(ranks.run(on_and_off, *case, 10, within=models.WITHIN[case[-1]]))


def against_one_process(recipe, policy, sizes, steps):
    expected, weights = models.one_process(models.model_of(sizes, recipe_of(recipe)), policy, steps, 2)
    model = sharded(models.model_of(sizes, recipe_of(recipe)), "1-D", models.POLICIES[policy], on=True)
    losses = models.trained(model, steps, dist.get_rank() % 2)
    found = differing(weights, models.weights_of(model))
    return found if losses == expected else [*found, "losses"]


@pytest.mark.parametrize(
    ("recipe", "policy", "sizes"), [("tensorwise", "fp32", "uneven"), ("blockwise", "bf16", "even")]
)
def test_one_process(ranks, recipe, policy, sizes):
    assert ranks.run(against_one_process, recipe, policy, sizes, 20, within="pair") == [[]] * 2


# ---------------------------------------------------------------------------------- what users reported

PLACES = {"all_reduce_amax": collectives, "part_of_weight": weight_scales, "scales_of": weight_scales}
REAL = {name: getattr(module, name) for name, module in PLACES.items()}


def amax_before_the_cast(weight, mesh, size, mp_policy):
    return REAL["part_of_weight"](weight, mesh, size, MixedPrecisionPolicy())


def amax_of_the_fsdp_ranks_alone(amax, group):
    is_tp = group == models.mesh_2d("dp", "tp")["tp"].get_group().group_name
    return amax if is_tp else REAL["all_reduce_amax"](amax, group)


WRONG = {
    # pytorch/ao 4300: a scale of float32 weights with all-gather on, of bfloat16 ones with it off
    "amax before the cast": ("part_of_weight", amax_before_the_cast, ("fp32", "bf16", "even", "1-D")),
    "amax of a local shard": ("all_reduce_amax", lambda amax, group: amax, ("fp32", "fp32", "even", "1-D")),
    # pytorch/ao 4300: the amax over the wrong mesh
    "amax over the FSDP mesh alone": (
        "all_reduce_amax",
        amax_of_the_fsdp_ranks_alone,
        ("fp32", "fp32", "even", "FSDP + TP"),
    ),
    # pytorch/ao 4300: the power of two ignored on the way to the gather
    "power of two dropped": (
        "scales_of",
        lambda amax, quantizer, **others: REAL["scales_of"](amax, replace(quantizer, scale="fp32"), **others),
        ("pow2", "fp32", "even", "1-D"),
    ),
}


def with_wrong(what):
    name, wrong, (scale, policy, sizes, mesh) = WRONG[what]
    setattr(PLACES[name], name, wrong)
    try:
        return on_and_off("tensorwise", scale, policy, sizes, mesh, 3)
    finally:
        setattr(PLACES[name], name, REAL[name])


@pytest.mark.parametrize("what", WRONG)
def test_what_users_reported_would_be_seen(ranks, what):
    """Each mistake that peers made, put in: the tests above would fail."""
    assert all(differ for differ in ranks.run(with_wrong, what))
