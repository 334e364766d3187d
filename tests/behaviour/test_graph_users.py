"""Whoever takes a model's graph: export, AOTInductor, make_fx, dynamic shapes, ways to call the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from ways import behaviour

import fp8compile as f8

RECIPE = f8.recipes.rowwise()
LINEAR = torch.ops.fp8compile.linear.default


def mlp(dtype=torch.bfloat16):
    # ReLU is exact: whatever differs comes from us
    return f8.convert(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(dtype), RECIPE)


def sample(rows=32):
    return torch.randn(rows, 64, dtype=torch.bfloat16)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def exported(model, *, strict):
    rows = torch.export.Dim("rows", min=2)
    return torch.export.export(model, (sample(),), dynamic_shapes=({0: rows},), strict=strict)


# ------------------------------------------------------------------------------- export


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
@behaviour("Graphs", "`torch.export`, strict and not, with a dynamic batch", ways=("compiled",))
def test_export(way, strict, assert_bits_equal):
    model = mlp()
    program = exported(model, strict=strict)
    assert targets(program.graph).count(LINEAR) == 2
    for rows in (2, 7, 64):
        x = sample(rows)
        assert_bits_equal(program.module()(x), model(x))


LOAD_WITHOUT_US = """
import sys, torch
program = torch.export.load(sys.argv[1])
x, expected = torch.load(sys.argv[2])
assert torch.equal(program.module()(x), expected)
assert "fp8compile" not in sys.modules
"""


@behaviour(
    "Graphs",
    "`torch.export.save` after `run_decompositions(f8.ops.decompositions())`; `load` needs no fp8compile",
    ways=("compiled",),
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # torch.export uses what PyTorch deprecates
def test_export_save(way, tmp_path):
    model, x = mlp(), sample()
    program = exported(model, strict=True).run_decompositions(f8.ops.decompositions())
    foreign = {str(target) for target in targets(program.graph) if not str(target).startswith("aten.")}
    assert not foreign
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, model(x).detach()), tmp_path / "sample.pt")
    command = [sys.executable, "-c", LOAD_WITHOUT_US, tmp_path / "model.pt2", tmp_path / "sample.pt"]
    finished = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-2000:]


@behaviour("Graphs", "`torch.export.save` of the undecomposed program, `load`", ways=("compiled",))
def test_export_save_undecomposed(way, tmp_path):
    program = exported(mlp(), strict=True)
    with way.raises(RuntimeError, "whose recipe PyTorch's files can't store"):
        torch.export.save(program, tmp_path / "model.pt2")


@pytest.mark.filterwarnings("ignore:.*")  # what PyTorch's own code generation warns of differs by version
@behaviour("Graphs", "AOTInductor on the forward, with a dynamic batch", ways=("compiled",))
def test_aot_inductor(way, tmp_path, assert_bits_equal):
    model = mlp().eval()
    with torch.no_grad():
        program = exported(model, strict=True)
    # what C++ the wrapper is compiled to makes no difference to the kernels, and -O1 takes half a minute of it
    quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2"), inductor_configs=quickly
    )
    compiled = torch._inductor.aoti_load_package(path)
    for rows in (2, 33):
        x = sample(rows)
        assert_bits_equal(compiled(x), model(x).detach())


# ------------------------------------------------------------------------------- traces


def training_step(parameters, momenta, x, model):
    """SGD with momentum, written out: parameters and momenta after a step."""
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    loss = torch.func.functional_call(model, leaves, (x,)).float().square().mean()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    momenta = {name: 0.9 * momenta[name] + grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: leaves[name].detach() - 0.1 * momenta[name] for name in leaves}, momenta, loss.detach()


@behaviour("Graphs", "`make_fx` of a whole training step: forward, loss, backward, optimizer")
def test_make_fx(way, assert_bits_equal):
    model, x = mlp(), sample()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    momenta = {name: torch.ones_like(p) for name, p in parameters.items()}
    graph = make_fx(lambda *args: training_step(*args, model), tracing_mode="fake")(parameters, momenta, x)
    names = [str(target) for target in targets(graph.graph)]
    assert names.count("fp8compile.linear.default") == 2
    assert names.count("fp8compile.grad_weight.default") == 2
    assert names.count("fp8compile.grad_input.default") == 1
    actual = way(graph)(parameters, momenta, x)
    expected = training_step(parameters, momenta, x, model)
    for a, e in zip(torch.utils._pytree.tree_leaves(actual), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert_bits_equal(a, e)


@behaviour("Graphs", "`torch.fx.symbolic_trace`", ways=("eager",))
def test_symbolic_trace(way, assert_bits_equal):
    model, x = mlp(), sample()
    graph = torch.fx.symbolic_trace(model)
    assert targets(graph.graph).count(f8.linear) == 2
    assert_bits_equal(graph(x), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a layer notes autocast's dtype, which a Proxy doesn't have
        assert_bits_equal(torch.fx.symbolic_trace(model)(x), model(x))


# ------------------------------------------------------------------------------- shapes


def graphs_made():
    return counters["stats"]["unique_graphs"]


@behaviour("Graphs", "dynamic batch, marked: one graph", ways=("compiled",))
def test_marked_dynamic(way, assert_bits_equal):
    model = mlp()
    call = way(model)
    for rows in (32, 5, 64):
        x = sample(rows)
        torch._dynamo.mark_dynamic(x, 0)
        assert_bits_equal(call(x), model(x))
    assert graphs_made() == 1


@behaviour("Graphs", "dynamic batch and sequence, automatic: a second graph, no third", ways=("compiled",))
def test_automatic_dynamic(way, assert_bits_equal):
    model = mlp()
    call = way(model)
    for batch, length in ((4, 8), (3, 9), (2, 17), (6, 5)):
        x = torch.randn(batch, length, 64, dtype=torch.bfloat16)
        assert_bits_equal(call(x), model(x))
    assert graphs_made() == 2


@behaviour("Graphs", "`dynamic=True`, and a batch of 1 or 0", ways=("compiled",))
def test_dynamic_small(way, assert_bits_equal):
    model = mlp()
    call = way(model, dynamic=True)
    for rows in (16, 3, 1, 0, 8, 1):
        x = sample(rows)
        assert_bits_equal(call(x), model(x))
    assert graphs_made() == 3  # PyTorch specialises 0 and 1


# ------------------------------------------------------------------------------- ways to compile


def train(call, model, x):
    """Gradients of one step."""
    model.zero_grad()
    call(x).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@behaviour("Graphs", "every `mode` of torch.compile, forward and backward", ways=("compiled",))
@pytest.mark.filterwarnings("ignore:.*")  # max-autotune looks for a GPU and says that there is none
def test_modes(way, mode, assert_bits_equal):
    model, x = mlp(), sample()
    expected = train(model, model, x)
    actual = train(way(model, backend="inductor", mode=mode), model, x)
    # a bias's gradient is a sum over rows that Inductor takes in another order, as with any nn.Linear
    for index in (0, 2):
        assert_bits_equal(actual[index], expected[index])


@behaviour("Graphs", "Inductor's `freezing`", ways=("compiled",))
def test_freezing(way, assert_bits_equal):
    model, x = mlp().eval(), sample()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        assert_bits_equal(way(model, backend="inductor")(x), model(x))


@behaviour("Graphs", "each block compiled by itself", ways=("compiled",))
def test_blocks(way, assert_bits_equal):
    blocks = nn.Sequential(mlp(), mlp(), mlp())
    x = sample().requires_grad_()  # as the other blocks' inputs do
    expected = train(blocks, blocks, x)
    for a, e in zip(train(nn.Sequential(*map(way, blocks)), blocks, x), expected, strict=True):
        assert_bits_equal(a, e)
    assert graphs_made() == 1  # three blocks of one shape share a graph


@behaviour("Graphs", "`nn.Module.compile`, of a model and of a single layer", ways=("compiled",))
def test_module_compile(way, assert_bits_equal):
    for pick in (lambda model: model, lambda model: model[0]):
        model, x = mlp(), sample()
        expected = train(model, model, x)
        pick(model).compile(fullgraph=True, backend="aot_eager")
        for a, e in zip(train(model, model, x), expected, strict=True):
            assert_bits_equal(a, e)


@torch.compiler.nested_compile_region
def region(block, x):
    return block(x)


@behaviour("Graphs", "blocks marked by `torch.compiler.nested_compile_region`", ways=("compiled",))
def test_nested_compile_region(way, assert_bits_equal):
    blocks, x = nn.ModuleList([mlp(), mlp(), mlp()]), sample()

    def call(x):
        for block in blocks:
            x = region(block, x)
        return x

    expected = train(nn.Sequential(*blocks), blocks, x)
    for a, e in zip(train(way(call), blocks, x), expected, strict=True):
        assert_bits_equal(a, e)


@behaviour("Graphs", "model and loss in one graph", ways=("compiled",))
def test_loss_inside(way, assert_bits_equal):
    model, x = mlp(), sample()

    def loss(x):
        return model(x).float().square().mean()

    expected = train(model, model, x)
    model.zero_grad()
    way(loss)(x).backward()
    for p, e in zip(model.parameters(), expected, strict=True):
        assert_bits_equal(p.grad, e)


@behaviour("Graphs", "`torch.profiler` names the layers' operators")
def test_profiler(way):
    model, x = mlp(), sample()
    call = way(model)
    call(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call(x).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert {name: counts[f"fp8compile::{name}"] for name in ("linear", "grad_input", "grad_weight")} == {
        "linear": 2,
        "grad_input": 1,
        "grad_weight": 2,
    }
