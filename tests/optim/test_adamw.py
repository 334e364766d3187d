"""f8.optim.AdamW: the bits of its state, one graph, files, and what torch.optim and its users do with an optimizer."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from moment_steps import differences, gradient, parameter, train
from moments_by_hand import AdamWByHand
from torch import nn
from torch._dynamo.utils import counters
from torch_files import through_a_file

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.optim.compiled_step import _rounded_to_bfloat16
from fp8compile.quantizers.stochastic_rounding import positions
from fp8compile.testing.bits import difference

CODES = ["exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"]
# rows of one block, of a part of one, of two and a part; three dims; trailing dims that make one row
SHAPES = [(32, 128), (64, 100), (20, 300), (3, 16, 160), (33, 15, 3, 3)]


def adamw(params, **options):
    return f8.optim.AdamW(params, **{"lr": 1e-2, "backend": None, **options})


# ---------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parameters_and_codes_are_those_by_hand(shape, rounding, assert_bits_equal):
    p = parameter(*shape)
    rows = (-1, shape[-1]) if len(shape) < 4 else (shape[0], -1)
    optimizer = adamw([p], rounding=rounding, seed=3, weight_decay=0.1)
    seed = 3 if rounding == "stochastic" else None
    by_hand = AdamWByHand(p.detach().reshape(rows).numpy(), lr=1e-2, weight_decay=0.1, seed=seed)
    for step in range(4):
        p.grad = gradient(p, step)
        optimizer.step()
        by_hand.step(p.grad.reshape(rows).numpy())
        state = optimizer.state[p]
        assert_bits_equal(p.detach().reshape(rows), torch.from_numpy(by_hand.parameter), f"step {step}")
        for name, (codes, scale) in by_hand.state.items():
            assert_bits_equal(state[f"{name}_codes"].reshape(rows), torch.from_numpy(codes), name)
            assert_bits_equal(state[f"{name}_scale"].reshape(len(scale), -1), torch.from_numpy(scale), name)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_has_the_bits_of_one_op_by_op_in_one_graph_over_steps_and_rates(backend):
    def made(backend, lr):
        params = [parameter(40, 160), parameter(seed=1), parameter(64, 128, seed=2, dtype=torch.bfloat16)]
        return params, f8.optim.AdamW(params, lr=lr, backend=backend, bf16_stochastic_round=True)

    (params, optimizer), (others, other) = made(backend, torch.tensor(0.01)), made(None, 0.01)
    for step, rate in enumerate((0.01, 0.005, 0.02)):
        optimizer.param_groups[0]["lr"].fill_(rate)
        other.param_groups[0]["lr"] = rate
        other.param_groups[0]["betas"] = optimizer.param_groups[0]["betas"] = (0.9 - 0.1 * step, 0.99)
        train(params, optimizer, step, step + 1)
        train(others, other, step, step + 1)
        assert differences(params, optimizer, others, other) == []
    params[0].grad = others[0].grad = None  # neither a float for a tensor nor a missing gradient is another graph
    optimizer.param_groups[0]["lr"] = 0.02
    optimizer.step(), other.step()
    assert differences(params, optimizer, others, other) == []
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("kind", [f8.optim.AdamW, f8.optim.Muon])
def test_a_step_on_a_cpu_compiles_nothing_unless_asked(kind):
    params, others = [parameter(64, 128)], [parameter(64, 128)]
    optimizer, other = kind(params, lr=0.01), kind(others, lr=0.01, backend="aot_eager")
    train(params, optimizer, 0, 2)
    assert counters["stats"]["unique_graphs"] == 0
    train(others, other, 0, 2)
    assert counters["stats"]["unique_graphs"] == 1
    assert differences(params, optimizer, others, other) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_that_are_values_train_as_torch_optim(dtype):
    ours, theirs = parameter(64, 128), parameter(64, 128)
    options = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    optimizer, other = adamw([ours], **options), torch.optim.AdamW([theirs], lr=1e-2)
    train([ours], optimizer, 0, 10)
    train([theirs], other, 0, 10)
    state = optimizer.state[ours]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype
    # PyTorch rounds between other operations; bfloat16 has 8 bits, and an update is at most about a rate
    bound = 2e-6 if dtype == torch.float32 else 10 * 1e-2 * 2**-8
    assert (ours - theirs).abs().max() < bound


# ---------------------------------------------------------------------------------- what has codes


def test_state_takes_two_bytes_a_parameter_and_a_scale_for_128():
    p = parameter(64, 1024)
    optimizer = adamw([p])
    train([p], optimizer, 0, 1)
    size = sum(value.numel() * value.element_size() for key, value in optimizer.state[p].items() if key != "step")
    assert size / p.numel() == 2 + 2 * 4 / 128


@pytest.mark.parametrize("shape", [(), (1,), (5000,), (63, 64), (500, 15), (16, 2, 2, 2)], ids=str)
def test_small_parameters_keep_float32(shape):
    p = parameter(*shape)
    optimizer = adamw([p])
    train([p], optimizer, 0, 2)
    state = optimizer.state[p]
    assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq")] == [torch.float32] * 2
    assert state["exp_avg"].shape == p.shape


def test_a_group_says_how_its_moments_are_kept():
    params = [parameter(64, 128), parameter(64, 128, seed=1)]
    groups = [{"params": [params[0]]}, {"params": [params[1]], "exp_avg_sq_dtype": torch.float32, "lr": 0.0}]
    optimizer = adamw(groups)
    train(params, optimizer, 0, 1)
    assert "exp_avg_sq_codes" in optimizer.state[params[0]]
    assert optimizer.state[params[1]]["exp_avg_sq"].dtype == torch.float32
    assert "exp_avg_codes" in optimizer.state[params[1]]
    assert torch.equal(params[1], parameter(64, 128, seed=1))  # its rate is 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_whose_dtypes_change_goes_on_as_a_loaded_state_would(dtype, assert_bits_equal):
    """From codes to values and back: once each, as `load_state_dict` turns one into the other."""
    params, others = ([parameter(64, 160), parameter(7)] for _ in range(2))
    optimizer, other = adamw(params), adamw(others)
    train(params, optimizer, 0, 2)
    train(others, other, 0, 2)
    for step, now in enumerate((dtype, torch.float8_e4m3fn)):
        optimizer.param_groups[0].update(exp_avg_dtype=now, exp_avg_sq_dtype=now)
        state = other.state_dict()
        other = adamw(others, exp_avg_dtype=now, exp_avg_sq_dtype=now)
        other.load_state_dict(state)
        train(params, optimizer, 2 + step, 3 + step)
        train(others, other, 2 + step, 3 + step)
        for p, expected in zip(params, others, strict=True):
            assert_bits_equal(p.detach(), expected.detach())
            assert set(optimizer.state[p]) == set(other.state[expected])
            for key, value in other.state[expected].items():
                assert_bits_equal(optimizer.state[p][key], value, key)
    optimizer.param_groups[0]["exp_avg_dtype"] = torch.float16
    with pytest.raises(ValueError, match=r"AdamW: `exp_avg_dtype` is torch.float16; it must be one of torch.float32"):
        train(params, optimizer, 4, 5)


def test_a_backward_of_a_forward_before_a_compiled_step_raises():
    """As behind a step of torch.optim: its gradients would be those of other weights."""
    p = parameter(64, 128)
    optimizer = adamw([p], backend="aot_eager")
    p.grad = gradient(p, 0)
    loss = p.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_strides_of_a_parameter_do_not_matter(assert_bits_equal):
    plain, turned = parameter(64, 160), nn.Parameter(parameter(64, 160).detach().t().contiguous().t())
    assert turned.stride() == (1, 64)
    optimizers = [adamw([each]) for each in (plain, turned)]
    for each, optimizer in zip((plain, turned), optimizers, strict=True):
        train([each], optimizer, 0, 3)
    assert_bits_equal(turned.detach().contiguous(), plain.detach())
    for key in CODES:
        assert_bits_equal(optimizers[1].state[turned][key], optimizers[0].state[plain][key], key)


# ---------------------------------------------------------------------------------- rare gradients, zeros, NaN


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_row_and_an_element_with_rare_or_small_gradients_do_not_explode(rounding):
    """Rows of an embedding, of which one gets a gradient in 500 steps, and an element beside much larger ones."""
    p = nn.Parameter(torch.zeros(32, 128))
    optimizer = adamw([p], lr=1.0, weight_decay=0.0, rounding=rounding)
    largest = torch.zeros(32, 128)
    for step in range(520):
        p.grad = gradient(p, step)
        p.grad[:, 5] *= 1e-5
        if step % 500:
            p.grad[7] = 0
        before = p.detach().clone()
        optimizer.step()
        largest = torch.maximum(largest, (p.detach() - before).abs())
    # float32 moments: 2.50 rates at most in row 7, when it gets its second gradient, and 1.14 elsewhere
    assert largest[7].max() < 4
    assert largest.max() < 4
    assert optimizer.state[p]["exp_avg_sq_codes"].min() >= 1


def test_rows_of_zeros_stay_zeros():
    p = nn.Parameter(torch.zeros(32, 128))
    optimizer = adamw([p], weight_decay=0.0)
    for step in range(3):
        p.grad = gradient(p, step)
        p.grad[4] = 0
        optimizer.step()
    assert not p[4].any()
    assert not any(optimizer.state[p][key][4].any() for key in ("exp_avg_codes", "exp_avg_sq_codes"))
    assert (optimizer.state[p]["exp_avg_sq_scale"][4] == 1).all()


def test_a_nan_in_a_gradient_is_seen_in_its_block_and_nowhere_else():
    p = parameter(32, 256)
    optimizer = adamw([p])
    p.grad = gradient(p, 0)
    p.grad[3, 130] = torch.nan
    optimizer.step()
    scale = optimizer.state[p]["exp_avg_scale"]
    assert scale[3].isnan().tolist() == [False, True]
    assert scale.isnan().sum() == 1
    assert p.isnan().sum() == 1


@pytest.mark.parametrize("large", [1.7e19, 2e19, -1e30, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_a_finite_gradient_whose_square_overflows_moves_its_weight_by_a_few_rates(large, dtype):
    p = nn.Parameter(torch.zeros(32, 256))
    optimizer = adamw([p], weight_decay=0.0, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    for step in range(6):
        p.grad = gradient(p, step)
        if step == 1:
            p.grad[3, 130] = large
        before = p.detach().clone()
        optimizer.step()
        assert (p - before).abs().max() < 4 * 1e-2


@pytest.mark.parametrize("large", [2e19, -1e30])
def test_a_step_with_a_large_gradient_has_the_bits_by_hand(large, assert_bits_equal):
    p = parameter(32, 128)
    optimizer, by_hand = adamw([p], rounding="nearest"), AdamWByHand(p.detach().numpy(), lr=1e-2)
    for step in range(3):
        p.grad = gradient(p, step)
        p.grad[3, 5] = large if step == 1 else 1.0
        optimizer.step()
        by_hand.step(p.grad.numpy())
        assert_bits_equal(p.detach(), torch.from_numpy(by_hand.parameter), f"step {step}")
        for name, (codes, scale) in by_hand.state.items():
            assert_bits_equal(optimizer.state[p][f"{name}_codes"], torch.from_numpy(codes), name)
            assert_bits_equal(optimizer.state[p][f"{name}_scale"], torch.from_numpy(scale), name)


def test_an_infinite_gradient_is_seen_in_its_block_and_nowhere_else():
    p = parameter(32, 256)
    optimizer = adamw([p])
    p.grad = gradient(p, 0)
    p.grad[3, 130] = -torch.inf
    optimizer.step()
    for key in ("exp_avg_scale", "exp_avg_sq_scale"):
        assert optimizer.state[p][key].isnan().nonzero().tolist() == [[3, 1]]
    assert p.isnan().nonzero().tolist() == [[3, 130]]


# ---------------------------------------------------------------------------------- files


def test_a_run_that_is_resumed_has_the_same_bits():
    def made():
        params = [parameter(40, 160), parameter(64, seed=1)]
        return params, adamw(params, rounding="stochastic")

    params, optimizer = made()
    train(params, optimizer, 0, 3)
    states = through_a_file([[p.detach() for p in params], optimizer.state_dict()])
    others, other = made()
    for p, values in zip(others, states[0], strict=True):
        p.data.copy_(values)
    other.load_state_dict(states[1])
    train(params, optimizer, 3, 6)
    train(others, other, 3, 6)
    assert differences(params, optimizer, others, other) == []


def test_loading_shares_no_memory_with_the_state():
    p, q = parameter(64, 128), parameter(64, 128)
    optimizer, other = adamw([p]), adamw([q])
    train([p], optimizer, 0, 1)
    other.load_state_dict(optimizer.state_dict())
    before = {key: value.clone() for key, value in optimizer.state[p].items()}
    train([q], other, 1, 2)
    assert all(torch.equal(before[key], optimizer.state[p][key]) for key in before)


def test_a_state_of_torch_optim_loads_rounded_once(assert_bits_equal):
    p, q = parameter(64, 160), parameter(64, 160)
    plain, optimizer = torch.optim.AdamW([p], lr=0.5), adamw([q], rounding="nearest")
    train([p], plain, 0, 3)
    optimizer.load_state_dict(plain.state_dict())
    state = optimizer.state[q]
    assert float(state["step"]) == 3
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["exp_avg_dtype"] == torch.float8_e4m3fn
    quantizer = f8.CurrentScaling(block=(1, 128))
    expected = f8.quantize(plain.state[p]["exp_avg"], quantizer)
    assert_bits_equal(state["exp_avg_codes"], expected.codes)
    assert_bits_equal(state["exp_avg_scale"], expected.scale)
    train([q], optimizer, 3, 4)


def test_an_infinite_second_moment_of_torch_optim_loads_as_a_large_one():
    p, q = parameter(64, 256), parameter(64, 256)
    plain, optimizer = torch.optim.AdamW([p]), adamw([q])
    train([p], plain, 0, 1)
    plain.state[p]["exp_avg_sq"][3, 130] = torch.inf
    optimizer.load_state_dict(plain.state_dict())
    before = q.detach().clone()
    train([q], optimizer, 1, 3)
    assert q.isfinite().all()
    assert (q / before)[3, 130].item() == pytest.approx((1 - 1e-3 * 1e-2) ** 2)  # the decay alone, as in torch.optim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (8, 8, 3, 3)], ids=str)
def test_a_state_of_a_channels_last_parameter_loads_as_that_of_a_plain_one(shape, dtype):
    def loaded(memory_format):
        p = nn.Parameter(parameter(*shape).detach().contiguous(memory_format=memory_format))
        plain = torch.optim.AdamW([p], lr=1e-2, foreach=False)
        train([p], plain, 0, 2)
        assert plain.state[p]["exp_avg"].is_contiguous(memory_format=memory_format)
        optimizer = adamw([p], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        optimizer.load_state_dict(plain.state_dict())
        train([p], optimizer, 2, 4)
        return [p], optimizer

    assert differences(*loaded(torch.channels_last), *loaded(torch.contiguous_format)) == []


def test_codes_load_whatever_their_strides():
    p, q = parameter(64, 256), parameter(64, 256)
    optimizer, other = adamw([p]), adamw([q])
    train([p], optimizer, 0, 1)
    state = optimizer.state_dict()
    turned = {key: value.t().contiguous().t() for key, value in state["state"][0].items() if key != "step"}
    other.load_state_dict({**state, "state": {0: {**state["state"][0], **turned}}})
    q.data.copy_(p.data)
    train([p], optimizer, 1, 2)
    train([q], other, 1, 2)
    assert differences([p], optimizer, [q], other) == []


def test_codes_load_where_values_are_kept(assert_bits_equal):
    p, q = parameter(64, 160), parameter(64, 160)
    optimizer = adamw([p])
    other = adamw([q], exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32)
    train([p], optimizer, 0, 3)
    other.load_state_dict(optimizer.state_dict())
    state = optimizer.state[p]
    values = f8.QuantizedTensor(
        state["exp_avg_codes"], state["exp_avg_scale"], f8.CurrentScaling(block=(1, 128)), torch.float32
    ).dequantize()
    assert_bits_equal(other.state[q]["exp_avg"], values)
    assert other.param_groups[0]["exp_avg_dtype"] == torch.float32


@pytest.mark.parametrize("kind", [f8.optim.AdamW, f8.optim.Muon])
def test_hooks_of_loading_see_the_whole_state_and_run_once(kind, assert_bits_equal):
    def made(names):
        params = [parameter(64, 128, seed=seed) for seed in range(2)]
        return params, kind(list(zip(names, params, strict=True)), backend=None)

    def by_name(optimizer, state):  # what PyTorch documents a pre-hook for
        calls.append(("before", len(state["state"])))
        places = {name: index for index, name in enumerate(state["param_groups"][0]["param_names"])}
        names = optimizer.param_groups[0]["param_names"]
        return {**state, "state": {index: state["state"][places[name]] for index, name in enumerate(names)}}

    calls = []
    params, optimizer = made(["a", "b"])
    train(params[:1], optimizer, 0, 1)
    train(params, optimizer, 1, 2)
    others, other = made(["b", "a"])
    handle = other.register_load_state_dict_pre_hook(by_name)
    other.register_load_state_dict_post_hook(lambda optimizer: calls.append(("behind", len(optimizer.state))))
    other.load_state_dict(optimizer.state_dict())
    assert calls == [("before", 2), ("behind", 2)]
    for p, q in zip(params, reversed(others), strict=True):
        for key, value in optimizer.state[p].items():
            assert_bits_equal(other.state[q][key], value, key)
    handle.remove()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_state_dict({"state": {}, "param_groups": []})
    other.load_state_dict(optimizer.state_dict())
    assert calls[2:] == [("behind", 2)]


def test_a_hook_may_change_what_would_be_refused():
    def without_amsgrad(optimizer, state):
        return {**state, "param_groups": [{**group, "amsgrad": False} for group in state["param_groups"]]}

    p = parameter(64, 128)
    theirs = torch.optim.AdamW([p], lr=1e-2, amsgrad=True)
    train([p], theirs, 0, 1)
    ours = adamw([p])
    ours.register_load_state_dict_pre_hook(without_amsgrad)
    ours.load_state_dict(theirs.state_dict())
    assert float(ours.state[p]["step"]) == 1


def test_a_state_with_amsgrad_is_refused():
    p = parameter(64, 128)
    theirs = torch.optim.AdamW([p], lr=1e-2, amsgrad=True)
    train([p], theirs, 0, 1)
    ours = adamw([p])
    with pytest.raises(ValueError, match="was trained with amsgrad=True"):
        ours.load_state_dict(theirs.state_dict())
    assert "amsgrad" not in ours.param_groups[0]
    assert not ours.state


def test_a_state_without_moments_is_refused():
    p, q = parameter(64, 128), parameter(64, 128)
    other = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    train([p], other, 0, 1)
    state = other.state_dict()
    state["state"][0]["step"] = 1
    with pytest.raises(KeyError, match="neither exp_avg nor exp_avg_codes and exp_avg_scale"):
        adamw([q]).load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_goes_on_as_it_does(copied):
    params = [parameter(64, 128)]
    optimizer = adamw(params)
    train(params, optimizer, 0, 2)
    others, other = copied((params, optimizer))
    train(params, optimizer, 2, 4)
    train(others, other, 2, 4)
    assert differences(params, optimizer, others, other) == []


# ---------------------------------------------------------------------------------- what users do


def test_schedules_closures_clipping_and_a_grad_scaler():
    torch.manual_seed(0)
    model = nn.Linear(128, 64)
    optimizer = adamw(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)  # changes betas too
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    x = torch.randn(16, 128)
    losses = []
    for _ in range(8):
        loss = (model(x) - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    model.weight.grad, model.bias.grad = torch.full((64, 128), torch.inf), torch.zeros(64)
    before, steps = model.weight.detach().clone(), float(optimizer.state[model.weight]["step"])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)  # skips the step
    assert torch.equal(model.weight, before)
    assert float(optimizer.state[model.weight]["step"]) == steps

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() < losses[0]
    assert float(optimizer.state[model.weight]["step"]) == steps + 1


def test_maximize_is_the_step_by_the_negative_gradient(assert_bits_equal):
    p, q = parameter(64, 128), parameter(64, 128)
    up, down = adamw([p], maximize=True, rounding="nearest"), adamw([q], rounding="nearest")
    p.grad, q.grad = gradient(p, 0), -gradient(q, 0)
    up.step(), down.step()
    assert_bits_equal(p.detach(), q.detach())


def test_a_parameter_without_gradient_and_its_state_stay():
    params = [parameter(64, 128), parameter(64, 128, seed=1)]
    optimizer = adamw(params)
    params[0].grad = gradient(params[0], 0)
    optimizer.step()
    assert params[1] not in optimizer.state
    before = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    values = params[0].detach().clone()
    params[0].grad, params[1].grad = None, gradient(params[1], 0)
    optimizer.step()
    assert torch.equal(params[0], values)
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[params[0]].items())


@pytest.mark.parametrize("kind", [f8.optim.AdamW, f8.optim.Muon])
def test_a_step_without_any_gradient_changes_nothing(kind):
    params, others = [parameter(64, 128)], [parameter(64, 128)]
    optimizer, other = kind(params, backend=None), kind(others, backend=None)
    optimizer.step()
    assert not optimizer.state
    train(params, optimizer, 0, 2)
    train(others, other, 0, 2)
    optimizer.zero_grad()
    optimizer.step()
    assert differences(params, optimizer, others, other) == []


def test_a_device_without_gradients_does_not_stop_the_step_of_another():
    params = [parameter(64, 128), nn.Parameter(torch.empty(64, 128, device="meta"))]
    optimizer = adamw(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = params[0].detach().clone()
    params[1].grad = None
    optimizer.step()
    assert (params[0] != before).all()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 1]


def test_a_group_that_is_added_has_a_state_of_its_own():
    params = [parameter(64, 128), parameter(64, 128, seed=1)]
    optimizer = adamw(params[:1])
    train(params, optimizer, 0, 2)
    optimizer.add_param_group({"params": params[1:], "lr": 0.5})
    train(params, optimizer, 2, 3)
    assert [float(optimizer.state[p]["step"]) for p in params] == [3, 1]


def test_bfloat16_parameters_round_stochastically_where_asked():
    def moved(**options):
        p = nn.Parameter(torch.full((64, 128), 1.0, dtype=torch.bfloat16))
        optimizer = adamw([p], lr=1e-4, weight_decay=0.0, **options)
        for _ in range(10):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return (p.detach().float() - 1).mean().item()

    assert moved() == 0  # each update is less than half the distance of two bfloat16 numbers
    # 10 updates of a rate; the standard error of the mean of 8192 elements is 3e-5
    assert abs(moved(bf16_stochastic_round=True) + 10 * 1e-4) < 1.5e-4


def test_bfloat16_specials_stay_when_rounded_stochastically():
    values = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.5, -3.0, 2.0**-130]])
    p = nn.Parameter(values.bfloat16())
    optimizer = adamw([p], lr=0.0, bf16_stochastic_round=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert difference(p.detach(), values.bfloat16()) is None


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_every_nan_stays_one_when_rounded_stochastically(backend):
    bits = torch.tensor([[0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001]], dtype=torch.int32)  # the first is what CUDA makes
    place = positions(bits.shape, bits.device)
    found = torch.compile(_rounded_to_bfloat16, backend=backend, fullgraph=True)(bits.view(torch.float32), 0, *place)
    assert found.isnan().all()


def test_masters_of_quantized_weights_have_moments_as_codes():
    def run(seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 144), nn.ReLU(), nn.Linear(144, 64)).bfloat16()
        return f8.convert(model, f8.recipes.tensorwise(), weight_lifetime="parameter")

    def losses(model, optimizer, first, last):
        found = []
        for step in range(first, last):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            loss = (model(x).float() - x.float()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    for keep in (True, False):
        model = run()
        optimizer = f8.MasterWeights(f8.optim.AdamW, model.parameters(), lr=0.01, keep=keep, backend=None)
        first = losses(model, optimizer, 0, 5)
        assert first[-1] < first[0]
        state = optimizer.state[model[0].weight]
        assert state["exp_avg_codes"].dtype == torch.uint8
        assert ("master" in state) == keep
        files = through_a_file([model.state_dict(), optimizer.state_dict()])
        other_model = run(seed=1)
        other = f8.MasterWeights(f8.optim.AdamW, other_model.parameters(), lr=0.01, keep=keep, backend=None)
        other_model.load_state_dict(files[0])
        other.load_state_dict(files[1])
        assert losses(other_model, other, 5, 8) == losses(model, optimizer, 5, 8)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"amsgrad": True}, "`amsgrad` is not supported: a third state"),
        ({"foreach": True}, "`foreach` is not supported: the step is already one compiled graph"),
        ({"fused": True}, "`fused` is not supported: the step is already one compiled graph"),
        ({"capturable": True}, "`capturable` is not supported: the number of steps is counted on the host"),
        ({"differentiable": True}, "`differentiable` is not supported: FP8 states"),
        ({"exp_avg_dtype": torch.float16}, "`exp_avg_dtype` is torch.float16; it must be one of torch.float32"),
        ({"exp_avg_sq_dtype": "fp8"}, "`exp_avg_sq_dtype` is fp8; it must be one of"),
        ({"rounding": "up"}, "`rounding` is 'up'; it must be 'nearest' or 'stochastic'"),
        ({"seed": -1}, "`seed` is -1"),
        ({"lr": -1.0}, "`lr` is -1.0; it must be a number of at least 0"),
        (
            {"lr": torch.ones(2)},
            r"`lr` is a Tensor of shape \(2,\); if it is a tensor, it must have exactly one element",
        ),
        ({"betas": (0.9, 1.0)}, r"`betas\[1\]` is 1.0; it must be a number of at least 0 and below 1"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        adamw([parameter(4, 4)], **options)


def test_a_group_is_refused_what_the_optimizer_is():
    with pytest.raises(ValueError, match="`amsgrad` is not supported: a third state"):
        adamw([{"params": [parameter(4, 4)], "amsgrad": True}])


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("kind", [f8.optim.AdamW, f8.optim.Muon])
def test_a_group_has_no_backend_of_its_own(kind, backend):
    says = (
        f"{kind.__name__}: a group has backend={backend!r}, but all groups are updated by one graph. Omit "
        "it from the group, and pass backend= to the optimizer"
    )
    with pytest.raises(ValueError, match=says):
        kind([{"params": [parameter(4, 4)], "backend": backend}])
    optimizer = kind([parameter(4, 4)], backend=None)
    with pytest.raises(ValueError, match=says):
        optimizer.add_param_group({"params": [parameter(4, 4)], "backend": backend})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": False}, {"foreach": None, "capturable": False}])
def test_options_that_ask_for_nothing_are_taken(options):
    assert adamw([parameter(4, 4)], **options).defaults["lr"] == 1e-2


def test_parameters_that_are_refused():
    weight = f8.convert(nn.Linear(64, 64), f8.recipes.tensorwise(), weight_lifetime="parameter").weight
    with pytest.raises(
        TypeError, match="a parameter is an FP8 parameter, which a step would round without a master weight"
    ):
        adamw([weight])
    with pytest.raises(TypeError, match=r"a parameter is torch\.float64"):
        adamw([nn.Parameter(torch.zeros(4, dtype=torch.float64))])
    embedding = nn.Embedding(8, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="a gradient is sparse; it must be dense"):
        adamw(embedding.parameters()).step()


def test_steps_of_more_than_one_optimizer_do_not_share_a_limit_of_graphs():
    if TORCH_VERSION < (2, 13):
        pytest.skip("before 2.13 Dynamo counts all graphs of a function together")
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (4, 5, 6):
            params = [parameter(4, size)]
            train(params, adamw(params, backend="eager"), 0, 1)
    assert counters["stats"]["unique_graphs"] == 3


def test_numpy_has_the_roots_that_are_correctly_rounded():
    values = np.random.default_rng(0).random(1000, dtype=np.float32)
    assert np.array_equal(np.sqrt(values), np.sqrt(values.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("kind", [f8.optim.AdamW, f8.optim.Muon])
@pytest.mark.parametrize("moments", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, None])
def test_master_weights_say_the_dtype_of_all_moments(kind, moments):
    model = f8.convert(torch.nn.Linear(128, 64).bfloat16(), f8.recipes.tensorwise(), weight_lifetime="parameter")
    optimizer = f8.MasterWeights(kind, [model.weight], moments=moments)
    dtypes = [value for name, value in optimizer.param_groups[0].items() if name.endswith("_dtype")]
    assert dtypes == [moments or torch.float8_e4m3fn] * len(kind.moments)


def test_moments_of_an_optimizer_without_that_option_raise():
    with pytest.raises(TypeError, match="SGD has no option for the dtype of its moments"):
        f8.MasterWeights(torch.optim.SGD, [torch.nn.Parameter(torch.ones(2))], lr=0.1, moments=torch.bfloat16)
