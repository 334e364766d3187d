"""Parameters with two sets of codes (rowwise, MX) under FSDP2: the bits of one process, and what each pass sends."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from fsdp_models import FOUR_BITS, recipe_of
from gloo_ranks import GROUPS, shared_ranks
from test_fsdp_use import CountedAllGather, counted
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile import _compat
from fp8compile._compat import local_itself
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.ops import collectives
from fp8compile.tensor import is_quantized_parameter
from fp8compile.testing.bits import difference

pytestmark = pytest.mark.skipif(
    _compat.TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12"
)
# rows of 96 and 95 on two ranks, of 64, 64 and 63 on three: uneven, and blocks of 32 rows stay whole
WIDTHS = (64, 191, 191, 191)
OPTIMIZERS = {
    "AdamW, masters": lambda p: f8.MasterWeights(torch.optim.AdamW, p, lr=0.02),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def plain_model(seed=0, widths=WIDTHS):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*each), nn.Tanh()) for each in pairwise(widths))).bfloat16()


def converted(recipe, seed=0, *, widths=WIDTHS, **options):
    options = {"weight_lifetime": "parameter", "filter": lambda *_: True, **options}
    return f8.convert(plain_model(seed, widths), recipe_of(recipe), **options)


def sharded(model, mesh, backend=None, **options):
    for index, block in enumerate(model):
        if backend is not None:
            model[index] = torch.compile(block, fullgraph=True, backend=backend)
        fully_shard(model[index], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def pair():
    return DeviceMesh.from_group(GROUPS["pair"], "cpu")


def backward(model, step):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
    loss = (model(x)[:, :64].float() - x.float()).square().mean()
    loss.backward()
    return loss.item()


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(model, whole, rank, size):
    """What differs between this rank's shards and those rows of a model in one process."""
    found = []
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        full = -(-other.shape[0] // size)
        rows = slice(min(rank * full, other.shape[0]), min(rank * full + full, other.shape[0]))
        if not (is_quantized_parameter(other) and len(other.sets()) == 2):
            found.append(difference(local_itself(mine).detach(), other.detach()[rows]))
            continue
        for own, all_of_it in zip(local_itself(mine).sets(), other.sets(), strict=True):
            block = own.quantizer.block[0]
            blocks = (
                slice(None)
                if block == -1 or own.has_all_scales
                else slice(rows.start // block, -(-rows.stop // block))
            )
            mine, codes = (one_a_byte(each.codes, each.quantizer)[0] for each in (own, all_of_it))
            found.append(difference(mine, codes[rows]))
            found.append(difference(own.scale, all_of_it.scale[blocks]))
            if own.outer_scale is not None:
                found.append(difference(own.outer_scale, all_of_it.outer_scale))
    return [words for words in found if words is not None]


def steps_of(recipe, optimizer, group, steps, use=train, **options):
    """FSDP2 over a group, and one process: whether losses are the same, and what differs."""
    hybrid = group == "HSDP"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    mesh = mesh or DeviceMesh.from_group(GROUPS[group], "cpu")
    whole, model = converted(recipe), sharded(converted(recipe), mesh, **options)
    losses = [use(each, OPTIMIZERS[optimizer](each.parameters()), steps) for each in (whole, model)]
    rank, size = (mesh.get_local_rank("shard"), 2) if hybrid else (mesh.get_local_rank(), mesh.size())
    return losses[0] == losses[1], differences(model, whole, rank, size)


CASES = [
    ("rowwise", "AdamW, masters", "pair", 20),
    ("rowwise", "AdamW, fused", "pair", 5),
    ("rowwise_bf16_wgrad", "SGD", "pair", 5),
    ("mxfp8", "AdamW, masters", "pair", 20),
    ("mxfp8", "AdamW, fused", "HSDP", 5),
    ("rowwise", "AdamW, masters", "HSDP", 5),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_fsdp_has_the_bits_of_one_process(ranks, case):
    answers = ranks.run(steps_of, *case, within="all" if case[2] == "HSDP" else case[2])
    assert answers == [(True, [])] * len(answers)


def few_rows(recipe, group="all", widths=(64, 5, 64)):
    """Five rows on four ranks, of which the last one has none, or other sizes."""
    mesh = DeviceMesh.from_group(GROUPS[group], "cpu")
    whole, model = converted(recipe, widths=widths), sharded(converted(recipe, widths=widths), mesh)
    losses = [train(each, OPTIMIZERS["AdamW, masters"](each.parameters()), 5) for each in (whole, model)]
    return losses[0] == losses[1], differences(model, whole, mesh.get_local_rank(), mesh.size())


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_a_rank_without_rows(ranks, recipe):
    assert ranks.run(few_rows, recipe) == [(True, [])] * 4


@pytest.mark.parametrize("widths", [(64, 160, 64), (64, 95, 64)], ids=["even", "uneven"])
def test_shards_may_cut_blocks(ranks, widths):
    """Rows of 80 and 80, or 48 and 47: the third block of 32, or the second, is of both ranks."""
    assert ranks.run(few_rows, "mxfp8", "pair", widths, within="pair") == [(True, [])] * 2


@pytest.mark.parametrize("widths", [(64, 144, 64), (64, 191, 64)], ids=["even", "uneven"])
def test_two_sets_of_four_bits(ranks, widths):
    """Rows of 72 and 72, which cut blocks of 16, in bytes that two of a row or of a column share; or 96 and 95."""
    assert ranks.run(few_rows, FOUR_BITS, "pair", widths, within="pair") == [(True, [])] * 2


def accumulated(model, optimizer, steps):
    losses = []
    for step in range(2 * steps):
        losses.append(backward(model, step))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def repeated(model, optimizer, steps):
    for block in model:
        block.forward = _checkpointed(block.forward)
    return train(model, optimizer, steps)


def _checkpointed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


WAYS = {
    "accumulated": (accumulated, {}),
    "kept after forward": (train, {"reshard_after_forward": False}),
    "offloaded": (train, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


def in_this_way(recipe, name):
    use, options = WAYS[name]
    return steps_of(recipe, "AdamW, masters", "pair", 3, use, **options)


WAYS_OF_TRAINING = [*zip(("mxfp8", "rowwise", "mxfp8"), WAYS, strict=True), (FOUR_BITS, "kept after forward")]


@pytest.mark.parametrize(("recipe", "name"), WAYS_OF_TRAINING)
def test_ways_of_training(ranks, recipe, name):
    assert ranks.run(in_this_way, recipe, name, within="pair") == [(True, [])] * 2


# ---------------------------------------------------------------------------------- bytes and messages


def counted_step(recipe):
    """Bytes that a rank sends in each pass of the second step, amax messages of its update, and what is said."""
    widths = (64, 128, 64)
    model = sharded(converted(recipe, widths=widths), pair())
    optimizer = OPTIMIZERS["AdamW, masters"](model.parameters())
    train(model, optimizer, 1)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountedAllGather())
    CountedAllGather.sent, passes = 0, []
    x = torch.randn(16, 64).bfloat16()
    with counted(collectives, "all_reduce_amax") as reduced:
        loss = model(x).float().square().mean()
        passes.append(CountedAllGather.sent)
        loss.backward()
        passes.append(CountedAllGather.sent - passes[0])
        optimizer.step()
    words = {row.gathered for row in f8.conversion_report(model).rows}
    return passes, [args[0].numel() for args in reduced], words


@pytest.mark.parametrize(
    ("recipe", "scales", "amaxes"),
    [
        ("rowwise", 4 * (128 + 64) // 2, [64 + 128]),
        ("mxfp8", 2 * 64 * 128 // 32 // 2, []),
        (FOUR_BITS, 2 * 64 * 128 // 16 // 2, [4]),  # an outer amax of each set
    ],
)
def test_each_pass_sends_a_byte_an_element_or_half_of_one_and_a_step_one_message(ranks, recipe, scales, amaxes):
    passes, reduced, words = ranks.run(counted_step, recipe, within="pair")[0]
    elements, biases = 2 * 64 * 128 // 2, 2 * (128 + 64) // 2
    codes = elements // 2 if recipe == FOUR_BITS else elements
    assert passes == [codes + scales + biases] * 2
    assert reduced == amaxes
    assert words == {"quantized data, separate for each pass"}


def compiled_blocks(recipe):
    """Graphs after two steps and after four, and whether losses are those of eager mode."""
    models = [sharded(converted(recipe), pair(), backend=each) for each in (None, "aot_eager")]
    optimizers = [OPTIMIZERS["AdamW, masters"](model.parameters()) for model in models]
    losses, graphs = [[], []], []
    for first in (0, 2):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            losses[index] += train(model, optimizer, 2, first)
        graphs.append(counters["stats"]["unique_graphs"])
    return losses[0] == losses[1], graphs


def test_compiled_blocks_are_one_graph_each(ranks):
    assert ranks.run(compiled_blocks, "mxfp8", within="pair") == [(True, [2, 2])] * 2  # the last two are alike


def broadcast():
    """Whether losses are those of the first rank's weights after they were sent to a rank that had others."""
    group, losses = GROUPS["pair"], []
    for seeds in ((0, 0), (0, 1)):
        model = converted("mxfp8", seeds[group.rank()], keep_initial=True)
        f8.parallel.broadcast_parameters(model, group=group)
        losses.append(train(model, OPTIMIZERS["AdamW, masters"](model.parameters()), 3))
    return losses[0] == losses[1]


def test_a_broadcast_sends_both_sets_and_what_they_were_made_of(ranks):
    assert ranks.run(broadcast, within="pair") == [True] * 2


# ---------------------------------------------------------------------------------- what raises


def complaints():
    """What is said of a shard that cuts blocks, of a repeated forward, and of values that are asked for."""
    texts = []

    def says(call):
        try:
            call()
            texts.append("nothing")
        except Exception as error:
            texts.append(str(error))

    by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    says(lambda: sharded(converted("mxfp8", widths=(96, 160)), pair(), **by_columns))
    model = sharded(converted("rowwise"), pair())
    says(lambda: repeated(model, None, 1))
    again = f8.parallel.fsdp_float8_all_gather(converted("rowwise"), checkpointed=True)
    again = sharded(again, pair())
    whole = converted("rowwise")
    optimizers = [OPTIMIZERS["SGD"](each.parameters()) for each in (whole, again)]
    texts.append(train(whole, optimizers[0], 2) == repeated(again, optimizers[1], 2))
    says(lambda: f8.parallel.fsdp_float8_all_gather(converted("rowwise"), one_gather="param_dtype"))
    says(lambda: sharded(converted(FOUR_BITS, widths=(64, 146)), pair()))
    return texts


def test_what_cannot_be_says_what_to_do(ranks):
    for cut, repeats, same, values, odd in ranks.run(complaints, within="pair"):
        assert (
            "splits blocks of 32. Split at multiples of 32, or convert this weight with weight_lifetime='call'" in cut
        )
        assert "fsdp_float8_all_gather, which supports split blocks" in cut
        assert "Pass checkpointed=True, so that each all-gather serves both" in repeats
        assert same
        assert "can't be gathered in high precision" in values
        assert "Split at even positions, or convert this weight with weight_lifetime='call'" in odd
