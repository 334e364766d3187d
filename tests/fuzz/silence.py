"""Properties of what was silently wrong once: codes of one's own, and weights written before their backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from own_arithmetic import FourBits, Int8, Packed, Subclass
from torch import Tensor

import fp8compile as f8
from fp8compile.library import recipe
from fp8compile.quantizers import GEMMS, Quantizer

__all__ = [
    "layer_follows_dequantize",
    "own_layers",
    "what_is_written_between_forward_and_backward_raises",
    "writes",
]

# ---------------------------------------------------------------------------------- arithmetic of one's own

BLOCKS = ((-1, -1), (1, -1), (1, 16))


@dataclass(frozen=True)
class OwnLayer:
    """A layer whose codes only its quantizer understands; sides are even, for two codes may share a byte."""

    m: int
    k: int
    n: int
    seed: int
    quantizer: Quantizer

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, weight, grad_output."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = ((self.m, self.k), (self.n, self.k), (self.m, self.n))
        x, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
        return x, weight, grad


even = st.integers(1, 30).map(lambda half: 2 * half)


def own_layers() -> st.SearchStrategy[OwnLayer]:
    """Any class of own arithmetic, block and even sizes, float32."""
    classes = st.sampled_from((Int8, Subclass, FourBits, Packed))
    quantizers = st.builds(lambda make, block: make(block=block), classes, st.sampled_from(BLOCKS))
    return st.builds(OwnLayer, m=even, k=even, n=even, seed=st.integers(0, 2**16), quantizer=quantizers)


def _values(x: Tensor, quantizer: Quantizer) -> Tensor:
    q = f8.quantize(x, quantizer)
    return quantizer.dequantize(q.codes, q.scale, torch.float64)


def layer_follows_dequantize(case: OwnLayer, same) -> tuple[str, ...]:
    """Output and gradients are the float64 products of what dequantize gives, rounded once."""
    made = recipe(case.quantizer)
    x, weight, grad = case.tensors()
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = f8.linear(*leaves, recipe=made)
    y.backward(grad)
    found = (y.detach(), leaves[0].grad, leaves[1].grad)
    for actual, gemm, operands in zip(found, GEMMS, ((x, weight), (grad, weight), (grad, x)), strict=True):
        pair = zip(operands, made.quantizers(gemm), strict=True)
        a, b = gemm.oriented(*(_values(tensor, quantizer) for tensor, quantizer in pair))
        exact = a @ b
        # float64 sums in two orders differ by far less than a float32 rounding, which a tie alone turns over
        off = (actual.double() - exact).abs()
        assert (off <= exact.abs() * 2.0**-24 + (a.abs() @ b.abs()) * 2.0**-48).all(), gemm.name
    return type(case.quantizer).__name__, str(case.quantizer.block)


# ---------------------------------------------------------------------------------- written in between

RECIPES = {"tensorwise": f8.recipes.tensorwise(), "blockwise": f8.recipes.blockwise()}
WRITERS = {
    "add_": lambda p: p.add_(1.0),
    "mul_": lambda p: p.mul_(2.0),
    "copy_": lambda p: p.copy_(torch.ones(p.shape, dtype=p.dtype)),
    "zero_": lambda p: p.zero_(),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
}


@dataclass(frozen=True)
class Write:
    """Who writes what between a forward and its backward."""

    recipe: str
    quantized: bool
    compiled: bool
    target: str
    how: str


@st.composite
def writes(draw: st.DrawFn, *, compiled: bool) -> Write:
    """Any recipe with FP8 parameters, any writer, input or weight."""
    quantized = draw(st.booleans())
    hows = (*WRITERS, "SGD", "SGD foreach", *(("MasterWeights",) if quantized else ()))
    target = draw(st.sampled_from(("weight", "weight", "input")))
    how = draw(st.sampled_from(hows if target == "weight" else tuple(WRITERS)))
    return Write(draw(st.sampled_from(sorted(RECIPES))), quantized, compiled, target, how)


def _writer(case: Write, model: torch.nn.Module, x: Tensor):
    weight = model[0].weight
    if case.how in WRITERS:
        tensor = x if case.target == "input" else weight
        return lambda: WRITERS[case.how](tensor)
    if case.how == "MasterWeights":
        return f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.5).step
    return torch.optim.SGD(model.parameters(), lr=0.5, foreach=case.how.endswith("foreach")).step


def what_is_written_between_forward_and_backward_raises(case: Write, same) -> tuple[str, ...]:
    """A backward over a weight or input that was written since its forward raises PyTorch's own error."""
    torch._dynamo.reset()
    layer = torch.nn.Linear(32, 48, bias=False).bfloat16()
    options = {"filter": lambda *_: True, "quantized_parameters": case.quantized}
    model = f8.convert(torch.nn.Sequential(layer), RECIPES[case.recipe], **options)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if case.compiled else model
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    call(x).float().sum().backward()  # an optimizer's step needs a gradient
    y = call(x)
    with torch.no_grad():
        _writer(case, model, x)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.float().sum().backward()
    return case.recipe, case.target, case.how, "FP8 parameter" if case.quantized else "plain"
