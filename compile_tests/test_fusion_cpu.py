"""Inductor's C++ code for norm and linear: the cast is part of the norm's kernel, and GEMMs are `_scaled_mm`.

Fused means: the kernel that computes the norm's rsqrt stores float8 codes, and stores no bfloat16, so that the normed
values never are in memory.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import fp8compile as f8
from fp8compile._compat import cpu_has_rowwise_gemm

pytestmark = pytest.mark.skipif(
    not cpu_has_rowwise_gemm(),
    reason=f"PyTorch {torch.__version__} has no FP8 GEMM that a CPU uses (2.13 has); products are emulated",
)
KERNEL = re.compile(r"^(cpp_\w+) = async_compile\.cpp_pybinding\(.*?r?'''\n(.*?)^'''\)", re.DOTALL | re.MULTILINE)
CALL = re.compile(r"^\s*extern_kernels\.(\w+)\(", re.MULTILINE)
FLOAT8_STORE, BFLOAT16_STORE = (re.compile(rf"^\s*{t}\* (?:in_)?out_ptr", re.MULTILINE) for t in (
    "at::Float8_e4m3fn", "at::BFloat16"
))  # fmt: skip


def layer(recipe):
    torch.manual_seed(0)
    norm, linear = nn.RMSNorm(64, dtype=torch.bfloat16), nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    return norm, f8.Linear.from_linear(linear, f8.recipes.by_name(recipe))


def sources(fn, *args, backward=False):
    """The Python files that Inductor made for ``fn(*args)``, and for its backward."""

    def run():
        out = torch.compile(fn)(*args)
        return out.float().sum().backward() if backward else out

    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        return run_and_get_code(run)[1]


def why_norm_is_not_fused(source):
    """What keeps the norm apart from the cast, or None; read from the generated kernels."""
    norms = [body for _, body in KERNEL.findall(source) if "rsqrt()" in body or "std::sqrt" in body]
    if len(norms) != 1:
        return f"{len(norms)} kernels compute rsqrt"
    signature = norms[0].partition("{")[0]
    if not FLOAT8_STORE.search(signature):
        return f"the norm's kernel stores no codes:\n{signature}"
    if BFLOAT16_STORE.search(signature):
        return f"the norm's kernel stores bfloat16 values:\n{signature}"
    return None


@pytest.mark.parametrize(
    ("recipe", "backward_gemms"),
    [
        ("tensorwise", {"_scaled_mm": 2}),
        ("rowwise", {"_scaled_mm": 2}),
        ("rowwise_bf16_wgrad", {"_scaled_mm": 1, "mm": 1}),
    ],
)
def test_the_cast_is_fused_with_the_norm_and_gemms_are_scaled_mm(recipe, backward_gemms):
    norm, linear = layer(recipe)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    forward, backward = sources(lambda x: linear(norm(x)), x, backward=True)
    # with grad_weight in bfloat16 too, whose operand is normed again in the backward
    assert why_norm_is_not_fused(forward) is None, why_norm_is_not_fused(forward)
    assert Counter(CALL.findall(forward)) == {"_scaled_mm": 1}
    assert Counter(CALL.findall(backward)) == backward_gemms
    for source in (forward, backward):
        assert "torch.ops.fp8compile" not in source.partition("def call")[2], "an op was not taken apart"


def test_a_value_realized_in_between_is_seen_as_not_fused():
    norm, linear = layer("rowwise")
    with torch.no_grad():
        (source,) = sources(lambda x: linear(f8.ops.realize(norm(x))), torch.randn(32, 64, dtype=torch.bfloat16))
    assert "stores bfloat16" in why_norm_is_not_fused(source)


def test_a_graph_break_in_between_is_seen_as_not_fused():
    norm, linear = layer("rowwise")

    def broken(x):
        normed = norm(x)
        torch._dynamo.graph_break()
        return linear(normed)

    with torch.no_grad():
        found = sources(broken, torch.randn(32, 64, dtype=torch.bfloat16))
    assert len(found) == 2
    assert "stores no codes" in why_norm_is_not_fused(found[0])
