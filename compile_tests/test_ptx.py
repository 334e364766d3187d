"""PTX of the kernels that a GPU would run: how scales and codes are computed, and how wide codes are stored.

`fp8compile.testing.gpu.ptx_paths` says where the arithmetic of scales and codes begins. Before it lies the model's own
function, in which silu divides approximately and an exponential flushes subnormals, as in every bfloat16 model.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from eight_bits import EIGHT_BITS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu

import fp8compile as f8
from benchmarks.mlp import mlp
from fp8compile.formats import Float8Format
from fp8compile.testing.gpu.compiled import compiled_jit
from fp8compile.testing.gpu.cubin import assembled
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.ptx import Ptx
from fp8compile.testing.gpu.ptx_report import kernel_ptx, ptx_of
from fp8compile.testing.gpu.scale_paths import written_parameters
from fp8compile.testing.gpu.schedule import schedule

triton = pytest.importorskip("triton", reason="needs Triton: it compiles to PTX")
tl = importlib.import_module("triton.language")

H200 = GPUS["h200"]


def arch_of(recipe):
    """The GPU that has the recipe's products."""
    return "b200" if recipe == "mxfp8" else "h200"


def findings(kernels):
    return [str(finding) for each in kernels for finding in each.findings]


# ---------------------------------------------------------------------------------- generated kernels


