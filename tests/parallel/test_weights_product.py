"""Every recipe's weights, gathered as codes and trained as codes, over every mesh: 20 steps, resumed, and resharded.

    way           what runs                                     has the bits of
    gathered      fsdp_float8_all_gather, AdamW                 stock fully_shard, which gathers values
    parameters    weight_lifetime="parameter", MasterWeights      FP8 layers over bfloat16 copies of float32 masters

A run is saved after half of its steps. Who loads it, on as many ranks or on three in place of two, goes on with the
same losses, and ends with the same weights.
"""

from __future__ import annotations

from itertools import product

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import GROUPS, shared_ranks
from masters import ByHand, scaled_by_values
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import parallel

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.nn.layer.codes_in_state import codes_and_scales
from fp8compile.testing.bits import difference

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)
RECIPES = {
    name: f8.recipes.by_name(name) for name in ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8")
} | {"delayed": f8.recipes.delayed(history=4), models.SQUARES: models.recipe_of(models.SQUARES)}
WAYS = ("gathered", "parameters")
# on which ranks the first half runs, and on which the second
MESHES = {
    "two": ("pair", "pair"),
    "three": ("three", "three"),
    "HSDP": ("HSDP", "HSDP"),
    "FSDP + TP": ("FSDP + TP", "FSDP + TP"),
    "two, then three": ("pair", "three"),
}
BACKENDS = ("eager", "aot_eager")
EVERYTHING = list(product(RECIPES, WAYS, MESHES, BACKENDS))
# each recipe, way, mesh and backend once; `make test-full` runs the others too
DIAGONAL = [
    ("tensorwise", "gathered", "two, then three", "eager"),
    ("rowwise", "parameters", "FSDP + TP", "eager"),
    ("rowwise_bf16_wgrad", "gathered", "HSDP", "aot_eager"),
    ("blockwise", "parameters", "three", "eager"),
    ("mxfp8", "parameters", "two", "aot_eager"),
    ("mxfp8", "parameters", "two, then three", "eager"),
    ("tensorwise", "parameters", "HSDP", "eager"),
    ("delayed", "parameters", "two, then three", "eager"),
    ("delayed", "gathered", "two", "eager"),
    (models.SQUARES, "parameters", "two, then three", "eager"),
]
HALF = 10
# dim and hidden where tensor parallel ranks may not cut blocks of a parameter; FSDP2 does cut those of ``down``
ALONG_BLOCKS = {"blockwise": (48, 512), "mxfp8": (48, 256), models.SQUARES: (48, 256)}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def model_on(mesh, recipe, way, backend, *, reference, seed):
    """A sharded model with its optimizer; None on a rank that is not in the mesh."""
    if dist.get_rank() >= {"pair": 2, "three": 3}.get(mesh, 4):
        return None
    torch.manual_seed(seed)
    sizes = ALONG_BLOCKS.get(recipe) if (way, mesh) == ("parameters", "FSDP + TP") else None
    model, where = models.Model(*(sizes or models.SIZES["uneven"])), None
    model = model if way == "gathered" else model.bfloat16()
    if mesh in ("pair", "three"):
        where, group = models.mesh_1d(mesh), GROUPS[mesh]
    elif mesh == "HSDP":
        where, group = models.mesh_2d("replicate", "shard"), GROUPS["all"]
    else:
        both = models.mesh_2d("dp", "tp")
        where, group = both["dp"], both["dp"].get_group()
        for block in model.blocks:
            plan = {f"inner.{name}": parallel.ColwiseParallel(use_local_output=False) for name in ("gate", "up")}
            parallel.parallelize_module(block, both["tp"], plan | {"inner.down": parallel.RowwiseParallel()})
    options = {"amax_group": group} if recipe == "delayed" else {}
    if way == "parameters" and not reference:
        options |= {"weight_lifetime": "parameter", "keep_initial": True}
    f8.convert(model, RECIPES[recipe], filter=lambda _, fqn: fqn != "head", **options)
    if way == "parameters" and reference:
        scaled_by_values(model)
    if way == "gathered" and not reference:
        f8.parallel.fsdp_float8_all_gather(model)
    policy = models.BF16 if way == "gathered" else MixedPrecisionPolicy()
    models.shard(model, where, policy, backend=None if backend == "eager" else backend)
    if way == "gathered":
        return model, models.adamw(model)
    if reference:
        return model, ByHand(model, lr=3e-3)
    return model, f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=3e-3)


