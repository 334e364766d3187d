"""What people do with sharded models, with experts whose weights travel as codes: the bits of stock `fully_shard`."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace

import expert_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import GROUPS, shared_ranks
from test_fsdp_experts import along, differing, needs_groups, sharded
from test_fsdp_use import CountedAllGather, counted
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fp8compile as f8
from fp8compile import _compat
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.ops import collectives
from fp8compile.parallel import fsdp_float8_all_gather, graph_fsdp
from fp8compile.testing.bits import difference

pytestmark = needs_groups


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def rank():
    return dist.get_rank() % 2


def mixture(recipe="tensorwise", count=3, kind="torchtitan"):
    return expert_models.mixture_of(kind, count, models.recipe_of(recipe) if recipe else f8.Recipe())


def same_as_stock(use, ways=("codes",), change=lambda model: None, recipe="tensorwise", **options):
    """What differs in what ``use(model)`` returns, and in the weights afterwards, from stock `fully_shard`."""
    found, weights = {}, {}
    for way in ("stock", *ways):
        model = mixture(recipe)
        change(model)
        model = sharded(model, way, "bf16", **(options if way != "graph" else {}))
        found[way] = use(model)
        weights[way] = models.weights_of(model)
    differ = [f"{way}: {name}" for way in ways for name in differing(weights["stock"], weights[way])]
    return [*differ, *(f"{way}: {found[way]}, not {found['stock']}" for way in ways if found[way] != found["stock"])]


def three_steps(model):
    return models.trained(model, 3, rank())


# ---------------------------------------------------------------------------------- messages


def bytes_of_three_steps(way, recipe, dim):
    """Amaxes that a rank exchanges, and bytes of parameters that it sends."""
    model = sharded(mixture(recipe, 2), way, "bf16", dim)
    sent = []
    for module in model.modules():
        if models.is_sharded(module):
            module.set_custom_all_gather(CountedAllGather())
    CountedAllGather.sent = 0
    gather = _compat.all_gather_single

    def counted_gather(x, *where):
        sent.append(x.nbytes)
        return gather(x, *where)

    _compat.all_gather_single = counted_gather
    try:
        with counted(collectives, "all_reduce_amax") as reduced:
            models.trained(model, 3, rank())
    finally:
        _compat.all_gather_single = gather
    return [args[0].numel() for args in reduced], CountedAllGather.sent + sum(sent)


SCALES = {  # bytes that a rank sends of the scales of its expert, 400 x 32 and 32 x 200, for both passes
    ("codes", "tensorwise", 0): 0,
    ("codes", "blockwise", 1): 0,
    ("codes", "nvfp4", 0): 0,
    ("graph", "rowwise", 0): 4 * (400 + 32 + 32 + 200),
    ("graph", "mxfp8", 0): 400 * 1 + 32 * 7 + 13 * 32 + 1 * 200,
    # a byte for 16 and four for a matrix; what FSDP2 gathers is as long in both passes, 13 blocks of 200 in each
    ("codes", models.FOUR_BITS, 0): 2 * (400 * 2 + 32 * 13 + 2 * 4),
    ("graph", models.FOUR_BITS, 0): 400 * 2 + 32 * 13 + 25 * 32 + 2 * 200 + 4 * 4,
}
# of an expert; ranks share no amaxes where each has the scales of its own experts
AMAXES = {"tensorwise": 1 + 1, "blockwise": 4 * 1 + 1 * 2, "nvfp4": 25 * 2 + 2 * 13, models.FOUR_BITS: 0}


@pytest.mark.parametrize("case", SCALES, ids=lambda case: " ".join(map(str, case)))
def test_a_gather_sends_a_byte_an_element_or_half_of_one(ranks, case):
    way, recipe, dim = case
    in_high_precision = ("stock", recipe, dim) if way == "codes" else ("graph", None, 0)
    reduced, sent = ranks.run(bytes_of_three_steps, *case, within="pair")[0]
    none, plain = ranks.run(bytes_of_three_steps, *in_high_precision, within="pair")[0]
    gathers = 3 * 2  # steps, blocks
    elements = 400 * 32 + 32 * 200  # of two experts a rank has one, or half of both
    others = plain - gathers * 2 * 2 * elements  # two passes, two bytes an element
    codes = elements // 2 if recipe in ("nvfp4", models.FOUR_BITS) else elements
    assert sent == others + gathers * (2 * codes + SCALES[case])
    expected = [2 * 2 * AMAXES[recipe]] * 3 if way == "codes" and AMAXES[recipe] else []
    assert (reduced, none) == (expected, []), "one message a step for all weights"


def parts_that_differ(count, dim):
    """Where what experts see of both sets of codes is not that of each whole matrix by itself."""
    model, found = mixture(models.FOUR_BITS, count), []
    recipe, whole = models.recipe_of(models.FOUR_BITS), dict(model.blocks[0].experts.named_parameters())
    whole = {name: stack.detach().bfloat16() for name, stack in whole.items()}
    model = sharded(model, "codes", "bf16", dim, reshard_after_forward=False)

    def compare(experts, _):
        for name, quantizer in itertools.product(whole, (recipe.weight, recipe.weight_for_grad_input)):
            own = getattr(experts, name).sets()[quantizer is recipe.weight_for_grad_input]
            expected = zip(*(f8.quantize(matrix, quantizer.unpacked()).parts() for matrix in whole[name]), strict=True)
            codes, scale, outer_scale = map(torch.stack, expected)
            found.append(difference(one_a_byte(own.codes, own.quantizer)[0], codes))
            found.append(difference(own.scale, scale))
            found.append(difference(own.outer_scale, outer_scale.flatten()))

    model.blocks[0].experts.register_forward_pre_hook(compare)
    model(models.batch(0, rank()))
    return len(found), [words for words in found if words is not None]


@pytest.mark.parametrize(("count", "dim"), [(2, 0), (3, 0), (2, 2)])
def test_experts_see_the_codes_and_scales_of_whole_matrices(ranks, count, dim):
    assert ranks.run(parts_that_differ, count, dim, within="pair") == [(2 * 2 * 3, [])] * 2


# ---------------------------------------------------------------------------------- ways of training


def clipped_and_evaluated(model):
    optimizer, found = models.adamw(model), []
    for step in range(3):
        with torch.no_grad():
            found.append(model(models.batch(7, rank())).item())
        loss = model(models.batch(step, rank()))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.full_tensor().item()]
    return found


def checkpointed(model):
    model.is_checkpointed = True
    return three_steps(model)


def freeze_one(model):
    model.blocks[0].experts.gate_up.requires_grad_(requires_grad=False)
    model.blocks[1].experts.requires_grad_(requires_grad=False)


BOTH = ("codes", "graph")
TRAINED = {
    "accumulated": {"use": models.accumulated},
    "clipped and evaluated": {"use": clipped_and_evaluated, "ways": BOTH},
    "checkpointed": {"use": checkpointed, "ways": BOTH},
    "frozen": {"use": three_steps, "ways": BOTH, "change": freeze_one},
    "kept after forward": {"use": three_steps, "reshard_after_forward": False},
    "offloaded": {"use": three_steps, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def trained_alike(name, recipe="tensorwise", arguments=()):
    return same_as_stock(**TRAINED[name], recipe=recipe, arguments=arguments)


@pytest.mark.parametrize("name", TRAINED)
def test_ways_of_training(ranks, name):
    assert ranks.run(trained_alike, name, within="pair") == [[]] * 2


TWO_SETS = [
    ("checkpointed", {"checkpointed": True}),
    ("kept after forward", {}),  # both sets in one gather
    pytest.param("accumulated", {}, marks=pytest.mark.slow),
    pytest.param("frozen", {}, marks=pytest.mark.slow),
    pytest.param("offloaded", {}, marks=pytest.mark.slow),
    pytest.param("kept after forward", {"one_gather": "param_dtype"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "arguments"), TWO_SETS, ids=str)
def test_ways_of_training_with_two_sets_of_codes(ranks, name, arguments):
    assert ranks.run(trained_alike, name, models.FOUR_BITS, arguments, within="pair") == [[]] * 2


def from_meta():
    """What differs between models that have memory only once they are sharded."""
    found = {}
    for way in ("stock", *BOTH):
        with torch.device("meta"):
            model = mixture()
        model = sharded(model, way, "bf16")
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
        found[way] = three_steps(model), models.weights_of(model)
    losses, weights = found["stock"]
    return [way for way in BOTH if found[way][0] != losses or differing(weights, found[way][1])]


def test_meta_device_init(ranks):
    assert ranks.run(from_meta, within="pair") == [[]] * 2


def on_three_ranks():
    """What differs where the last of three ranks has no expert, and where one that has none comes before it."""
    found = []
    for recipe, count in (("blockwise", 4), ("tensorwise", 1), (models.FOUR_BITS, 4)):
        losses = {}
        for way in ("stock", *BOTH):
            model = mixture(recipe, count)
            if way == "graph":
                model = graph_fsdp(model, models.mesh_1d("three"), mp_policy=models.BF16)
            else:
                model = fsdp_float8_all_gather(model) if way == "codes" else model
                model = models.shard(model, models.mesh_1d("three"), models.BF16)
            assert dist.get_rank() != 2 or model.blocks[0].experts.gate_up.to_local().numel() == 0
            losses[way] = models.trained(model, 3, dist.get_rank())
        found += [f"{way} {recipe}: {losses}" for way in BOTH if losses[way] != losses["stock"]]
    return found


def test_ranks_without_experts(ranks):
    assert ranks.run(on_three_ranks, within="three") == [[]] * 3


class Spread(expert_models.Experts):
    """Experts that each rank has some of: a DTensor's own part is what a rank multiplies by."""

    def __init__(self, mesh, placement):
        torch.manual_seed(0)
        super().__init__(4)
        for name, stack in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(stack.detach(), mesh, [placement])))

    def forward(self, rows):
        ends = torch.tensor([5, rows.shape[0]], dtype=torch.int32)
        up, down = (stack.to_local().transpose(-2, -1) for stack in (self.gate_up, self.down))
        gate, up = self._grouped_mm(A=rows, B_t=up, offs=ends).chunk(2, dim=-1)
        return self._grouped_mm(A=gate * up, B_t=down, offs=ends)