class Gated(nn.Module):
    """A layer behind a silu and a product, whose casts fuse with them in the forward and in the backward."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.down = nn.Linear(hidden, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, gate, up):
        return self.down(silu(gate) * up)


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_scales_and_codes_are_computed_exactly(recipe):
    with FakeTensorMode():
        model = f8.convert(Gated(4096, 14336), f8.recipes.by_name(recipe), filter="*")
        gate, up = (torch.empty(8192, 14336, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        kernels = ptx_of(model, gate, up, arch=arch_of(recipe))
    assert any(each.code_stores for each in kernels)
    assert not findings(kernels), "\n".join(findings(kernels))
    opcodes = {each.opcode for kernel in kernels for each in Ptx(kernel.kernel.ptx).instructions}
    assert {"div.full.f32", "ex2.approx.ftz.f32"} <= opcodes, "the silu's, which the walk must not take for a scale's"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_every_configuration_of_a_block_is_exact_and_one_of_each_stores_words_of_codes(recipe):
    with FakeTensorMode():
        kernels = ptx_of(*mlp(recipe, 8192, 4096, 14336), arch=arch_of(recipe), most=None)
    assert not findings(kernels), "\n".join(findings(kernels))
    # Inductor times its configurations on the GPU and takes the best: one has to be good
    resources = [assembled(each.kernel, GPUS[arch_of(recipe)]) for each in kernels]
    limit = GPUS[arch_of(recipe)].shared_memory_per_block_optin
    for named in kernels_by_source(zip(kernels, resources, strict=True)):
        assert any(r.spilled_bytes == 0 and r.shared_bytes <= limit for _, r in named), [str(r) for _, r in named]
        widths = [each.code_stores for each, _ in named]
        for parameter in set.intersection(*map(set, widths)):
            widest = max(width[parameter] for width in widths)
            assert widest >= least_width(named[0][0].kernel), f"{parameter} of {named[0][0].kernel}: {widest} bytes"


def kernels_by_source(pairs):
    """Configurations of one kernel together; forward and backward may have a name in common."""
    groups = []
    for each, resources in pairs:
        if not groups or groups[-1][0][0].kernel.name != each.kernel.name:
            groups.append([])
        groups[-1].append((each, resources))
    return groups


def least_width(kernel):
    """Bytes of codes that a thread stores by one instruction in the best configuration.

    A reduction of rows and of columns in one kernel has but one configuration, a row at a time. Where Inductor fuses a
    cast along columns with it, codes go to the transposed matrix one by one. Another kernel would read the input once
    more; which is faster, a GPU must tell.
    """
    return 1 if "RSPLIT_SIZE" in kernel.config else 4


# ---------------------------------------------------------------------------------- our own kernels

OWN = [
    ("*bf16", "fp32", 128, 0.0), ("*fp16", "pow2", 128, 1e-6), ("*fp32", "e8m0_rceil", 32, 0.0),
    ("*bf16", "e8m0_floor", 32, 1e-6),
]  # fmt: skip
SIZES = {"M": "i32", "K": "i32"}


def own_kernels(x_type, rule, n, eps):
    """(function, types, constants, warps) of each of our kernels."""
    from fp8compile.kernels import both_directions as both
    from fp8compile.kernels import group_quantize_rows, quantize_weight

    stored = "*u8" if rule.startswith("e8m0") else "*fp32"
    row, column, square, whole = (
        f8.CurrentScaling(block=block, scale=rule, eps=eps) for block in ((1, n), (n, 1), (n, n), (1, -1))
    )
    x = {"x_ptr": x_type}
    codes = {"rows_ptr": "*u8", "row_scales_ptr": stored, "columns_ptr": "*u8", "column_scales_ptr": stored}
    given = {"stride_k": 1, **both.constants(row, column, H200.target)}
    yield both.both_kernel, x | codes | SIZES | {"stride_m": "i32"}, given, both.CANDIDATES[0].num_warps
    one_way = x | {"codes_ptr": "*u8", "scales_ptr": stored}
    yield (
        quantize_weight.tiles_kernel,
        one_way | {"amax_ptr": "*fp32"} | SIZES,
        quantize_weight.tile_constants(square, H200.target),
        quantize_weight.CANDIDATES[0].num_warps,
    )
    rows, sizes = group_quantize_rows, {"R": "i32", "K": "i32", "ROWS": "i32", "stride_m": "i32"}
    one_group = {"offsets_ptr": None, "E": 1, "stride_k": 1, **rows.group_row_constants(whole, 4096, H200.target)}
    yield (
        rows.group_rows_kernel,
        one_way | {"amax_ptr": "*fp32"} | sizes,
        one_group,
        rows.candidates(4096)[0].num_warps,
    )


@pytest.mark.parametrize(("x_type", "rule", "n", "eps"), OWN, ids=str)
def test_our_kernels_compute_exactly_and_store_words_of_codes(x_type, rule, n, eps):
    for fn, kinds, constants, warps in own_kernels(x_type, rule, n, eps):
        compiled = compiled_jit(fn, kinds, constants, num_warps=warps, gpu=H200)
        found = kernel_ptx(compiled, range(1, len(kinds)))
        assert not found.findings, "\n".join(map(str, found.findings))
        codes = {"rows_ptr", "columns_ptr", "codes_ptr"} & set(kinds)
        assert codes
        assert all(found.code_stores[name] >= 4 for name in codes), found.code_stores
        assert compiled.shared_bytes <= H200.shared_memory_per_block_optin


@pytest.mark.parametrize("x_type", ["*bf16", "*fp32"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "stochastic_hardware"])
@pytest.mark.parametrize("scale", ["transformer_engine", pytest.param("torchao", marks=pytest.mark.slow)])
def test_four_bit_codes_of_both_directions_are_computed_exactly_and_without_spills(x_type, rounding, scale):
    from fp8compile.kernels import quantize_two_levels

    recipe = f8.recipes.nvfp4(scale=scale, grad_rounding=rounding)
    pair = recipe.grad_output, recipe.grad_output_for_grad_weight
    kinds = {"x_ptr": x_type, "row_amax_ptr": "*fp32", "column_amax_ptr": "*fp32"}
    for side in ("row", "column"):
        kinds |= {f"{side}s_ptr": "*u8", f"{side}_scales_ptr": "*u8", f"{side}_outer_ptr": "*fp32"}
    constants = quantize_two_levels.constants(*pair, GPUS["b200"].target)
    fn, gpu = quantize_two_levels.both_packed_kernel, GPUS["b200"]
    compiled = compiled_jit(
        fn, kinds | SIZES, constants, num_warps=quantize_two_levels.CANDIDATES[0].num_warps, gpu=gpu
    )
    found = kernel_ptx(compiled, range(3, len(kinds)))
    assert not found.findings, "\n".join(map(str, found.findings))
    resources = assembled(compiled, gpu)
    assert not resources.spilled_bytes, resources
    stores = [each.opcode for each in Ptx(compiled.ptx).instructions if each.opcode.startswith("st.global")]
    assert any(each.endswith(("b64", "v2.b32", "v4.b32")) for each in stores), set(stores)
    assert ("cvt.rs.satfinite.e2m1x4.f32" in compiled.ptx) == (rounding == "stochastic_hardware")


# ---------------------------------------------------------------------------------- planted


@dataclass(frozen=True, repr=False)
class Approximate(f8.CurrentScaling):
    """What not to do: a float32 quotient, which Triton divides approximately."""

    def multiplier(self, amax):
        return 448.0 / amax


def quantized(quantizer):
    """Kernels of a cast behind a silu; its codes are returned."""

    def fn(x):
        return f8.quantize(silu(x), quantizer).codes.view(torch.float8_e4m3fn)

    with FakeTensorMode():
        return ptx_of(fn, torch.empty(512, 4096, dtype=torch.bfloat16))


@pytest.mark.parametrize("block", [(1, -1), (-1, -1)], ids=["in the kernel of the codes", "in a kernel before"])
def test_a_planted_approximate_division_is_named(block):
    assert not findings(quantized(f8.CurrentScaling(block=block)))
    kernels = quantized(Approximate(block=block))
    (found, *others) = [finding for each in kernels for finding in each.findings]
    assert found.instruction.opcode == "div.full.f32"
    assert not others, findings(kernels)
    line = next(each for each in kernels if each.findings).kernel.ptx.splitlines()[found.instruction.line - 1]
    assert found.instruction.text.split() == line.strip().rstrip(";").split()
    assert str(found).startswith("triton_")
    assert f"PTX line {found.instruction.line}: `div.full.f32" in str(found)
    assert re.search("is approximate, on the way to (in_)?out_ptr", str(found))


def test_a_planted_flush_of_subnormals_is_named():
    def encode(self, values):
        return torch.where(values.isnan(), 0x7F, self.encode_numbers(values))

    with mock.patch.object(Float8Format, "encode", encode):
        kernels = quantized(f8.CurrentScaling(block=(1, -1)))
    assert {finding.instruction.opcode for each in kernels for finding in each.findings} == {"abs.ftz.f32"}


@triton.jit
def divides(x_ptr, codes_ptr, other_ptr, HOW: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    if HOW == "approximately":
        x = x / tl.max(x, 1)[:, None]
    if HOW == "beside":
        tl.store(other_ptr + at, (x / (x + 3.1)).to(tl.bfloat16))
    if HOW == "in float64":
        tl.store(other_ptr + at, (x.to(tl.float64) * 3.1).to(tl.bfloat16))
    if HOW == "before":
        x = (x / tl.max(x, 1)[:, None]).to(tl.bfloat16).to(tl.float32)
    tl.store(codes_ptr + tl.arange(0, 64), tl.max(x, 0).to(tl.float8e4nv))


@triton.jit
def divides_in_a_loop(x_ptr, codes_ptr, N):
    for first in range(0, N, 128):
        at = first + tl.arange(0, 128)
        x = tl.load(x_ptr + at).to(tl.float64)
        tl.store(codes_ptr + at, (3.1 / x).to(tl.float32).to(tl.float8e4nv))


TYPES = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "other_ptr": "*bf16"}


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("exactly", None),
        ("approximately", "`div.full.f32 .* is approximate, on the way to codes_ptr, made for test_ptx.py"),
        ("in float64", "`mul.*f64 .* computes in float64 what no scale needs"),
        ("beside", None),
        ("before", None),
    ],
)
def test_the_walk_goes_through_shared_memory_and_ends_at_the_activation(how, complaint):
    compiled = compiled_jit(divides, TYPES, {"HOW": how}, num_warps=4, gpu=H200)
    opcodes = {each.opcode for each in Ptx(compiled.ptx).instructions}
    assert any(opcode.startswith("ld.shared") for opcode in opcodes), "the reduction over warps"
    assert ("div.full.f32" in opcodes) == (how in ("approximately", "beside", "before"))
    found = list(map(str, kernel_ptx(compiled, [1]).findings))
    assert bool(found) == (complaint is not None), found
    assert all(re.search(complaint, each) for each in found if "cvt" not in each)


def test_a_division_for_each_code_of_a_loop_is_named():
    types = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "N": "i32"}
    compiled = compiled_jit(divides_in_a_loop, types, {}, num_warps=4, gpu=H200)
    named = [str(each) for each in kernel_ptx(compiled, [1]).findings if each.instruction.opcode == "div.rn.f64"]
    assert named
    assert all(
        "computes in float64, in a loop that divides as often as it stores quantized data" in each for each in named
    )


# ---------------------------------------------------------------------------------- the reader

READ = """
.visible .entry small(
	.param .u64 .ptr .global .align 1 small_param_0,
	.param .u32 small_param_1
)
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<3>;
	ld.param.b64 	%rd1, [small_param_0];
	.loc	1 7 3                           // small.py:7:3
	// begin inline asm
	mov.u32 %r1, 0x0; @!%p1 ld.global.L1::evict_last.v2.b32 { %r1, %r2 }, [ %rd1 + 8 ];
	// end inline asm
	{ .reg .b32 inner; mov.b32 inner, %r2; mov.b32 %r4, inner; }
	setp.lt.f32 	%p1|%p2, %r1, %r4;
