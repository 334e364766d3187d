"""Quantized parameters under FSDP2 and DDP: the bits of one process, one amax message a step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, MEMBERS, shared_ranks
from masters import train
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fp8compile as f8
from fp8compile import _compat
from fp8compile._compat import local_itself
from fp8compile.ops import collectives
from fp8compile.tensor import QuantizedParameter, QuantizedTensor
from fp8compile.testing.bits import difference

pytestmark = pytest.mark.skipif(
    _compat.TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12"
)
RECIPES = {name: f8.recipes.by_name(name) for name in ("tensorwise", "blockwise", "nvfp4")}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "AdamW, masters": lambda p: f8.MasterWeights(torch.optim.AdamW, p, lr=0.02),
    "SGD, masters": lambda p: f8.MasterWeights(torch.optim.SGD, p, lr=0.1, momentum=0.9),
    "AdamW, masters in a step": lambda p: f8.MasterWeights(torch.optim.AdamW, p, lr=0.02, keep=False),
    "AdamW, stochastic": lambda p: f8.MasterWeights(torch.optim.AdamW, p, lr=0.02, keep=False, rounding="stochastic"),
    "moments as codes": lambda p: f8.MasterWeights(f8.optim.AdamW, p, lr=0.02, backend=None),
    "moments as codes, no masters": lambda p: f8.MasterWeights(f8.optim.AdamW, p, lr=0.02, backend=None, keep=False),
    "AdamW, loop compiled": lambda p: compiled_step(torch.optim.AdamW(p, lr=0.02, weight_decay=0.5, foreach=False)),
    "AdamW, foreach compiled": lambda p: compiled_step(torch.optim.AdamW(p, lr=0.02, foreach=True)),
}


def compiled_step(optimizer):
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    return optimizer


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def plain_model(hidden, seed=0):
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(64, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, 64)) for _ in range(2)]
    return nn.Sequential(*blocks).bfloat16()


def converted(hidden, name="tensorwise", seed=0, **options):
    return f8.convert(
        plain_model(hidden, seed), RECIPES[name], weight_lifetime="parameter", filter=lambda *_: True, **options
    )


def sharded(model, mesh, backend=None, **options):
    for index, block in enumerate(model):
        if backend is not None:
            model[index] = torch.compile(block, fullgraph=True, backend=backend)
        fully_shard(model[index], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def quantized(model):
    found = [local_itself(parameter) for parameter in model.parameters()]
    return [each for each in found if isinstance(each, QuantizedParameter)]


def differences(model, whole, rank, size):
    """What differs between this rank's shards and those rows of a model in one process."""
    found = []
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        mine, parts = local_itself(mine), other.shape[0]
        full = -(-parts // size)
        rows = slice(min(rank * full, parts), min(rank * full + full, parts))
        if not isinstance(other, QuantizedParameter):
            found.append(difference(mine.detach(), other.detach()[rows]))
            continue
        found.append(difference(mine.codes, other.codes[rows]))
        same_scale = other.scale.shape[0] == 1
        block = other.quantizer.block[0]
        scale = (
            other.scale
            if same_scale or mine.has_all_scales
            else other.scale[rows.start // block : -(-rows.stop // block)]
        )
        found.append(difference(mine.scale, scale))
        if other.outer_scale is not None:
            found.append(difference(mine.outer_scale, other.outer_scale))
    return [words for words in found if words is not None]


def refusals():
    """What is said of what is no model."""
    texts = []
    for call in (f8.parallel.share_scales, f8.parallel.broadcast_parameters):
        try:
            texts.append(f"nothing: {call(3)}")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def steps_of(optimizer, group, hidden, steps, name="tensorwise"):
    """FSDP2 over a group, and one process: losses, what differs, and whether every weight changed."""
    mesh = DeviceMesh.from_group(GROUPS[group], "cpu")
    whole, model = converted(hidden, name), sharded(converted(hidden, name), mesh)
    before = [each.codes.clone() for each in quantized(model)]
    losses = [train(each, OPTIMIZERS[optimizer](each.parameters()), steps) for each in (whole, model)]
    # a rank may have no rows
    changed = all(
        not old.numel() or not torch.equal(old, q.codes) for old, q in zip(before, quantized(model), strict=True)
    )
    size = mesh.size()
    found = differences(model, whole, mesh.get_local_rank(), size)
    return losses[0] == losses[1], found, changed


def shards_that_cut_blocks():
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    model = f8.convert(plain_model(200), RECIPES["blockwise"], weight_lifetime="parameter")
    try:
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    except TypeError as error:
        return str(error)


def sharded_by_columns(name, share):
    """Weights whose columns ranks share, for rows would cut blocks, and one process: losses and bits."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = nn.Linear(256, 200).bfloat16()
        models.append(f8.convert(nn.Sequential(layer), RECIPES[name], weight_lifetime="parameter", keep_initial=True))
    fully_shard(models[1], mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    if share:
        f8.parallel.share_scales(models[1])
    losses, pairs = [], []
    for model in models:
        optimizer, own = OPTIMIZERS["AdamW, masters"](model.parameters()), []
        for step in range(4):
            x = torch.randn(16, 256, generator=torch.Generator().manual_seed(step)).bfloat16()
            loss = (model(x).float() - x[:, :200].float()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        losses.append(own)
        parts = model[0].weight_codes, model[0].weight_scale
        pairs.append([part.full_tensor() if isinstance(part, DTensor) else part for part in parts])
    return losses[0] == losses[1], [torch.equal(*pair) for pair in zip(*pairs, strict=True)]


def messages(optimizer, name="tensorwise"):
    """Sizes of the amax messages of one step."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    model = sharded(converted(144, name), mesh)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    train(model, optimizer, 1)
    calls, reduce = [], collectives.all_reduce_amax
    collectives.all_reduce_amax = lambda amax, group: calls.append(amax.numel()) or reduce(amax, group)
    try:
        train(model, optimizer, 1, first=1)
    finally:
        collectives.all_reduce_amax = reduce
    return calls


def compiled_blocks(backend):
    """Graphs after two steps and after four; losses beside those of eager; the weight's type in the block."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    seen = set()
    models = [sharded(converted(144), mesh, backend=each) for each in (None, backend)]
    models[0][0][0].register_forward_pre_hook(lambda module, args: seen.add(type(module.weight)))
    optimizers = [OPTIMIZERS["AdamW, masters"](model.parameters()) for model in models]
    losses, graphs = [[], []], []
    for first in (0, 2):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            losses[index] += train(model, optimizer, 2, first)
        graphs.append(counters["stats"]["unique_graphs"])
    return losses[0] == losses[1], graphs, seen == {QuantizedTensor}


def mixed_precision():
    """Float32 parameters whose layers run in bfloat16: the type and the dtype of gathered weights."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    model = f8.convert(plain_model(144).float(), RECIPES["tensorwise"], weight_lifetime="parameter")
    sharded(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    seen = set()
    model[0][0].register_forward_pre_hook(lambda module, args: seen.add((module.weight.dtype, args[0].dtype)))
    losses = train(model, OPTIMIZERS["AdamW, masters"](model.parameters()), 4)
    return seen == {(torch.bfloat16, torch.bfloat16)}, losses[0] > losses[-1], model[0][0].weight.dtype


def from_meta():
    """Start on the meta device, shards filled by reset_parameters: the scales of all ranks, and an early write."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    with torch.device("meta"):
        model = plain_model(145)
    f8.convert(model, RECIPES["tensorwise"], weight_lifetime="parameter", filter=lambda module, fqn: True)
    sharded(model, mesh)
    model.to_empty(device="cpu")
    layers = [module for module in model.modules() if isinstance(module, f8.Linear)]
    try:
        layers[0].reset_parameters()
        early = "wrote"
    except RuntimeError as error:
        early = str(error)
    f8.parallel.share_scales(model)
    for layer in layers:
        layer.reset_parameters()
    found = []
    for each in quantized(model):
        others = [torch.empty_like(each.scale) for _ in range(2)]
        dist.all_gather(others, each.scale, group=GROUPS["pair"])
        amaxes = [torch.empty(1) for _ in range(2)]
        dist.all_gather(amaxes, each.dequantize(torch.float32).abs().max().view(1), group=GROUPS["pair"])
        found.append(
            torch.equal(*others) and bool(others[0].isfinite()) and torch.equal((others[0] * 448).view(1), max(amaxes))
        )
    losses = train(model, OPTIMIZERS["AdamW, masters"](model.parameters()), 3)
    return early, found, losses[0] > losses[-1]


def initial_values(group, hidden, name):
    """Masters that start from kept values: losses and bits of one process, with a start on the meta device too."""
    mesh = DeviceMesh.from_group(GROUPS[group], "cpu")
    values = [each.detach() for each in plain_model(hidden, seed=3).float().parameters()]
    models = [converted(hidden, name, keep_initial=True), sharded(converted(hidden, name, keep_initial=True), mesh)]
    with torch.device("meta"):
        filled = converted(hidden, name, keep_initial=True)
    sharded(filled, mesh).to_empty(device="cpu")
    f8.parallel.share_scales(filled)
    models += [converted(hidden, name, keep_initial=True), filled]
    with torch.no_grad():
        for model in models[2:]:
            for parameter, value in zip(model.parameters(), values, strict=True):
                spread = isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(value, mesh, [Shard(0)]) if spread else value)
    kept = [sum(q.initial.untyped_storage().nbytes() for q in quantized(model)) for model in models]
    optimizers = [OPTIMIZERS["AdamW, masters"](model.parameters()) for model in models]
    after = [q.initial for model in models for q in quantized(model) if q.initial is not None]
    losses = [train(each, optimizer, 5) for each, optimizer in zip(models, optimizers, strict=True)]
    found = differences(models[1], models[0], mesh.get_local_rank(), mesh.size())
    found += differences(models[3], models[2], mesh.get_local_rank(), mesh.size())
    codes = converted(hidden, name)
    others = train(codes, OPTIMIZERS["AdamW, masters"](codes.parameters()), 5)  # masters of what the codes stand for
    same = losses[0] == losses[1] != others and losses[2] == losses[3]
    padded = sum(
        -(-p.shape[0] // mesh.size()) * p.shape[1] * 4
        for p in models[0].parameters()
        if isinstance(p, QuantizedParameter)
    )
    return same, found, kept[1:2] == kept[3:] == [padded], after


def loaded_before_the_first_forward(hidden, name):
    """The values that masters start from, after a load into shards that no forward has run: those that were saved."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    models = [sharded(converted(hidden, name, seed, keep_initial=True), mesh) for seed in (1, 0)]
    models[1].load_state_dict(models[0].state_dict())
    f8.parallel.share_scales(models[0])
    saved, loaded = (quantized(model) for model in models)
    assert any(each.has_all_scales for each in saved)
    return [difference(b.initial, a.dequantize(torch.float32)) for a, b in zip(saved, loaded, strict=True)]


def data_parallel():
    """DDP on ranks that start with other weights: the losses, and whether all have rank 0's weights."""
    from torch.nn.parallel import DistributedDataParallel

    group, model = GROUPS["pair"], converted(144, seed=GROUPS["pair"].rank())
    try:
        DistributedDataParallel(model, process_group=group)
        refused = ""
    except TypeError as error:
        refused = str(error)
    f8.parallel.broadcast_parameters(model, group=group)
    model = DistributedDataParallel(model, process_group=group, init_sync=False)
    whole = converted(144)
    losses = [train(each, OPTIMIZERS["AdamW, masters"](each.parameters()), 3) for each in (whole, model)]
    same = [difference(a.codes, b.codes) for a, b in zip(quantized(model), quantized(whole), strict=True)]
    return "init_sync=False" in refused, losses[0] == losses[1], [words for words in same if words]


# ---------------------------------------------------------------------------------- what they answer


@pytest.mark.parametrize(
    ("optimizer", "group", "hidden", "steps"),
    [
        ("SGD", "pair", 144, 3),
        ("SGD, foreach", "pair", 145, 20),
        ("AdamW", "pair", 145, 5),
        ("AdamW, foreach", "all", 145, 5),
        ("AdamW, fused", "pair", 144, 20),
        ("AdamW, masters", "all", 145, 20),
        ("SGD, masters", "pair", 145, 5),
        ("AdamW, masters in a step", "pair", 145, 5),
        ("AdamW, stochastic", "pair", 145, 3),
        ("moments as codes", "pair", 145, 3),
        ("moments as codes, no masters", "pair", 145, 3),
        ("AdamW, masters", "all", 5, 5),  # the last rank has no rows
    ],
)
def test_fsdp_has_the_bits_of_one_process(ranks, optimizer, group, hidden, steps):
    answers = ranks.run(steps_of, optimizer, group, hidden, steps, within=group)
    assert answers == [(True, [], True)] * len(answers)


@pytest.mark.parametrize(
    ("optimizer", "group", "hidden"),
    [
        ("AdamW, masters", "pair", 512),  # of the other layer, 64 rows, all ranks have a part of the one block
        ("AdamW, masters", "pair", 300),
        ("AdamW", "all", 301),  # 76 rows each: a rank has parts of two blocks, a block is of two or three ranks
        ("AdamW, stochastic", "pair", 300),
        ("AdamW, masters in a step", "all", 5),  # the last rank has no rows
    ],
)
def test_fsdp_of_blocks_that_shards_cut_has_the_bits_of_one_process(ranks, optimizer, group, hidden):
    answers = ranks.run(steps_of, optimizer, group, hidden, 3, "blockwise", within=group)
    assert answers == [(True, [], True)] * len(answers)


@pytest.mark.parametrize(
    ("optimizer", "group", "hidden"),
    [
        ("AdamW, masters", "pair", 128),  # rows that end between blocks, two codes to a byte on the way
        ("AdamW", "pair", 144),  # 72 rows end within a block
        ("AdamW, stochastic", "pair", 144),
        ("AdamW, masters", "all", 145),  # uneven shards, and 145 columns that share no byte
        ("AdamW, masters in a step", "all", 5),  # the last rank has no rows
    ],
)
def test_fsdp_of_four_bit_codes_has_the_bits_of_one_process(ranks, optimizer, group, hidden):
    answers = ranks.run(steps_of, optimizer, group, hidden, 3, "nvfp4", within=group)
    assert answers == [(True, [], True)] * len(answers)


def test_what_sharding_can_not_do_raises(ranks):
    for texts in ranks.run(refusals):
        expected = (
            "TypeError: share_scales: `model` is a int",
            "TypeError: broadcast_parameters: `model` is a int",
        )
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), text


def test_shards_of_columns_that_cut_blocks_raise(ranks):
    for text in ranks.run(shards_that_cut_blocks):
        assert "along dim 1 of 64 splits blocks of 128. Split at multiples of 128, or convert this weight" in text, (
            text
        )
        assert "row shards may split blocks, column shards may not (omit shard_placement_fn)" in text


@pytest.mark.parametrize(("name", "share"), [("tensorwise", True), ("blockwise", False), ("nvfp4", True)])
def test_shards_of_columns_have_the_bits_of_one_process(ranks, name, share):
    assert ranks.run(sharded_by_columns, name, share, within="pair") == [(True, [True, True])] * 2


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("AdamW, masters", [4]),
        ("AdamW, fused", [4]),
        ("SGD, foreach", [4]),
        ("AdamW", [4]),
    ],
)
def test_a_step_takes_one_amax_message_for_all_weights(ranks, optimizer, expected):
    assert ranks.run(messages, optimizer, within="pair") == [expected] * 2


