"""f8.testing.compare: which module makes a difference, forward and backward, and how far it goes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.testing import compare


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.up = nn.Linear(64, 128)
        self.act = nn.SiLU(inplace=True)
        self.down = nn.Linear(128, 64)
        self.dropout = nn.Dropout(0.2)

    def between(self, x):
        return x

    def forward(self, x):
        return x + self.dropout(self.down(self.between(self.act(self.up(self.norm(x))))))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).bfloat16()


def batch():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def loss(y):
    return y.float().square().mean()


def rows(found, direction):
    return {row.name: row for row in found.rows if row.direction == direction}


def test_equal_models_are_equal_to_the_bit_with_dropout_and_inplace_operations():
    found = compare(model(), model(), batch(), loss=loss)
    assert found.first is found.worst is found.between_modules is None
    assert found.losses[0] == found.losses[1]
    assert {row.leaving for row in found.rows} <= {math.inf, None}
    assert "every module returns the reference's result, bit for bit" in str(found)


def test_fp8_layers_are_named_with_what_each_adds_and_what_has_grown():
    one = f8.convert(model(), {"1.down": f8.recipes.nvfp4(), "*": f8.recipes.rowwise()})
    found = compare(one, model(), batch(), loss=loss)
    assert (found.first.name, found.first.direction) == ("0.up", "forward")
    assert (found.worst.name, found.worst.kind) == ("1.down", "Linear, Linear")
    forward, backward = rows(found, "forward"), rows(found, "backward")
    assert forward["0.norm"].own == forward["0.norm"].leaving == math.inf
    assert 26 < forward["0.up"].own < 32
    assert forward["0.up"].own == forward["0.up"].leaving, "what arrives there is the reference's"
    assert 14 < forward["1.down"].own < 19
    assert forward["1.act"].own == math.inf
    assert 20 < forward["1.act"].arriving < 40
    assert 13 < backward["1.down"].own < 18
    assert 13 < backward["1.down"].own_weight < 20
    assert backward["0.down"].arriving < 30, "it has gone through the layers after it"
    assert found.between_modules is None


def test_a_wrong_backward_is_found_in_the_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    class Wrong(nn.Linear):
        def forward(self, x):
            return Twice.apply(super().forward(x))

    one = model()
    one[1].up.__class__ = Wrong
    found = compare(one, model(), batch(), loss=loss)
    assert (found.first.name, found.first.direction, found.first.kind) == ("1.up", "backward", "Wrong, Linear")
    assert found.first.own == pytest.approx(0.0), "the difference is as large as the gradient"
    assert rows(found, "backward")["0.down"].own == math.inf
    assert rows(found, "backward")["0.down"].arriving < 20


def test_a_difference_between_modules_is_said():
    one = model()
    one[1].between = lambda x: x * 1.5
    found = compare(one, model(), batch(), loss=loss)
    assert found.between_modules.name == "1.down"
    assert "it arises before 1.down, outside of modules" in str(found)


def test_a_module_that_is_called_twice_has_a_number():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(self.linear(x).relu())

    torch.manual_seed(0)
    one = Shared().bfloat16()
    found = compare(f8.convert(copy.deepcopy(one), f8.recipes.rowwise()), one, batch(), loss=loss)
    assert list(rows(found, "forward")) == ["linear", "linear [2]"]


def test_modules_of_one_model_only_are_listed_and_none_in_common_is_an_error():
    found = compare(nn.Sequential(*model(), nn.Identity()), model(), batch(), loss=loss)
    assert found.missing == ("2",)
    with pytest.raises(ValueError, match="the two models have no module name in common"):
        compare(model(), nn.ModuleDict({"other": nn.Linear(64, 64)}).other.bfloat16(), batch(), loss=loss)


def hooks_of(module):
    return [[*each._forward_hooks, *each._forward_pre_hooks] for each in module.modules()]


def test_both_models_are_as_before():
    one, other = f8.convert(model(), f8.recipes.delayed()), model()
    before = [{name: each.clone() for name, each in module.state_dict().items()} for module in (one, other)]
    hooks = [hooks_of(module) for module in (one, other)]
    compare(one, other, batch(), loss=loss)
    assert [hooks_of(module) for module in (one, other)] == hooks
    for module, values in zip((one, other), before, strict=True):
        after = module.state_dict()
        assert all(torch.equal(after[name], value) for name, value in values.items())
        assert all(each.grad is None for each in module.parameters())
