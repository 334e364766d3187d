"""The GEMMs, a file each: which codes one takes, where it runs, how it multiplies. `table` has their order.

    tensorwise   torch._scaled_mm with two numbers                          GPUs from compute capability 8.9
    rowwise      torch._scaled_mm with a scale a row and a column           GPUs from 9.0 (bf16 out); CPU, for both
    scaled_after torch._scaled_mm without scales, float32 out, then both    rowwise on GPUs otherwise
    blockwise    torch._scaled_mm with a scale for 128 values of the sum    GPUs of 9.0
    mx           torch._scaled_mm with a power of two for 32 of them        GPUs from 10.0
    nvfp4        fp8compile::nvfp4_mm: an e4m3 number for 16 of them     GPUs from 10.0
    (registered) what other packages add by `register_gemm`                 where they say
    emulated     float64 product of the exact values                        CPU where it has no kernel; a GPU if asked

To add one, write a file like `blockwise.py` and name its value in `table.py`.
"""