def test_the_outer_amaxes_of_a_step_are_in_the_one_message(ranks):
    """It has the amaxes of 9 x 4 blocks for each of two weights that ranks cut, and one number for each of four."""
    assert ranks.run(messages, "AdamW, masters", "nvfp4", within="pair") == [[2 * 9 * 4 + 4]] * 2


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_blocks_are_one_graph_each(ranks, backend):
    assert ranks.run(compiled_blocks, backend, within="pair") == [(True, [2, 2], True)] * 2


def test_mixed_precision(ranks):
    assert ranks.run(mixed_precision, within="pair") == [(True, True, torch.float32)] * 2


def test_start_on_the_meta_device(ranks):
    for early, found, falls in ranks.run(from_meta, within="pair"):
        assert "before the ranks that share its scale are known. Call fp8compile.parallel.share_scales" in early
        assert all(found)
        assert len(found) == 4
        assert falls


@pytest.mark.parametrize(
    ("group", "hidden", "name"), [("pair", 145, "tensorwise"), ("all", 5, "tensorwise"), ("pair", 512, "blockwise")]
)
def test_initial_values_follow_the_shards(ranks, group, hidden, name):
    assert ranks.run(initial_values, group, hidden, name, within=group) == [(True, [], True, [])] * len(
        MEMBERS[group][0]
    )


def test_shards_that_cut_blocks_are_loaded_before_the_first_forward(ranks):
    assert ranks.run(loaded_before_the_first_forward, 145, "blockwise", within="pair") == [[None] * 4] * 2


def test_ddp(ranks):
    assert ranks.run(data_parallel, within="pair") == [(True, True, [])] * 2


@pytest.mark.parametrize(
    ("optimizer", "group", "hidden", "name"),
    [
        ("AdamW, loop compiled", "pair", 145, "tensorwise"),
        ("AdamW, foreach compiled", "all", 145, "tensorwise"),
        ("AdamW, loop compiled", "pair", 145, "blockwise"),
    ],
)
def test_a_compiled_step_has_the_bits_of_one_process(ranks, optimizer, group, hidden, name):
    answers = ranks.run(steps_of, optimizer, group, hidden, 3, name, within=group)
    assert answers == [(True, [], True)] * len(answers)


def test_a_compiled_step_takes_one_amax_message_for_all_weights(ranks):
    assert ranks.run(messages, "AdamW, foreach compiled", within="pair") == [[4]] * 2
