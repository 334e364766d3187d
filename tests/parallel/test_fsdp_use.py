"""What people do with a model whose weights FSDP2 gathers as codes: it behaves as the one without, bit for bit."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from test_fsdp import differing, recipe_of, sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from torch_files import through_a_file

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.ops import collectives
from fp8compile.parallel import fsdp_float8_all_gather
from fp8compile.parallel.fsdp2.sharded_weight import ShardedWeight
from fp8compile.testing.bits import bits

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)
BF16 = models.BF16


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


@contextmanager
def counted(module, name):
    """How often a function of a module is called, and what with."""
    calls, original = [], getattr(module, name)

    def count(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    setattr(module, name, count)
    try:
        yield calls
    finally:
        setattr(module, name, original)


def pair_of(recipe="tensorwise", sizes="uneven", policy=BF16, *, on=True, **options):
    """A model on two ranks."""
    return sharded(models.model_of(sizes, recipe_of(recipe)), "1-D", policy, on=on, **options)


def rank():
    return dist.get_rank() % 2


def same_both_ways(use, **options):
    """What differs in what ``use(model)`` returns, and in the weights afterwards, from the model without codes."""
    found, weights = {}, {}
    for on in (False, True):
        model = pair_of(on=on, **options)
        found[on] = use(model)
        weights[on] = models.weights_of(model)
    differ = differing(weights[False], weights[True])
    return differ if found[False] == found[True] else [*differ, f"found {found}"]


# ---------------------------------------------------------------------------------- messages


class CountedAllGather:
    """FSDP2's all-gather, and the bytes that a rank sends."""

    sent = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        CountedAllGather.sent += input_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def messages_of_three_steps(recipe, *, on):
    model = pair_of(recipe, sizes="even", on=on)
    optimizer = models.adamw(model)
    models.trained(model, 1, rank(), optimizer=optimizer)
    for module in model.modules():
        if models.is_sharded(module):
            module.set_custom_all_gather(CountedAllGather())
    CountedAllGather.sent = 0
    with counted(collectives, "all_reduce_amax") as reduced:
        models.trained(model, 3, rank(), optimizer=optimizer, start=1)
    return len(reduced), CountedAllGather.sent


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_one_amax_message_a_step_and_half_the_bytes(ranks, recipe):
    reductions, sent = ranks.run(partial(messages_of_three_steps, on=True), recipe)[0]
    none, plain = ranks.run(partial(messages_of_three_steps, on=False), recipe)[0]
    assert (reductions, none) == (3, 0), "one message for all weights, once a step"
    dim, hidden = models.SIZES["even"]
    gathered = 3 * 2 * (2 * 3 * dim * hidden) // 2  # steps, passes, elements of two blocks' weights that a rank has
    others = plain - 2 * gathered  # norms, biases, embedding, head: as they were
    assert sent - others <= 0.55 * (plain - others)


CHANGES = {
    "optimizer, for loop": lambda p: stepped(p, foreach=False),
    "optimizer, foreach": lambda p: stepped(p, foreach=True),
    "optimizer, fused": lambda p: stepped(p, fused=True),
    "in place": lambda p: p.mul_(3),
    "in place, .data": lambda p: p.data.mul_(3),
    "in place, .detach()": lambda p: p.detach().mul_(3),
    "in place, the local tensor": lambda p: p._local_tensor.mul_(3),
    "in place, to_local()": lambda p: p.to_local().mul_(3),
    "in place, a view": lambda p: p.to_local().view(-1)[:].mul_(3),
    "in place, what is wrapped": lambda p: getattr(p._local_tensor, "plain", p._local_tensor).mul_(3),
    "copy_": lambda p: p.copy_(p.clone() * 3),
    "init": lambda p: nn.init.constant_(p, 3.0),
    "foreach": lambda p: torch._foreach_mul_([p], 3),
    "all_reduce": lambda p: dist.all_reduce(rows_of_shard(p), group=GROUPS["pair"]),
    "recv": lambda p: tripled_by_the_other(rows_of_shard(p)),
}


def rows_of_shard(parameter):
    return parameter.to_local()[:100]  # which both ranks have


