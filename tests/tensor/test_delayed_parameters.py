"""Parameters that are codes by delayed scaling: the bits and the states of layers over bfloat16 copies of masters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from masters import ByHand, train
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
    model = model_of(quantized_parameters=True, keep_initial=True, **options)
    return model, f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01)


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
    plain = model_of(recipe=recipe)
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


def test_stock_optimizers_round_once_a_step():
    """As a plain weight of what codes stand for, updated, and then cast by the multiplier of that moment."""
    model = model_of(quantized_parameters=True)
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
        model = model_of(quantized_parameters=True)
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
    with pytest.raises(RuntimeError, match="this tensor is no layer's weight: a copy of one"):
        copied.mul_(2)
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="several layers share the weight of 0, each of which has a state"):
        f8.convert(tied, RECIPE, quantized_parameters=True)
