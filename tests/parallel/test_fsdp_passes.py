"""Weights of which forward and backward multiply different codes: stock FSDP2 gathers for each pass its own.

Losses and weights are those without it, bit for bit, whatever keeps or repeats a forward; and what is sent is counted.
"""

from __future__ import annotations

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from test_fsdp import data_rank, differing, sharded
from test_fsdp_use import TRAINED, CountedAllGather, counted
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.ops import collectives

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def on_and_off(recipe, policy, sizes, mesh, backend=None, arguments=(), use=None, **options):
    """What differs between gathers of codes and of values, in words."""
    found, weights = {}, {}
    for on in (False, True):
        model = models.model_of(sizes, recipe if isinstance(recipe, f8.Recipe) else models.recipe_of(recipe))
        model = sharded(
            model, mesh, models.POLICIES[policy], on=dict(arguments) if on else False, backend=backend, **options
        )
        if model is None:
            return []
        found[on] = models.trained(model, 4, data_rank(mesh)) if use is None else use(model)
        weights[on] = models.weights_of(model)
    differ = differing(weights[False], weights[True])
    return differ if found[False] == found[True] else [*differ, f"found {found}"]


CASES = [
    ("rowwise", "bf16", "uneven", "1-D"),
    ("rowwise", "fp32", "even", "FSDP + TP"),
    ("rowwise_bf16_wgrad", "bf16", "uneven", "three"),
    ("rowwise_bf16_wgrad", "fp32", "even", "HSDP"),
    ("mxfp8", "bf16", "even", "1-D"),
    ("mxfp8", "bf16", "uneven", "three"),
    ("mxfp8", "fp32", "uneven", "HSDP"),
    ("mxfp8", "bf16", "even", "FSDP + TP"),
    ("mxfp8", "fp32", "uneven", "FSDP + TP"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_all_gather_on_and_off(ranks, case):
    assert not any(ranks.run(on_and_off, *case, within=models.WITHIN[case[-1]]))


def trained_so(name):
    use, options = TRAINED[name]
    arguments = {"checkpointed": name == "checkpointed"}
    return on_and_off("mxfp8", "bf16", "uneven", "1-D", arguments=arguments, use=use, **options)


@pytest.mark.parametrize("name", TRAINED)
def test_ways_of_training(ranks, name):
    assert ranks.run(trained_so, name, within="pair") == [[]] * 2


def prefetched(model):
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    losses = models.trained(model, 2, dist.get_rank() % 2)
    two = [model(models.batch(step, dist.get_rank() % 2)) for step in (7, 8)]
    for loss in two:  # two forwards, then two backwards
        loss.backward()
    return losses + [loss.item() for loss in two]


def with_prefetch():
    return on_and_off("rowwise", "bf16", "even", "1-D", use=prefetched)


def test_prefetching_gathers_what_the_pass_needs(ranks):
    assert ranks.run(with_prefetch, within="pair") == [[]] * 2


def compiled_once(recipe, mesh, backend, arguments, options, sizes="uneven"):
    """What differs, and how often blocks were compiled."""
    differ = on_and_off(recipe, "bf16", sizes, mesh, backend, arguments, **options)
    return differ, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("recipe", "mesh", "backend", "arguments", "options"),
    [
        ("rowwise", "1-D", "aot_eager", {}, {}),
        pytest.param("rowwise", "FSDP + TP", "aot_eager", {}, {}, marks=pytest.mark.slow),
        ("mxfp8", "1-D", "inductor", {}, {}),
        ("rowwise_bf16_wgrad", "1-D", "aot_eager", {"checkpointed": True}, {}),
        ("mxfp8", "1-D", "aot_eager", {}, {"reshard_after_forward": False}),
    ],
)
def test_a_compiled_block_has_one_graph_for_all_passes(ranks, recipe, mesh, backend, arguments, options):
    """One graph with codes and one without, of two equal blocks."""
    within = models.WITHIN[mesh]
    found = ranks.run(compiled_once, recipe, mesh, backend, arguments, options, within=within)
    assert found == [([], 2)] * len(found)


# ---------------------------------------------------------------------------------- what is sent


def sent(recipe, sizes, on, options):
    """Bytes of FSDP2's gathers in each pass, messages of amaxes, and the report: of the second of two steps."""
    model = models.model_of(sizes, models.recipe_of(recipe))
    model = sharded(model, "1-D", models.BF16, on=False if on is None else on, **options)
    models.trained(model, 1, dist.get_rank())
    for module in model.modules():
        if models.is_sharded(module):
            module.set_custom_all_gather(CountedAllGather())
    CountedAllGather.sent, passes = 0, []
    with counted(collectives, "all_reduce_amax") as reduced:
        loss = model(models.batch(0, dist.get_rank()))
        passes.append(CountedAllGather.sent)
        loss.backward()
        passes.append(CountedAllGather.sent - passes[0])
    weights = [row.gathered for row in f8.conversion_report(model).rows if row.converted]
    return passes, [args[0].numel() for args in reduced], weights


DIM, HIDDEN = models.SIZES["even"]
WEIGHTS = 2 * 3 * DIM * HIDDEN // 2  # elements of two blocks' weights that each of two ranks has


@pytest.mark.parametrize(
    ("recipe", "scales", "amaxes"),
    [
        # a float32 a row that travels; one a column in the message: of up and gate DIM, of down HIDDEN
        ("rowwise", 4 * 2 * (2 * HIDDEN + DIM) // 2, 2 * (2 * DIM + HIDDEN)),
        # a byte for 32 elements; of columns, down has 16 rows on each rank, and its blocks have amaxes of both
        ("mxfp8", WEIGHTS // 32, 2 * HIDDEN),
    ],
)
def test_each_pass_sends_a_byte_an_element(ranks, recipe, scales, amaxes):
    (codes, messages, report), *_ = ranks.run(sent, recipe, "even", {}, {}, within="pair")
    (values, none, _), *_ = ranks.run(sent, recipe, "even", None, {}, within="pair")
    others = [every - 2 * WEIGHTS for every in values]  # norms, biases, embedding, head: as they were
    assert [every - rest for every, rest in zip(codes, others, strict=True)] == [WEIGHTS + scales] * 2
    assert (messages, none) == ([amaxes], [])
    assert set(report) == {"quantized data, separate for each pass"}


KEPT = {"reshard_after_forward": False}


@pytest.mark.parametrize(
    ("on", "options", "bytes_an_element", "words"),
    [
        ({}, KEPT, [2, 0], "quantized data of both passes at once"),
        ({"one_gather": "param_dtype"}, KEPT, [2, 0], "param_dtype: one all-gather serves both passes"),
        ({"checkpointed": True}, {}, [2, 2], "quantized data of both passes at once"),
        ({"checkpointed": True, "one_gather": "param_dtype"}, {}, [2, 2], "param_dtype: one all-gather"),
    ],
)
def test_one_gather_for_both_passes_brings_what_was_asked_for(ranks, on, options, bytes_an_element, words):
    (codes, messages, report), *_ = ranks.run(sent, "rowwise", "even", on, options, within="pair")
    (values, *_), *_ = ranks.run(sent, "rowwise", "even", None, options, within="pair")
    scales = 4 * 2 * (2 * HIDDEN + DIM) // 2 if "quantized" in words else 0
    expected = [WEIGHTS * each + scales * bool(each) for each in bytes_an_element]
    others = [every - plain * WEIGHTS for every, plain in zip(values, bytes_an_element, strict=True)]
    assert [every - rest for every, rest in zip(codes, others, strict=True)] == expected
    assert len(messages) == ("quantized" in words)
    assert all(words in row for row in report)


def alone():
    """What differs on a mesh of one rank, for which FSDP2 takes one tensor to send."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh, found = DeviceMesh("cpu", [dist.get_rank()]), []
    for recipe, options in (("rowwise", {}), ("mxfp8", {}), ("mxfp8", KEPT), ("rowwise", KEPT)):
        losses = {}
        for on in (False, True):
            model = models.model_of("uneven", f8.recipes.by_name(recipe))
            model = f8.parallel.fsdp_float8_all_gather(model) if on else model
            losses[on] = models.trained(models.shard(model, mesh, models.BF16, **options), 3, 0)
        found.append(losses[True] == losses[False])
    return found


def test_a_mesh_of_one_rank(ranks):
    assert ranks.run(alone) == [[True] * 4] * 4


# ---------------------------------------------------------------------------------- what raises


def _checkpointed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def repeated(how):
    """The error of a forward that is repeated, and nobody said so."""
    model = models.model_of("even", f8.recipes.rowwise())
    f8.parallel.fsdp_float8_all_gather(model)
    backend = "aot_eager" if "compiled" in how else None
    if "inside" in how:
        for block in model.blocks:
            block.forward = _checkpointed(block.forward)
    model = models.shard(model, models.mesh_1d("pair"), models.BF16, backend=backend)
    if "around" in how:
        for block in model.blocks:
            block.forward = _checkpointed(block.forward)
    try:
        model(models.batch(0, dist.get_rank())).backward()
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["inside", "compiled inside", "compiled around"])
def test_a_forward_that_is_repeated_raises(ranks, how):
    for answer in ranks.run(repeated, how, within="pair"):
        assert "Pass checkpointed=True, so that each all-gather serves both" in answer.replace("\n", " "), answer


def gathered_between():
    model = models.model_of("even", f8.recipes.rowwise())
    f8.parallel.fsdp_float8_all_gather(model)
    model = models.shard(model, models.mesh_1d("pair"), models.BF16)
    loss = model(models.batch(0, dist.get_rank()))
    model.blocks[1].unshard()
    found = []
    try:
        loss.backward()
    except RuntimeError as error:
        found.append("because unshard() was called between forward and backward" in str(error))
    return found


def test_codes_of_the_other_pass_raise(ranks):
    assert ranks.run(gathered_between, within="pair") == [[True]] * 2


def told_later():
    model = models.model_of("even", f8.recipes.rowwise())
    f8.parallel.fsdp_float8_all_gather(model)
    model = models.shard(model, models.mesh_1d("pair"), models.BF16)
    models.trained(model, 1, dist.get_rank())
    model.set_reshard_after_forward(False)
    try:
        models.trained(model, 1, dist.get_rank())
    except RuntimeError as error:
        return "Call set_reshard_after_forward(False) before the first forward" in str(error)
    return False


def test_another_way_of_resharding_later_raises(ranks):
    assert ranks.run(told_later, within="pair") == [True] * 2


def test_arguments_are_checked():
    model = f8.convert(nn.Sequential(nn.Linear(32, 32)), f8.recipes.rowwise(), filter=lambda *_: True)
    with pytest.raises(ValueError, match="`one_gather` is 'both'; it must be 'codes' or 'param_dtype'"):
        f8.parallel.fsdp_float8_all_gather(model, one_gather="both")
    with pytest.raises(TypeError, match="`checkpointed` is 'yes'; it must be True or False"):
        f8.parallel.fsdp_float8_all_gather(model, checkpointed="yes")
