"""What has to hold for every case that is drawn, each a function that raises where it does not.

A property returns the classes that a case belongs to, for the counts. It gets ``same(actual, expected, what)``, the
bit-exact comparison of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from bad_input import BadCall, bad_calls, raised_by_us
from cases import Drawn, Layer, layers, quantizers, shapes, tensors
from expected import quantized
from groups import groups, groups_are_linears, groups_are_linears_compiled, reused_groups
from hypothesis import strategies as st
from silence import (
    layer_follows_dequantize,
    own_layers,
)
from torch import Tensor
from two_levels import four_bit_layers, layer_is_made_of_its_four_bit_products, two_levels, two_levels_are_numpys

import fp8compile as f8
from fp8compile.quantizers import GEMMS, Gemm
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.testing.samples.inputs import blockwise_of_16

__all__ = ["PROPERTIES", "Property"]

Same = Callable[..., None]


def _copies(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if t is None else t.clone() for t in tensors]


def _untouched(tensors: tuple[Tensor | None, ...], before: list[Tensor | None], same: Same) -> None:
    for tensor, copy in zip(tensors, before, strict=True):
        if tensor is not None:
            same(tensor, copy, "an input was changed:")


# ---------------------------------------------------------------------------------- quantize


@dataclass(frozen=True)
class Quantized:
    """A call of ``f8.quantize``, described."""

    x: Drawn
    quantizer: f8.CurrentScaling


@st.composite
def _quantized(draw: st.DrawFn, *, matrices: bool = False, **restrictions: object) -> Quantized:
    matrix = st.tuples(st.integers(1, 70), st.integers(1, 70))
    shape = draw(st.one_of(matrix, matrix, shapes()) if matrices else st.one_of(shapes(), st.just(())))
    dtype = draw(st.sampled_from(("bf16", "fp16", "fp32")))
    return Quantized(x=draw(tensors(shape, dtype, **restrictions)), quantizer=draw(quantizers()))


def quantize_is_the_oracles(case: Quantized, same: Same) -> tuple[str, ...]:
    """N1 to N4: codes, scale and values of every block, by numpy; and the transposed of a matrix likewise."""
    x = case.x.tensor()
    before = _copies((x,))
    q = f8.quantize(x, case.quantizer)
    codes, scale, values = quantized(x, case.quantizer)
    same(q.codes, codes, "codes")
    same(q.scale.reshape(-1), scale.reshape(-1), "scale")
    assert q.scale.shape == case.quantizer.scale_shape(x.shape)
    same(q.dequantize(torch.float32), values, "values")
    same(q.dequantize(), values.to(x.dtype), "values in the dtype of x")
    if x.ndim == 2:
        other = f8.quantize(x.t(), case.quantizer.transposed())
        same(other.codes.t(), q.codes, "codes of the transposed")
        same(other.scale.t(), q.scale, "scale of the transposed")
    _untouched((x,), before, same)
    return f"scale {case.quantizer.scale}", case.x.dtype, case.x.profile, case.x.layout


# ---------------------------------------------------------------------------------- views

View = tuple[str, Callable[[Tensor], Tensor]]


def _view(name: str, a: int, b: int) -> View:
    """A view by its name; what of ``a`` and ``b`` it needs is taken modulo the tensor's size."""

    def cut(x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim]
        start, end = sorted((a % (size + 1), b % (size + 1)))
        return x.narrow(dim, start, end - start)

    return name, {
        "detach": lambda x: x.detach(),
        "clone": lambda x: x.clone(),
        "t": lambda x: x.t(),
        "transpose": lambda x: x.transpose(0, -1),
        "contiguous": lambda x: x.contiguous(),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "flatten": lambda x: x.reshape(-1, x.shape[-1]) if x.numel() else x.flatten(0, -1),
        "vector": lambda x: x.reshape(-1),
        "cut rows": lambda x: cut(x, 0),
        "cut columns": lambda x: cut(x, -1),
        "cut at 16": lambda x: x[16 * (a % 3) :],
        "cut columns at 16": lambda x: x[..., 16 * (a % 3) : 16 * (a % 3) + 32],
        "select": lambda x: x[a % max(1, x.shape[0])] if x.ndim else x[0],
        "every other": lambda x: x[::2],
        "split": lambda x: x.split(max(1, a % 40), -1)[0],
        "chunk": lambda x: x.chunk(2)[-1],
    }[name]