def on_a_mesh_of_two_dims(recipe, dim):
    """What differs where FSDP cuts a rank's own experts, and what is said of matrices that ranks have parts of."""
    mesh, trained = models.mesh_2d("dp", "ep"), {}
    for way in ("stock", "codes"):
        model = f8.convert(Spread(mesh["ep"], Shard(0)), models.recipe_of(recipe))
        model = fsdp_float8_all_gather(model) if way == "codes" else model
        fully_shard(model, mesh=mesh["dp"], mp_policy=models.BF16, **along(dim))
        optimizer, losses = models.adamw(model), []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * dist.get_rank() + step)
            loss = model(torch.randn(16, 32, generator=generator)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        trained[way] = losses, models.weights_of(model)
    (losses, weights), (own, found) = trained.values()
    try:
        fsdp_float8_all_gather(f8.convert(Spread(mesh["ep"], Shard(1)), models.recipe_of(recipe)))
    except ValueError as error:
        return [*differing(weights, found), own == losses, "matrix of each expert" in str(error)]
    return ["no error"]


@pytest.mark.parametrize(
    "case", [("tensorwise", 0), ("blockwise", 1), (models.FOUR_BITS, 0)], ids=lambda case: " ".join(map(str, case))
)
def test_experts_that_other_ranks_have_others_of(ranks, case):
    assert ranks.run(on_a_mesh_of_two_dims, *case) == [[True, True]] * 4


# ---------------------------------------------------------------------------------- checkpoints


def loaded():
    """What differs after a state dict was loaded, by a copy and by assignment, and from the keys of another model."""
    found = []
    for assign in (False, True):

        def use(model, assign=assign):
            source = sharded(mixture(count=3), "stock", "bf16")
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.mul_(1.5)
            state, own = source.state_dict(), model.state_dict()
            losses = [model(models.batch(0, rank())).item()]
            same = {name: type(each) for name, each in own.items()} == dict.fromkeys(state, DTensor)
            file = io.BytesIO()
            torch.save({name: each.to_local() for name, each in own.items()}, file)
            file.seek(0)
            same &= {type(each) for each in torch.load(file, weights_only=True).values()} == {torch.Tensor}
            model.load_state_dict(state, assign=assign)
            return [*losses, *models.trained(model, 2, rank()), same]

        found += same_as_stock(use)
    return found


def test_state_dicts_are_plain_and_are_loaded(ranks):
    assert ranks.run(loaded, within="pair") == [[]] * 2


def saved_on_two(folder, way):
    """Trained by two ranks and saved; weights and moments, as bytes."""
    model = sharded(mixture(), way, "bf16")
    optimizer = models.adamw(model)
    models.trained(model, 2, rank(), optimizer=optimizer)
    found, state = get_state_dict(model, optimizer)
    dcp.save({"model": found, "optimizer": state}, checkpoint_id=folder, process_group=GROUPS["pair"])
    moments = {name: optimizer.state[p]["exp_avg"].full_tensor() for name, p in model.named_parameters()}
    file = io.BytesIO()
    torch.save((models.weights_of(model), moments), file)
    return file.getvalue()


def loaded_on_three(folder, way, expected):
    """What differs in what three ranks read."""
    model = mixture()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if way == "graph":
        model = graph_fsdp(model, models.mesh_1d("three"), mp_policy=models.BF16)
    else:
        model = models.shard(fsdp_float8_all_gather(model), models.mesh_1d("three"), models.BF16)
    optimizer = models.adamw(model)
    found, state = get_state_dict(model, optimizer)
    dcp.load({"model": found, "optimizer": state}, checkpoint_id=folder, process_group=GROUPS["three"])
    set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=state)
    weights, moments = torch.load(io.BytesIO(expected))
    own = {name: optimizer.state[p]["exp_avg"].full_tensor() for name, p in model.named_parameters()}
    differ = differing(weights, models.weights_of(model)) + differing(moments, own)
    model(models.batch(9, dist.get_rank())).backward()  # runs
    return differ