def steps_of(run, mesh, first, steps=HALF):
    rank = dist.get_rank() // 2 if mesh == "FSDP + TP" else dist.get_rank()
    return models.trained(run[0], steps, rank, optimizer=run[1], start=first)


def state_of(run):
    return {"model": run[0].state_dict(), "optimizer": run[1].state_dict()}


def loaded(run, mesh, folder):
    """The run goes on where the checkpoint was made."""
    steps_of(run, mesh, 50, 1)  # makes the optimizer's state
    state = state_of(run)
    dcp.load(state, checkpoint_id=folder, process_group=GROUPS.get(mesh))
    run[0].load_state_dict(state["model"])
    run[1].load_state_dict(state["optimizer"])
    return run


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def bits_of(run, recipe):
    """All that a run ends with, whole: weights, or the masters of those that are codes, and these codes."""
    model, optimizer = run
    found = {}
    for name, module in model.named_modules():
        name = name.replace("_orig_mod.", "")
        if not isinstance(module, f8.Linear):
            continue
        if (state := module.delayed_state()) is not None:
            # at 0 is the amax of what codes were made of
            found |= {f"{name} history": whole(state.amax_history)[:, 1:], f"{name} multiplier": state.multiplier}
        weight = module.weight
        if module.is_quantized():
            found[f"{name} master"] = optimizer.state[weight]["master"]
            found |= {f"{name} {key}": getattr(module, key) for key in codes_and_scales("weight", module.weight)}
        elif isinstance(optimizer, ByHand):
            found[f"{name} master"] = optimizer.pairs[weight].detach()
            found |= {f"{name} {key}": value for key, value in codes_of(whole(weight.detach()), recipe).items()}
        else:
            found[f"{name} weight"] = weight.detach()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or not any(each in name for each in ("gate", "up", "down")):
            found[name.replace("_orig_mod.", "")] = parameter.detach()
    return {name: whole(tensor) for name, tensor in found.items()}


def codes_of(weight, recipe):
    """What a weight's values are quantized to; of delayed scaling only who cast them knows by what."""
    how, found = RECIPES[recipe], {}
    ends = {} if recipe == "delayed" else {"": how.weight}
    ends |= {} if how.shares_weight_codes() else {"_for_grad_input": how.weight_for_grad_input}
    for end, quantizer in ends.items():
        q = f8.quantize(weight, quantizer)
        found |= {f"weight_codes{end}": q.codes, f"weight_scale{end}": q.scale}
    return found


def differing(found, expected):
    """What differs of what is expected, in words."""
    words = {name: difference(found[name], each) for name, each in expected.items()}
    return [f"{name}: {said}" for name, said in words.items() if said is not None]


def outcome(recipe, way, mesh, backend, folder):
    """What differs, in words, from the other way to compute it."""
    before, after = MESHES[mesh]
    options = (recipe, way, backend)
    run = model_on(before, *options, reference=False, seed=0)
    other = model_on(before, *options, reference=True, seed=0)
    found = []
    if run is not None:
        if steps_of(run, before, 0) != steps_of(other, before, 0):
            found.append("losses of the first half")
        dcp.save(state_of(run), checkpoint_id=f"{folder}/run", process_group=GROUPS.get(before))
        if before != after:
            dcp.save(state_of(other), checkpoint_id=f"{folder}/other", process_group=GROUPS.get(before))
    if before != after:
        dist.barrier()
    again = model_on(after, *options, reference=False, seed=7)
    if again is None:
        return found
    loaded(again, after, f"{folder}/run")
    if before != after:
        other = loaded(model_on(after, *options, reference=True, seed=7), after, f"{folder}/other")
    expected, bits = steps_of(other, after, HALF), bits_of(other, recipe)
    for words, each in [("resumed", again)] + ([] if before != after else [("straight", run)]):
        if steps_of(each, after, HALF) != expected:
            found.append(f"losses of the second half, {words}")
        found += [f"{words}: {said}" for said in differing(bits_of(each, recipe), bits)]
    return found


# ---------------------------------------------------------------------------------- what they answer


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in DIAGONAL else pytest.mark.slow, id=" ".join(case)) for case in EVERYTHING],
)
def test_weights_that_are_codes_have_the_bits_of_values(ranks, tmp_path, case):
    within = {"two": "pair", "three": "three"}.get(case[2], "all")
    answers = ranks.run(outcome, *case, str(tmp_path), within=within)
    assert answers == [[]] * len(answers)
