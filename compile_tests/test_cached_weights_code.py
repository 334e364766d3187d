"""Generated code of layers whose weights' codes live for a step: fewer kernels, the same bits, no other graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from fp8compile.testing import gpu_kernels

WIDTH, TOKENS = 256, 512


def model_of(recipe, *, cached):
    torch.manual_seed(0)
    sizes = (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)
    up, down = (nn.Linear(*each, dtype=torch.bfloat16) for each in sizes)
    layers = nn.Sequential(up, nn.SiLU(), down)
    return f8.convert(
        layers, replace(f8.recipes.by_name(recipe), weight_lifetime="step" if cached else "call"), filter="*"
    )


def gpu_kernels_of(recipe, *, cached):
    """Numbers of generated kernels for an H200, forward and backward."""
    torch._dynamo.reset()
    with FakeTensorMode():
        model = model_of(recipe, cached=cached)
        x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        return [len(code.kernels) for code in gpu_kernels(model, x, arch="h200")]


@pytest.mark.parametrize(
    ("recipe", "without", "cached"), [("rowwise", [11, 12], [5, 10]), ("tensorwise", [8, 12], [7, 12])]
)
def test_a_graph_that_finds_codes_has_no_kernel_that_reads_weights(recipe, without, cached):
    assert gpu_kernels_of(recipe, cached=False) == without
    assert gpu_kernels_of(recipe, cached=True) == cached


def steps(model, call):
    """What two steps of two micro-batches compute, and a third one behind an edit by hand."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        for micro in range(2):
            x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(micro)).bfloat16().requires_grad_()
            y = call(x)
            y.float().square().mean().backward()
            found += [y.detach().clone(), x.grad]
        optimizer.step()
        if step == 1:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
    return found + [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("compile", [torch.compile, f8.compile])
def test_inductors_code_has_the_same_bits_with_and_without(compile):
    found, graphs = [], []
    for cached in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = model_of("rowwise", cached=cached)
        found.append(steps(model, compile(model, fullgraph=True)))
        graphs.append(counters["stats"]["unique_graphs"])
    assert all(map(torch.equal, *found))
    assert graphs == [1, 4]  # one that finds codes, one for the edit, and one to make codes for each shape


def test_on_a_cpu_too_the_second_micro_batch_has_fewer_kernels():
    found = []
    for cached in (False, True):
        torch._dynamo.reset()
        metrics.reset()
        model = model_of("tensorwise", cached=cached)
        x = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_()
        torch.compile(model, fullgraph=True)(x).float().square().mean().backward()
        found.append(metrics.generated_kernel_count)
    assert found[0] - found[1] == 6  # of two weights: an amax in two kernels, and a cast
