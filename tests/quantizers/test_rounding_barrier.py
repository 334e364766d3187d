"""N5: a quantization that Inductor fuses with what makes its input sees that input as eager mode would store it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.functional import gelu, silu

import fp8compile as f8

QUANTIZERS = {
    "tensorwise": f8.CurrentScaling(),
    "rowwise": f8.CurrentScaling(block=(1, -1), scale="pow2"),
    "blockwise_e5m2": f8.CurrentScaling(block=(128, 1), format="e5m2"),
}
ROWS, COLUMNS = 64, 256


def _norm(x: Tensor, y: Tensor) -> Tensor:
    values = x.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * y


def _gelu_product(x: Tensor, y: Tensor) -> Tensor:
    return gelu(x) * y


def _silu_product(x: Tensor, y: Tensor) -> Tensor:
    return silu(x) * y


def _narrowed(x: Tensor, y: Tensor) -> Tensor:
    return (x.float() * 1.1 + y.float()).to(x.dtype)


PRODUCERS = {"norm": _norm, "gelu": _gelu_product, "silu": _silu_product, "narrowed": _narrowed}


def _inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    # multiples of 1/16 below 8: sums of their squares are exact in any order
    x = torch.randint(-127, 128, (ROWS, COLUMNS)) / 16
    return x.to(dtype), torch.randn(ROWS, COLUMNS).to(dtype)


def _fused(producer, quantizer):
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        quantized = f8.quantize(producer(x, y), quantizer)
        return quantized.codes, quantized.scale

    return torch.compile(run, fullgraph=True, dynamic=False)


def _stored(producer, x: Tensor, y: Tensor) -> Tensor:
    """What Inductor makes of the producer, with nothing fused to it, as its bits in memory.

    Asked for as integers: on a CPU those keep a kernel from being vectorized, as the quantization does, and scalar and
    vectorized erf and exp differ in an ulp.
    """
    bits = torch.compile(lambda x, y: producer(x, y).view(torch.int16) ^ 1, fullgraph=True, dynamic=False)(x, y)
    return (bits ^ 1).view(x.dtype)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_fused_codes_and_scales_are_those_of_the_stored_value(producer, assert_bits_equal):
    x, y = _inputs()
    value = _stored(PRODUCERS[producer], x, y)
    for name, quantizer in QUANTIZERS.items():
        codes, scale = _fused(PRODUCERS[producer], quantizer)(x, y)
        expected = f8.quantize(value, quantizer)
        assert_bits_equal(scale, expected.scale, f"scale, {producer}, {name}")
        assert_bits_equal(codes, expected.codes, f"codes, {producer}, {name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_narrowing_gives_the_codes_of_eager_mode(dtype, assert_bits_equal):
    # products, sums and casts are rounded the same everywhere: nothing but the barrier can differ
    x, y = _inputs(dtype)
    codes, scale = _fused(_narrowed, QUANTIZERS["rowwise"])(x, y)
    expected = f8.quantize(_narrowed(x, y), QUANTIZERS["rowwise"])
    assert_bits_equal(scale, expected.scale)
    assert_bits_equal(codes, expected.codes)


@pytest.mark.parametrize("producer", ["norm", "silu", "narrowed"])
def test_without_the_barrier_codes_differ(producer, monkeypatch):
    for op in ("amax", "cast"):
        monkeypatch.setattr(sys.modules[f"fp8compile.ops.{op}"], "rounded", lambda x, **apart: x.float())
    x, y = _inputs()
    value = _stored(PRODUCERS[producer], x, y)
    quantizer = QUANTIZERS["tensorwise"]
    # the caches don't know of the patch, and must not keep what it makes
    with torch._inductor.config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        codes, _ = _fused(PRODUCERS[producer], quantizer)(x, y)
    different = (codes != f8.quantize(value, quantizer).codes).sum().item()
    assert different > 10, f"{different} codes differ: nothing was fused, so the tests above show nothing"


def test_a_fused_dequantization_is_rounded_before_its_use(assert_bits_equal):
    x, y = _inputs()
    quantizer = QUANTIZERS["tensorwise"]

    def run(x: Tensor, y: Tensor) -> Tensor:
        return f8.quantize(x, quantizer).dequantize().float() + y.float() * 2.0**-20

    compiled = torch.compile(run, fullgraph=True, dynamic=False)(x, y)
    assert_bits_equal(compiled, run(x, y))