VIEW_NAMES = (
    *("detach", "clone", "t", "transpose", "contiguous", "unsqueeze", "flatten", "vector", "cut rows", "cut columns"),
    *("cut at 16", "cut columns at 16", "select", "every other", "split", "chunk"),
)


@dataclass(frozen=True)
class Viewed:
    """Views of a quantized tensor, one after the other, described."""

    of: Quantized
    views: tuple[tuple[str, int, int], ...]


@st.composite
def _viewed(draw: st.DrawFn) -> Viewed:
    one = st.tuples(st.sampled_from(VIEW_NAMES), st.integers(0, 300), st.integers(0, 300))
    return Viewed(
        of=draw(_quantized(matrices=True, layouts=("contiguous",))),
        views=tuple(draw(st.lists(one, min_size=1, max_size=4))),
    )


def views_keep_values_or_raise(case: Viewed, same: Same) -> tuple[str, ...]:
    """``view(q).dequantize()`` has the bits of ``view(q.dequantize())``, or the view raises and says the way out."""
    q = f8.quantize(case.of.x.tensor(), case.of.quantizer)
    plain = q.dequantize()
    for name, view in (_view(*arguments) for arguments in case.views):
        try:
            expected = view(plain)
        except (RuntimeError, IndexError) as error:  # PyTorch has no such view of a plain tensor
            try:
                view(q)
            except (RuntimeError, IndexError, TypeError):
                continue
            raise AssertionError(f"{name} works on codes only") from error
        try:
            q = view(q)
        except TypeError as error:
            assert ".dequantize()" in str(error), f"foreign error: {error}"  # noqa: PT017
            return "refused", name
        plain = expected
        assert type(q) is f8.QuantizedTensor
        assert (q.shape, q.dtype) == (plain.shape, plain.dtype), name
        same(q.dequantize(), plain, name)
    return "right", *(name for name, _, _ in case.views)


def gradients_pass_views(case: Viewed, same: Same) -> tuple[str, ...]:
    """The gradient through quantize, views and dequantize is that through the same views of x."""
    x, other = (case.of.x.tensor().detach().requires_grad_() for _ in range(2))
    q, plain = f8.quantize(x, case.of.quantizer), other
    for name, view in (_view(*arguments) for arguments in case.views):
        try:
            q, plain = view(q), view(plain)
        except (RuntimeError, IndexError, TypeError):
            return "refused", name
    assert q.requires_grad == plain.requires_grad
    if not plain.requires_grad:  # detached
        return ("constant",)
    weights = torch.arange(plain.numel()).view(plain.shape).cos().to(plain.dtype)
    q.dequantize().backward(weights)
    plain.backward(weights)
    same(x.grad, other.grad, "gradient of x")
    return "right", *(name for name, _, _ in case.views)


# ---------------------------------------------------------------------------------- layer, by hand


def _by_hand(a: Tensor, b: Tensor, gemm: Gemm, recipe: f8.Recipe, same: Same) -> Tensor:
    """A product of the layer, from the oracle's codes and scales."""
    pair = recipe.quantizers(gemm)
    if pair is None:
        return (a.t() if gemm.a_transposed else a) @ (b.t() if gemm.b_transposed else b)
    operands = []
    for x, quantizer in zip((a, b), pair, strict=True):
        codes, scale, _ = quantized(x, quantizer)
        operands.append(f8.QuantizedTensor(codes, scale.view(quantizer.scale_shape(x.shape)), quantizer, x.dtype))
    left = operands[0].t() if gemm.a_transposed else operands[0]
    right = operands[1].t() if gemm.b_transposed else operands[1]
    return f8.scaled_mm(left, right, out_dtype=a.dtype)


def _run(linear: Callable, case: Layer, same: Same, *, dense_grad: bool = False) -> list[Tensor | None]:
    """Output and gradients of x, weight and bias of one call; the inputs are what they were."""
    *inputs, grad_output = case.tensors()
    grad_output = grad_output.contiguous() if dense_grad else grad_output
    before = _copies((*inputs, grad_output))
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    y = linear(*leaves, case.recipe)
    wanted = [leaf for leaf in leaves if leaf is not None]
    results = [y.detach(), *torch.autograd.grad(y, wanted, grad_output)]
    _untouched((*inputs, grad_output), before, same)
    return results


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: f8.Recipe) -> Tensor:
    return f8.linear(x, weight, bias, recipe=recipe)


def _kinds(case: Layer) -> tuple[str, ...]:
    ready = f8.recipes.describe(case.recipe) in f8.recipes.names()
    return ("a ready recipe" if ready else "any recipe"), case.x.dtype, case.x.layout, case.x.profile


