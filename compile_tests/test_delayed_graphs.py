"""Delayed scaling compiled: one graph over the steps, each history updated once a step, the bits of eager mode."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from compiles import Compiles
from graphs import calls
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.testing import Call, Recording, assert_cacheable, assert_fullgraph, graph_report

RECIPE = f8.recipes.delayed(history=4)
BACKENDS = ("aot_eager", "inductor")
STEPS = 20


class Block(nn.Module):
    """Two layers and a relu: nothing whose rounding or order of sums Inductor would choose itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Net(nn.Module):
    """Two blocks, the first called twice if asked, each checkpointed if asked."""

    def __init__(self, *, recompute=False, twice=False):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.recompute, self.twice = recompute, twice
        f8.convert(self.bfloat16(), RECIPE)

    def forward(self, x):
        for block in (self.first, self.first, self.second) if self.twice else (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def batch(step, part=0):
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(16, 64, generator=generator).bfloat16() * (1 + step % 3)  # so that the largest amax leaves


def trained(backend=None, *, parts=1, forwards_first=False, around=contextlib.nullcontext, **options):
    """Losses and the state dict after 20 steps of ``parts`` micro-batches each, and how many graphs they took."""
    torch.manual_seed(0)
    model, compiles = Net(**options), Compiles()
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    losses = []
    for step in range(STEPS):
        pending = []
        for part in range(parts):
            loss = run(batch(step, part)).float().square().mean() / parts
            losses.append(loss.item())
            pending.append(loss)
            if not forwards_first:
                with around():
                    pending.pop().backward()
        for loss in pending:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict(), compiles.new()


@functools.cache
def eager(**options):
    """What eager mode gives, which several tests compare with."""
    return trained(**options)


def assert_same_run(found, expected, assert_bits_equal):
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert_bits_equal(found[1][name], value, name)


WAYS = {
    "plain": {},
    "checkpointed": {"recompute": True},
    "accumulated": {"parts": 2},
    "a layer twice": {"twice": True},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_are_one_graph_with_the_bits_of_eager(way, backend, assert_bits_equal):
    found, expected = trained(backend, **WAYS[way]), eager(**WAYS[way])
    assert found[2] == 1
    assert len(set(expected[0])) == len(expected[0])
    assert_same_run(found, expected, assert_bits_equal)


def test_checkpointing_updates_each_history_once(assert_bits_equal):
    assert_same_run(eager(recompute=True), eager(), assert_bits_equal)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_checkpointing_of_a_layer_called_twice_keeps_its_scales(backend, assert_bits_equal):
    """In eager mode the recomputed forward would read what the first backward has updated, and raises."""
    assert_same_run(trained(backend, recompute=True, twice=True), eager(twice=True), assert_bits_equal)


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_forwards_before_their_backwards_by_inductor(recompute, assert_bits_equal):
    """As in a pipeline: each backward casts by what its own forward used, and updates the state once."""
    ways = {"parts": 3, "forwards_first": True}
    assert_same_run(trained("inductor", recompute=recompute, **ways), eager(**ways), assert_bits_equal)


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_forwards_before_their_backwards_raise_without_inductor(recompute):
    """The state is saved for the backward, which the backward before has written to: autograd tells that."""
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[3, 4\]\]"):
        trained("aot_eager", parts=2, forwards_first=True, recompute=recompute)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_autograd(backend, assert_bits_equal):
    def around():
        return torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend))

    assert_same_run(trained(backend, around=around), eager(), assert_bits_equal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("after", [1, 9])
def test_resumed_in_the_middle_it_is_the_same_run(after, backend, assert_bits_equal):
    def train(model, steps):
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        for step in steps:
            run(batch(step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    straight, first, second = Net(), Net(), Net()
    first.load_state_dict(straight.state_dict())
    train(straight, range(STEPS))
    second.load_state_dict(train(first, range(after)).state_dict())
    train(second, range(after, STEPS))
    for name, value in straight.state_dict().items():
        assert_bits_equal(second.state_dict()[name], value, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_graph_is_cacheable(backend):
    report = graph_report(Net(), batch(0), backend=backend)
    assert_fullgraph(report)
    assert_cacheable(report)


def test_the_backward_makes_each_update_once_and_the_forward_none():
    recording = Recording("aot_eager")
    compiled = torch.compile(Net(recompute=True), fullgraph=True, backend=recording)
    compiled(batch(0)).sum().backward()
    (graph,) = recording.graphs
    assert len(calls(graph.backward, "aten.copy_.default")) == 4 * 2
    assert not calls(graph.forward, "aten.copy_.default")
    assert len(calls(graph.forward, "fp8compile.delayed_linear.default")) == 4


def test_evaluation_updates_nothing_and_computes_no_amax():
    model = Net()
    report = graph_report(model, calls=[Call((batch(0),), train=False, grad=False)], backend="inductor")
    (graph,) = report.graphs
    assert graph.backward is None
    assert not [op for op in graph.forward if "amax" in op or "copy_" in op]
    assert not any(buffer.any() for name, buffer in model.named_buffers() if name.endswith("amax_history"))


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition", "inductor"])
@pytest.mark.parametrize("roles", [("input", "weight"), ("input",), ("weight",), ("grad_output",)], ids="+".join)
def test_a_state_in_which_some_tensors_have_no_row_goes_on_as_in_eager(roles, backend):
    """Also one that depends on no gradient, which PyTorch's partitioner orders otherwise: amaxes that get smaller."""
    value, gradient = f8.DelayedScaling(history=4), f8.DelayedScaling(format="e5m2", history=4)
    recipe = f8.Recipe(
        input=value if "input" in roles else f8.CurrentScaling(),
        weight=value if "weight" in roles else f8.CurrentScaling(),
        grad_output=gradient if "grad_output" in roles else None,
        weight_for_grad_input=f8.CurrentScaling() if "grad_output" in roles else None,
    )

    def states(backend):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = f8.Linear(64, 96, bias=False, recipe=recipe, dtype=torch.bfloat16)
        run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
        found = []
        for step in range(7):
            x = torch.full((32, 64), 4.0 / 2**step, dtype=torch.bfloat16, requires_grad=True)
            (run(x) / 2**step).float().sum().backward()
            with torch.no_grad():
                layer.weight.div_(2)
            found += [buffer.clone() for buffer in layer.buffers()]
        return found

    for compiled, eager in zip(states(backend), states(None), strict=True):
        assert torch.equal(compiled, eager)
