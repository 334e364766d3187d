"""MasterWeights around optimizers of other packages, scheduled, copied, pickled: the bits of each by hand."""

from __future__ import annotations

import copy
import io
import pickle
import re

import prodigyopt
import pytest
import schedulefree
import torch
from torch import nn

import fp8compile as f8
from fp8compile.tensor import QuantizedParameter

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamWScheduleFree": (schedulefree.AdamWScheduleFree, {"lr": 0.02, "warmup_steps": 2, "weight_decay": 0.1}),
    "SGDScheduleFree, loop": (schedulefree.SGDScheduleFree, {"lr": 0.5, "foreach": False}),
    "RAdamScheduleFree": (schedulefree.RAdamScheduleFree, {"lr": 0.02}),
    "Prodigy": (prodigyopt.Prodigy, {"d0": 1e-3, "weight_decay": 0.1, "use_bias_correction": True}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def converted(*, recipe="tensorwise", quantized=True, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 144), nn.ReLU(), nn.Linear(144, 64)).bfloat16()
    return f8.convert(model, f8.recipes.by_name(recipe), weight_lifetime="parameter" if quantized else None, **options)


def masters_of(name, model, **options):
    kind, own = OPTIMIZERS[name]
    return f8.MasterWeights(kind, model.parameters(), **own, **options)


def loss_of(model, step):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
    return (model(x).float() - x.float()).square().mean()


def train(model, optimizer, first, last):
    """Losses of some steps, and one of an evaluation after them."""
    switch(optimizer, "train")
    losses = []
    for step in range(first, last):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    switch(optimizer, "eval")
    with torch.no_grad():
        losses.append(loss_of(model, 100).item())
    switch(optimizer, "train")
    return losses


def switch(optimizer, mode):
    """As schedule-free optimizers are to be told; others know no modes."""
    getattr(optimizer, mode, lambda: None)()


class ByHand:
    """Float32 masters of the plain weights of FP8 layers, and this optimizer over them."""

    def __init__(self, name, model):
        kind, options = OPTIMIZERS[name]
        self.masters = {p: p.detach().float().requires_grad_() for p in model.parameters() if p.ndim == 2}
        self.inner = kind([self.masters.get(p, p) for p in model.parameters()], **options)

    def __getattr__(self, mode):
        call = getattr(self.inner, mode)

        def called():
            call()
            for weight, master in self.masters.items():
                weight.data.copy_(master)

        return called

    def step(self):
        for weight, master in self.masters.items():
            master.grad = weight.grad.float()
        self.__getattr__("step")()

    def zero_grad(self):
        self.inner.zero_grad()
        for weight in self.masters:
            weight.grad = None


def counted(optimizer):
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


@every_optimizer
def test_losses_and_counts_of_algorithms_are_those_by_hand(name, assert_bits_equal):
    model, plain = converted(keep_initial=True), converted(quantized=False)
    optimizer, by_hand = masters_of(name, model), ByHand(name, plain)
    losses = train(model, optimizer, 0, 6)
    assert losses == train(plain, by_hand, 0, 6)
    assert losses[5] < losses[0]
    assert counted(optimizer) == counted(by_hand.inner)
    for mine, weight in zip(model.parameters(), plain.parameters(), strict=True):
        if isinstance(mine, QuantizedParameter):
            assert_bits_equal(mine.codes, f8.quantize(weight.detach(), mine.quantizer).codes)


@every_optimizer
def test_run_that_is_resumed_has_the_same_losses_and_counts(name):
    model = converted()
    optimizer = masters_of(name, model)
    train(model, optimizer, 0, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected = train(model, optimizer, 3, 6), counted(optimizer)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    model = converted(seed=1)
    optimizer = masters_of(name, model)
    for each, state in zip((model, optimizer), states, strict=True):
        each.load_state_dict(state)
    assert (train(model, optimizer, 3, 6), counted(optimizer)) == expected


def step(model, optimizer, *, lr=0.01, without=False):
    """A step of AdamW, without a gradient of the first weight if ``without``."""
    optimizer.param_groups[0]["lr"] = lr
    loss_of(model, 0).backward()
    if without:
        model[0].weight.grad = None
    optimizer.step()
    optimizer.zero_grad()


# the codes of the first weight were made by convert, or with the noise of an earlier step than the last one
@pytest.mark.parametrize("last", [None, {"lr": 0.0}, {"without": True}], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
def test_stochastically_rounded_masters_are_those_of_the_file(recipe, last, assert_bits_equal):
    def made():
        model = converted(recipe=recipe, keep_initial=True)
        return model, masters_of("AdamW", model, rounding="stochastic")

    model, optimizer = made()
    if last is not None:
        step(model, optimizer)
        step(model, optimizer, **last)
    own, of_own = made()
    own.load_state_dict(copy.deepcopy(model.state_dict()))
    of_own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (own, of_own)):
        step(*each)
    found, expected = (each.state_dict()["state"] for each in (of_own, optimizer))
    assert found.keys() == expected.keys()
    for index, values in expected.items():
        for name, value in values.items():
            assert_bits_equal(found[index][name], value, f"{name} of parameter {index}")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_that_somebody_else_writes_replace_the_master(rounding, assert_bits_equal):
    model = converted()
    optimizer = masters_of("AdamW", model, rounding=rounding)
    step(model, optimizer)
    codes = model[0].weight.codes.clone()
    written = torch.where(torch.arange(codes.numel()).view(codes.shape) == 7, codes + 2, codes)  # one of 9,216
    model.load_state_dict({**model.state_dict(), "0.weight_codes": written})
    expected = model[0].weight.dequantize(torch.float32)
    step(model, optimizer, lr=1e-30)  # moves no value
    assert_bits_equal(optimizer.state_dict()["state"][0]["master"], expected)


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v)), saved_and_loaded])
@pytest.mark.parametrize("options", [{}, {"keep": False}, {"keep": False, "rounding": "stochastic"}], ids=str)
def test_copy_of_a_model_and_its_optimizer_goes_on_as_they_do(copied, options):
    model = converted()
    optimizer = masters_of("AdamWScheduleFree", model, **options)
    train(model, optimizer, 0, 3)
    own_model, own = copied((model, optimizer))
    before = [each.codes.clone() for each in model.parameters() if isinstance(each, QuantizedParameter)]
    losses = train(own_model, own, 3, 6)
    assert all(isinstance(each, nn.Parameter) for each in own_model.parameters())
    after = [each.codes for each in model.parameters() if isinstance(each, QuantizedParameter)]
    assert all(map(torch.equal, before, after))
    assert losses == train(model, optimizer, 3, 6)


