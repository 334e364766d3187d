"""Inductor's code for an H200, made here: kernels, bytes, divisions; ours and torchao's in one run."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from unittest import mock

import expecttest
import pytest
import torch
from block_rows import row_of
from eight_bits import EIGHT_BITS
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.table import lines
from fp8compile._compat import ADDCDIV_IS_EXACT
from fp8compile.testing import gpu_kernels
from fp8compile.testing.gpu.cubin import jit_resources
from fp8compile.testing.gpu.gpus import GPUS

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
]
TORCH = ".".join(torch.__version__.split(".")[:2])
DIVISION = re.compile(r"^ *(tmp\d+) = \((\S+) / (\S+)\)$", re.MULTILINE)
EXACT_DIVISION = re.compile(r"^ *tmp\d+ = triton\.language\.div_rn\(.*\)$", re.MULTILINE)  # none before PyTorch 2.13
FLOAT64 = re.compile(r"^ *(tmp\d+) = .*tl\.float64\)$", re.MULTILINE)
LOOP = re.compile(r"^( +)for r0_offset in .*\n(?:\1 +.*\n|\n)+", re.MULTILINE)
CODES = re.compile(r"'(\w+)': '\*(?:fp8\w+|u8)'")


class TestTable(expecttest.TestCase):
    @pytest.mark.skipif(TORCH != "2.13", reason=f"the table is that of PyTorch 2.13, this is {TORCH}")
    def test_kernels_gemms_and_bytes_of_a_block(self):
        rows = [row_of(name) for name in ("bf16", *EIGHT_BITS)]
        self.assertExpectedInline(
            "\n".join(lines(rows)),
            """\
block               GPU   fwd kernels  fwd GEMMs  fwd GB  bwd kernels  bwd GEMMs  bwd GB  sum GB  bound ms
bf16                h200            2          3   2.164            3          6   4.028   6.192     9.245
tensorwise          h200            9          3   3.205            9          6   4.716   7.920     5.501
rowwise             h200            9          3   2.316           13          6   4.920   7.236     5.358
rowwise_bf16_wgrad  h200            9          3   2.316            8          6   4.750   7.066     6.688
blockwise           h200            7          3   2.394           11          6   5.020   7.414     5.390
mxfp8               b200            6          3   2.405           15          6   5.166   7.571     2.551
delayed             h200           12          3   2.525            8          6   3.449   5.975     5.096""",
        )

    @pytest.mark.skipif(TORCH != "2.13", reason=f"the table is that of PyTorch 2.13, this is {TORCH}")
    @pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="shows torchao, which is not installed")
    def test_kernels_gemms_and_bytes_of_torchao(self):
        rows = [row_of(f"torchao {name}") for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
        self.assertExpectedInline(
            "\n".join(lines(rows)),
            """\
block                       GPU   fwd kernels  fwd GEMMs  fwd GB  bwd kernels  bwd GEMMs  bwd GB  sum GB  bound ms
torchao tensorwise          h200            9          3   3.238            9          6   4.749   7.987     5.515
torchao rowwise             h200            5          3   2.349           18          6   8.076  10.425     6.023
torchao rowwise_with_gw_hp  h200            5          3   2.651           10          6   4.934   7.585     6.797""",
        )


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_a_block_has_as_many_gemms_as_in_bf16(recipe):
    own, bf16 = row_of(recipe), row_of("bf16")
    assert (own["fwd GEMMs"], own["bwd GEMMs"]) == (bf16["fwd GEMMs"], bf16["bwd GEMMs"]) == (3, 6)


# ---------------------------------------------------------------------------------- divisions


@dataclass(frozen=True, repr=False)
class Approximate(f8.CurrentScaling):
    """What not to do: on a GPU this is a reciprocal and a product, each with its error."""

    def multiplier(self, amax):
        return 448.0 / amax


def layer_code(block, quantizer=f8.CurrentScaling):
    """The code of quantizing behind a relu: no division but ours."""
    how = quantizer(block=block)

    def fn(x):
        quantized = f8.quantize(x.relu(), how)
        return quantized.codes, quantized.scale

    with FakeTensorMode():
        (code,) = gpu_kernels(fn, torch.empty(4096, 8192, dtype=torch.bfloat16))
    return code


def approximate_divisions(source):
    """Divisions by ``/`` in Triton code whose operands aren't both float64."""
    exact = set(FLOAT64.findall(source))
    return [match[0].strip() for match in DIVISION.finditer(source) if not {match[2], match[3]} <= exact]


