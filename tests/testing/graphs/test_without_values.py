"""A module is called without values: shapes and dtypes are right, nothing is computed, and nothing fake is left."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fp8compile.testing.graphs.without_values import on_meta, values_needed, without_values


class Tied(nn.Module):
    """Two names of one weight, a buffer, and an attribute that the forward sets."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("shift", torch.ones(4))
        self.before = "text"

    def forward(self, x):
        self.seen = self.before = self.a(x) + self.shift
        return self.b(self.seen)


@pytest.mark.parametrize("place", ["memory", "meta", "fake"])
def test_tensors_are_fake_inside_and_as_before_outside(place):
    context = {"memory": torch.device("cpu"), "meta": torch.device("meta"), "fake": FakeTensorMode()}[place]
    with context:
        model, x = Tied(), torch.ones(2, 4)
    state = model.state_dict(keep_vars=True)
    with without_values(model, (x,), {}) as (args, kwargs):
        assert model.a.weight is model.b.weight
        assert isinstance(model.a.weight, nn.Parameter)
        assert all(isinstance(each, FakeTensor) for each in (model.a.weight, model.shift, *args))
        y = model(*args, **kwargs)
        assert (tuple(y.shape), y.device.type, y.requires_grad) == ((2, 4), "cpu", True)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in state.items())
    assert (model.before, hasattr(model, "seen")) == ("text", False)
    assert on_meta(model) == (place != "memory")


def test_a_forward_that_reads_values_needs_them():
    class Reads(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    assert values_needed(Tied(), (torch.ones(2, 4),), {}) == ""
    assert values_needed(Reads(), (torch.ones(2),), {}).startswith("DataDependentOutputException: ")
    assert "2" in (said := values_needed(Tied(), (torch.ones(2, 5),), {}))
    assert said.startswith("RuntimeError: ")