def tripled_by_the_other(rows):
    """Write three times the other rank's rows into this rank's."""
    message = dist.isend(rows * 3, group=GROUPS["pair"], group_dst=1 - rank())
    dist.recv(rows, group=GROUPS["pair"], group_src=1 - rank())
    message.wait()


def stepped(parameter, **options):
    parameter.grad = parameter.detach().clone()
    torch.optim.AdamW([parameter], lr=0.5, **options).step()
    parameter.grad = None


def change_is_seen(name):
    def use(model):
        losses = [model(models.batch(0, rank())).item()]
        with torch.no_grad():
            CHANGES[name](model.blocks[0].inner["gate"].weight)
        return [*losses, model(models.batch(0, rank())).item()]

    def checked(model):
        with torch.no_grad():
            found = use(model)
        assert found[0] != found[1], "the change makes no difference to the loss"
        return found

    return same_both_ways(checked, reshard_after_forward=True)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_weight_gets_new_scales(ranks, name):
    assert ranks.run(change_is_seen, name, within="pair") == [[]] * 2


def writes_counted_by_a_send():
    """How many writes rank 0 counts while it sends a shard to rank 1, which has nothing to count."""
    local = pair_of().blocks[0].inner["gate"].weight.to_local()
    before = local.write_counter.count
    if rank() == 0:
        dist.send(local.contiguous(), group=GROUPS["pair"], group_dst=1)
    else:
        dist.recv(torch.empty(101, local.shape[1], dtype=local.dtype), group=GROUPS["pair"], group_src=0)
    return local.write_counter.count - before


def test_a_shard_that_one_rank_sends_is_not_written_to_so_no_rank_waits_for_amaxes(ranks):
    assert ranks.run(writes_counted_by_a_send, within="pair") == [0, 0]


# ---------------------------------------------------------------------------------- checkpoints


def keys_and_values():
    plain, codes = pair_of(on=False).state_dict(), pair_of(on=True).state_dict()
    found = [] if list(plain) == list(codes) else ["keys"]
    for name, value in codes.items():
        if not torch.equal(bits(plain[name].full_tensor()), bits(value.full_tensor())):
            found.append(name)
    for name, value in through_a_file(codes).items():
        if type(value._local_tensor) is not torch.Tensor:
            found.append(f"{name} is a {type(value._local_tensor).__name__} in a file")
        if not torch.equal(bits(plain[name]._local_tensor), bits(value._local_tensor)):
            found.append(f"{name} in a file")
    return found


def test_state_dict_is_that_of_the_unconverted_model(ranks):
    assert ranks.run(keys_and_values) == [[]] * 4


def loaded(how):
    """Losses after loading another model's weights."""
    source = sharded(models.model_of("uneven", recipe_of("tensorwise"), seed=1), "1-D", BF16, on=False)
    state_dict = source.state_dict()

    def use(model):
        losses = [model(models.batch(0, rank())).item()]
        if how == "copy":
            model.load_state_dict(state_dict)
        elif how == "assign":
            model.load_state_dict(through_a_file(state_dict), assign=True)
        else:
            set_model_state_dict(model, get_model_state_dict(source))
        with counted(collectives, "all_reduce_amax") as reduced:
            losses.append(model(models.batch(0, rank())).item())
        on = type(model.blocks[0].inner["gate"].weight._local_tensor) is not torch.Tensor
        return [*losses, bool(reduced) == on]

    return same_both_ways(use)


@pytest.mark.parametrize("how", ["copy", "assign", "set_model_state_dict"])
def test_load_state_dict(ranks, how):
    assert ranks.run(loaded, how) == [[]] * 4


# ---------------------------------------------------------------------------------- ways of training


def clipped(model):
    optimizer, losses = models.adamw(model), []
    for step in range(3):
        loss = model(models.batch(step, rank()))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.full_tensor().item()]
    return losses


def evaluated_between(model):
    losses = models.trained(model, 2, rank())
    with torch.no_grad():
        losses.append(model(models.batch(7, rank())).item())
    return losses + models.trained(model, 2, rank(), start=2)