$L__BB0_1:
	st.global.v4.b8 	[%rd1+4], {%r1, %r2, %r4, 0};
	@%p2 bra 	$L__BB0_1;
	%s
}
"""


def test_instructions_are_read_with_what_they_read_and_write():
    ptx = Ptx(READ.replace("%s", "ret;"))
    found = [(each.line, each.opcode, each.guard, each.outputs, each.inputs) for each in ptx.instructions]
    assert ptx.parameters == ("small_param_0", "small_param_1")
    assert ptx.labels == {"$L__BB0_1": 17}
    assert found == [
        (10, "ld.param.b64", None, ("%rd1",), ()),
        (13, "mov.u32", None, ("%r1",), ()),
        (13, "ld.global.L1::evict_last.v2.b32", "%p1", ("%r1", "%r2"), ("%rd1",)),
        (15, "mov.b32", None, ("inner",), ("%r2",)),
        (15, "mov.b32", None, ("%r4",), ("inner",)),
        (16, "setp.lt.f32", None, ("%p1", "%p2"), ("%r1", "%r4")),
        (18, "st.global.v4.b8", None, (), ("%rd1", "%r1", "%r2", "%r4")),
        (19, "bra", "%p2", (), ()),
        (20, "ret", None, (), ()),
    ]
    assert ptx.instructions[2].source == "small.py:7:3"
    assert ptx.instructions[2].addresses == ("%rd1 + 8",)
    assert [ptx.instructions[number].bytes for number in (2, 6)] == [8, 4]


def test_an_instruction_that_cannot_be_followed_raises():
    with pytest.raises(
        NotImplementedError, match=r"PTX line 20: call .*: the operands of this instruction are unknown"
    ):
        Ptx(READ.replace("%s", "call (%r1), f, (%r2);"))


def test_launches_in_a_form_that_is_not_known_raise():
    with FakeTensorMode():
        graphs = gpu_graphs(torch.relu, (torch.empty(64, dtype=torch.bfloat16),), H200)
        scheduled = schedule(graphs[0], H200)
    assert written_parameters(graphs, [scheduled]) == [{"triton_poi__0": set()}]
    with pytest.raises(RuntimeError, match=r"kernels \['triton_poi__0'\] were scheduled, calls of \[\] found"):
        written_parameters(graphs, [replace(scheduled, source="")])
