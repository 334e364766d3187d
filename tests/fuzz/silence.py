"""A property of what was silently wrong once: layers of codes of one's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from own_arithmetic import FourBits, Int8, Packed, Subclass
from torch import Tensor

import fp8compile as f8
from fp8compile.library import recipe
from fp8compile.quantizers import GEMMS, Quantizer

__all__ = ["layer_follows_dequantize", "own_layers"]

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
