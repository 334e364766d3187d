"""f8.recipes.nvfp4: a layer and its gradients from codes, on any shape; who can't take two levels says so."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from golden_cases import GOLDEN

import fp8compile as f8
from fp8compile.formats import pack
from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.selection import multiply
from fp8compile.quantizers import GEMMS, GemmConfig

RECIPES = {
    "default": f8.recipes.nvfp4(),
    "1x16, no transform, torchao": f8.recipes.nvfp4(weight_block=(1, 16), hadamard=(), scale="torchao", seed=5),
    "bf16 backward": f8.recipes.nvfp4(backward="bf16"),
    "dequantized backward": f8.recipes.nvfp4(backward="dequantized"),
}
SHAPES = [(48, 64, 32), (37, 23, 19), (1, 16, 16), (5, 40, 24)]  # M, K, N


def tensors(m, k, n):
    generator = torch.Generator().manual_seed(m)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in ((m, k), (n, k), (m, n))]


def run(layer, x, weight, grad, recipe):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = layer(x, weight, recipe=recipe)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]


def exact(x, quantizer):
    """Codes times scales of blocks in float64, with the zeros behind them; and the outer scale."""
    quantizer = quantizer.unpacked()
    amax = quantizer.amax(x)
    outer_amax = quantizer.outer_amax(amax)
    codes = quantizer.cast(x, quantizer.multiplier(amax))
    return quantizer.dequantize(codes, quantizer.block_scale(amax, outer_amax), torch.float64), quantizer.outer_scale(
        outer_amax
    ).double()


def oracle(x, weight, grad, recipe):
    given = {"output": (x, weight), "grad_input": (grad, weight), "grad_weight": (grad, x)}
    for gemm in GEMMS:
        a, b = given[gemm.name]
        if recipe.quantizers(gemm) is None:
            if recipe.dequantized_gradients:
                quantizer = recipe.quantizer_read(gemm.b)
                b = f8.quantize(b, quantizer.for_shape(b.shape)).dequantize()
            a, b = gemm.oriented(a, b)
            yield a @ b
            continue
        pairs = [exact(t, q) for t, q in zip((a, b), recipe.quantizers(gemm), strict=True)]
        a, b = gemm.oriented(pairs[0][0], pairs[1][0])
        yield ((a @ b) * (pairs[0][1] * pairs[1][1])).bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_and_its_gradients_are_those_of_a_float64_oracle(name, shape, assert_bits_equal):
    recipe, given = RECIPES[name], tensors(*shape)
    found = run(f8.linear, *given, recipe)
    compiled = run(torch.compile(f8.linear, fullgraph=True, backend="aot_eager"), *given, recipe)
    for what, a, b, wanted in zip(("y", "dx", "dw"), found, compiled, oracle(*given, recipe), strict=True):
        assert_bits_equal(a, wanted, what)
        assert_bits_equal(b, wanted, f"{what}, compiled")


def test_inductor_has_the_bits_of_eager_where_nothing_is_a_multiple_of_sixteen(assert_bits_equal):
    given, recipe = tensors(37, 23, 19), RECIPES["default"]
    compiled = torch.compile(f8.linear, fullgraph=True, dynamic=False)
    for a, b in zip(run(compiled, *given, recipe), run(f8.linear, *given, recipe), strict=True):
        assert_bits_equal(a, b)


def test_tokens_of_any_number_run_one_graph(assert_bits_equal):
    recipe = RECIPES["default"]
    compiled = torch.compile(f8.linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (48, 37, 50):
        given = tensors(tokens, 64, 32)
        for a, b in zip(run(compiled, *given, recipe), run(f8.linear, *given, recipe), strict=True):
            assert_bits_equal(a, b, f"{tokens} tokens")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_product_is_the_golden_one():
    arrays = {name: torch.from_numpy(a) for name, a in np.load(next(GOLDEN.glob("gemm_nvfp4_*.npz"))).items()}
    line = f8.TwoLevelScaling()

    def operand(name):
        codes, outer = pack(arrays[f"{name}_codes"], 1), line.outer_scale(arrays[f"{name}_global_amax"].reshape(1))
        return Quantized(codes=codes, scale=arrays[f"{name}_scale_e4m3"], quantizer=line, outer_scale=outer)

    found = multiply(operand("a"), operand("b").t(), torch.float32, GemmConfig())
    # The outer scale is 1 / (2688 / amax), two float32 roundings; the golden product has amax / 2688 itself. Two outer
    # scales and the last rounding make five half units, of an exact sum of products.
    apart = (found.double() - arrays["y_f64"]).abs()
    assert (apart <= 5 * 2.0**-24 * arrays["y_f64"].abs()).all()


def test_noise_is_of_the_seed_and_the_backward_alone(assert_bits_equal):
    given = tensors(48, 64, 32)
    first, other = (run(f8.linear, *given, f8.recipes.nvfp4(seed=seed)) for seed in (0, 1))
    assert_bits_equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])
    for a, b in zip(first, run(f8.linear, *given, f8.recipes.nvfp4()), strict=True):
        assert_bits_equal(a, b)


def test_names_and_arguments():
    recipe = f8.recipes.by_name("nvfp4", grad_rounding="nearest")
    assert recipe == f8.recipes.nvfp4(grad_rounding="nearest")
    for made, said in (
        (f8.recipes.nvfp4(), "nvfp4"),
        (f8.recipes.nvfp4(hadamard=()), "nvfp4(hadamard=())"),
        (f8.recipes.nvfp4(backward="bf16"), "nvfp4(backward='bf16')"),
        (f8.recipes.nvfp4(backward="dequantized"), "nvfp4(backward='dequantized')"),
    ):
        assert f8.recipes.describe(made) == said
    assert f8.recipes.nvfp4().shares_weight_codes()
    for fields, says in (
        ({"backward": "fp8"}, "`backward` is 'fp8'; it must be 'nvfp4', 'bf16' or 'dequantized'"),
        ({"weight_block": (1, 32)}, r"`weight_block` is \(1, 32\); it must be \(16, 16\) or \(1, 16\)"),
    ):
        with pytest.raises(ValueError, match=says):
            f8.recipes.nvfp4(**fields)


def test_dequantized_gradients_are_of_codes_that_there_are():
    row = f8.CurrentScaling(block=(1, -1))
    for fields in ({}, {"input": f8.recipes.delayed().input, "weight": f8.recipes.delayed().weight}):
        with pytest.raises(
            ValueError,
            match="dequantized_gradients requires a quantized output with current "
            "scaling and gradients in high precision",
        ):
            f8.Recipe(dequantized_gradients=True, **fields)
    recipe = f8.Recipe(input=row, weight=row, dequantized_gradients=True)
    assert recipe.quantizer_read("weight_for_grad_input") == recipe.quantizer_read("input_for_grad_weight") == row
    layer = f8.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), RECIPES["dequantized backward"])
    assert not f8.set_recipe(layer, forward=None)[0].recipe.dequantized_gradients
    assert f8.recipes.by_name("nvfp4", backward="dequantized") == RECIPES["dequantized backward"]


def test_a_product_of_a_transformed_and_another_operand_is_refused():
    recipe = f8.recipes.nvfp4()
    with pytest.raises(ValueError, match="the GEMM of grad_weight has transform"):
        replace(recipe, input_for_grad_weight=f8.recipes.nvfp4(hadamard=()).input_for_grad_weight)


def test_groups_take_gradients_of_dequantized_codes(assert_bits_equal):
    recipe, ends = f8.recipes.nvfp4(backward="dequantized"), (0, 16, 40)
    x, weight, grad = torch.randn(40, 32), torch.randn(2, 48, 32), torch.randn(40, 48)
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    f8.grouped_linear(*leaves, torch.tensor(ends[1:], dtype=torch.int32), recipe=recipe).backward(grad)
    for expert, rows in enumerate(map(slice, ends, ends[1:])):
        own = [each.clone().requires_grad_() for each in (x[rows], weight[expert])]
        f8.linear(*own, recipe=recipe).backward(grad[rows])
        assert_bits_equal(leaves[0].grad[rows], own[0].grad)
        assert_bits_equal(leaves[1].grad[expert], own[1].grad)


def test_a_quantized_parameter_does_not_lose_an_outer_scale_in_silence():
    from fp8compile.tensor.quantized_parameter import QuantizedParameter

    q = f8.quantize(torch.randn(32, 32), f8.TwoLevelScaling())
    with pytest.raises(TypeError, match="QuantizedParameter of TwoLevelScaling: `outer_scale` is None"):
        QuantizedParameter(q.codes, q.scale, q.quantizer, q.dtype)


def test_a_gpu_says_which_groups_in_two_levels_it_has():
    from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE
    from fp8compile.ops.gemms.grouped.nvfp4 import NVFP4
    from fp8compile.ops.gemms.interface import GemmProblem
    from fp8compile.target import Target

    recipe = f8.recipes.nvfp4()
    pair = {"a": recipe.input, "b": recipe.weight.transposed(), "out_dtype": torch.bfloat16, "config": GemmConfig()}
    lacks = ONE_BY_ONE.lacks(GemmProblem(target=Target("cuda", (10, 0)), **pair))
    assert "which grouped GEMMs on a GPU only support fp8compile.TwoLevelScaling" in lacks
    assert ONE_BY_ONE.lacks(GemmProblem(target=Target("cpu"), **pair)) is None
    assert NVFP4.lacks(GemmProblem(target=Target("cuda", (10, 0)), **pair)) is None
    assert "needs compute capability 10.0" in NVFP4.lacks(GemmProblem(target=Target("cuda", (9, 0)), **pair))
    pair["out_dtype"] = torch.float32
    assert "only supports an output in bfloat16" in NVFP4.lacks(GemmProblem(target=Target("cuda", (10, 0)), **pair))


def test_dequantized_gradients_of_experts_are_those_of_each_alone(assert_bits_equal):
    generator = torch.Generator().manual_seed(0)
    for recipe in (RECIPES["dequantized backward"], f8.recipes.tensorwise()):
        recipe = f8.Recipe(input=recipe.input, weight=recipe.weight, dequantized_gradients=True)
        ends = torch.tensor([16, 16, 57], dtype=torch.int32)
        shapes = ((64, 96), (len(ends), 192, 96), (64, 192))
        x, weight, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
        x, weight = x.requires_grad_(), weight.requires_grad_()
        y = f8.grouped_linear(x, weight, ends, recipe=recipe)
        found = torch.autograd.grad(y, (x, weight), grad)
        for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            own = [each.detach().clone().requires_grad_() for each in (x[start:end], weight[expert])]
            alone = f8.linear(*own, recipe=recipe)
            assert_bits_equal(y[start:end], alone)
            of_x, of_weight = torch.autograd.grad(alone, own, grad[start:end])
            assert_bits_equal(found[0][start:end], of_x)
            assert_bits_equal(found[1][expert], of_weight)
