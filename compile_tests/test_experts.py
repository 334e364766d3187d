"""Mixtures of experts as graphs: one for a whole model, whatever the routing, with the bits of eager mode."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from compiles import Compiles

import fp8compile as f8
from fp8compile.testing import Recording, gemm_share, gpu_kernels
from fp8compile.testing.explain import explain

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "behaviour"))

from mixtures import EXPERTS, HELD_OTHERWISE, MIXTURES
from zoo import bf16_model, tail, train

RECIPE = f8.recipes.rowwise()


def converted(name):
    return f8.convert(bf16_model(MIXTURES[name]), RECIPE)


def inputs_of_experts(model, batch):
    """What each module of experts is called with, by its name."""
    found, hooks = {}, []
    for row in f8.conversion_report(model).rows:
        if row.experts:
            module = model.get_submodule(row.fqn)
            hooks.append(module.register_forward_pre_hook(lambda _, args, fqn=row.fqn: found.update({fqn: args})))
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return found


def which_experts(name, args):
    """(tokens, experts chosen); Llama 4 gives every expert all tokens, zeros where it was not chosen."""
    return args[0].view(EXPERTS, -1, args[0].shape[-1]).any(-1).t() if name == "Llama 4" else args[1]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_model_is_one_graph_whatever_its_routing_and_nearly_all_of_it_in_fp8(name):
    model, batches = converted(name), [MIXTURES[name].batch(step) for step in range(3)]
    first, *others = (inputs_of_experts(model, batch) for batch in batches)
    for fqn, args in first.items():
        assert not any(torch.equal(which_experts(name, args), which_experts(name, other[fqn])) for other in others)
    compiles, recording = Compiles(), Recording()
    call = torch.compile(model, fullgraph=True, backend=recording)
    for step, batch in enumerate(batches):
        call(**batch).loss.backward()
        compiles.assert_new(0 if step else 1, f"batch {step}")
    assert not torch._dynamo.utils.counters["graph_break"]
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert gemm_share(*recording.traced).linear_share > 0.9


@pytest.mark.parametrize("name", HELD_OTHERWISE)
def test_a_model_that_holds_its_experts_otherwise_is_one_graph_too(name):
    zoo = HELD_OTHERWISE[name]
    model = f8.convert(bf16_model(zoo), RECIPE)
    compiles, recording = Compiles(), Recording()
    call = torch.compile(model, fullgraph=True, backend=recording)
    for step in range(2):
        call(**zoo.batch(step)).loss.backward()
        compiles.assert_new(0 if step else 1, f"batch {step}")
    assert not torch._dynamo.utils.counters["graph_break"]
    assert gemm_share(*recording.traced).linear_share > 0.9


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_compiled_have_the_bits_of_eager_mode(name, assert_bits_equal):
    model = converted(name)
    for fqn, args in inputs_of_experts(model, MIXTURES[name].batch(0)).items():
        module, results = model.get_submodule(fqn), []
        for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
            x, *routing = (arg.detach().requires_grad_(arg.is_floating_point()) for arg in args)
            y = call(x, *routing)
            tensors = [x, *(arg for arg in routing if arg.requires_grad), *module.parameters()]
            results.append([y, *torch.autograd.grad(y.float().square().sum(), tensors)])
        for actual, expected in zip(*results, strict=True):
            assert_bits_equal(actual, expected, fqn)


def test_explain_says_in_what_the_products_of_experts_run():
    model, x = converted("gpt-oss").model.layers[0].mlp, torch.randn(1, 24, 64).bfloat16().requires_grad_()
    row = next(row for row in explain(model, (x,), gpu=None).layers if row.fqn == "experts")
    assert [(gemm.gemm, gemm.status, gemm.runs) for gemm in row.gemms] == [
        (gemm, "fp8", "e4m3 x e4m3 rowwise") for gemm in ("output", "grad_input", "grad_weight")
    ]
    # two experts a token; of two products the first that is in the graph: up in the forward, down in the backward
    assert [(gemm.m, gemm.k, gemm.n) for gemm in row.gemms] == [(48, 64, 256), (48, 64, 128), (64, 48, 128)]
    assert all(len(gemm.ops) == 2 for gemm in row.gemms)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Inductor writes a GPU's kernels with Triton")
def test_code_for_a_gpu_scatters_no_gradient_and_never_waits():
    model = converted("Qwen3-MoE")
    module = model.model.layers[0].mlp.experts
    (x, index, weights), *_ = inputs_of_experts(model, MIXTURES["Qwen3-MoE"].batch(0)).values()
    forward, backward = gpu_kernels(module, x.detach().requires_grad_(), index, weights.detach().requires_grad_())
    assert forward.no_cuda_graph is backward.no_cuda_graph is None
    opaque = {launch.name for launch in (*forward.launches, *backward.launches) if launch.kind == "opaque"}
    assert all(name.startswith("fp8compile.group") for name in opaque - {"aten.sort.stable"}), opaque
    written = {operator for launch in backward.launches for operator in launch.ops}
    assert not {operator for operator in written if "index_put" in operator or "scatter" in operator}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_fifty_steps_end_where_bf16_ends_within_its_spread_over_seeds(name):
    zoo, ends = MIXTURES[name], []
    for seed in range(3):
        model = bf16_model(zoo, seed=seed)
        ends.append(tail(train(zoo, model, model, seed=seed)))
    model = converted(name)
    losses = train(zoo, model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert tail(losses) < zoo.level
    assert abs(tail(losses) - ends[0]) <= max(ends) - min(ends), (tail(losses), ends)
