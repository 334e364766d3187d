"""f8.optim.Muon: the momentum is codes, the rest is torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch
from moment_steps import differences, gradient, parameter, train
from torch import nn
from torch_files import through_a_file

import fp8compile as f8
from fp8compile.testing.bits import difference


def muon(params, **options):
    return f8.optim.Muon(params, **{"lr": 1e-2, "backend": None, **options})


@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}], ids=str)
def test_a_momentum_of_values_trains_as_torch_optim(options):
    ours, theirs = parameter(96, 128), parameter(96, 128)
    optimizer = muon([ours], momentum_buffer_dtype=torch.float32, **options)
    train([ours], optimizer, 0, 3)
    other = torch.optim.Muon([theirs], lr=1e-2, **options)
    train([theirs], other, 0, 3)
    # momenta differ in their last bits, so that a few elements of an update differ by a unit of bfloat16's last place
    assert difference(ours.detach(), theirs.detach()) is None or (ours - theirs).abs().max() < 3 * 1e-2 * 2**-7


def test_the_momentum_is_codes_of_what_it_would_be(assert_bits_equal):
    p = parameter(64, 160)
    optimizer = muon([p], rounding="nearest")
    p.grad = gradient(p, 0)
    optimizer.step()
    expected = f8.quantize(p.grad * torch.tensor(1 - 0.95), f8.CurrentScaling(block=(1, 128)))
    state = optimizer.state[p]
    assert list(state) == ["step", "momentum_buffer_codes", "momentum_buffer_scale"]
    assert_bits_equal(state["momentum_buffer_codes"], expected.codes)
    assert_bits_equal(state["momentum_buffer_scale"], expected.scale)
    size = state["momentum_buffer_codes"].numel() + 4 * state["momentum_buffer_scale"].numel()
    assert size == 64 * (160 + 2 * 4)


def test_a_compiled_step_has_the_bits_of_one_op_by_op():
    params, others = ([parameter(40, 160), parameter(16, 16)] for _ in range(2))
    optimizer, other = muon(params, backend="aot_eager"), muon(others)
    train(params, optimizer, 0, 3)
    train(others, other, 0, 3)
    assert differences(params, optimizer, others, other) == []


def test_a_run_that_is_resumed_has_the_same_bits():
    params, others = ([parameter(64, 160)] for _ in range(2))
    optimizer, other = muon(params), muon(others)
    train(params, optimizer, 0, 2)
    values, state = through_a_file([params[0].detach(), optimizer.state_dict()])
    others[0].data.copy_(values)
    other.load_state_dict(state)
    train(params, optimizer, 2, 4)
    train(others, other, 2, 4)
    assert differences(params, optimizer, others, other) == []


def test_a_state_of_torch_optim_loads():
    p, q = parameter(64, 160), parameter(64, 160)
    plain, optimizer = torch.optim.Muon([p], lr=0.1), muon([q])
    train([p], plain, 0, 2)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[q]["momentum_buffer_codes"].any()
    train([q], optimizer, 2, 3)


def test_a_matrix_without_gradient_stays():
    params = [parameter(64, 128), parameter(64, 128, seed=1)]
    optimizer = muon(params)
    train(params, optimizer, 0, 1)
    before = params[1].detach().clone(), optimizer.state[params[1]]["momentum_buffer_codes"].clone()
    params[0].grad, params[1].grad = gradient(params[0], 1), None
    optimizer.step()
    assert torch.equal(params[1], before[0])
    assert torch.equal(optimizer.state[params[1]]["momentum_buffer_codes"], before[1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"momentum": 1.0}, "`momentum` is 1.0; it must be a number of at least 0 and below 1"),
        ({"adjust_lr_fn": "mine"}, "`adjust_lr_fn` is 'mine'; it must be one of"),
        ({"momentum_buffer_dtype": torch.int8}, "`momentum_buffer_dtype` is torch.int8; it must be one of"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        muon([parameter(4, 4)], **options)


def test_a_group_is_refused_stochastic_rounding_of_parameters():
    group = {"params": [parameter(4, 4, dtype=torch.bfloat16)], "bf16_stochastic_round": True}
    with pytest.raises(
        ValueError, match=r"Muon: `bf16_stochastic_round` is not supported: .* rounding to nearest\. Omit"
    ):
        muon([group])
    assert muon([{**group, "bf16_stochastic_round": False}]).param_groups[0]["lr"] == 1e-2


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"a parameter has shape \(4,\); it must have two dims"):
        muon([nn.Parameter(torch.zeros(4))])
