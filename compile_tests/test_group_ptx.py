"""The kernels over groups of tokens, compiled for GPUs: exact arithmetic, wide stores, no spills, tensor cores."""

from __future__ import annotations

import pytest

import fp8compile as f8
from fp8compile.testing.gpu.compiled import compiled_jit
from fp8compile.testing.gpu.cubin import assembled
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.ptx_report import kernel_ptx

pytest.importorskip("triton", reason="needs Triton: it compiles to PTX")

import triton

from fp8compile.kernels import (
    both_directions,
    group_amax_and_cast,
    group_cast_transpose,
    group_quantize_rows,
    group_quantize_two_levels,
    grouped_blockwise_mm,
    quantize_two_levels,
)

TOKENS = {"offsets_ptr": "*i32", "R": "i32", "K": "i32", "E": "i32", "stride_m": "i32"}
TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
CONTIGUOUS = {"stride_k": 1}  # as Triton compiles it where an argument is 1


def assert_good(fn, kinds, constants, candidates, gpu, codes=()):
    warps = candidates[0].num_warps
    compiled = compiled_jit(fn, kinds, constants, num_warps=warps, gpu=gpu)
    resources = assembled(compiled, gpu)
    assert resources.spilled_bytes == 0, resources
    # two programs or more a multiprocessor, or all of its registers
    assert resources.registers * 32 * warps <= gpu.regs_per_multiprocessor, resources
    assert resources.shared_bytes <= gpu.shared_memory_per_block_optin, resources
    found = kernel_ptx(compiled, range(len(kinds)))
    assert not found.findings, "\n".join(map(str, found.findings))
    assert all(found.code_stores[name] >= 4 for name in codes), found.code_stores


@pytest.mark.parametrize("arch", ["h200", "b200"])
@pytest.mark.parametrize("block", [(-1, 1), (-1, -1)], ids=str)
def test_amax_and_cast(arch, block):
    quantizer, gpu, x = f8.CurrentScaling(block=block), GPUS[arch], {"x_ptr": "*bf16"}
    kinds = TOKENS | x | {"amax_ptr": "*fp32"}
    constants = group_amax_and_cast.amax_constants(quantizer) | CONTIGUOUS
    assert_good(group_amax_and_cast.amax_kernel, kinds, constants, group_amax_and_cast.AMAX_CANDIDATES, gpu)
    fixed, other = ("multiplier_stride_k", "multiplier_stride_m")[:: 1 if block == (-1, 1) else -1]
    kinds = TOKENS | x | {"multiplier_ptr": "*fp32", "codes_ptr": "*u8", "C": "i32", other: "i32"}
    constants = group_amax_and_cast.cast_constants(quantizer, 16, gpu.target) | CONTIGUOUS | {fixed: 1}
    assert_good(
        group_amax_and_cast.cast_kernel,
        kinds,
        constants,
        group_amax_and_cast.CAST_CANDIDATES,
        gpu,
        codes=["codes_ptr"],
    )


@pytest.mark.parametrize("arch", ["h200", "b200"])
@pytest.mark.parametrize(("x_type", "rule", "n"), [("*bf16", "fp32", 128), ("*fp32", "e8m0_rceil", 32)], ids=str)
def test_quantize(arch, x_type, rule, n):
    quantizer, gpu = f8.CurrentScaling(block=(n, 1), scale=rule), GPUS[arch]
    scales = "*u8" if quantizer.stores_e8m0() else "*fp32"
    kinds = TOKENS | {"x_ptr": x_type, "codes_ptr": "*u8", "scales_ptr": scales, "C": "i32"}
    constants = group_amax_and_cast.quantize_constants(quantizer, n, gpu.target) | CONTIGUOUS
    assert_good(
        group_amax_and_cast.quantize_kernel,
        kinds,
        constants,
        group_amax_and_cast.CAST_CANDIDATES,
        gpu,
        codes=["codes_ptr"],
    )
    both = {"rows_ptr": "*u8", "row_scales_ptr": scales, "columns_ptr": "*u8", "column_scales_ptr": scales}
    kinds = TOKENS | {"x_ptr": x_type, "C": "i32"} | both
    constants = group_cast_transpose.group_constants(quantizer.transposed(), quantizer, n, gpu.target) | CONTIGUOUS
    fn = group_cast_transpose.groups_both_kernel
    assert_good(fn, kinds, constants, both_directions.CANDIDATES, gpu, codes=["rows_ptr", "columns_ptr"])


@pytest.mark.parametrize("arch", ["h200", "b200"])
@pytest.mark.parametrize(("x_type", "k"), [("*bf16", 2048), ("*bf16", 7168), ("*fp32", 4096)], ids=str)
def test_rows(arch, x_type, k):
    kinds = TOKENS | {"x_ptr": x_type, "codes_ptr": "*u8", "scales_ptr": "*fp32", "amax_ptr": "*fp32", "ROWS": "i32"}
    constants = (
        group_quantize_rows.group_row_constants(f8.CurrentScaling(block=(1, -1)), k, GPUS[arch].target) | CONTIGUOUS
    )
    assert_good(
        group_quantize_rows.group_rows_kernel,
        kinds,
        constants,
        group_quantize_rows.candidates(k),
        GPUS[arch],
        codes=["codes_ptr"],
    )


