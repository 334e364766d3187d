"""The table of GEMMs: who is asked when, what a registration checks, and that reports name one that was registered."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.cli import doctor, doctor_checks, main
from fp8compile.cli.explain.sections import gpu_sections
from fp8compile.library import Quantizer, register_gemm
from fp8compile.ops.gemms.selection import _selected, select_gemm, selected_gemm
from fp8compile.ops.gemms.table import REGISTERED, gemm_table
from fp8compile.quantizers import constant
from fp8compile.target import Target, pretend_target
from fp8compile.testing.explain import explain

CPU = torch.device("cpu")
NATIVE = ["scaled_by_mx", "tensorwise", "rowwise", "scaled_after", "blockwise", "blockwise_by_mx", "mx"]


@dataclass(frozen=True, repr=False)
class Own(Quantizer):
    """Codes that no GEMM of ours reads."""

    block: tuple[int, int] = (1, -1)

    def multiplier(self, amax):
        return torch.ones_like(amax)

    def dequantize(self, codes, scale, dtype=torch.float32):
        return codes.to(dtype) * scale.to(dtype)


def takes(a, b):
    return type(a) is type(b) is Own


def lacks(problem):
    is_new = problem.target.type == "cpu" or problem.target.capability >= (9, 0)
    return None if is_new else "needs compute capability 9.0."


def multiply(a, b, out_dtype, config):
    return (a.codes.float() @ b.codes.float()).to(out_dtype)


PARTS = {"takes": takes, "lacks": lacks, "multiply": multiply, "detail": "in two words"}


@pytest.fixture
def register():
    """`register_gemm` with parts of the good GEMM above replaced; forgets what was registered afterwards."""
    before = [(known, set(known)) for known in (REGISTERED, constant.SALTED_MODULES, constant.SALTED_NAMES)]
    yield lambda name, **parts: register_gemm(name, **PARTS | parts)
    for known, names in before:
        for name in set(known) - names:
            known.pop(name) if isinstance(known, dict) else known.discard(name)
    constant.source_salt.cache_clear()
    _selected.cache_clear()


def operands(quantizer=None):
    quantizer = quantizer or Own()
    return quantizer, quantizer.transposed()


# ---------------------------------------------------------------------------------- the table


def test_a_registered_gemm_is_asked_after_ours_and_before_emulation(register):
    register("mine::own")
    names = [gemm.name for gemm in gemm_table()]
    assert names[: len(NATIVE)] == NATIVE
    assert (names[-2], names[-1]) == ("mine::own", "emulated")


def test_it_takes_over_from_emulation_and_changes_no_product_that_has_a_gemm(register):
    e4m3 = f8.CurrentScaling(block=(1, -1))
    before = select_gemm(*operands(e4m3), CPU, torch.bfloat16)
    assert select_gemm(*operands(), CPU, torch.bfloat16) == "emulated"
    register("mine::own", takes=lambda a, b: True)
    assert select_gemm(*operands(), CPU, torch.bfloat16) == "mine::own"
    expected = "mine::own" if before == "emulated" else before  # PyTorch 2.11's CPU has no rowwise GEMM
    assert select_gemm(*operands(e4m3), CPU, torch.bfloat16) == expected


def test_where_it_does_not_run_a_gpu_says_its_reason_and_emulates_if_asked(register):
    register("mine::own")
    emulated = replace(f8.quantizers.GemmConfig(), emulate=True)
    with pretend_target(Target("cuda", (8, 9))):
        with pytest.raises(
            RuntimeError, match=r"codes of Own with block .* needs compute capability 9\.0\. This GPU .* 8\.9\."
        ):
            select_gemm(*operands(), CPU, torch.bfloat16)
        assert select_gemm(*operands(), CPU, torch.bfloat16, emulated) == "emulated"
    with pretend_target(Target("cuda", (9, 0))):
        assert select_gemm(*operands(), CPU, torch.bfloat16) == "mine::own"


def test_another_device_is_told_where_gemms_run():
    with (
        pretend_target(Target("xpu")),
        pytest.raises(RuntimeError, match=r"has no FP8 GEMM on device 'xpu'; FP8 GEMMs run on 'cuda' and 'cpu'\.$"),
    ):
        select_gemm(*operands(f8.CurrentScaling()), CPU, torch.bfloat16)


def test_two_packages_with_a_gemm_for_the_same_operands_are_both_named(register):
    register("mine::own")
    register("yours::own")
    with pytest.raises(
        RuntimeError, match=r"are supported by several GEMMs, mine::own and yours::own. Let `takes` of all but one"
    ):
        select_gemm(*operands(), CPU, torch.bfloat16)


def test_a_registration_changes_the_text_of_constants_in_graphs(register):
    before = repr(f8.CurrentScaling().__fx_repr__())
    register("mine::own")
    assert repr(f8.CurrentScaling().__fx_repr__()) != before


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["own", "rowwise", "mine:own", "mine::", "::own", "mine::two words", None, 3])
def test_a_name_without_its_package_is_refused(register, name):
    with pytest.raises(ValueError, match=rf"register_gemm: the name .* 'package::name', got {re.escape(repr(name))}"):
        register(name)


def test_a_name_that_is_taken_is_refused(register):
    register("mine::own")
    with pytest.raises(ValueError, match=r"register_gemm: mine::own is already registered. Choose"):
        register("mine::own")


class Callable:
    def __call__(self, a, b):
        return True


@pytest.mark.parametrize("argument", ["takes", "lacks", "multiply"])
@pytest.mark.parametrize("given", [None, 3, Callable()], ids=["left out", "a number", "an object"])
def test_what_is_no_function_is_refused_with_what_to_write(register, argument, given):
    with pytest.raises(TypeError, match=rf"register_gemm: mine::own: `{argument}` is .*; it must be a function \("):
        register("mine::own", **{argument: given})
    assert "mine::own" not in REGISTERED


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"takes": lambda a: True}, r"`takes` has the signature \(a\): too many .* It is called as takes\(a, b\)\."),
        ({"lacks": lambda: None}, r"called as lacks\(problem\)"),
        ({"multiply": lambda a, b: a}, r"called as multiply\(a, b, out_dtype, config\)"),
        ({"detail": ""}, "`detail` is ''; it must be a non-empty string that says how the GEMM runs"),
        ({"calls": "_int_mm"}, "`calls` is '_int_mm'; it must be a tuple of operator names, such as"),
    ],
)
def test_parts_of_another_form_are_refused(register, parts, text):
    with pytest.raises(TypeError, match=rf"register_gemm: mine::own: .*{text}"):
        register("mine::own", **parts)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"takes": lambda a, b: None}, r"mine::own: `takes` returned None for Own\(.*; it must return True or False"),
        ({"lacks": lambda problem: True}, "mine::own: `lacks` returned True; it must return None if the GEMM runs"),
        (
            {"multiply": lambda *_: None},
            r"mine::own: `multiply` returned None; it must return a contiguous float32 of "
            r"shape \(4, 5\)",
        ),
        (
            {"multiply": lambda *_: torch.ones(4, 6)},
            r"`multiply` returned float32 of shape \(4, 6\); it must return a "
            r"contiguous",
        ),
        ({"multiply": lambda *_: torch.ones(4, 5).half()}, r"`multiply` returned float16 of shape \(4, 5\)"),
        ({"multiply": lambda *_: torch.ones(5, 4).t()}, r"returned a tensor with strides \(1, 4\); .* contiguous"),
    ],
)
def test_an_answer_of_another_form_is_refused(register, parts, text):
    register("mine::own", **parts)
    a, b = f8.quantize(torch.ones(4, 8), Own()), f8.quantize(torch.ones(5, 8), Own()).t()
    with pytest.raises(TypeError, match=text):
        f8.scaled_mm(a, b, out_dtype=torch.float32)


# ---------------------------------------------------------------------------------- reports


@pytest.fixture
def int8(monkeypatch):
    """The recipe of the example library's int8, whose import registers its GEMM."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "custom_quantizer")
    import swiglu8

    return f8.library.recipe(swiglu8.Int8())


