"""Int8 and its GEMM: the arithmetic that its file names, to the bit, eager, compiled and as a GPU would run it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from swiglu8 import Int8, int8, int8_rowwise
from swiglu8.int8 import LONGEST
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from fp8compile.library import GemmConfig, Operand
from fp8compile.testing import check_quantizer, eager_run, gpu_kernels, run_gpu_program

RECIPE = f8.library.recipe(Int8())
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
)
triton_warns = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")


def values(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(a, b, dtype):
    """Integers summed without rounding; float32; a scale, rounded; the other, rounded; the dtype of the product."""
    a, b = (f8.quantize(each, quantizer) for each, quantizer in ((a, Int8()), (b, Int8(block=(-1, 1)))))
    total = a.codes.view(torch.int8).double() @ b.codes.view(torch.int8).double()
    return (total.float() * a.scale * b.scale).to(dtype)


def test_it_keeps_every_contract():
    check_quantizer(Int8())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k", "n"), [(17, 24, 40), (1, 5, 3), (64, 2100, 8)])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_layer_has_the_bits_of_exact_sums_scaled_in_float32(m, k, n, dtype, backend, assert_bits_equal):
    x, weight, grad = values(m, k, dtype=dtype), values(n, k, seed=1, dtype=dtype), values(m, n, seed=2, dtype=dtype)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    layer = f8.linear if backend is None else torch.compile(f8.linear, fullgraph=True, backend=backend)
    y = layer(*leaves, recipe=RECIPE)
    y.backward(grad)
    assert_bits_equal(y, exact(x, weight.t(), dtype))
    assert_bits_equal(leaves[0].grad, exact(grad, weight, dtype))
    assert_bits_equal(leaves[1].grad, exact(grad.t(), x, dtype))


def test_a_row_that_is_not_finite_is_nan_and_no_other():
    x = values(20, 32)
    x[3, 5] = torch.inf
    found = f8.linear(x, values(16, 32, seed=1), recipe=RECIPE).isnan()
    assert found[3].all()
    assert found.sum() == 16


def test_a_sum_that_int32_may_not_hold_is_refused():
    codes = torch.zeros(1, LONGEST + 1, dtype=torch.uint8)
    operand = Operand(codes=codes, scale=torch.ones(1, 1), quantizer=Int8())
    with pytest.raises(ValueError, match=r"the sum is over 133145 products; int32 holds 133144"):
        int8_rowwise.multiply(operand, operand.t(), torch.float32, GemmConfig())


def test_a_cpu_whose_int_mm_clamps_multiplies_in_float64(monkeypatch):
    codes = torch.full((24, 40), 127, dtype=torch.int8).view(torch.uint8)
    a = Operand(codes=codes, scale=torch.ones(24, 1), quantizer=Int8())
    b = Operand(codes=codes[:8].t(), scale=torch.ones(1, 8), quantizer=Int8().transposed())
    monkeypatch.setattr(int8, "CPU_IS_EXACT", False)
    monkeypatch.setattr(torch, "_int_mm", None)
    found = int8_rowwise.multiply(a, b, torch.float32, GemmConfig())
    assert torch.equal(found, torch.full((24, 8), 40.0 * 127**2))


def trained(*, backend):
    """Losses and weights of a model over 20 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 16, bias=False)).bfloat16()
    model = f8.convert(model, RECIPE)
    assert all(row.converted for row in f8.conversion_report(model).rows)
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, wanted, losses = values(24, 32), values(24, 16, seed=1), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (run(x) - wanted).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(parameter.detach() for parameter in model.parameters())]


def test_a_model_trains_in_it_compiled_as_in_eager_mode(assert_bits_equal):
    eager, compiled = trained(backend=None), trained(backend="inductor")
    assert eager[0][-1] < 0.6 * eager[0][0]
    for got, expected in zip(compiled, eager, strict=True):
        assert_bits_equal(got, expected)


@dataclass(frozen=True, repr=False)
class Offset(Int8):
    """Its codes mean something else."""

    def dequantize(self, codes, scale, dtype=torch.float32):
        return super().dequantize(codes, scale, dtype) + 1


def test_codes_of_a_class_that_derives_from_it_are_not_read():
    assert int8_rowwise.takes(Int8(), Int8().transposed())
    assert not int8_rowwise.takes(Offset(), Offset().transposed())
    assert not int8_rowwise.takes(Int8(block=(-1, -1)), Int8(block=(-1, -1)))


def layer_step(x, weight):
    return f8.linear(x, weight, recipe=RECIPE)


@needs_triton
@triton_warns
def test_on_a_gpu_each_product_is_one_call_of_int_mm():
    with FakeTensorMode():
        x, weight = (torch.empty(256, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        codes = gpu_kernels(layer_step, x, weight)
    called = [[launch.name for launch in code.launches if launch.kind == "gemm"] for code in codes]
    assert called == [["_int_mm"], ["_int_mm", "_int_mm"]]


@needs_triton
@triton_warns
@pytest.mark.skipif(TORCH < (2, 13), reason="run_gpu_program needs PyTorch 2.13")
@pytest.mark.parametrize(("m", "k", "n"), [(20, 36, 28), (32, 32, 32)])
def test_the_program_of_a_gpu_has_the_bits_of_eager_mode(m, k, n, assert_bits_equal):
    x, weight = values(m, k).requires_grad_(), values(n, k, seed=1).requires_grad_()
    found = run_gpu_program(layer_step, x, weight, precision_casts=True)
    assert not found.differences
    expected = eager_run(layer_step, x, weight)
    assert_bits_equal(found.outputs[0], expected.outputs[0])
    for name, gradient in expected.gradients.items():
        assert_bits_equal(found.gradients[name], gradient, name)