def checkpointed(model):
    for block in model.blocks:
        block.forward = _recomputed(block.forward)
    return models.trained(model, 3, rank())


def _recomputed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def three_steps(model):
    return models.trained(model, 3, rank())


TRAINED = {
    "accumulated": (models.accumulated, {}),
    "clipped": (clipped, {}),
    "evaluated": (evaluated_between, {}),
    "checkpointed": (checkpointed, {}),
    "kept after forward": (three_steps, {"reshard_after_forward": False}),
    "offloaded": (
        lambda model: models.trained(model, 3, rank()),
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ),
}


def trains_alike(name):
    use, options = TRAINED[name]
    return same_both_ways(use, **options)


@pytest.mark.parametrize("name", TRAINED)
def test_ways_of_training(ranks, name):
    assert ranks.run(trains_alike, name, within="pair") == [[]] * 2


def frozen():
    found = {}
    for on in (False, True):
        model = models.model_of("uneven", recipe_of("tensorwise"))
        model.blocks[0].requires_grad_(requires_grad=False)
        model = sharded(model, "1-D", BF16, on=on)
        before = models.weights_of(model)
        with counted(collectives, "all_reduce_amax") as reduced:
            losses = models.trained(model, 3, rank())
        after = models.weights_of(model)
        still = [name for name in before if torch.equal(before[name], after[name])]
        found[on] = losses, [name for name in still if "blocks.0" not in name], [args[0].numel() for args in reduced]
    assert found[True][2] == [6, 3, 3], "scales of frozen weights are computed once"
    return found[False][:2] == found[True][:2]


def test_frozen_layers(ranks):
    assert ranks.run(frozen) == [True] * 4


class Tied(nn.Module):
    """An embedding and a head of one weight, and a layer between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 32)
        self.middle = nn.Linear(32, 32)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, symbols):
        return self.head(self.middle(self.embed(symbols))).float().square().mean()


def tied():
    found = {}
    for on in (False, True):
        model = f8.convert(Tied(), recipe_of("tensorwise"), filter=lambda *_: True)
        if on:
            fsdp_float8_all_gather(model)
            assert model.head.weight is model.embed.weight
            assert "tied" in model.head.gathered
            assert model.middle.gathered == "quantized data"
        fully_shard(model, mesh=models.mesh_1d("pair"), mp_policy=BF16)
        found[on] = models.trained(model, 3, rank())
    return found[False] == found[True]


def test_tied_embeddings(ranks):
    assert ranks.run(tied) == [True] * 4


def from_meta():
    """A model that has memory only once it is sharded."""
    found = {}
    for on in (False, True):
        with torch.device("meta"):
            model = models.model_of("uneven", recipe_of("tensorwise"))
        model = sharded(model, "1-D", BF16, on=on)
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
        found[on] = models.trained(model, 3, rank()), models.weights_of(model)
    return differing(found[False][1], found[True][1]) or found[False][0] == found[True][0]


def test_meta_device_init(ranks):
    assert ranks.run(from_meta) == [True] * 4


class Short(nn.Module):
    """The last of three ranks has none of the first layer's rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 4, bias=False)
        self.second = nn.Linear(4, 16, bias=False)

    def forward(self, symbols):
        return self.second(self.first(nn.functional.one_hot(symbols % 16, 16).float())).float().square().mean()


# ---------------------------------------------------------------------------------- bad input


def half_of(recipe):
    """Without FP8 in grad_input."""
    return replace(recipe, grad_output=None, weight_for_grad_input=None)


