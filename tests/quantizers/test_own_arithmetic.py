"""Quantizers with arithmetic of their own: products follow their `dequantize`, and no GEMM reads what it can't."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from own_arithmetic import ByteScales, FourBits, Int8, Packed, SameFloat8, Subclass

import fp8compile as f8
from fp8compile.library import recipe
from fp8compile.ops.gemms.selection import select_gemm
from fp8compile.quantizers import GEMMS
from fp8compile.target import Target, pretend_target
from fp8compile.testing import check_quantizer
from fp8compile.testing.contracts.quantizer_contracts import CONTRACTS
from fp8compile.testing.explain.graphs import describe

CPU = torch.device("cpu")
GPUS = {"h200": Target("cuda", (9, 0)), "b200": Target("cuda", (10, 0))}
OWN = [Int8(), Int8(block=(-1, -1)), Subclass(), FourBits(), FourBits(block=(1, -1)), FourBits(block=(1, 16))]
OWN = [*OWN, Packed(block=(1, -1)), Packed(block=(1, 16))]


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(x, quantizer):
    q = f8.quantize(x, quantizer)
    return quantizer.dequantize(q.codes, q.scale, torch.float64)


# Inductor compiles C++ for each: packed codes here, Int8 below in its contracts
WAYS = [*((q, backend) for q in OWN for backend in (None, "aot_eager")), (OWN[-1], "inductor")]


@pytest.mark.parametrize(("quantizer", "backend"), WAYS, ids=repr)
def test_a_layer_multiplies_what_dequantize_gives(quantizer, backend, assert_bits_equal):
    made = recipe(quantizer)
    x, weight, grad = values(24, 48), values(32, 48, seed=1), values(24, 32, seed=2)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    layer = f8.linear if backend is None else torch.compile(f8.linear, fullgraph=True, backend=backend)
    y = layer(*leaves, recipe=made)
    y.backward(grad)
    # emulated in float64 and rounded once, so equal to the bit
    assert_bits_equal(y, (exact(x, made.input) @ exact(weight, made.weight).t()).float())
    dx = exact(grad, made.grad_output) @ exact(weight, made.weight_for_grad_input)
    assert_bits_equal(leaves[0].grad, dx.float())
    dw = exact(grad, made.grad_output_for_grad_weight).t() @ exact(x, made.input_for_grad_weight)
    assert_bits_equal(leaves[1].grad, dw.float())


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("quantizer", OWN, ids=repr)
def test_a_gpu_refuses_codes_that_it_cannot_read_unless_emulation_is_asked_for(quantizer, gpu):
    operands = (quantizer, quantizer.transposed(), CPU, torch.bfloat16)
    with pretend_target(GPUS[gpu]):
        with pytest.raises(
            RuntimeError, match=r"codes of \w+ with block .* only the quantizer's own dequantize method defines"
        ):
            select_gemm(*operands)
        assert select_gemm(
            *operands, replace(recipe(quantizer), emulate=True).gemm_config(f8.quantizers.GEMMS[0])
        ) == ("emulated")


def test_a_class_that_declares_its_codes_gets_the_native_gemm():
    for target, kind in ((GPUS["h200"], "rowwise"), (GPUS["b200"], "rowwise")):
        with pretend_target(target):
            assert select_gemm(SameFloat8(), SameFloat8().transposed(), CPU, torch.bfloat16) == kind


def test_scales_of_another_meaning_are_no_mx_scales():
    with pretend_target(GPUS["b200"]), pytest.raises(RuntimeError, match="no GEMM on any GPU"):
        select_gemm(ByteScales(), ByteScales().transposed(), CPU, torch.bfloat16)
    mx = f8.CurrentScaling(block=(1, 32), scale="e8m0_rceil")
    with pretend_target(GPUS["b200"]):
        assert select_gemm(mx, mx.transposed(), CPU, torch.bfloat16) == "mx"


@pytest.mark.parametrize("quantizer", [Int8(), SameFloat8()], ids=repr)
def test_they_keep_every_contract(quantizer):
    # packed codes can't be cut between two of a byte, and one dim has to be even: what the contracts cut is not
    skip = ("text_in_a_fresh_process",)
    if isinstance(quantizer, Packed):
        shapes = (
            "layout_is_what_it_says",
            "scale_undoes_the_multiplier",
            "passes_opcheck",
            "one_graph_for_every_size",
        )
        cut = ("compiled_gives_the_bits_of_eager", "sharded_gives_the_bits_of_whole", "what_is_not_finite_shows")
        skip += (*shapes, *cut)
    check_quantizer(quantizer, skip=skip)


def test_packed_codes_keep_the_contracts_of_products():
    names = [contract.__name__ for contract in CONTRACTS]
    asked = ("products_are_those_of_dequantize", "gemms_read_what_dequantize_gives", "code_zero_is_zero")
    # the others look at odd sizes, of which two codes a byte leave one over
    unseen = check_quantizer(Packed(block=(1, 16)), skip=[name for name in names if name not in asked])
    assert not set(asked) & set(unseen)


def test_views_of_packed_codes_that_would_cut_bytes_are_refused():
    q = f8.quantize(values(32, 64), Packed(block=(1, 16)))
    assert q.t().shape == (64, 32)
    assert torch.equal(q.t().dequantize(), q.dequantize().t())
    for view in (lambda: q[:, 16:32], lambda: q.reshape(4, 8, 64), lambda: q.split(16), lambda: q[0]):
        with pytest.raises(TypeError, match=r"stores several values per byte.*\.dequantize\(\) first"):
            view()


def test_a_wrong_transposed_is_told_and_not_a_wrong_shape(monkeypatch):
    monkeypatch.setattr(Packed, "transposed", lambda self: replace(self, block=self.block[::-1]))
    with pytest.raises(TypeError, match=r"values_shape gives shape \(32, 64\) for the transposed data"):
        f8.quantize(values(32, 64), Packed(block=(1, 16))).t()


@pytest.mark.parametrize(
    ("base", "method", "declares"),
    [(SameFloat8, "dequantize", "gemm_format"), (f8.CurrentScaling, "scale_values", "stores_e8m0")],
)
def test_a_declaration_of_another_method_is_not_inherited(base, method, declares):
    own = {method: lambda self, *args: None, "__annotations__": {}, "__module__": __name__}
    with pytest.raises(
        TypeError, match=f"overrides {method} but inherits another {declares}. Override {declares} too"
    ):
        type("Lower", (base,), own)


def test_explain_names_the_class_in_place_of_a_format():
    assert describe(recipe(Int8()), GEMMS[0]) == "Int8 x Int8 rowwise"
    assert describe(f8.recipes.rowwise(), GEMMS[0]) == "e4m3 x e4m3 rowwise"