@pytest.mark.parametrize(
    ("directions", "rounding"),
    [("both", "stochastic"), ("both", "stochastic_hardware"), ("rows", "nearest"), ("tokens", "nearest")],
    ids=str,
)
def test_two_levels(directions, rounding):
    recipe, gpu = f8.recipes.nvfp4(grad_rounding=rounding), GPUS["b200"]
    rows = None if directions == "tokens" else recipe.grad_output
    columns = None if directions == "rows" else recipe.grad_output_for_grad_weight
    constants = group_quantize_two_levels.amax_constants(rows, columns, gpu.target) | CONTIGUOUS
    kinds = TOKENS | {"x_ptr": "*bf16", "amaxes_ptr": "*fp32"}
    assert_good(
        group_quantize_two_levels.amaxes_kernel, kinds, constants, group_quantize_two_levels.AMAX_CANDIDATES, gpu
    )
    kinds = TOKENS | {"x_ptr": "*bf16", "amaxes_ptr": "*fp32", "C": "i32"}
    for side in ("row", "column"):
        kinds |= {f"{side}s_ptr": "*u8"}
        kinds |= {f"{side}_scales_ptr": "*u8", f"{side}_outer_ptr": "*fp32"}
    codes = [f"{side}s_ptr" for side, way in (("row", rows), ("column", columns)) if way is not None]
    constants = group_quantize_two_levels.code_constants(rows, columns, gpu.target) | CONTIGUOUS
    assert_good(
        group_quantize_two_levels.codes_kernel, kinds, constants, quantize_two_levels.CANDIDATES, gpu, codes=codes
    )


# ---------------------------------------------------------------------------------- products

ROWS = {
    "a_ptr": "*u8", "b_ptr": "*u8", "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32", "offsets_ptr": "*i32",
    "y_ptr": "*bf16", "R": "i32", "N": "i32", "K": "i32", "E": "i32", "a_scale_stride_m": "i32",
    "a_scale_stride_k": "i32", "b_scale_stride_e": "i32", "b_scale_stride_n": "i32", "b_scale_stride_k": "i32",
}  # fmt: skip
OUTER = {name: kind for name, kind in ROWS.items() if name in grouped_blockwise_mm.tokens_kernel.arg_names}
OUTER |= {f"{side}_scale_stride_{dim}": "i32" for side, dim in (("a", "c"), ("a", "n"), ("b", "c"), ("b", "k"))}
TENSOR_CORES = {  # instructions of each GPU
    "rtx4090": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "h200": "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    "b200": "tcgen05.mma.cta_group::1.kind::f8f6f4",
    "rtx5090": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
}


def assert_multiplies_float8(fn, kinds, constants, arch):
    """On the tensor cores, without spills, with the next blocks on their way."""
    gpu = GPUS[arch]
    constants = {"TILE": grouped_blockwise_mm.TILE, "A_E4M3": True, "B_E4M3": True, **constants}
    for candidate in grouped_blockwise_mm.candidates(gpu.target):
        given = constants | candidate.kwargs
        own = {name: kind for name, kind in kinds.items() if name not in given}
        compiled = compiled_jit(
            fn, own, given, num_warps=candidate.num_warps, gpu=gpu, num_stages=candidate.num_stages
        )
        resources = assembled(compiled, gpu)
        # Triton 3.9 keeps the scaled sums of blocks in registers on Blackwell, and spills 1 to 8 KB a thread
        if not (arch == "b200" and not constants["IS_WHOLE"] and TRITON_VERSION >= (3, 9)):
            assert resources.spilled_bytes == 0, resources
        assert resources.registers * 32 * candidate.num_warps <= gpu.regs_per_multiprocessor, resources
        assert resources.shared_bytes <= gpu.shared_memory_per_block_optin, resources
        assert TENSOR_CORES[arch] in compiled.ptx
        assert "cp.async.cg" in compiled.ptx, "loads of the next blocks"


@pytest.mark.parametrize("arch", TENSOR_CORES)
@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize(("has_tiles", "is_whole"), [(True, False), (False, False), (False, True)], ids=str)
def test_products_of_rows(has_tiles, is_whole, is_even, arch):
    constants = {"a_scale_stride_m": 1, "IS_EVEN": is_even, "HAS_TILES": has_tiles, "IS_WHOLE": is_whole}
    assert_multiplies_float8(grouped_blockwise_mm.rows_kernel, ROWS, constants, arch)


@pytest.mark.parametrize("arch", TENSOR_CORES)
@pytest.mark.parametrize(("align", "is_whole"), [(128, False), (16, True)], ids=str)
def test_products_over_tokens(align, is_whole, arch):
    kinds, constants = OUTER | {"d_ptr": "*bf16", "C": "i32"}, {"ALIGN": align, "IS_WHOLE": is_whole}
    assert_multiplies_float8(grouped_blockwise_mm.tokens_kernel, kinds, constants | {"a_scale_stride_n": 1}, arch)