@pytest.mark.parametrize(("way", "other"), [("codes", "graph"), ("graph", "codes")])
def test_dcp_from_two_ranks_to_three(ranks, tmp_path, way, other):
    expected = ranks.run(saved_on_two, str(tmp_path), way, within="pair")[0]
    assert ranks.run(loaded_on_three, str(tmp_path), other, expected, within="three") == [[]] * 3


# ---------------------------------------------------------------------------------- what is said


def test_the_report_says_what_is_gathered():
    model = mixture("tensorwise", 2)
    model.blocks[1].experts.recipe = f8.recipes.rowwise()
    fsdp_float8_all_gather(model)
    first, second = (row.gathered for row in f8.conversion_report(model).rows if row.experts)
    assert first == "quantized data"
    assert second.startswith(
        "quantized data, separate for each pass; or, if FSDP2 keeps the weight, quantized data of both passes at once"
    )
    half = mixture("rowwise")
    for block in half.blocks:
        block.experts.recipe = replace(f8.recipes.rowwise(), grad_output=None, weight_for_grad_input=None)
    with pytest.raises(ValueError, match="no weight of this model can be all-gathered in FP8"):
        fsdp_float8_all_gather(half)
    with pytest.raises(ValueError, match="it was already called for this model"):
        fsdp_float8_all_gather(model)


