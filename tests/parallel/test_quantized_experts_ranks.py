"""Experts whose weights are codes, on ranks: the bits of FP8 experts over bfloat16 copies of float32 masters.

FSDP2 cuts them along experts, along N or along K; expert parallelism along experts, with FSDP2 beside it or not. The
reference has the same ranks, so sums over them are in one order.
"""

from __future__ import annotations

from unittest.mock import patch

import expert_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import GROUPS, shared_ranks
from masters import ByHand
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8compile as f8
from fp8compile import parallel
from fp8compile._compat import TORCH_VERSION, local_itself
from fp8compile.nn.layer.codes_in_state import codes_and_scales
from fp8compile.tensor import QuantizedParameter, is_quantized_parameter
from fp8compile.testing.bits import difference

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)
STEPS = 3


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def on_ranks(
    kind, count, recipe, where, backend=None, *, quantized, seed=0, group="pair", is_checkpointed=False, **shard
):
    """A model and its optimizer; ``where`` is the dim that FSDP2 cuts on a group, or "EP", or "EP + FSDP"."""
    options = {"weight_lifetime": "parameter", "keep_initial": True} if quantized else {}
    model = expert_models.mixture_of(kind, count, models.recipe_of(recipe), seed=seed, dtype=torch.bfloat16, **options)
    if is_checkpointed:
        model.is_checkpointed = True
        parallel.fsdp_float8_all_gather(model, checkpointed=True)
    mesh, names = None, [name for name, _ in model.named_modules() if name.endswith("experts")]
    if isinstance(where, str):
        both = models.mesh_2d("fsdp", "ep")
        plan = {name: parallel.ExpertParallel(float8_dispatch=False) for name in names}
        parallelize_module(model, both["ep"], plan)
        mesh = both["fsdp"] if where == "EP + FSDP" else None
    if backend is not None:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=backend)
    if where == "EP + FSDP":
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    elif where != "EP":
        place = {"shard_placement_fn": lambda p: Shard(where) if p.ndim == 3 else None} if where else {}
        models.shard(model, models.mesh_1d(group), MixedPrecisionPolicy(), **place, **shard)
    if not quantized:
        return model, ByHand(model, lr=3e-3)
    return model, f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=3e-3)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def differing(model, reference):
    """Which codes and scales are not those of the reference's weights."""
    found = []
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if not is_quantized_parameter(local_itself(mine)):
            found.append((name, difference(whole(mine.detach()), whole(other.detach()))))
            continue
        quantizers = [own.quantizer for own in local_itself(mine).sets()]
        parts = QuantizedParameter.of(whole(other.detach()), *quantizers, batch=mine.ndim - 2).parts()
        for (key, part), expected in zip(codes_and_scales(name, mine).items(), parts, strict=True):
            found.append((key, difference(whole(part.detach()), expected)))
    return [f"{name}: {words}" for name, words in found if words is not None]


def beside_the_reference(kind, count, recipe, where, backend):
    rank = dist.get_rank() if isinstance(where, str) else dist.get_rank() % 2
    runs = [on_ranks(kind, count, recipe, where, backend, quantized=each) for each in (True, False)]
    losses = [models.trained(model, STEPS, rank, optimizer=optimizer) for model, optimizer in runs]
    found = differing(runs[0][0], runs[1][0])
    return found + [f"losses {losses[0]}, not {losses[1]}"] * (losses[0] != losses[1])


