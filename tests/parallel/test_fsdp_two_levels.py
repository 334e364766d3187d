"""FSDP2 gathers weights in four bits: half a byte an element, outer scales and all, and trains as it does without."""

from __future__ import annotations

import copy

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from test_fsdp import differing, sharded
from test_fsdp_passes import KEPT, compiled_once, on_and_off, sent
from test_fsdp_use import TRAINED
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.testing.bits import difference

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


CASES = [
    ("bf16", "even", "1-D", {}),
    pytest.param(("fp32", "uneven", "HSDP", {}), marks=pytest.mark.slow),
    ("bf16", "uneven", "three", KEPT),
    pytest.param(("fp32", "even", "FSDP + TP", {}), marks=pytest.mark.slow),
    ("bf16", "uneven", "FSDP + TP", {}),
]


def differ(policy, sizes, mesh, options):
    return on_and_off("nvfp4", policy, sizes, mesh, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_all_gather_on_and_off(ranks, case):
    """Over two and three ranks 256 and 201 rows end within a block of 16 x 16, or between two."""
    assert not any(ranks.run(differ, *case, within=models.WITHIN[case[2]]))


TWO_SETS = [
    (("even", "FSDP + TP", None, {}), {}),
    (("uneven", "1-D", "aot_eager", {"checkpointed": True}), {}),
    (("even", "HSDP", None, {}), KEPT),
    (("uneven", "three", None, {}), {}),
]


def two_sets_differ(case, options):
    sizes, mesh, backend, arguments = case
    recipe = models.recipe_of(models.FOUR_BITS)
    return on_and_off(recipe, "bf16", sizes, mesh, backend, arguments, **options)


@pytest.mark.slow  # one process has the same bits: below
@pytest.mark.parametrize(("case", "options"), TWO_SETS, ids=str)
def test_two_sets_of_codes_on_and_off(ranks, case, options):
    assert not any(ranks.run(two_sets_differ, case, options, within=models.WITHIN[case[1]]))


def resumed(model):
    """Losses of four steps, and of the last two again, from the weights and the optimizer's state before them."""
    optimizer, rank = models.adamw(model), dist.get_rank()
    losses = models.trained(model, 2, rank, optimizer=optimizer)
    weights = {name: values.clone() for name, values in model.state_dict().items()}
    saved = weights, copy.deepcopy(optimizer.state_dict())
    losses += models.trained(model, 2, rank, optimizer=optimizer, start=2)
    for each, state in zip((model, optimizer), saved, strict=True):
        each.load_state_dict(state)
    again = models.trained(model, 2, rank, optimizer=optimizer, start=2)
    assert again == losses[2:]
    return losses


def frozen_in_part(model):
    model.blocks[0].inner["gate"].requires_grad_(requires_grad=False)
    return models.trained(model, 3, dist.get_rank())


WAYS = TRAINED | {"resumed": (resumed, {}), "frozen": (frozen_in_part, {})}


def trained_so(name, sizes):
    use, options = WAYS[name]
    arguments = {"checkpointed": name == "checkpointed"}
    return on_and_off(models.recipe_of(models.FOUR_BITS), "bf16", sizes, "1-D", None, arguments, use, **options)


@pytest.mark.parametrize("name", WAYS)
def test_ways_of_training_with_two_sets_of_codes(ranks, name):
    """Even sizes: ranks have their blocks to themselves. The slow ones cut blocks of one set and pad its shards."""
    assert ranks.run(trained_so, name, "even", within="pair") == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_ways_of_training_with_two_sets_of_codes_in_uneven_shards(ranks, name):
    assert ranks.run(trained_so, name, "uneven", within="pair") == [[]] * 2


def against_one_process(sizes, options):
    recipe = f8.recipes.nvfp4(**options)
    expected, weights = models.one_process(models.model_of(sizes, recipe), "bf16", 4, 2)
    model = sharded(models.model_of(sizes, recipe), "1-D", models.BF16, on=True)
    losses = models.trained(model, 4, dist.get_rank() % 2)
    return losses == expected and not differing(weights, models.weights_of(model))


OPTIONS = [
    ("even", {}),
    ("even", {"backward": "dequantized"}),  # which needs the forward's codes alone
    ("even", {"weight_block": (1, 16)}),  # two sets of codes
    ("uneven", {"weight_block": (1, 16)}),
]


@pytest.mark.parametrize(("sizes", "options"), OPTIONS, ids=str)
def test_one_process(ranks, sizes, options):
    assert ranks.run(against_one_process, sizes, options, within="pair") == [True] * 2


@pytest.mark.parametrize(
    ("recipe", "sizes", "mesh", "backend"),
    [
        (models.FOUR_BITS, "even", "1-D", "aot_eager"),
        pytest.param("nvfp4", "uneven", "1-D", "aot_eager", marks=pytest.mark.slow),
        pytest.param("nvfp4", "uneven", "FSDP + TP", "aot_eager", marks=pytest.mark.slow),
        pytest.param(models.FOUR_BITS, "even", "FSDP + TP", "aot_eager", marks=pytest.mark.slow),
        pytest.param(models.FOUR_BITS, "uneven", "three", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_block_has_one_graph(ranks, recipe, sizes, mesh, backend):
    found = ranks.run(compiled_once, recipe, mesh, backend, {}, {}, sizes, within=models.WITHIN[mesh])
    assert found == [([], 2)] * len(found)


DIM, HIDDEN = models.SIZES["even"]
WEIGHTS = 2 * 3 * DIM * HIDDEN // 2  # elements of two blocks' weights that each of two ranks has


@pytest.mark.parametrize("options", [{}, KEPT], ids=["freed", "kept"])
def test_half_a_byte_an_element_and_one_message_of_amaxes(ranks, options):
    """Scales are made on each rank, of the amaxes of all 16 x 16 blocks: four bytes for 256 elements, once a step."""
    (codes, messages, report), *_ = ranks.run(sent, "nvfp4", "even", {}, options, within="pair")
    (values, none, _), *_ = ranks.run(sent, "nvfp4", "even", None, options, within="pair")
    gathers = 1 if options else 2
    saved = [every - own for every, own in zip(values, codes, strict=True)]
    assert saved == [WEIGHTS * 3 // 2] * gathers + [0] * (2 - gathers), "two bytes an element became half a byte"
    assert (messages, none) == ([2 * WEIGHTS // 256], [])
    assert set(report) == {"quantized data"}


def blocks_along_columns(sizes):
    """The number of blocks of 16 x 1 in the weights of both blocks of the model."""
    dim, hidden = models.SIZES[sizes]
    return 2 * (2 * -(-hidden // 16) * dim + -(-dim // 16) * hidden)


@pytest.mark.parametrize("options", [{}, KEPT], ids=["freed", "kept"])
def test_scales_of_two_sets_travel_beside_their_codes(ranks, options):
    """Ranks exchange the outer amax of each set alone; a byte for 16 elements travels with codes, in each pass."""
    (codes, messages, report), *_ = ranks.run(sent, models.FOUR_BITS, "even", {}, options, within="pair")
    (values, *_), *_ = ranks.run(sent, models.FOUR_BITS, "even", None, options, within="pair")
    saved = [every - own for every, own in zip(values, codes, strict=True)]
    a_set = WEIGHTS // 2 + WEIGHTS // 16
    assert saved == ([2 * WEIGHTS - 2 * a_set, 0] if options else [2 * WEIGHTS - a_set] * 2)
    assert messages == [2 * 3 * 2], "two blocks, three weights, two sets"
    assert set(report) == {
        "quantized data of both passes at once" if options else "quantized data, separate for each pass"
    }


def test_of_blocks_that_shards_cut_all_amaxes_are_in_the_message(ranks):
    """All rows of a rank are its own; each second rank begins within a block of 16 x 1."""
    found = ranks.run(sent, models.FOUR_BITS, "uneven", {}, {}, within="pair")
    assert [messages for _, messages, _ in found] == [[2 * 3 + blocks_along_columns("uneven")]] * 2


def parts_that_differ(shapes, group, spoiled):
    """Where what layers see of both sets of codes is not that of each whole weight by itself."""
    recipe, found = models.recipe_of(models.FOUR_BITS), []
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in shapes)).bfloat16()
    with torch.no_grad():
        for layer in model:
            layer.weight[-1, -1] = spoiled  # on the last rank that has a part
    whole = [layer.weight.detach().clone() for layer in model]
    f8.convert(model, recipe, filter=lambda *_: True)
    f8.parallel.fsdp_float8_all_gather(model)
    for layer in model:
        fully_shard(layer, mesh=models.mesh_1d(group), reshard_after_forward=False)
        layer.unshard()
    for layer, weight in zip(model, whole, strict=True):
        for own, quantizer in zip(layer.weight.sets(), (recipe.weight, recipe.weight_for_grad_input), strict=True):
            expected = f8.quantize(weight, quantizer.unpacked()).parts()
            parts = one_a_byte(own.codes, own.quantizer)[0], own.scale, own.outer_scale
            found += [difference(*both) for both in zip(parts, expected, strict=True)]
    return len(found), [words for words in found if words is not None]


# of two ranks: 31 rows are cut behind 16, 48 and 16 in the middle of a block; of 1 row the other rank has none
SHAPES = [(64, 48), (31, 48), (48, 40), (16, 33), (33, 16), (1, 32)]


@pytest.mark.parametrize("spoiled", [3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("group", ["pair", "three"])
def test_layers_see_the_codes_and_scales_of_whole_weights(ranks, group, spoiled):
    count = len(SHAPES) * 2 * 3
    found = ranks.run(parts_that_differ, SHAPES, group, spoiled, within=group)
    assert found == [(count, [])] * len(found)
