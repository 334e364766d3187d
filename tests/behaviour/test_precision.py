"""Autocast, dtypes of parameters and inputs, gradient scaling."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from ways import behaviour

import fp8compile as f8

RECIPE = f8.recipes.rowwise()
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def pair(dtype):
    """A converted model and its unconverted twin."""
    plain = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(dtype)
    converted = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(dtype)
    converted.load_state_dict(plain.state_dict())
    return f8.convert(converted, RECIPE), plain


def differs(actual, expected):
    """FP8 ran: near the unconverted result, and not its bits."""
    actual, expected = actual.float(), expected.float()
    # e4m3 rounds by 2^-4 at most: each product by about twice that, sums by less
    return not torch.equal(actual, expected) and (actual - expected).norm() < 0.1 * expected.norm()


@behaviour("Precision", "parameters and inputs in bfloat16, float16, float32")
def test_one_dtype(way):
    for dtype in NAMES:
        model, plain = pair(dtype)
        x = torch.randn(32, 64, dtype=dtype)
        y, expected = way(model)(x), plain(x)
        assert y.dtype == dtype
        assert differs(y, expected)
        y.sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("parameters", NAMES, ids=NAMES.get)
@behaviour("Precision", "bf16 and fp16 autocast, over parameters and inputs of any of the three dtypes")
def test_autocast(way, parameters):
    for dtype in (torch.bfloat16, torch.float16):
        for inputs in NAMES:
            model, plain = pair(parameters)
            x = torch.randn(32, 64, dtype=inputs)
            call = way(model)
            with torch.autocast("cpu", dtype=dtype):
                y, expected = call(x), plain(x)
            assert y.dtype == expected.dtype == dtype
            assert differs(y, expected)
            y.float().sum().backward()
            expected.float().sum().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.grad.dtype == q.grad.dtype == parameters


@behaviour("Precision", "autocast inside the model")
def test_autocast_inside(way, assert_bits_equal):
    model, _ = pair(torch.float32)
    x = torch.randn(32, 64)

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    assert_bits_equal(way(inside)(x), expected)


@behaviour("Precision", "a region that switches autocast off")
def test_autocast_off(way, assert_bits_equal):
    model, _ = pair(torch.float32)
    x = torch.randn(32, 64)

    def off(x):
        with torch.autocast("cpu", enabled=False):
            return model(x)

    call = way(off)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(x)
    assert_bits_equal(y, model(x))


@behaviour("Precision", "parameters of one dtype, inputs of another, no autocast")
def test_mixed_dtypes(way):
    model, plain = pair(torch.bfloat16)
    x = torch.randn(32, 64)
    with pytest.raises(RuntimeError):  # nn.Linear takes no mixture either
        plain(x)
    with way.raises(TypeError, "`weight` is torch.bfloat16, but x is torch.float32", "autocast"):
        way(model)(x)


@behaviour("Precision", "`torch.set_default_dtype` and `torch.set_default_device`")
def test_defaults(way, assert_bits_equal):
    expected = f8.linear(torch.ones(32, 64).bfloat16(), torch.ones(96, 64).bfloat16(), recipe=RECIPE)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        model = f8.convert(nn.Sequential(nn.Linear(64, 96, bias=False)), RECIPE)
        assert (model[0].weight.dtype, model[0].weight.device.type) == (torch.bfloat16, "meta")
        model.to_empty(device="cpu").requires_grad_(requires_grad=False)[0].weight.fill_(1)
        y = way(model)(torch.ones(32, 64, device="cpu"))  # no constant of ours may land on the default device
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert_bits_equal(y, expected)


@behaviour("Precision", "`model.half()`, `.bfloat16()`, `.float()` after conversion")
def test_casts_after_conversion(way, assert_bits_equal):
    model, plain = pair(torch.float32)
    x = torch.randn(32, 64)
    for name, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32)):
        getattr(model, name)()
        expected = f8.convert(getattr(plain, name)(), RECIPE)(x.to(dtype))
        assert_bits_equal(way(model)(x.to(dtype)), expected)
        f8.revert(plain)


def scaled_steps(way, model, batches):
    """Train with a GradScaler; the scale after each step, and which steps changed the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    call, scales, stepped = way(model), [], []
    for x in batches:
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = call(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(not torch.equal(before, model[0].weight))
    return scales, stepped


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@behaviour("Precision", "GradScaler sees a non-finite gradient, skips the step, halves its scale")
def test_grad_scaler(way):
    model, plain = pair(torch.float32)
    batches = [torch.randn(32, 64) for _ in range(4)]
    batches[1][3, 5] = torch.inf
    batches[2][0, 0] = torch.nan
    scales, stepped = scaled_steps(way, model, batches)
    assert (scales, stepped) == ([256.0, 128.0, 64.0, 64.0], [True, False, False, True])
    assert (scales, stepped) == scaled_steps(lambda m: m, plain, batches)


@behaviour("Precision", "GradScaler sees a float16 gradient that overflows on its way")
def test_grad_scaler_overflow(way):
    model, plain = pair(torch.float32)
    batches = [torch.randn(32, 64) * 3e3]
    assert scaled_steps(way, model, batches) == scaled_steps(lambda m: m, plain, batches) == ([128.0], [False])
