"""benchmarks.pytorch_grouped_gemms: tile, schedule and accumulation are read from mangled names."""

from __future__ import annotations

from benchmarks.pytorch_grouped_gemms import rows_of

HEAD = "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5tupleIJiiiEEEEENS1_10"
MAIN = (
    HEAD
    + "collective13CollectiveMmaINS1_42MainloopSm90ArrayTmaGmmaWarpSpecializedFP8ILi8ENS6_IJNS5_1CILi2EEESD_NSC_ILi1"
)
WIDE = "EEENS6_IJNSC_ILi128EEENSC_ILi256EEENSC_ILi64EEEEEENS_12float_e4m3_tEPNS6_IJlSE_NSC_ILi0EEEEEE"
CUBE = "EEENS6_IJNSC_ILi128EEESI_SI_EEENS_12float_e4m3_tEPNS6_IJlSE_NSC_ILi0EEEEEESK_SN_NS5_8TiledMMAI"
USAGE = f"""
 Function {MAIN}EEEEEENS1_43KernelPtrArrayTmaWarpSpecializedCooperative{WIDE}:
  REG:168 STACK:280 SHARED:1024 LOCAL:0 CONSTANT[0]:2432
 Function {MAIN}EEEEEENS1_53KernelPtrArrayTmaWarpSpecializedPingpongFP8FastAccum{CUBE}:
  REG:152 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:2432
 Function {MAIN}EEEEEENS1_43KernelPtrArrayTmaWarpSpecializedCooperative{WIDE.replace("float_e4m3_t", "bfloat16_t")}:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:2432
 Function _Z9elsewherev:
  REG:4 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:532
"""


def test_rows_are_of_fp8_kernels_alone():
    wide, cube = rows_of(USAGE)
    assert tuple(wide.values()) == ("128 x 256 x 64", "cooperative", "in float32", 168, 280)
    assert tuple(cube.values()) == ("128 x 128 x 128", "pingpong", "fast", 152, 0)
