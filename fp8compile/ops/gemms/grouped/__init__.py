"""Grouped GEMMs: a product for each group of tokens; the sizes of groups are data.

rowwise     torch._scaled_grouped_mm, fast accumulation, scales of rows       GPUs of 9.0, bf16 out
mx          torch._scaled_grouped_mm with a power of two for 32 values        GPUs of 10.x, bf16 out
nvfp4       torch._scaled_grouped_mm_v2 with an e4m3 scale for 16 values      GPUs of 10.x, bf16 out
ours        a Triton kernel with scales of rows, of groups, or of 128 values  GPUs from 8.9 on
one_by_one  a GEMM of `fp8compile.ops.gemms`, called for each group           CPU
"""
