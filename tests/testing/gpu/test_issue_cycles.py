"""Counts of instructions and bytes in disassembled kernels."""

from __future__ import annotations

import pytest

from fp8compile.testing.explain.issue_cycles import of_sass

LOOP = """
        /*0000*/                   LDG.E R1, desc[UR4][R2.64] ;
        /*0010*/              @P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0020*/              @!P1 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   {work} ;
        /*0040*/                   STG.E.64 desc[UR4][R8.64], R4 ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
$__internal_0_$__cuda_sm20_div_rn_f64_full:
        /*0080*/                   RET.REL.NODEC R2 `(kernel) ;
"""


def test_the_loop_that_moves_most_bytes_is_counted():
    found = of_sass("cast", LOOP.replace("{work}", "FMUL R4, R4, R5"), "h200")
    assert (found.instructions, found.float64, found.bytes_moved) == (4, 0, 16 + 8)
    bytes_a_cycle = 0.71 * 4.8e12 / 1.755e9 / 132
    assert found.ratio == pytest.approx((4 / 4) / (24 * 32 / bytes_a_cycle))  # divided in another order
    assert not found.has_tensor_cores


def test_code_without_a_loop_is_counted_without_subroutines():
    found = of_sass("cast", LOOP.replace("{work}", "NOP").replace(" @P2 BRA `(.L_x_0)", "NOP"), "h200")
    assert (found.instructions, found.bytes_moved) == (8, 24)  # the branch behind the end counts


def test_float64_units_of_a_geforce_are_the_limit():
    source = LOOP.replace("{work}", "DFMA R4, R4, R5, R6")
    assert of_sass("cast", source, "h200").ratio == of_sass("cast", source.replace("DFMA", "FFMA"), "h200").ratio
    fast = of_sass("cast", source.replace("DFMA", "FFMA"), "rtx5090")
    assert of_sass("cast", source, "rtx5090").ratio == pytest.approx(16 * fast.ratio)  # multiplied in another order


def test_local_memory_beside_a_product_is_found():
    source = LOOP.replace("{work}", "QGMMA.64x128x32.F32.E4M3.E4M3 R24 ;\n        /*0031*/ STL [R1], R4")
    found = of_sass("gemm", source, "h200")
    assert found.has_tensor_cores
    assert found.spills_in_loop == 1