def test_what_cannot_be_gathered_says_so():
    with pytest.raises(TypeError, match="`model` is a str"):
        fsdp_float8_all_gather("model")
    with pytest.raises(ValueError, match=r"no FP8 layers. Call fp8compile.convert first"):
        fsdp_float8_all_gather(nn.Linear(16, 16))
    delayed, own = f8.recipes.delayed(weight_lifetime="call"), f8.CurrentScaling()
    once = replace(delayed, grad_output=own, weight_for_grad_input=own)
    half = half_of(f8.recipes.rowwise())
    for recipe, reason in ((once, "of its two GEMMs"), (half, "leaves grad_input in high precision")):
        model = f8.convert(nn.Sequential(nn.Linear(32, 32)), recipe, filter=lambda *_: True)
        with pytest.raises(ValueError, match=f"no weight of this model can be all-gathered in FP8.*{reason}"):
            fsdp_float8_all_gather(model)
    model = f8.convert(nn.Sequential(nn.Linear(32, 32)), f8.recipes.tensorwise(), weight_lifetime="parameter")
    with pytest.raises(ValueError, match="can't be gathered in high precision"):
        fsdp_float8_all_gather(model, one_gather="param_dtype")
    model = f8.convert(nn.Sequential(nn.Linear(32, 32)), f8.recipes.tensorwise(), filter=lambda *_: True)
    fsdp_float8_all_gather(model)
    with pytest.raises(ValueError, match="it was already called for this model"):
        fsdp_float8_all_gather(model)


def wrong_order():
    model = fully_shard(models.model_of("even", recipe_of("tensorwise")), mesh=models.mesh_1d("pair"))
    try:
        fsdp_float8_all_gather(model)
    except ValueError as error:
        return str(error)
    return "no error"


def test_after_fully_shard(ranks):
    answers = ranks.run(wrong_order)
    assert all("is already sharded by fully_shard. The order is" in answer for answer in answers), answers


def other_dim():
    model = models.model_of("even", recipe_of("tensorwise"))
    fsdp_float8_all_gather(model)
    fully_shard(
        model,
        mesh=models.mesh_1d("pair"),
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0),
    )
    try:
        model(models.batch(0, rank()))
    except ValueError as error:
        return str(error)
    return "no error"


def test_other_dims_are_refused(ranks):
    assert all("sharded along dim 0" in answer for answer in ranks.run(other_dim))


def mixed():
    """One layer's weight travels as codes, another one's as it is; the report says which and why."""
    model = models.model_of("even", recipe_of("tensorwise"))
    f8.revert(model.blocks[1])
    f8.convert(model.blocks[1], half_of(f8.recipes.tensorwise()))
    fsdp_float8_all_gather(model)
    model = models.shard(model, models.mesh_1d("pair"), BF16)
    models.trained(model, 2, rank())
    return str(f8.conversion_report(model))


def test_the_report_says_what_is_gathered(ranks):
    report = ranks.run(mixed)[0]
    assert "quantized data" in report
    assert "param_dtype [" in report
    assert "] the recipe leaves grad_input in high precision" in report


# -------------------------------------------------------------------- why rowwise may need both sets of codes


def uses_of_a_gather(how):
    """In the order of a step: when a layer's weight is gathered, and which of its products run."""
    seen, original = [], ShardedWeight.fsdp_pre_all_gather

    def gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        seen.append("gather")
        return original(self, mesh, outer_size, outer_stride, module, mp_policy)

    model = f8.convert(Short(), recipe_of("tensorwise"), filter=lambda *_: True)
    fsdp_float8_all_gather(model)
    layer = fully_shard(model.first, mesh=models.mesh_1d("pair"), reshard_after_forward=how != "kept after forward")
    layer.register_forward_pre_hook(lambda *_: seen.append("output"))
    layer.register_full_backward_hook(lambda *_: seen.append("grad_input"))
    ShardedWeight.fsdp_pre_all_gather = gather
    try:
        x = torch.ones(2, 16, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if how == "checkpointed" else layer(x)
        y.sum().backward()
    finally:
        ShardedWeight.fsdp_pre_all_gather = original
    return seen


@pytest.mark.parametrize(
    ("how", "order"),
    [
        ("plain", ["gather", "output", "gather", "grad_input"]),
        # one gather serves the product that forward does again, and grad_input: its codes have to serve both
        ("checkpointed", ["gather", "output", "gather", "output", "grad_input"]),
        ("kept after forward", ["gather", "output", "grad_input"]),
    ],
)
def test_a_gather_may_serve_both_passes(ranks, how, order):
    """So codes that are one pass's alone (rowwise, MX) are not always enough: see test_fsdp_passes.py."""
    assert ranks.run(uses_of_a_gather, how) == [order] * 4