def divisions_beside_a_cast(code):
    """Divisions that a kernel does once for each code it stores.

    In a kernel with loops over a row those in the loop that stores; where there is no loop but one value an
    element, all of them.
    """
    found = []
    for name in code.kernels:
        header, body = code.source[: code.source.index(f"def {name}(")].rpartition("triton_meta")[2], code.kernel(name)
        outputs = [a for a in CODES.findall(header) if re.search(rf"tl\.store\({a} ", body)]
        if not outputs:
            continue
        loops = [match[0] for match in LOOP.finditer(body)] or [body]
        storing = "".join(loop for loop in loops if "tl.store" in loop)
        found += [f"{name}: {d[0].strip()}" for kind in (DIVISION, EXACT_DIVISION) for d in kind.finditer(storing)]
    return found


BLOCKS = [(-1, -1), (1, -1), (-1, 1), (128, 128)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_division_is_exact(block):
    source = layer_code(block).source
    found = DIVISION.findall(source) + EXACT_DIVISION.findall(source)
    assert len(found) >= 2, "the multiplier and the scale are quotients"
    assert not approximate_divisions(source)


@pytest.mark.skipif(not ADDCDIV_IS_EXACT, reason=f"Inductor of {TORCH} has no exact division in float32")
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_no_division_is_in_float64(block):
    """A GeForce divides 64 times slower in float64."""
    assert not DIVISION.findall(layer_code(block).source)


def test_an_approximate_division_would_be_found():
    assert approximate_divisions(layer_code((1, -1), Approximate).source)


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (-1, 1)], ids=str)
def test_no_division_is_repeated_for_each_element(block):
    assert not divisions_beside_a_cast(layer_code(block))


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (-1, 1)], ids=str)
def test_without_realize_the_division_would_be_repeated(block):
    with mock.patch.object(import_module("fp8compile.ops.scale"), "realize", lambda x: x):
        assert divisions_beside_a_cast(layer_code(block))


# ---------------------------------------------------------------------------------- fusions


