"""N8: any shape and layout gives the product of its codes, and padding never shows."""

from __future__ import annotations

import pytest
import torch
from eight_bits import EIGHT_BITS
from states import MULTIPLIERS, state_of
from torch import Tensor

import fp8compile as f8
from fp8compile.quantizers import GEMMS, TENSORS, Gemm
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.testing import Recording
from fp8compile.testing.samples.inputs import blockwise_of_16

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


RECIPES = {name: f8.recipes.by_name(name) for name in EIGHT_BITS} | {"custom_blockwise": blockwise_of_16()}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def _operand(x: Tensor, role: str, recipe: f8.Recipe) -> Tensor:
    """What the GEMM multiplies, in float64: the values of the codes, or of the operand in high precision."""
    quantizer = getattr(recipe, role)
    if quantizer is None:
        return x.double()
    if isinstance(quantizer, f8.DelayedScaling):
        tensor = next(tensor for tensor, roles in TENSORS.items() if role in roles)
        multiplier = torch.full((1, 1), MULTIPLIERS[tensor])
        codes, scale = quantizer.cast(x, multiplier), quantizer.scale_of(multiplier)
    else:
        quantized = f8.quantize(x, quantizer)
        codes, scale = quantized.codes, quantized.scale
    return quantizer.dequantize(codes, scale, torch.float64)


def _exact(a: Tensor, b: Tensor, gemm: Gemm, recipe: f8.Recipe) -> tuple[Tensor, Tensor]:
    """A GEMM of the layer in float64, and the sum of the magnitudes of its terms."""
    left, right = _operand(a, gemm.a, recipe), _operand(b, gemm.b, recipe)
    left, right = (left.t() if gemm.a_transposed else left), (right.t() if gemm.b_transposed else right)
    return left @ right, left.abs() @ right.abs()


def _assert_rounded(actual: Tensor, exact: tuple[Tensor, Tensor], terms: int) -> None:
    """Within half an ulp of the output's dtype of a sum in float32.

    A float32 sum of n products in any order is off by at most n * 2**-24 of the sum of magnitudes; the two scales add
    three roundings (their product or one after the other, and the sum's). float64 needs no allowance beside that.
    """
    value, magnitudes = exact
    accumulation = (terms + 3) * 2.0**-24 * magnitudes
    info = torch.finfo(actual.dtype)
    rounding = (info.eps / 2 * (value.abs() + accumulation)).clamp(min=info.tiny * info.eps / 2)
    error = (actual.double() - value.reshape(actual.shape)).abs()
    allowed = (accumulation + rounding).reshape(actual.shape)
    assert (error <= allowed).all(), f"error {error.max():.3g}, {(error / allowed).nan_to_num().max():.3g} of allowed"


def _check_layer(x: Tensor, weight: Tensor, recipe: f8.Recipe) -> None:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = f8.linear(x, weight, recipe=recipe, state=state_of(recipe))
    assert y.shape == (*x.shape[:-1], weight.shape[0])
    assert y.dtype == x.dtype
    grad_output = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, weight), grad_output)
    assert (dx.shape, dw.shape) == (x.shape, weight.shape)
    x_MK, w_NK, dy_MN = as_matrix(x.detach()), weight.detach(), as_matrix(grad_output)
    (m, k), n = x_MK.shape, w_NK.shape[0]
    _assert_rounded(y, _exact(x_MK, w_NK, OUTPUT, recipe), k)
    _assert_rounded(dx, _exact(dy_MN, w_NK, GRAD_INPUT, recipe), n)
    _assert_rounded(dw, _exact(dy_MN, x_MK, GRAD_WEIGHT, recipe), m)


@every_recipe
@pytest.mark.parametrize(("k", "n"), [(24, 100), (100, 24), (16, 129), (129, 16), (1, 1), (32, 16), (200, 257)])
@pytest.mark.parametrize("m", [0, 1, 17])
def test_output_and_gradients_are_products_of_codes(name, m, k, n):
    _check_layer(_normal(m, k), _normal(n, k), RECIPES[name])


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float32_and_float16_layers(name, dtype):
    _check_layer(torch.randn(17, 100).to(dtype), torch.randn(24, 100).to(dtype), RECIPES[name])


@every_recipe
@pytest.mark.parametrize(
    "shape", [(24,), (1, 24), (5, 24), (2, 3, 24), (1, 1, 24), (2, 0, 24), (2, 3, 2, 24), (1, 2, 1, 24)]
)
def test_one_to_four_dims(name, shape, assert_bits_equal):
    x, weight = _normal(*shape), _normal(100, 24)
    _check_layer(x, weight, RECIPES[name])
    flat = f8.linear(x.reshape(-1, 24), weight, recipe=RECIPES[name], state=state_of(RECIPES[name]))
    assert_bits_equal(f8.linear(x, weight, recipe=RECIPES[name], state=state_of(RECIPES[name])).reshape(-1, 100), flat)


LAYOUTS = {
    "transposed": lambda: _normal(24, 17).t(),
    "permuted": lambda: _normal(5, 3, 24).permute(1, 0, 2),
    "last dim first": lambda: _normal(24, 3, 5).permute(1, 2, 0),
    "strided": lambda: _normal(34, 48)[::2, ::2],
    "expanded": lambda: _normal(1, 24).expand(17, 24),
    "with an offset": lambda: _normal(20, 30)[3:, 6:],
}


