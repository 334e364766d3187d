"""FSDP2 gathers weights in four bits: half a byte an element, outer scales and all, and trains as it does without."""

from __future__ import annotations

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from test_fsdp import differing, sharded
from test_fsdp_passes import KEPT, compiled_once, on_and_off, sent

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION

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
    ("mesh", "backend"),
    [
        pytest.param("1-D", "aot_eager", marks=pytest.mark.slow),
        pytest.param("1-D", "inductor", marks=pytest.mark.slow),
        pytest.param("FSDP + TP", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_block_has_one_graph(ranks, mesh, backend):
    found = ranks.run(compiled_once, "nvfp4", mesh, backend, {}, {}, within=models.WITHIN[mesh])
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
    assert set(report) == {"codes"}
