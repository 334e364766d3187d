"""What compiled layers in NVFP4 keep for their backward: codes, 0.3 of what bf16 keeps or less."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from fp8compile.testing.gpu.gpus import gpu_called
from fp8compile.testing.gpu.graphs import gpu_graphs, kept_bytes

NVFP4 = f8.recipes.nvfp4()
TOKENS, WIDTH = 512, 128  # whole tiles of scales
LAYERS = 4


def chain(recipe=None, layers=LAYERS):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    return model if recipe is None else f8.convert(model, recipe, filter="*")


def test_compiled_code_for_a_b200_keeps_codes_of_all_that_bf16_keeps():
    """Inputs of layers, and weights, which in bf16 are parameters and here are codes besides them."""

    def kept(recipe):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, x = chain(recipe), torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            (forward, _) = gpu_graphs(model, (x,), gpu_called("b200"))
        (outputs,) = forward.graph.graph.find_nodes(op="output")[0].args
        saved = [node.meta["val"] for at, node in enumerate(outputs) if at not in forward.returned]
        return kept_bytes(forward), [each for each in saved if each.dtype == torch.bfloat16]

    of_bf16, _ = kept(None)
    x_and_weights = 2 * TOKENS * WIDTH + LAYERS * 2 * WIDTH * WIDTH
    found, in_bf16 = kept(NVFP4)
    assert found <= 0.3 * (of_bf16 + x_and_weights)
    assert not in_bf16, f"the backward reads an input or a weight in bf16: {[each.shape for each in in_bf16]}"


def test_a_checkpointed_block_has_the_same_bits(assert_bits_equal):
    def gradients(call):
        model, x = chain(NVFP4, layers=2), torch.linspace(-3, 3, 48 * WIDTH).view(48, WIDTH).bfloat16()
        x.requires_grad_()
        call(model, x).float().square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    def checkpointed(model, x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    for one, other in zip(gradients(lambda m, x: m(x)), gradients(checkpointed), strict=True):
        assert_bits_equal(one, other)


def test_a_compiled_derivative_of_weights_that_want_another_says_that_there_is_one(assert_bits_equal):
    """PyTorch's answer for a wrapped tensor whose node it is asked for named no cause."""
    layer, x = f8.Linear.from_linear(nn.Linear(32, 48, bias=False).bfloat16(), NVFP4), torch.randn(16, 32).bfloat16()

    def loss(weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).float().square().mean()

    derivative = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"fp8compile::grad_weight has no derivative.*only once"):
        derivative(layer.weight)
    assert_bits_equal(derivative(layer.weight.detach()), torch.func.grad(loss)(layer.weight.detach()))