# what FSDP2 cuts: experts unevenly, an expert for one rank alone, matrices within blocks (200 of 400, 100 of 200)
CASES = [
    ("torchtitan", 3, "tensorwise", 0, None),
    ("torchtitan", 1, "blockwise", 0, None),
    ("torchtitan", 2, "rowwise", 0, None),
    ("gpt-oss", 3, "mxfp8", 0, None),
    ("torchtitan", 1, "tensorwise", 1, None),
    ("torchtitan", 1, "blockwise", 1, None),
    ("gpt-oss", 1, "rowwise", 1, None),
    ("torchtitan", 1, "mxfp8", 1, None),
    ("gpt-oss", 1, "rowwise_bf16_wgrad", 2, None),
    ("gpt-oss", 2, "blockwise", 2, None),
    ("gpt-oss", 2, "tensorwise", "EP", None),
    ("gpt-oss", 4, "rowwise", "EP + FSDP", None),
    ("Qwen3-MoE", 4, "blockwise", "EP + FSDP", None),
    ("gpt-oss", 3, "rowwise", 0, "aot_eager"),
    ("torchtitan", 1, "tensorwise", 1, "aot_eager"),
    ("gpt-oss", 4, "mxfp8", "EP + FSDP", "aot_eager"),
    ("gpt-oss", 2, "nvfp4", 0, None),
    ("torchtitan", 1, "nvfp4", 1, None),
    ("torchtitan", 2, models.FOUR_BITS, 0, None),
    ("gpt-oss", 3, models.FOUR_BITS, 0, None),
    ("gpt-oss", 1, models.FOUR_BITS, 1, None),
    ("gpt-oss", 4, models.FOUR_BITS, "EP + FSDP", None),
    ("gpt-oss", 3, models.FOUR_BITS, 0, "aot_eager"),
    ("torchtitan", 1, models.SQUARES, 1, None),
    ("gpt-oss", 4, models.SQUARES, "EP + FSDP", None),
    ("gpt-oss", 3, models.SQUARES, 0, "aot_eager"),
]
SLOW = [
    ("gpt-oss", 4, "nvfp4", "EP + FSDP", None),
    ("torchtitan", 3, "nvfp4", 0, None),
    ("gpt-oss", 1, "nvfp4", 2, None),
    ("gpt-oss", 2, "nvfp4", "EP", None),
    ("gpt-oss", 2, "nvfp4", 0, "aot_eager"),
    ("torchtitan", 1, models.FOUR_BITS, 0, None),
    ("torchtitan", 1, models.FOUR_BITS, 2, None),
    ("gpt-oss", 2, models.FOUR_BITS, "EP", None),
    ("torchtitan", 1, models.FOUR_BITS, 1, "aot_eager"),
]
EVERY = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: " ".join(map(str, case)))
def test_experts_that_are_codes_have_the_bits_of_values(ranks, case):
    within = "all" if isinstance(case[3], str) else "pair"
    answers = ranks.run(beside_the_reference, *case, within=within)
    assert answers == [[]] * len(answers)


WAYS = {
    "kept after forward": {"reshard_after_forward": False},
    "kept by three ranks": {"reshard_after_forward": False, "group": "three"},
    "of three ranks": {"group": "three"},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "checkpointed": {"is_checkpointed": True},
}


def in_this_way(name):
    """What differs from FSDP2 of values, where four experts have two sets of codes of four bits."""
    options = WAYS[name]
    group = options.get("group", "pair")
    rank = GROUPS[group].rank()
    model, optimizer = on_ranks("gpt-oss", 4, models.FOUR_BITS, 0, quantized=True, **options)
    losses = models.trained(model, STEPS, rank, optimizer=optimizer)
    other, by_hand = on_ranks("gpt-oss", 4, models.FOUR_BITS, 0, quantized=False, group=group)
    expected = models.trained(other, STEPS, rank, optimizer=by_hand)
    return differing(model, other) + [f"losses {losses}, not {expected}"] * (losses != expected)


@pytest.mark.parametrize("name", [*list(WAYS)[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in list(WAYS)[2:])])
def test_two_sets_of_codes_in_other_ways(ranks, name):
    within = WAYS[name].get("group", "pair")
    assert ranks.run(in_this_way, name, within=within) == [[]] * (3 if within == "three" else 2)