def normed_layer():
    """Forward code of a norm and a layer; each operand's cast fuses with what makes the operand, or stands alone."""
    with FakeTensorMode():
        norm = torch.nn.RMSNorm(4096, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
        weight = torch.empty(8192, 4096, dtype=torch.bfloat16)
        (code,) = gpu_kernels(
            lambda x: f8.linear(norm(x), weight, recipe=f8.recipes.rowwise()),
            torch.empty(4096, 4096, dtype=torch.bfloat16),
        )
    return code


def test_the_cast_is_in_the_kernel_of_the_norm():
    code = normed_layer()
    kinds = [launch.kind for launch in code.launches]
    # the weight has a kernel of its own, which updates amaxes that are zeros before
    assert kinds == ["triton", "triton", "triton", "gemm"], "\n".join(map(str, code.launches))
    assert code.launches[2].op == "fp8compile.quantize_weight.default"
    assert {"aten.rsqrt", "fp8compile.linear"} <= set(code.launches[0].ops), "\n".join(map(str, code.launches))


def test_a_fusion_broken_on_purpose_is_seen():
    """A cast that Inductor can't look into: another launch, and the norm's output goes through memory."""
    whole = normed_layer()
    cast = torch.ops.fp8compile.cast.default
    from torch._inductor import decomposition

    with mock.patch.dict(decomposition.decompositions):
        del decomposition.decompositions[cast]
        decomposition.fast_random_decomps.cache_clear()
        broken = normed_layer()
    decomposition.fast_random_decomps.cache_clear()
    assert [launch.kind for launch in broken.launches].count("opaque") == 1
    assert broken.bytes > whole.bytes


def test_launches_account_for_every_byte():
    with FakeTensorMode():
        x, w = (torch.empty(m, 256, dtype=torch.bfloat16, requires_grad=True) for m in (512, 128))
        codes = gpu_kernels(lambda x, w: f8.linear(x.relu(), w, recipe=f8.recipes.rowwise()).exp(), x, w)
    for code in codes:
        assert sum(launch.bytes_read + launch.bytes_written for launch in code.launches) == code.bytes
        assert sum(launch.kind == "gemm" for launch in code.launches) == len(code.gemms)
        assert {launch.name for launch in code.launches if launch.kind == "triton"} == set(code.kernels)


def test_what_follows_the_sums_of_a_mixed_reduction_is_a_launch_of_its_own():
    """Inductor keeps both in one node of its schedule: the kernel of rows and columns, and the cast of the columns."""
    with FakeTensorMode():
        x = torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(4096, requires_grad=True)
        norm = partial(torch.nn.functional.layer_norm, normalized_shape=(4096,))
        _, backward = gpu_kernels(lambda x, w: norm(x, weight=w, bias=w), x, weight, arch="gb10")
    assert "# Call mix order reduction kernel" in backward.source
    assert [launch.kind for launch in backward.launches] == ["triton", "triton"]
    assert sum(launch.bytes_read + launch.bytes_written for launch in backward.launches) == backward.bytes


def test_sums_that_a_mixed_reduction_adds_are_no_launch():
    def norm(x, weight):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    with FakeTensorMode():
        x, weight = (
            torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((8192, 1024), (1024,))
        )
        _, backward = gpu_kernels(norm, x, weight, arch="rtx5090")
    assert "# Call mix order reduction kernel" in backward.source
    assert [launch.kind for launch in backward.launches] == ["triton"]
    assert sum(launch.bytes_read + launch.bytes_written for launch in backward.launches) == backward.bytes


def test_kernels_compile_for_sm_90_without_spills():
    code = layer_code((1, -1))
    found = code.resources()
    assert {resources.name for resources in found} == set(code.kernels)
    assert all(0 < resources.registers <= 255 for resources in found)
    # Inductor times its configurations on the GPU and takes the best: one without spills has to be among them
    assert all(any(r.spilled_bytes == 0 for r in found if r.name == name) for name in code.kernels), [*map(str, found)]


@pytest.mark.parametrize(("n", "scale", "stored"), [(128, "fp32", "*fp32"), (32, "e8m0_rceil", "*u8")])
def test_the_kernel_of_both_directions_has_no_spills(n, scale, stored):
    from fp8compile.kernels.both_directions import CANDIDATES, both_kernel, constants

    rows, columns = (f8.CurrentScaling(block=block, scale=scale) for block in ((1, n), (n, 1)))
    kinds = {
        "x_ptr": "*bf16", "rows_ptr": "*u8", "row_scales_ptr": stored, "columns_ptr": "*u8",
        "column_scales_ptr": stored, "M": "i32", "K": "i32", "stride_m": "i32",
    }  # fmt: skip
    h200, warps = GPUS["h200"], CANDIDATES[0].num_warps
    given = {"stride_k": 1, **constants(rows, columns, h200.target)}
    found = jit_resources(both_kernel, kinds, given, num_warps=warps, gpu=h200)
    assert 0 < found.registers <= 128, found
    assert found.spilled_bytes == 0, found


# ---------------------------------------------------------------------------------- the tool


def test_pretending_leaves_no_trace(assert_bits_equal):
    before = {name: getattr(torch.cuda, name) for name in ("is_available", "get_device_properties", "device_count")}
    layer_code((1, -1))
    assert {name: getattr(torch.cuda, name) for name in before} == before
    x = torch.randn(8, 32)
    compiled = torch.compile(lambda x: f8.quantize(x, f8.CurrentScaling(block=(1, -1))).codes, fullgraph=True)
    assert_bits_equal(compiled(x), f8.quantize(x, f8.CurrentScaling(block=(1, -1))).codes, "codes")


def test_code_of_real_tensors_is_that_of_fake_ones():
    how = f8.CurrentScaling(block=(1, -1))

    def fn(x, weight):
        return f8.linear(x.relu(), weight, recipe=f8.recipes.rowwise()), f8.quantize(x, how).codes

    def codes():
        made = (torch.zeros(m, 64, dtype=torch.bfloat16, requires_grad=True) for m in (32, 48))
        return [(code.kernels, code.gemms, code.bytes) for code in gpu_kernels(fn, *made)]

    with FakeTensorMode():
        fake = codes()
    assert codes() == fake
    assert [len(gemms) for _, gemms, _ in fake] == [1, 2]


def test_gemms_are_chosen_for_the_gpu():
    """Rowwise with a float32 output: natively on a CPU, by scaling the product on a Hopper GPU."""
    with FakeTensorMode():
        tensors = (torch.empty(m, 64) for m in (32, 48))
        (code,) = gpu_kernels(lambda x, w: f8.linear(x, w, recipe=f8.recipes.rowwise()), *tensors)
    assert code.gemms == ("_scaled_mm",)
    assert "out_dtype=torch.float32" in code.source
    generated = [code.kernel(each) for each in code.kernels if each.startswith("triton_")]
    assert any(re.search(r"\* *tmp\d+", kernel) for kernel in generated)


def test_columns_are_padded_for_the_gpu():
    """cuBLASLt takes multiples of 16, so a GPU pads n; a CPU doesn't."""
    with FakeTensorMode():
        tensors = (torch.empty(m, 64, dtype=torch.bfloat16) for m in (32, 40))
        (code,) = gpu_kernels(lambda x, w: f8.linear(x, w, recipe=f8.recipes.tensorwise()), *tensors)
    assert "48, 64" in code.source, "the weight's codes, padded from 40 rows to 48"
    assert code.gemms == ("_scaled_mm",)


def test_a_partial_block_is_indexed_as_on_a_gpu():
    """On a CPU the index of a partial last block is computed by a float64 floor; a GPU divides integers."""
    how = f8.CurrentScaling(block=(1, 64))
    with FakeTensorMode():
        (code,) = gpu_kernels(lambda x: f8.quantize(x, how).codes, torch.empty(16, 200, dtype=torch.bfloat16))
    assert "// 64" in code.kernel(code.kernels[-1]), code.source


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match="`arch` is 'gtx480'; it must be one of h200"):
        gpu_kernels(torch.relu, torch.zeros(2), arch="gtx480")