def test_copy_of_an_optimizer_alone_has_weights_of_its_own():
    model = converted()
    optimizer = masters_of("AdamW", model)
    own = copy.deepcopy(optimizer)
    weights = own.param_groups[0]["params"]
    assert not set(weights) & set(model.parameters())
    for weight in weights:
        weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
    own.step()
    assert torch.equal(model[0].weight.codes, converted()[0].weight.codes)
    assert not torch.equal(weights[0].codes, model[0].weight.codes)


def test_schedules_write_to_the_groups_that_the_optimizer_reads():
    model = converted()
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias, *model[2].parameters()]}]
    optimizer = f8.MasterWeights(torch.optim.SGD, groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    for rates in ([0.5, 0.1], [0.05, 0.01]):
        train(model, optimizer, 0, 1)
        assert [group["lr"] for group in optimizer.inner.param_groups] == pytest.approx(rates)
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.step()
    assert [group["lr"] for group in optimizer.inner.param_groups] == pytest.approx([0.5e-3, 0.1e-3])


def test_named_parameters_have_masters_and_names():
    model, other = converted(), converted()
    named = f8.MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=0.01)
    assert named.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert train(model, named, 0, 3) == train(other, masters_of("AdamW", other), 0, 3)


def test_groups_have_the_weights_again_after_an_error():
    model = converted()
    optimizer = masters_of("AdamWScheduleFree", model)
    loss_of(model, 0).backward()
    with pytest.raises(Exception, match="not in train mode"):
        optimizer.step()
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, model.parameters()))
    assert not hasattr(masters_of("AdamW", converted()), "train")


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, schedulefree.SGDScheduleFreeClosure])
def test_an_optimizer_that_calls_a_closure_itself_is_refused_when_it_is_made(kind):
    with pytest.raises(TypeError, match=f"the step of {kind.__name__} requires a closure, which would always see"):
        f8.MasterWeights(kind, converted().parameters())


def test_a_state_of_the_optimizer_itself_is_refused_where_masters_are_kept():
    model = converted(quantized=False)
    state = torch.optim.AdamW(model.parameters()).state_dict()
    with pytest.raises(ValueError, match="the state has no master for a quantized weight"):
        masters_of("AdamW", converted()).load_state_dict(state)


def test_hooks_of_loading_see_masters_and_run_once(assert_bits_equal):
    def doubled(optimizer, state):
        calls.append(("before", len(state["state"])))
        return {**state, "state": {0: {**state["state"][0], "master": 2 * state["state"][0]["master"]}}}

    calls = []
    model = converted()
    optimizer = f8.MasterWeights(torch.optim.AdamW, [model[0].weight])
    train(model, optimizer, 0, 1)
    before = optimizer.state_dict()["state"][0]["master"].clone()
    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: calls.append(("behind", len(optimizer.state))))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [("before", 1), ("behind", 1)]
    assert_bits_equal(optimizer.state_dict()["state"][0]["master"], 2 * before)


DAMAGED = {
    "(1,)": lambda master: master.flatten()[:1].clone(),
    "(1, 64)": lambda master: master[:1].clone(),
    "(144, 64), torch.int32": lambda master: master.to(torch.int32),
}


@pytest.mark.parametrize("named", DAMAGED)
def test_masters_of_another_shape_or_dtype_raise_and_change_nothing(named, assert_bits_equal):
    optimizer = masters_of("AdamW", converted())
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    state = masters_of("AdamW", converted(seed=1)).state_dict()
    last = next(reversed([index for index, each in state["state"].items() if each["master"].shape == (144, 64)]))
    state["state"][last]["master"] = DAMAGED[named](state["state"][last]["master"])
    with pytest.raises(ValueError, match=re.escape(f"a loaded master has shape {named}")):
        optimizer.load_state_dict(state)
    for index, each in optimizer.state_dict()["state"].items():
        assert_bits_equal(each["master"], expected[index]["master"])
