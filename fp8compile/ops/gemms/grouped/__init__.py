"""Grouped GEMMs, a value each: a product for each group of tokens, of sizes that are data.

rowwise     torch._scaled_grouped_mm with a scale a row and a column         GPUs of 9.0, bf16 out
mx          torch._scaled_grouped_mm with a power of two for 32 values       GPUs of 10.0, bf16 out
nvfp4       torch._scaled_grouped_mm_v2 with an e4m3 number for 16 values     GPUs of 10.0, bf16 out
blockwise   a Triton kernel with a scale for 128 values of the sum           GPUs of 9.0
one_by_one  the GEMM of `fp8compile.ops.gemms`, group by group               CPU
"""
