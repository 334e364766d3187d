"""The fused ops: what they compute, that they are fused, and what a registration without one of its parts says."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from swiglu8 import Ceil8, quantized_swiglu, swiglu, swiglu_linear, swiglu_quantize
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from fp8compile.library import OPS, register_op
from fp8compile.testing import check_op, gpu_kernels

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
PARTS = ("fake", "backward", "setup_context", "decompose", "sharding", "samples")


@pytest.mark.parametrize("op", [swiglu_quantize, swiglu_linear], ids=str)
def test_they_keep_every_contract(op):
    check_op(op)


def pair(*shape, dtype=torch.bfloat16):
    return tuple(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_swiglu_then_quantize(dtype, assert_bits_equal):
    gate, up = pair(9, 130, dtype=dtype)
    exact = (F.silu(gate.double()) * up.double()).float().to(dtype)
    expected, found = f8.quantize(exact, Ceil8()), quantized_swiglu(gate, up, Ceil8())
    assert (found.shape, found.dtype, found.quantizer) == (expected.shape, expected.dtype, Ceil8())
    assert_bits_equal(found.scale, expected.scale)
    apart = (found.codes.int() - expected.codes.int()).abs()
    assert apart.max() <= 1  # the sigmoid of silu and that of sigmoid differ in float64's last bit
    assert (apart > 0).float().mean() < 0.001


def test_gradients_are_those_of_swiglu_and_a_straight_through_product():
    gate, up = (x.requires_grad_() for x in pair(8, 128, dtype=torch.float32))
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    grad = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(swiglu_linear(gate, up, weight, f8.library.recipe(Ceil8())), (gate, up, weight), grad)
    expected = torch.autograd.grad((F.silu(gate) * up) @ weight.t(), (gate, up, weight), grad)
    for got, want in zip(found, expected, strict=True):
        assert (got - want).norm() < 0.1 * want.norm()  # FP8 has 3 bits of mantissa


def test_only_the_gradients_asked_for_come():
    gate, up = pair(8, 128)
    weight = torch.randn(64, 128).bfloat16().requires_grad_()
    swiglu_linear(gate, up, weight, f8.library.recipe(Ceil8())).sum().backward()
    assert weight.grad is not None
    assert gate.grad is None


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it")
@pytest.mark.skipif(
    TORCH < (2, 13), reason="Inductor of PyTorch 2.11 makes a second kernel for the cast of such blocks"
)
def test_on_a_gpu_swiglu_amax_and_cast_are_one_kernel():
    with FakeTensorMode():
        gate, up = (torch.empty(4096, 8192, dtype=torch.bfloat16) for _ in range(2))
        (code,) = gpu_kernels(lambda gate, up: swiglu_quantize(gate, up, Ceil8()), gate, up)
        (apart,) = gpu_kernels(lambda gate, up: swiglu_quantize(f8.ops.realize(gate * up), up, Ceil8()), gate, up)
    assert len(code.kernels) == 1, code.source
    assert code.bytes < 1.01 * (2 * 2 + 1 + 4 / 64) * gate.numel()  # read two bfloat16, write a code, a scale a block
    assert len(apart.kernels) == 2


@pytest.mark.parametrize("name", ["swiglu8::swiglu_quantize", "swiglu8::swiglu_linear", "swiglu8::observe"])
@pytest.mark.parametrize("part", PARTS)
def test_deleting_a_part_of_a_registration_says_which(name, part, monkeypatch):
    op = OPS[name]
    parts = {argument: getattr(op, argument) for argument in PARTS if argument != "setup_context"}
    if op.backward is not None:
        parts["setup_context"] = swiglu._setup_context
    elif part == "setup_context":
        pytest.skip("an op without backward has none")
    del parts[part]
    monkeypatch.delitem(OPS, name)
    with pytest.raises(TypeError, match=rf"register_op: {name} .*\. Write {part}= a function"):
        register_op(name, op.impl, **parts)
