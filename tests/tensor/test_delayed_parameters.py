"""Parameters that are codes by delayed scaling: the bits and the states of layers over bfloat16 copies of masters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from masters import ByHand, scaled_by_values, train
from torch import nn
from torch._dynamo.utils import counters

import fp8compile as f8
from fp8compile.testing.bits import difference

RECIPE = f8.recipes.delayed(history=4)
MASTERS = {"lr": 0.01, "weight_decay": 0.1}


def model_of(seed=0, recipe=RECIPE, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)).bfloat16()
    return f8.convert(model, recipe, filter=lambda *_: True, **options)


def codes_of(**options):
    model = model_of(weight_lifetime="parameter", keep_initial=True, **options)
    return model, f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01)


def multiplier_of(values, quantizer):
    """The multiplier (1 / scale) by the amax of values themselves."""
    return quantizer.next_state(torch.zeros(2), torch.ones(()), values.detach().float().abs().max())[1]


def states_of(model):
    """Histories without entry 0, and multipliers."""
    return [t[:, 1:] if t.ndim == 2 else t for t in model.buffers()]


@pytest.mark.parametrize(
    "recipe",
    [RECIPE, f8.recipes.delayed(history=1), f8.recipes.delayed(history=3, algorithm="most_recent", margin=1)],
    ids=["4", "1", "most recent"],
)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_losses_and_states_are_those_of_layers_over_copies_of_masters(recipe, backend):
    model, optimizer = codes_of(recipe=recipe)
    plain = scaled_by_values(model_of(recipe=recipe))
    runs = [
        each if backend is None else torch.compile(each, backend=backend, fullgraph=True) for each in (model, plain)
    ]
    losses = train(runs[0], optimizer, 12)
    assert counters["stats"]["unique_graphs"] == (backend is not None)
    assert losses == train(runs[1], ByHand(plain, lr=0.01), 12)
    assert not any(difference(*pair) for pair in zip(states_of(model), states_of(plain), strict=True))


def test_a_weight_keeps_the_amax_that_its_next_backward_takes():
    model, optimizer = codes_of()
    train(model, optimizer, 3)
    for layer in (model[0], model[2]):
        master = optimizer.state[layer.weight]["master"].bfloat16()
        assert layer.amax_history[1, 0] == master.abs().max().float()
        assert layer.amax_history[0, 0] == layer.amax_history[2, 0] == 0


@pytest.mark.parametrize("how", ["copied", "pickled", "loaded", "on another device and back"])
def test_a_copy_goes_on_with_the_same_losses(how):
    model, optimizer = codes_of()
    train(model, optimizer, 3)
    if how == "copied":
        again = copy.deepcopy((model, optimizer))
    elif how == "pickled":
        again = pickle.loads(pickle.dumps((model, optimizer)))
    elif how == "loaded":
        again = codes_of(seed=7)
        train(*again, 2)
        again[0].load_state_dict(copy.deepcopy(model.state_dict()))
        again[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        again = model.to("cpu"), optimizer
        model, optimizer = copy.deepcopy(again)
    assert train(*again, 3, first=3) == train(model, optimizer, 3, first=3)


def test_values_that_are_loaded_are_cast_by_the_multiplier_that_comes_with_them():
    plain = model_of(3)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3)
    model, _ = codes_of()
    model.load_state_dict(plain.state_dict())
    for own, other in ((model[0], plain[0]), (model[2], plain[2])):
        multiplier = other.multiplier[1].view(1, 1)
        assert torch.equal(own.weight_codes, f8.ops.cast(other.weight.detach(), multiplier, RECIPE.weight))
        assert torch.equal(own.weight_scale, RECIPE.weight.scale_of(multiplier))
        assert own.amax_history[1, 0] == other.weight.detach().abs().max().float()


def decibels(values, reference):
    error = (values.float() - reference.float()).square().mean()
    return 10 * torch.log10(reference.float().square().mean() / error)


WRITTEN = {
    "converted": lambda source: f8.convert(source, RECIPE, filter="*", weight_lifetime="parameter"),
    "loaded": lambda source: loaded(model_of(weight_lifetime="parameter"), source.state_dict()),
    "copied after convert": lambda source: copied(model_of(weight_lifetime="parameter"), source),
    "written by an optimizer": lambda source: stepped(model_of(weight_lifetime="parameter"), source),
    "loaded and reset": lambda source: loaded(f8.reset_delayed_scaling(trained()), source.state_dict()),
    "loaded after training": lambda source: loaded(trained(), source.state_dict()),
    "frozen": lambda source: f8.freeze_weights(f8.convert(source, RECIPE, filter="*")),
    "frozen after a load": lambda source: f8.freeze_weights(loaded(model_of(), source.state_dict())),
}


def trained():
    model, optimizer = codes_of()
    train(model, optimizer, 2)
    return model


def loaded(model, state):
    model.load_state_dict(state)
    return model


@torch.no_grad()
def copied(model, source):
    for own, other in zip(model.parameters(), source.parameters(), strict=True):
        own.copy_(other)
    return model


class Copies(torch.optim.Optimizer):
    """An optimizer whose step copies given values."""

    def __init__(self, params, values):
        super().__init__(params, {})
        self.values = list(values)

    @torch.no_grad()
    def step(self):
        for own, values in zip(self.param_groups[0]["params"], self.values, strict=True):
            own.copy_(values)


def stepped(model, source):
    Copies(model.parameters(), source.parameters()).step()
    return model


def small_model(std):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)).bfloat16()
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=std)
    return model


@pytest.mark.parametrize("std", [0.02, 0.0005, 3000.0])
@pytest.mark.parametrize("how", WRITTEN)
def test_before_training_the_scale_is_that_of_the_values(how, std, assert_bits_equal):
    source = small_model(std)
    model = WRITTEN[how](copy.deepcopy(source))
    for own, other in ((model[0], source[0]), (model[2], source[2])):
        assert decibels(own.weight.dequantize(), other.weight) > 28  # as tensorwise has
        multiplier = multiplier_of(other.weight, RECIPE.weight).view(1, 1)
        assert_bits_equal(own.weight_codes, f8.ops.cast(other.weight.detach(), multiplier, RECIPE.weight))
        assert_bits_equal(own.weight_scale, RECIPE.weight.scale_of(multiplier))


@pytest.mark.parametrize("history", [1, 4])
def test_what_is_frozen_after_training_is_cast_as_its_forward_casts_it(history):
    model = model_of(recipe=f8.recipes.delayed(history=history))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    multiplier, values = model[0].multiplier[1].view(1, 1).clone(), model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.mul_(8)  # a later backward would see it
    f8.freeze_weights(model)
    assert torch.equal(model[0].weight_codes, f8.ops.cast(values * 8, multiplier, RECIPE.weight))


def test_stock_optimizers_round_once_a_step():
    """As a plain weight of what codes stand for, updated, and then cast by the multiplier of that moment."""
    model = model_of(weight_lifetime="parameter")
    weight, before = model[0].weight, model[0].weight.dequantize().detach()
    model(torch.randn(16, 64).bfloat16()).float().square().mean().backward()
    plain = nn.Parameter(before.clone())
    plain.grad = weight.grad.clone()
    for parameters in ([weight], [plain]):
        torch.optim.AdamW(parameters, **MASTERS, foreach=False).step()
    multiplier = model[0].multiplier[1].view(1, 1)
    assert torch.equal(weight.codes, f8.ops.cast(plain.detach(), multiplier, RECIPE.weight))


def test_a_start_on_the_meta_device_and_a_reset():
    with torch.device("meta"):
        model = model_of(weight_lifetime="parameter")
    model.to_empty(device="cpu")
    for layer in (model[0], model[2]):
        layer.reset_parameters()
        assert (layer.multiplier == 1).all()
        # codes stand for what was written, whose amax is kept; by a multiplier of 1, e4m3 rounds it by at most 2**-4
        kept = layer.amax_history[1, 0]
        assert abs(layer.weight.dequantize().abs().max() - kept) <= kept / 16
    kept = model[0].amax_history[1, 0].clone()
    f8.reset_delayed_scaling(model)
    assert model[0].amax_history[1, 0] == kept
    assert train(model, torch.optim.SGD(model.parameters(), lr=0.01), 2)


def test_what_is_no_layers_weight_takes_no_values():
    model, _ = codes_of()
    copied = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="this tensor is a copy"):
        copied.mul_(2)
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="several layers share the weight of 0, but each has its own state"):
        f8.convert(tied, RECIPE, weight_lifetime="parameter")
