"""Four-bit codes with two levels of scales: any quantizer of them beside numpy, and layers beside their products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import oracle
import torch
from cases import Drawn, Layer, layers, shapes, tensors
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

import fp8compile as f8
from fp8compile.quantizers import GEMMS

__all__ = [
    "TwoLevels",
    "four_bit_layers",
    "layer_is_made_of_its_four_bit_products",
    "two_levels",
    "two_levels_are_numpys",
]

RULES = ("transformer_engine", "torchao")
BLOCKS = {(1, 16): ("rows", "none"), (16, 1): ("columns", "none"), (16, 16): ("rows", "columns", "none")}
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LARGEST = np.float32(oracle.LARGEST_FLOAT32)
Same = Callable[..., None]
signs = st.one_of(st.just(()), st.tuples(*[st.sampled_from((1, -1))] * 16))


# ---------------------------------------------------------------------------------- quantize


@dataclass(frozen=True)
class TwoLevels:
    """A call of ``f8.quantize``, described."""

    x: Drawn
    quantizer: f8.TwoLevelScaling


@st.composite
def two_levels(draw: st.DrawFn) -> TwoLevels:
    """Any quantizer of two levels to the nearest code, and a matrix that it takes, or one of odd sizes."""
    block = draw(st.sampled_from(tuple(BLOCKS)))
    hadamard = () if block == (16, 16) else draw(signs)
    fits = st.sampled_from((16, 32, 48, 80))
    size = st.one_of(fits, fits, fits, st.sampled_from((2, 18, 34)), st.integers(1, 70))
    shape = draw(size), draw(size)
    quantizer = f8.TwoLevelScaling(
        block=block, packed=draw(st.sampled_from(BLOCKS[block])), scale=draw(st.sampled_from(RULES)), hadamard=hadamard
    )
    return TwoLevels(x=draw(tensors(shape, draw(st.sampled_from(("bf16", "fp16", "fp32"))))), quantizer=quantizer)


def _transformed(values: np.ndarray, signs: tuple[int, ...], dim: int) -> np.ndarray:
    """Sixteen neighbours as sixteen signed sums, float32, term after term."""
    groups = np.moveaxis(values, dim, 0).reshape(-1, 16, values.shape[1 - dim])
    sums = np.empty_like(groups)
    for j in range(16):
        terms = [groups[:, i] * np.float32(sign * (-1) ** bin(i & j).count("1") / 4) for i, sign in enumerate(signs)]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        sums[:, j] = total
    return np.moveaxis(sums.reshape(-1, values.shape[1 - dim]), 0, dim)


def _scales(amax: np.ndarray, g: np.float32, rule: str) -> tuple[np.float32, np.ndarray, np.ndarray]:
    """The outer scale, e4m3 bytes and multipliers of blocks, by the table of docs/numerics.md."""
    one, six = np.float32(1), np.float32(6)
    if rule == "transformer_engine":
        outer_multiplier = np.minimum(np.float32(2688) / g, LARGEST) if np.isfinite(g) else np.float32(np.nan)
        outer = one / outer_multiplier
        scale = oracle.encode(amax * (outer_multiplier * (one / six)), "e4m3")
    else:
        outer = g / np.float32(2688) if np.isfinite(g) else np.float32(np.nan)
        outer = one if outer == 0 else outer
        scale = oracle.encode(np.maximum(amax / six / outer, np.float32(2**-6)), "e4m3")
    numbers = np.array([oracle.value(code, "e4m3") for code in range(256)], np.float32)[scale]
    if rule == "transformer_engine":
        return outer, scale, np.minimum(one / (numbers * outer), LARGEST)
    return outer, scale, np.minimum(one / outer, LARGEST) / numbers


def _codes(values: np.ndarray) -> np.ndarray:
    """Nearest codes, a tie to the even one; of NaN 0."""
    middles, magnitude = (VALUES[:-1] + VALUES[1:]) / 2, np.abs(values.astype(np.float64))
    code = np.searchsorted(middles, magnitude, side="left")
    code = np.where(np.isin(magnitude, middles) & (code % 2 == 1), code + 1, code)
    return np.where(np.isnan(values), 0, code | (np.signbit(values).astype(np.int64) << 3)).astype(np.uint8)


def _quantized(x: Tensor, quantizer: f8.TwoLevelScaling) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, one a byte, e4m3 bytes and the outer scale."""
    values, (height, width) = x.float().numpy(), quantizer.block
    if quantizer.hadamard:
        values = _transformed(values, quantizer.hadamard, 0 if height == 16 else 1)
    magnitude = np.pad(np.abs(values), ((0, -values.shape[0] % height), (0, -values.shape[1] % width)))
    grid = magnitude.reshape(magnitude.shape[0] // height, height, magnitude.shape[1] // width, width)
    amax = grid.max((1, 3))
    outer, scale, multiplier = _scales(amax, amax.max(), quantizer.scale)
    spread = multiplier.repeat(height, 0).repeat(width, 1)[: values.shape[0], : values.shape[1]]
    scaled = values * spread
    if quantizer.scale == "transformer_engine":
        scaled = np.where(values == 0, np.float32(0), scaled)
    return torch.from_numpy(_codes(scaled)), torch.from_numpy(scale), torch.tensor([outer])


def two_levels_are_numpys(case: TwoLevels, same: Same) -> tuple[str, ...]:
    """Codes and both scales of a matrix; one whose codes do not fit into bytes or sixteens is refused."""
    x, quantizer = case.x.tensor(), case.quantizer
    rows, columns = x.shape
    along = {"rows": columns, "columns": rows, "none": 0}[quantizer.packed]
    transformed = (rows if quantizer.block[0] == 16 else columns) if quantizer.hadamard else 0
    if along % 2 or transformed % 16:
        try:
            f8.quantize(x, quantizer)
        except ValueError as error:
            assert "Pad" in str(error), f"foreign error: {error}"  # noqa: PT017
            return "refused", f"packed {quantizer.packed}"
        raise AssertionError("codes that do not fit were made")
    with np.errstate(all="ignore"):
        codes, scale, outer = _quantized(x, quantizer)
    q = f8.quantize(x, quantizer)
    packed = {
        "none": lambda: codes,
        "rows": lambda: codes[:, ::2] | (codes[:, 1::2] << 4),
        "columns": lambda: codes[::2] | (codes[1::2] << 4),
    }[quantizer.packed]()
    same(q.codes, packed, "codes")
    same(q.scale, scale, "scale")
    same(q.outer_scale, outer, "outer scale")
    kind = "transformed" if quantizer.hadamard else "as it is"
    return f"scale {quantizer.scale}", f"packed {quantizer.packed}", f"block {quantizer.block}", kind, case.x.profile


# ---------------------------------------------------------------------------------- layers


@st.composite
def _recipes(draw: st.DrawFn) -> f8.Recipe:
    return f8.recipes.nvfp4(
        weight_block=draw(st.sampled_from(((16, 16), (1, 16)))),
        grad_rounding=draw(st.sampled_from(("nearest", "stochastic", "stochastic_hardware"))),
        seed=draw(st.integers(0, 3)),
        hadamard=draw(signs),
        backward=draw(st.sampled_from(("nvfp4", "nvfp4", "bf16", "dequantized"))),
        scale=draw(st.sampled_from(RULES)),
    )


def four_bit_layers() -> st.SearchStrategy[Layer]:
    """Layers of any four-bit recipe, on matrices of any sizes but 0."""
    return layers(recipe=_recipes(), x_shape=shapes(least=1), n=st.integers(1, 40))


def _exact(x: Tensor, quantizer: f8.TwoLevelScaling) -> tuple[Tensor, Tensor]:
    """The float64 values of an operand's codes without the outer scale, and that; transformed, with zeros behind."""
    quantizer = quantizer.unpacked()
    padded = pad(x, (0, 0, 0, -x.shape[0] % 16)) if quantizer.hadamard else x
    q = f8.quantize(padded, quantizer)
    return quantizer.dequantize(q.codes, q.scale, torch.float64), q.outer_scale.double()


def _product(a: Tensor, b: Tensor, gemm: object, recipe: f8.Recipe) -> Tensor:
    pair = recipe.quantizers(gemm)
    if pair is None:
        if recipe.dequantized_gradients:
            quantizer = recipe.quantizer_read(gemm.b)
            b = f8.quantize(b, quantizer.for_shape(b.shape)).dequantize()
        return (a.t() if gemm.a_transposed else a) @ (b.t() if gemm.b_transposed else b)
    (left, left_outer), (right, right_outer) = (_exact(x, q) for x, q in zip((a, b), pair, strict=True))
    left, right = left.t() if gemm.a_transposed else left, right.t() if gemm.b_transposed else right
    summed = min(left.shape[1], right.shape[0])  # zeros behind one of them meet nothing
    m, n = (a.t() if gemm.a_transposed else a).shape[0], (b.t() if gemm.b_transposed else b).shape[1]
    product = left[:, :summed] @ right[:summed]
    return (product * (left_outer * right_outer)).to(a.dtype)[:m, :n]


def layer_is_made_of_its_four_bit_products(case: Layer, same: Same) -> tuple[str, ...]:
    """Output and gradients are the exact products of what `f8.quantize` gives of their operands, rounded once."""
    x, weight, bias, grad = case.tensors()
    inputs = [t.clone().requires_grad_() for t in (x, weight)]
    y = f8.linear(*inputs, bias, recipe=case.recipe)
    rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    output, grad_input, grad_weight = GEMMS
    expected = _product(rows, weight, output, case.recipe)
    same(y.detach(), (expected if bias is None else expected + bias).view(y.shape), "output")
    y.backward(grad)
    same(inputs[0].grad, _product(grads, weight, grad_input, case.recipe).view(x.shape), "gradient of x")
    same(inputs[1].grad, _product(grads, rows, grad_weight, case.recipe), "gradient of weight")
    return case.recipe.input.scale, f"weights {case.recipe.weight.block}", x.dtype.__repr__()
