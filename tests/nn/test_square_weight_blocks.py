"""MXFP8 with a scale for 32 x 32 values of a weight: both products read one set of codes, and all else is as ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.target import Target, pretend_target
from fp8compile.testing.bits import difference
from fp8compile.testing.explain import explain
from fp8compile.testing.explain.gpu_code import missing_gemm
from fp8compile.testing.explain.recipe_support import recipe_support
from fp8compile.testing.gpu.gpus import GPUS

SQUARE, LINE = f8.recipes.mxfp8(weight_block=(32, 32)), f8.recipes.mxfp8()
CUDA = torch.device("cuda")
SIZES = [(32, 64, 96), (33, 70, 50), (1, 31, 33), (7, 200, 8)]  # tokens, features in, features out


def tensors(m, k, n, dtype=torch.bfloat16):
    """x, weight and the gradient of the output, of other magnitudes in each block."""
    generator = torch.Generator().manual_seed(m + k + n)

    def values(*shape):
        return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-4, 4, shape, generator=generator))

    return [values(*shape).to(dtype) for shape in ((m, k), (n, k), (m, n))]


def results(layer, x, weight, grad, *, frozen=False):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    y = layer(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x,) if frozen else (x, weight), grad)]


def layer(x, weight):
    return f8.linear(x, weight, recipe=SQUARE)


def exact(tensor, quantizer):
    quantized = f8.quantize(tensor, quantizer)
    return quantizer.dequantize(quantized.codes, quantized.scale, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_products_are_those_of_one_quantization_of_the_weight(sizes, dtype, assert_bits_equal):
    x, weight, grad = tensors(*sizes, dtype=dtype)
    quantized = f8.quantize(weight, SQUARE.weight)
    assert quantized.scale.shape == (-(-sizes[2] // 32), -(-sizes[1] // 32))
    codes = SQUARE.weight.dequantize(quantized.codes, quantized.scale, torch.float64)
    y, grad_x, _ = results(layer, x, weight, grad)
    assert_bits_equal(y, (exact(x, SQUARE.input) @ codes.t()).to(dtype))
    assert_bits_equal(grad_x, (exact(grad, SQUARE.grad_output) @ codes).to(dtype))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_gradient_of_the_weight_is_that_of_blocks_along_the_sum(sizes, assert_bits_equal):
    x, weight, grad = tensors(*sizes)
    other = results(lambda x, weight: f8.linear(x, weight, recipe=LINE), x, weight, grad)
    assert_bits_equal(results(layer, x, weight, grad)[2], other[2])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_have_the_bits_of_eager_ones(backend):
    torch._dynamo.reset()
    given = tensors(*SIZES[1])
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for found, expected in zip(results(compiled, *given), results(layer, *given), strict=True):
        assert difference(found, expected) is None


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_frozen_weight_changes_no_bit(backend):
    torch._dynamo.reset()
    given = tensors(*SIZES[1])
    run = layer if backend is None else torch.compile(layer, fullgraph=True, backend=backend)
    for found, expected in zip(results(run, *given, frozen=True), results(layer, *given)[:2], strict=True):
        assert difference(found, expected) is None


class Experts(nn.Module):
    """As torchtitan writes them."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 64, 128))

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)

    def forward(self, x, offsets):
        return self._grouped_mm(A=x, B_t=self.w1.transpose(-2, -1), offs=offsets)


def bytes_of(module, name, recipe):
    model = f8.convert(nn.ModuleDict({"0": module}), recipe, filter="*", weight_lifetime="parameter")
    weight = model["0"].get_parameter(name)
    return sum(part.nbytes for own in weight.sets() for part in own.parts()) / weight.numel()


@pytest.mark.parametrize(("make", "name"), [(lambda: nn.Linear(128, 256), "weight"), (Experts, "w1")])
def test_parameters_are_a_byte_and_a_1024th_in_place_of_two_and_a_16th(make, name):
    assert bytes_of(make().bfloat16(), name, SQUARE) == 1 + 1 / 32**2
    assert bytes_of(make().bfloat16(), name, LINE) == 2 * (1 + 1 / 32)


@pytest.mark.parametrize("grouped", [False, True], ids=["linears", "experts"])
def test_a_b200_multiplies_them_by_its_mx_gemm_and_an_h200_says_what_it_lacks(grouped):
    for capability, kind in (((10, 0), "mx"), ((9, 0), "none"), ((8, 9), "none")):
        with pretend_target(Target("cuda", capability)):
            found = recipe_support(SQUARE, CUDA, grouped=grouped)
        assert [each.kind for each in found] == [kind] * 3
        assert kind == "mx" or "compute capability" in found[0].detail


def test_explain_names_the_recipe_and_finds_its_gemms():
    model = f8.convert(nn.Sequential(nn.Linear(64, 96, bias=False).bfloat16()), SQUARE, filter="*")
    assert missing_gemm(model, GPUS["b200"]) == ""
    assert "is MX, which needs compute capability 10.0 (B200)" in missing_gemm(model, GPUS["h200"])
    text = str(explain(model, (torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True),), gpu=None))
    assert "mxfp8(weight_block=(32, 32))" in text
    assert "e4m3 x e4m3 mxfp8" in text