def layer_is_made_of_its_products(case: Layer, same: Same) -> tuple[str, ...]:
    """Output and gradients have the bits of three products of the oracle's codes, and of contiguous operands."""
    actual = _run(_linear, case, same)
    x, weight, bias, grad_output = case.tensors()
    x_MK, dy_MN = as_matrix(x), as_matrix(grad_output)
    operands = ((x_MK, weight), (dy_MN, weight), (dy_MN, x_MK))
    y, dx, dw = (_by_hand(a, b, gemm, case.recipe, same) for (a, b), gemm in zip(operands, GEMMS, strict=True))
    y = y if bias is None else y + bias
    same(actual[0].reshape(y.shape), y, "output")
    same(actual[1].reshape(dx.shape), dx, "grad_input")
    same(actual[2], dw, "grad_weight")
    if bias is not None:
        same(actual[3], dy_MN.sum(0), "grad_bias")
    assert [t.shape for t in actual[:3]] == [grad_output.shape, x.shape, weight.shape]
    return _kinds(case)


# ---------------------------------------------------------------------------------- compiled


@cache
def _compiled(backend: str, *, dynamic: bool | None) -> Callable:
    return torch.compile(_linear, fullgraph=True, backend=backend, dynamic=dynamic)


@cache
def _compiled_quantize(backend: str) -> Callable:
    return torch.compile(_codes_scale_values, fullgraph=True, backend=backend, dynamic=True)


def _codes_scale_values(x: Tensor, quantizer: f8.CurrentScaling) -> tuple[Tensor, Tensor, Tensor]:
    q = f8.quantize(x, quantizer)
    return q.codes, q.scale, q.dequantize()


def _assert_sums_alike(actual: Tensor, expected: Tensor, terms: Tensor) -> None:
    """Two sums over the rows of ``terms``, in float32 and in any order, rounded to the dtype of both.

    A float32 sum of n terms is off by n * 2**-24 of the sum of magnitudes at most. Where that is so large that a part
    of the sum may overflow, the order decides, and nothing can be said.
    """
    magnitudes = terms.double().abs().sum(0)
    info = torch.finfo(terms.dtype)
    said = magnitudes < info.max / 2
    off = 2 * len(terms) * 2.0**-24 * magnitudes + info.eps * expected.double().abs() + info.tiny * info.eps
    assert ((actual.double() - expected.double()).abs() <= off)[said].all(), (actual[said], expected[said])
    has_nan = terms.isnan().any(0)
    assert (actual.isnan() & expected.isnan())[has_nan].all(), (actual, expected)


def _same_as_eager(compiled: Callable, case: Layer, same: Same, *, inductor: bool) -> tuple[str, ...]:
    # first compiled, then eager: an element that is never written must not find the eager result in its memory
    # AOTAutograd makes grad_output contiguous; PyTorch's own sums and bf16 products differ by strides in eager mode
    actual, expected = _run(compiled, case, same), _run(_linear, case, same, dense_grad=True)
    names = ("output", "grad_input", "grad_weight", "grad_bias")
    for name, a, e in zip(names, actual, expected, strict=False):
        if name == "grad_bias" and inductor:  # PyTorch's sum of grad_output, nothing of ours, in Inductor's own order
            _assert_sums_alike(a, e, as_matrix(case.grad_output.tensor()))
        else:
            same(a, e, name)
    return _kinds(case)


def _reused(backend: str) -> st.SearchStrategy[Layer]:
    """Layers that share graphs: a few recipes, any number of rows (one graph from 2 on), any values."""
    blockwise = blockwise_of_16(scale="e8m0_rceil")
    few = (
        f8.recipes.tensorwise(),
        f8.recipes.rowwise(scale="pow2"),
        f8.recipes.rowwise_bf16_wgrad(eps=0.3),
        blockwise,
    )
    return layers(
        recipe=st.sampled_from(few),
        x_shape=st.tuples(st.integers(0, 70), st.sampled_from((17, 24, 48))),
        n=st.sampled_from((33, 40)),
        dtype=st.sampled_from(("bf16", "fp32") if backend == "inductor" else ("bf16", "fp16", "fp32")),
        layouts=("contiguous",),
    ).filter(lambda layer: backend != "inductor" or layer.bias is not None)


def _one_graph_for_many(backend: str) -> Callable:
    def compiled_is_eager(case: Layer, same: Same) -> tuple[str, ...]:
        return _same_as_eager(_compiled(backend, dynamic=True), case, same, inductor=backend == "inductor")

    return compiled_is_eager