def cut_at_an_odd_place():
    """What is said where each of two ranks has 201 of 402 rows, two of a column in a byte."""
    with patch.object(expert_models, "INNER", 201):
        try:
            on_ranks("torchtitan", 2, models.FOUR_BITS, 1, quantized=True)
        except TypeError as error:
            return str(error)


def test_bytes_that_ranks_would_share_are_refused(ranks):
    for said in ranks.run(cut_at_an_odd_place, within="pair"):
        assert (
            "[0:201:1] along dim 1 splits bytes that store 2 values each. Split at even positions, or convert this"
            in said
        )
        assert "fsdp_float8_all_gather, which supports split blocks" in said


# ---------------------------------------------------------------------------------- checkpoints


def saved_on_two_and_loaded_on_three(recipe, folder):
    """What differs: losses of the runs, and of one that was saved on two ranks and goes on on three."""
    run, loaded = None, []
    if dist.get_rank() < 2:
        run = on_ranks("gpt-oss", 4, recipe, 0, quantized=True)
        models.trained(run[0], 1, dist.get_rank(), optimizer=run[1])
        dcp.save(run[0].state_dict(), checkpoint_id=folder, process_group=GROUPS["pair"])
        loaded = [whole(each) for each in run[0].state_dict().values()]
    dist.barrier(GROUPS["three"])
    model = expert_models.mixture_of(
        "gpt-oss", 4, models.recipe_of(recipe), seed=1, dtype=torch.bfloat16, weight_lifetime="parameter"
    )
    models.shard(model, models.mesh_1d("three"), MixedPrecisionPolicy())
    parallel.share_scales(model)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder, process_group=GROUPS["three"])
    model.load_state_dict(state)
    own = [whole(each) for each in model.state_dict().values()]
    return [difference(one, other) for one, other in zip(loaded, own, strict=False)]


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4", models.FOUR_BITS])
def test_experts_that_two_ranks_saved_are_loaded_by_three(ranks, recipe, tmp_path):
    answers = ranks.run(saved_on_two_and_loaded_on_three, recipe, str(tmp_path), within="three")
    assert len(answers[0]) > 8
    assert {words for answer in answers for words in answer} == {None}


def reached(where, recipe):
    """Which keys PyTorch's checkpoints lose, or bring back with other bits, of whole tensors and of shards."""
    found = []
    for options in (StateDictOptions(full_state_dict=True), StateDictOptions()):
        model, other = (on_ranks("Qwen3-MoE", 4, recipe, where, quantized=True, seed=seed)[0] for seed in (0, 1))
        for each in (model, other) if where == 0 else ():
            parallel.share_scales(each)
        state = get_model_state_dict(model, options=options)
        set_model_state_dict(other, dict(state), options=options)
        own, loaded = model.state_dict(), other.state_dict()
        assert any(name.endswith("down_proj_codes") for name in state)
        assert state.keys() == own.keys() == loaded.keys()
        found += [difference(whole(own[name]), whole(loaded[name])) for name in own]
    return found


@pytest.mark.parametrize(("where", "recipe"), [("EP", "rowwise"), (0, "tensorwise"), ("EP + FSDP", "nvfp4")])
def test_checkpoints_of_pytorch_reach_experts_on_ranks(ranks, where, recipe):
    for found in ranks.run(reached, where, recipe, within="all" if isinstance(where, str) else "pair"):
        assert len(found) > 20
        assert {*found} == {None}


def drawn_by_chance():
    model, _ = on_ranks("gpt-oss", 2, "tensorwise", 0, quantized=True)
    try:
        f8.MasterWeights(torch.optim.AdamW, model.parameters(), rounding="stochastic")
    except ValueError as error:
        return str(error)


def test_stochastic_rounding_of_experts_on_ranks_is_refused(ranks):
    for said in ranks.run(drawn_by_chance, within="pair"):
        assert "stochastic rounding is not supported for experts sharded over ranks" in said
