"""A weight or an input that is written to between forward and backward: PyTorch says so, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8compile as f8
from fp8compile import _compat
from fp8compile.parallel import broadcast_parameters


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False)).bfloat16()


def converted(model):
    return f8.convert(model, f8.recipes.tensorwise(), weight_lifetime="parameter")


def other_state():
    model = converted(plain())
    with torch.no_grad():
        [each.mul_(3.0) for each in model.parameters()]
    return model.state_dict()


def multiply(tensors):
    with torch.no_grad():
        [each.mul_(3.0) for each in tensors]


def copy_codes(model, x):
    source = converted(plain())
    multiply(source.parameters())
    with torch.no_grad():
        [own.copy_(other) for own, other in zip(model.parameters(), source.parameters(), strict=True)]


def stepped(kind, **options):
    return lambda model, x: kind(model.parameters(), lr=0.5, **options).step()


def masters_stepped(model, x):
    f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.5).step()


WRITERS = {
    "optimizer, loop": stepped(torch.optim.SGD, foreach=False),
    "optimizer, foreach": stepped(torch.optim.SGD, foreach=True),
    "optimizer, fused": stepped(torch.optim.AdamW, fused=True),
    "optimizer, compiled": lambda model, x: torch.compile(
        torch.optim.AdamW(model.parameters(), lr=0.5).step, backend="aot_eager"
    )(),
    "MasterWeights": masters_stepped,
    "a view": lambda model, x: multiply([each.detach() for each in model.parameters()]),
    ".data": lambda model, x: multiply([each.data for each in model.parameters()]),
    "rows of a view": lambda model, x: multiply([each.detach().view(64, 64) for each in model.parameters()]),
    "codes": copy_codes,
    "state dict of values": lambda model, x: model.load_state_dict(plain().state_dict()),
    "state dict of codes": lambda model, x: model.load_state_dict(other_state()),
}


def raises(model, write, *, compiled):
    """Whether the backward says that a tensor was modified."""
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    call(x).float().sum().backward()  # gives optimizers their gradients
    y = call(x)
    write(model, x)
    try:
        y.float().sum().backward()
    except RuntimeError as error:
        return "has been modified by an inplace operation" in str(error)
    return False


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", WRITERS)
def test_backward_notices_a_write(name, compiled):
    assert raises(converted(plain()), WRITERS[name], compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("target", ["weight", "input"])
@pytest.mark.parametrize("quantized", [False, True], ids=["values", "FP8 parameters"])
def test_backward_notices_a_write_to_a_weight_or_an_input(recipe, quantized, target, compiled):
    model = f8.convert(
        plain(), f8.recipes.by_name(recipe), filter="*", weight_lifetime="parameter" if quantized else None
    )
    write = (lambda model, x: multiply(model.parameters())) if target == "weight" else lambda model, x: multiply([x])
    assert raises(model, write, compiled=compiled)


def noticed_under_tensor_parallelism():
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    found = {}
    for name in ("optimizer, loop", "MasterWeights", "state dict of codes"):
        for compiled in (False, True):
            torch._dynamo.reset()
            model = converted(parallelize_module(plain(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))
            same = model.state_dict()
            write = WRITERS[name] if "state" not in name else lambda model, x, same=same: model.load_state_dict(same)
            found[name, compiled] = raises(model, write, compiled=compiled)
    return found


@pytest.mark.skipif(_compat.TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
def test_backward_notices_a_write_to_a_part():
    for found in shared_ranks().run(noticed_under_tensor_parallelism):
        assert all(found.values()), found


def broadcast_between():
    group = GROUPS["pair"]
    return [
        raises(converted(plain()), lambda model, x: broadcast_parameters(model, group=group), compiled=compiled)
        for compiled in (False, True)
    ]


def test_backward_notices_a_broadcast():
    assert shared_ranks().run(broadcast_between) == [[True, True]] * 4