def _a_graph_each(backend: str) -> Callable:
    def compiled_is_eager(case: Layer, same: Same) -> tuple[str, ...]:
        torch._dynamo.reset()
        return _same_as_eager(_compiled(backend, dynamic=False), case, same, inductor=backend == "inductor")

    return compiled_is_eager


FEW_QUANTIZERS = (
    f8.CurrentScaling(),
    f8.CurrentScaling(block=(1, -1), scale="pow2", format="e5m2"),
    f8.CurrentScaling(block=(1, 16), scale="e8m0_floor"),
    f8.CurrentScaling(block=(16, 16), eps=0.3),
)


@st.composite
def _reused_quantize(draw: st.DrawFn) -> Quantized:
    shape = draw(st.tuples(st.integers(2, 70), st.integers(2, 70)))
    x = draw(tensors(shape, draw(st.sampled_from(("bf16", "fp32"))), layouts=("contiguous",)))
    return Quantized(x=x, quantizer=draw(st.sampled_from(FEW_QUANTIZERS)))


def inductor_quantizes_as_eager(case: Quantized, same: Same) -> tuple[str, ...]:
    """Codes, scale and values of one graph for all sizes."""
    x = case.x.tensor()
    compiled = _compiled_quantize("inductor")(x, case.quantizer)
    for name, a, e in zip(("codes", "scale", "values"), compiled, _codes_scale_values(x, case.quantizer), strict=True):
        same(a, e, name)
    return f"scale {case.quantizer.scale}", case.x.dtype, case.x.profile


# ---------------------------------------------------------------------------------- wrong arguments


def wrong_calls_raise_our_errors(case: BadCall, same: Same) -> tuple[str, ...]:
    """The last frame of the traceback is ours, the text begins with what the user called, inputs stay."""
    raised_by_us(case, same)
    return case.function, *case.wrong


def wrong_calls_say_the_same_compiled(case: BadCall, same: Same) -> tuple[str, ...]:
    """What the user of torch.compile reads contains the text of the eager error."""
    torch._dynamo.reset()
    raised_by_us(case, same, backend="aot_eager")
    return case.function, *case.wrong


@dataclass(frozen=True)
class Property:
    """A property, where its cases come from, and how many of them a run draws.

    Attributes:
        cases: What is drawn.
        holds: Raises where it does not hold.
        share: Of the cases of a long run.
        in_ci: Cases in each run of the tests.
    """

    cases: st.SearchStrategy
    holds: Callable[..., tuple[str, ...]]
    share: float
    in_ci: int


PROPERTIES = {
    "quantize: numpy's codes and scales": Property(_quantized(), quantize_is_the_oracles, 0.125, 300),
    "quantize in two levels: numpy's codes and scales": Property(two_levels(), two_levels_are_numpys, 0.05, 150),
    "layer in four bits: its products": Property(four_bit_layers(), layer_is_made_of_its_four_bit_products, 0.03, 60),
    "views: values kept or refused": Property(_viewed(), views_keep_values_or_raise, 0.06, 300),
    "views: gradients pass": Property(_viewed(), gradients_pass_views, 0.04, 100),
    "layer: products of numpy's codes": Property(layers(), layer_is_made_of_its_products, 0.14, 200),
    "layer: products of own arithmetic": Property(own_layers(), layer_follows_dequantize, 0.03, 60),
    "groups: a linear each": Property(groups(), groups_are_linears, 0.04, 40),
    "groups: a linear each, one graph": Property(reused_groups(), groups_are_linears_compiled, 0.02, 12),
    "aot_eager, graphs reused": Property(_reused("aot_eager"), _one_graph_for_many("aot_eager"), 0.12, 50),
    "inductor, graphs reused": Property(_reused("inductor"), _one_graph_for_many("inductor"), 0.1, 0),
    "inductor, quantize, graphs reused": Property(_reused_quantize(), inductor_quantizes_as_eager, 0.1, 2),
    "aot_eager, a graph each": Property(layers(), _a_graph_each("aot_eager"), 0.05, 20),
    "inductor, a graph each": Property(layers(), _a_graph_each("inductor"), 0.006, 2),
    "wrong calls": Property(bad_calls(), wrong_calls_raise_our_errors, 0.124, 400),
    "wrong calls, compiled": Property(bad_calls(compiled=True), wrong_calls_say_the_same_compiled, 0.02, 20),
}