def model_of(recipe):
    return f8.convert(nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)), recipe)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it")
def test_explain_names_it_and_counts_its_products(int8):
    found = explain(model_of(int8), (torch.randn(24, 32),))
    assert found.verdict.startswith("YES, as the recipes specify: 5 of 5 GEMMs"), found.gpu.problem
    assert {gemm.runs for layer in found.layers for gemm in layer.gemms if gemm.runs} == {"Int8 x Int8 rowwise"}
    assert found.gpu.gemms == (("swiglu8::int8_rowwise", 6),)
    assert [(cost.gemms, cost.fp8_gemms) for cost in found.gpu.costs] == [(2, 2), (3, 3)]
    lines = [line for section in gpu_sections(found) for line in section.lines]
    assert "GEMMs of converted layers: swiglu8::int8_rowwise (6)." in lines


def test_doctor_names_it_where_an_installed_package_offers_its_recipe(int8, tmp_path, monkeypatch, capsys):
    info = tmp_path / "swiglu8-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swiglu8\nVersion: 1.0\n")
    entries = "[fp8compile.quantizers]\nswiglu8-int8 = swiglu8:Int8\nbroken = swiglu8:nothing\n"
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(doctor_checks, "run_checks", lambda: [{"name": "left out", "ok": True, "detail": "slow"}])
    monkeypatch.setattr(doctor, "_devices", lambda: [{"device": "cpu"}, {"device": "cuda:0"}])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert main(["doctor", "--json"]) == 0
    rows = {(row["device"], row["recipe"]): row["gemms"] for row in json.loads(capsys.readouterr().out)["recipes"]}
    assert [gemm["kind"] for gemm in rows["cpu", "swiglu8-int8"]] == ["swiglu8::int8_rowwise"] * 3
    (detail,) = {gemm["detail"] for gemm in rows["cuda:0", "swiglu8-int8"]}
    assert "needs a CPU, or a GPU of compute capability 7.5 or more" in detail
    assert "can't be used: AttributeError" in rows["cpu", "broken"][0]["detail"]


def test_the_value_says_all_that_reports_show(int8):
    gemm = selected_gemm(*operands(int8.input), CPU, torch.bfloat16)
    assert (gemm.name, gemm.calls) == ("swiglu8::int8_rowwise", ("_int_mm",))
    assert "swiglu8" in gemm.detail
