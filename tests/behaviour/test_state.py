"""State: dicts, files, copies, devices, initialization, parametrizations, pruning."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils import parametrizations, parametrize, prune
from ways import behaviour

import fp8compile as f8

RECIPE = f8.recipes.rowwise()


def plain(dtype=torch.bfloat16, **kwargs):
    return nn.Sequential(nn.Linear(64, 96, **kwargs), nn.ReLU(), nn.Linear(96, 64, bias=False, **kwargs)).to(dtype)


def converted(dtype=torch.bfloat16):
    return f8.convert(plain(dtype), RECIPE)


@pytest.fixture
def x():
    return torch.randn(32, 64, dtype=torch.bfloat16)


def train(call, model, x, steps=2, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        call(x).float().square().mean().backward()
        optimizer.step()
    return optimizer


# ------------------------------------------------------------------------------- dicts and files


@behaviour("State", "`state_dict` of a converted model into an unconverted one, and back")
def test_state_dict_both_ways(way, x, assert_bits_equal):
    model, other = converted(), plain()
    assert list(model.state_dict()) == list(other.state_dict())
    other.load_state_dict(model.state_dict())
    for name, value in other.state_dict().items():
        assert type(value) is torch.Tensor
        assert_bits_equal(value, model.state_dict()[name], name)
    third = converted()
    third.load_state_dict(other.state_dict())
    assert_bits_equal(way(third)(x), model(x))


@behaviour("State", "`load_state_dict(assign=True)`")
def test_load_assign(way, x, assert_bits_equal):
    model, other = converted(), converted()
    call = way(other)
    call(x)
    other.load_state_dict(model.state_dict(), assign=True)
    assert other[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert_bits_equal(call(x), model(x))


@behaviour("State", "`torch.save`, `torch.load(weights_only=True)`")
def test_torch_save(way, x, tmp_path, assert_bits_equal):
    model, other = converted(), converted()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_bits_equal(way(other)(x), model(x))


@behaviour("State", "`torch.save` of the whole model")
def test_torch_save_model(way, x, tmp_path, assert_bits_equal):
    model = converted()
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    assert other[0].recipe == RECIPE
    assert_bits_equal(way(other)(x), model(x))


@behaviour("State", "safetensors, also with tied weights")
def test_safetensors(way, x, tmp_path, assert_bits_equal):
    from safetensors.torch import load_model, save_model

    model, other = f8.convert(tied(), RECIPE), f8.convert(tied(), RECIPE)
    save_model(model, tmp_path / "model.safetensors")
    load_model(other, tmp_path / "model.safetensors")
    assert_bits_equal(way(other)(x), model(x))


@behaviour("State", "distributed checkpoints: model and optimizer, into an unconverted model too")
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable|not initialized)")
def test_dcp(way, x, tmp_path, assert_bits_equal):
    model = converted()
    optimizer = train(way(model), model, x)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)

    other = plain()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    state, optimizer_state = get_state_dict(other, other_optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    f8.convert(other, RECIPE)

    train(way(model), model, x, optimizer=optimizer)
    train(way(other), other, x, optimizer=other_optimizer)
    for name, value in model.state_dict().items():
        assert_bits_equal(other.state_dict()[name], value, name)


@behaviour("State", "optimizer made before `convert`")
def test_optimizer_before_convert(way, x, assert_bits_equal):
    first, second = plain(), plain()
    second.load_state_dict(first.state_dict())
    early = torch.optim.AdamW(first.parameters(), lr=1e-2)
    f8.convert(first, RECIPE)
    f8.convert(second, RECIPE)
    train(way(first), first, x, optimizer=early)
    train(second, second, x)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert_bits_equal(p, q)


# ------------------------------------------------------------------------------- copies


@behaviour("State", "`copy.deepcopy`, of a compiled model too")
def test_deepcopy(way, x, assert_bits_equal):
    model = converted()
    call = way(model)
    expected = call(x)
    copied = copy.deepcopy(call)
    with torch.no_grad():
        model[0].weight.zero_()
    assert_bits_equal(copied(x), expected)


@behaviour("State", "`pickle`")
def test_pickle(way, x, assert_bits_equal):
    model = converted()
    other = pickle.loads(pickle.dumps(model))
    assert other[0].recipe == RECIPE
    assert_bits_equal(way(other)(x), model(x))


@behaviour("State", "exponential moving averages (`swa_utils.AveragedModel`)")
def test_averaged_model(way, x, assert_bits_equal):
    model = converted()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.0))
    train(way(model), model, x)
    average.update_parameters(model)  # the first update copies
    assert type(average.module[0]) is f8.Linear
    assert_bits_equal(way(average)(x), model(x))


@behaviour("State", "`share_memory`")
def test_share_memory(way, x, assert_bits_equal):
    model = converted()
    expected = model(x)
    assert model.share_memory()[0].weight.is_shared()
    assert_bits_equal(way(model)(x), expected)


# ------------------------------------------------------------------------------- devices, initialization


@behaviour("State", "`to(dtype)`, `to(device)`")
def test_to(way, x, assert_bits_equal):
    model = converted(torch.float32)
    expected = copy.deepcopy(model).bfloat16()(x)
    model.to("cpu", torch.bfloat16)
    assert_bits_equal(way(model)(x), expected)


@behaviour("State", "built and converted on the meta device, `to_empty`, `reset_parameters`")
def test_meta_device(way, x, assert_bits_equal):
    with torch.device("meta"):
        model = f8.convert(plain(), RECIPE)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    other = plain()
    torch.manual_seed(1)
    for layer in (other[0], other[2]):
        layer.reset_parameters()
    f8.convert(other, RECIPE)
    assert_bits_equal(way(model)(x), other(x))


@behaviour("State", "on the meta device: shapes without a computation")
def test_meta_forward(way):
    with torch.device("meta"):
        model = f8.convert(plain(), RECIPE)
    y = way(model)(torch.empty(32, 64, dtype=torch.bfloat16, device="meta"))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (32, 64), torch.bfloat16)


@behaviour("State", "meta device, then `load_state_dict(assign=True)`")
def test_meta_load(way, x, assert_bits_equal):
    with torch.device("meta"):
        model = f8.convert(plain(), RECIPE)
    other = converted()
    model.load_state_dict(other.state_dict(), assign=True)
    assert_bits_equal(way(model)(x), other(x))


@behaviour("State", "`torch.nn.init` on a converted layer's parameters")
def test_init(way, x, assert_bits_equal):
    model, other = converted(), plain()
    for each in (model, other):
        torch.manual_seed(2)
        each.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
    other.load_state_dict({**other.state_dict(), "0.bias": model[0].bias})
    assert_bits_equal(way(model)(x), f8.convert(other, RECIPE)(x))


# ------------------------------------------------------------------------------- weights that are not what they were


def tied():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    model[2].weight = model[0].weight
    return model


@behaviour("State", "tied weights stay tied")
def test_tied(way, x, assert_bits_equal):
    model = f8.convert(tied(), RECIPE)
    assert model[2].weight is model[0].weight
    train(way(model), model, x)
    assert model[2].weight is model[0].weight
    untied = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    untied.load_state_dict(model.state_dict())
    assert_bits_equal(way(model)(x), f8.convert(untied, RECIPE)(x))


@behaviour("State", "`layer.weight = nn.Parameter(...)` after conversion")
def test_weight_replaced(way, x, assert_bits_equal):
    model = converted()
    call = way(model)
    call(x)
    weight = torch.randn(96, 64, dtype=torch.bfloat16)
    model[0].weight = nn.Parameter(weight)
    expected = f8.linear(f8.linear(x, weight, model[0].bias, recipe=RECIPE).relu(), model[2].weight, recipe=RECIPE)
    assert_bits_equal(call(x), expected)


@behaviour("State", "weights written in place between steps are quantized anew")
def test_weight_in_place(way, x, assert_bits_equal):
    model = converted()
    call = way(model)
    before = call(x)
    with torch.no_grad():
        model[2].weight.mul_(2)
    assert_bits_equal(call(x), before * 2)  # a power of two: the codes stay


@pytest.mark.parametrize("order", ["before", "after"])
@behaviour("State", "weight norm by `parametrizations`: registered after conversion works, before it is left out")
def test_weight_norm(way, x, order, assert_bits_equal):
    model = plain()
    if order == "before":
        parametrizations.weight_norm(model[0])
        f8.convert(model, RECIPE)
        assert not isinstance(model[0], f8.Linear)
        row = f8.conversion_report(model).rows[0]
        assert "parametrized; convert the model first, then parametrize the converted layer" in row.reason
    else:
        f8.convert(model, RECIPE)
        parametrizations.weight_norm(model[0])
        assert isinstance(model[0], f8.Linear)
    first = (
        f8.linear(x, model[0].weight, model[0].bias, recipe=RECIPE)
        if order == "after"
        else nn.functional.linear(x, model[0].weight, model[0].bias)
    )
    expected = f8.linear(first.relu(), model[2].weight, recipe=RECIPE)
    y = way(model)(x)
    assert_bits_equal(y, expected)
    y.sum().backward()
    assert model[0].parametrizations.weight.original1.grad is not None


@behaviour("State", "spectral norm by `parametrizations` after conversion, and its removal")
def test_spectral_norm(way, x, assert_bits_equal):
    model = converted()
    parametrizations.spectral_norm(model[0])
    model.eval()
    expected = f8.linear(x, model[0].weight, model[0].bias, recipe=RECIPE)
    assert_bits_equal(way(model[0])(x), expected)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is f8.Linear
    assert_bits_equal(way(model[0])(x), expected)


@behaviour("State", "pruning (`torch.nn.utils.prune`): masks hold while training")
def test_pruning(way, x):
    model = converted()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    mask = model[0].weight_mask.clone()
    optimizer = train(way(model), model, x)
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())
    model(x)
    assert torch.equal(model[0].weight != 0, mask != 0)
    prune.remove(model[0], "weight")
    assert type(model[0]) is f8.Linear
    assert int((model[0].weight == 0).sum()) == mask.numel() // 2


@behaviour("State", "`torch.__future__.set_swap_module_params_on_conversion`")
def test_swap_tensors(way, x, assert_bits_equal):
    model = converted(torch.float32)
    expected = copy.deepcopy(model).bfloat16()(x)
    weight = model[0].weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight is weight
    assert_bits_equal(way(model)(x), expected)


@behaviour("State", "`revert` after training, and `state_dict` of a compiled model")
def test_revert(way, x, assert_bits_equal):
    model = converted()
    call = way(model)
    train(call, model, x)
    keys = {name.removeprefix("_orig_mod.") for name in call.state_dict()}
    assert keys == set(model.state_dict())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = plain()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_bits_equal(f8.revert(model)(x), other(x))
