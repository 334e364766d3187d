"""`weight_lifetime="pass"`: what the forward keeps of weights for grad_input, when it keeps nothing; same bits."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8compile as f8
from fp8compile.cli.explain.fake_ranks import pretended_ranks
from fp8compile.ops.layer import operands
from fp8compile.target import Target, pretend_target
from fp8compile.testing.gpu.gpus import gpu_called
from fp8compile.testing.gpu.graphs import gpu_graphs

WIDTH, TOKENS = 256, 512
RECIPES = {
    "delayed": f8.recipes.delayed(history=4),
    "tensorwise": replace(f8.recipes.tensorwise(), weight_lifetime="pass"),
    "blockwise": replace(f8.recipes.blockwise(), weight_lifetime="pass"),
}
MIXED = f8.Recipe(  # the state is of the input alone; weights by their own amax
    input=f8.DelayedScaling(history=4),
    weight=f8.CurrentScaling(),
    grad_output=f8.CurrentScaling(format="e5m2"),
    weight_for_grad_input=f8.CurrentScaling(),
    weight_lifetime="pass",
)
every_recipe = pytest.mark.parametrize("recipe", [*RECIPES.values(), MIXED], ids=[*RECIPES, "mixed"])


def layers(recipe, *, first_needs_grad=True):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(3)))
    f8.convert(model, recipe, filter="*")
    return model, torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=first_needs_grad)


class Experts(nn.Module):
    """A stack of matrices, and rows of which the last ones are nobody's."""

    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        self.recipe = recipe
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=torch.bfloat16))
        self.register_buffer("ends", torch.tensor([TOKENS // 2, TOKENS // 2, TOKENS - 16], dtype=torch.int32))

    def forward(self, x):
        return f8.grouped_linear(x * 2, self.weight, self.ends, recipe=self.recipe)


EXPERTS = {  # products of groups take e4m3 alone
    "tensorwise": replace(f8.recipes.tensorwise(grad_format="e4m3"), weight_lifetime="pass"),
    "blockwise": RECIPES["blockwise"],
    "nvfp4": f8.recipes.nvfp4(grad_rounding="nearest"),
}


def kept_codes(model, x, gpu="h200"):
    """Shapes of codes of weights that are kept for the backward: what the forward of a GPU gives out in 8 bits."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        graphs = gpu_graphs(model, (x,), gpu_called(gpu))
    (outputs,) = graphs[0].graph.graph.find_nodes(op="output")[0].args
    values = [node.meta["val"] for node in outputs if hasattr(node, "meta") and node.op != "placeholder"]
    return [tuple(value.shape) for value in values if value.itemsize == 1 and TOKENS not in value.shape]


@every_recipe
def test_codes_of_each_weight_are_kept_once(recipe):
    assert len(kept_codes(*layers(recipe))) == 3


@every_recipe
def test_none_are_kept_unless_asked_for(recipe):
    assert not kept_codes(*layers(replace(recipe, weight_lifetime="call")))


@every_recipe
def test_none_are_kept_for_an_input_without_a_gradient(recipe):
    assert len(kept_codes(*layers(recipe, first_needs_grad=False))) == 2


@every_recipe
def test_none_are_kept_without_a_backward(recipe):
    model, x = layers(recipe)
    with torch.no_grad():
        assert not kept_codes(model, x)


@every_recipe
def test_what_is_not_a_multiple_of_32_is_made_again(recipe):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH + 8, bias=False, dtype=torch.bfloat16))
    f8.convert(model, recipe, filter="*")
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    assert not kept_codes(model, x)


@pytest.mark.parametrize(
    "recipe", [RECIPES["delayed"], RECIPES["tensorwise"], MIXED], ids=["delayed", "tensorwise", "mixed"]
)
def test_bits_are_those_of_codes_made_again(recipe):
    """The graph of a GPU, run on the CPU. Its blockwise GEMM has no kernel there; its codes are the forward's own."""

    def steps(recipe):
        torch._dynamo.reset()
        model, x = layers(recipe)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        with pretend_target(Target("cuda", (9, 0))):
            for _ in range(3):
                y = compiled(x)
                y.float().square().sum().backward()
        return [y, x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]

    for kept, again in zip(steps(recipe), steps(replace(recipe, weight_lifetime="call")), strict=True):
        assert torch.equal(kept, again)


def test_a_checkpointed_block_keeps_none():
    """Its backward repeats the forward, and has the codes at hand then."""
    model, x = layers(RECIPES["delayed"])

    def block(x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    assert not kept_codes(block, x)


def test_a_layer_under_fsdp_keeps_none():
    """Whoever frees the weights between forward and backward does not want to keep the codes of all of them."""
    model, x = layers(RECIPES["delayed"])
    with pretended_ranks(2):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    alone, _ = layers(replace(RECIPES["delayed"], weight_lifetime="call"))
    for layer, own in zip(alone, model, strict=True):
        # as FSDP2 marks it; fake tensors can't go through its gather
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            setattr(layer, mark, getattr(own, mark))
        layer.recipe = own.recipe
        assert layer.recipe.keeps_weight_for_backward()
    assert not kept_codes(alone, x)


def test_a_model_with_it_is_one_graph():
    torch._dynamo.reset()
    counters.clear()
    model, x = layers(RECIPES["delayed"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        compiled(x).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it")
def test_codes_in_two_layouts_are_written_in_tiles():
    """A kernel over the flat tensor scatters the bytes of one of them: the index of its store divides by a side."""
    from fp8compile.testing import gpu_kernels

    with FakeTensorMode(allow_non_fake_inputs=True):
        codes = gpu_kernels(*layers(RECIPES["delayed"]), arch="h200")
    stores = [line for code in codes for line in code.source.splitlines() if "tl.store(" in line]
    assert len(stores) > 10
    assert not [line for line in stores if "%" in line or "//" in line]


@pytest.mark.parametrize("recipe", EXPERTS)
@pytest.mark.parametrize("keeps", [True, False])
def test_codes_of_a_stack_are_kept_once(recipe, keeps):
    model = Experts(replace(EXPERTS[recipe], weight_lifetime="pass" if keeps else "call"))
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gpu = "b200" if recipe == "nvfp4" else "h200"
    found = [shape for shape in kept_codes(model, x, gpu) if shape[0] == 3 and shape[-1] >= WIDTH // 2]
    assert len(found) == keeps, found


@pytest.mark.parametrize("recipe", EXPERTS)
def test_bits_of_experts_are_those_of_codes_made_again(recipe, monkeypatch):
    """What a GPU's graph keeps of a stack, in a graph of a CPU, which has products of groups."""
    monkeypatch.setattr(operands, "_on_gpu", lambda tensor: True)

    def step(*, keeps):
        torch._dynamo.reset()
        model = Experts(replace(EXPERTS[recipe], weight_lifetime="pass" if keeps else "call"))
        x = torch.linspace(-3, 3, TOKENS * WIDTH).view(TOKENS, WIDTH).bfloat16().requires_grad_()
        y = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")(x)
        y.float().square().sum().backward()
        return y, x.grad, model.weight.grad

    eager = Experts(EXPERTS[recipe])
    x = torch.linspace(-3, 3, TOKENS * WIDTH).view(TOKENS, WIDTH).bfloat16().requires_grad_()
    y = eager(x)
    y.float().square().sum().backward()
    for kept, again, alone in zip(step(keeps=True), step(keeps=False), (y, x.grad, eager.weight.grad), strict=True):
        assert torch.equal(kept, again)
        assert torch.equal(kept, alone)