def test_parameters_that_fsdp_will_ignore_stay_the_objects_that_they_are():
    model = mixture("rowwise", 2)
    spread = set(model.blocks[0].experts.parameters())
    before = dict(model.named_parameters())
    fsdp_float8_all_gather(model, ignored_params=spread)
    replaced = {name for name, each in model.named_parameters() if each is not before[name]}
    assert replaced == {f"blocks.1.experts.{name}" for name in ("gate_up", "down")}
    first, second = (row.gathered for row in f8.conversion_report(model).rows if row.experts)
    assert (first, second[:15]) == ("", "quantized data,")
    other = mixture("rowwise", 2)
    with pytest.raises(ValueError, match="all FP8 weights of MixtureModel are in ignored_params"):
        fsdp_float8_all_gather(other, ignored_params=list(other.parameters()))


def used_otherwise():
    """What is raised where a module does something else with weights of experts than multiply rows by them."""
    uses = {
        "sum": lambda experts: experts.down.sum(),
        "rows of all": lambda experts: experts.down.transpose(0, 1),
        "float32": lambda experts: experts.down.to(torch.float32),
        "another recipe": lambda experts: setattr(experts, "recipe", f8.recipes.rowwise()),
    }
    found = {}
    for way, name in itertools.product(BOTH, uses):
        model = sharded(mixture(), way, "bf16")
        experts = model.blocks[0].experts
        experts.register_forward_pre_hook(lambda module, args, name=name: uses[name](module) and None)
        try:
            model(models.batch(0, rank()))
        except (TypeError, ValueError, AttributeError) as error:
            found[way, name] = str(error)
    return found


def test_other_uses_of_the_weights_of_experts_raise(ranks):
    for found in ranks.run(used_otherwise, within="pair"):
        assert len(found) == 7, found  # in the graph each product gathers what the recipe says
        assert "Use fp8compile.grouped_linear" in found["codes", "sum"]
        assert "no attribute 'sum'" in found["graph", "sum"]
        assert (
            "is not supported, because the weights are gathered only inside their GEMMs"
            in found["graph", "rows of all"]
        )
        assert "param_dtype" in found["graph", "float32"]
        assert "Set the recipe of experts before" in found["codes", "another recipe"]