@every_recipe
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_bits_of_contiguous_copies(name, layout, assert_bits_equal):
    x, weight = LAYOUTS[layout](), _normal(24, 40).t()
    assert not x.is_contiguous()
    _check_layer(x, weight, RECIPES[name])
    results = []
    for a, w in ((x, weight), (x.contiguous(), weight.contiguous())):
        a, w = a.detach().requires_grad_(), w.detach().requires_grad_()
        y = f8.linear(a, w, recipe=RECIPES[name], state=state_of(RECIPES[name]))
        results.append((y, *torch.autograd.grad(y, (a, w), torch.ones_like(y))))
    for got, expected in zip(*results, strict=True):
        assert_bits_equal(got.contiguous(), expected)


@every_recipe
@pytest.mark.parametrize("zeros", [8, 40])
def test_zeros_appended_along_k_change_no_bit(name, zeros, assert_bits_equal):
    # what the op appends inside may do no more than this: scales and outputs stay
    x, weight = _normal(17, 24), _normal(20, 24)
    wide = [torch.nn.functional.pad(t, (0, zeros)) for t in (x, weight)]
    assert_bits_equal(
        f8.linear(*wide, recipe=RECIPES[name], state=state_of(RECIPES[name])),
        f8.linear(x, weight, recipe=RECIPES[name], state=state_of(RECIPES[name])),
    )


@every_recipe
@pytest.mark.parametrize("shape", [(17, 24), (24,), (0, 24), (2, 3, 24)])
def test_bias_is_added_in_the_outputs_dtype(name, shape, assert_bits_equal):
    x, weight = _normal(*shape), _normal(10, 24)
    bias = _normal(10).requires_grad_()
    y = f8.linear(x, weight, bias, recipe=RECIPES[name], state=state_of(RECIPES[name]))
    assert_bits_equal(y, f8.linear(x, weight, recipe=RECIPES[name], state=state_of(RECIPES[name])) + bias)
    (grad,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    assert_bits_equal(grad, torch.full((10,), x[..., 0].numel()).bfloat16())


# what Inductor is handed as it is: a multiplier that is stored, and for delayed scaling a copy of it
NOT_DECOMPOSED = {f"fp8compile.{name}.default" for name in ("after", "stored")}
COMPILED = (((1, 100), 24), ((3, 5, 129), 16), ((0, 24), 16))


def _layers(xs: list[Tensor], weights: list[Tensor], bias: Tensor, recipe: f8.Recipe, states: list) -> list[Tensor]:
    return [
        f8.linear(x, w, bias[: w.shape[0]], recipe=recipe, state=state)
        for x, w, state in zip(xs, weights, states, strict=True)
    ]


BACKENDS = [(name, backend) for backend in ("aot_eager", "inductor") for name in RECIPES]
BACKENDS.remove(("custom_blockwise", "inductor"))  # blockwise with other numbers


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_compiled_layers_give_the_bits_of_eager_ones(name, backend, assert_bits_equal):
    # first compiled, then eager: memory of the eager result could else be what an element never written shows
    base = _normal(5, 3, 129).transpose(0, 1)
    xs = [base if len(shape) == 3 else _normal(*shape) for shape, _ in COMPILED]
    weights = [_normal(n, shape[-1]) for shape, n in COMPILED]
    bias = _normal(100)
    grads = [_normal(*shape[:-1], n) for shape, n in COMPILED]
    results = []
    recording = Recording(backend)
    for layers in (torch.compile(_layers, backend=recording, fullgraph=True, dynamic=False), _layers):
        leaves = [tensor.detach().requires_grad_() for tensor in (*xs, *weights)]
        ys = layers(leaves[: len(xs)], leaves[len(xs) :], bias, RECIPES[name], [state_of(RECIPES[name]) for _ in xs])
        results.append([*ys, *torch.autograd.grad(ys, leaves, grads)])
    for index, (got, expected) in enumerate(zip(*results, strict=True)):
        what = ("output", "grad_input", "grad_weight")[index // len(COMPILED)]
        assert_bits_equal(got, expected, f"{what} of {COMPILED[index % len(COMPILED)]}")
    if backend == "inductor":
        targets = {str(node.target) for graph in recording.traced for node in graph.graph.nodes}
        assert {target for target in targets if target.startswith("fp8compile.")} <= NOT_DECOMPOSED
        counters = torch._dynamo.utils.counters
        assert not [name for group in counters.values() for name in group if "bypass" in name], counters


def _quantize(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    quantized = [f8.quantize(x, f8.CurrentScaling(block=block)) for block in ((1, 16), (16, 16), (16, 1), (-1, -1))]
    return [(q.codes, q.scale) for q in quantized]


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_blocks_at_ragged_edges_are_complete(dynamic, assert_bits_equal):
    # Inductor's C++ backend splits loops by a division and forgets what is left over, unless the op hides the division
    compiled = torch.compile(_quantize, fullgraph=True, dynamic=dynamic)
    for shape in ((17, 24), (40, 100)):
        x = _normal(*shape)
        for got, expected in zip(compiled(x), _quantize(x), strict=True):
            assert_bits_equal(got[1], expected[1], f"scale of {shape}")
            assert_bits_equal(got[0], expected[0], f"codes of {shape}")


def test_the_bias_gradient_of_one_token_without_leading_dims_is_that_of_linear():
    layer = f8.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), f8.recipes.rowwise())[0]
    layer(torch.ones(16)).backward(torch.full((16,), -0.0))
    assert not layer.bias.grad.signbit().any()  # nn.Linear sums one row, and 0.0 + -0.0 is 0.0
