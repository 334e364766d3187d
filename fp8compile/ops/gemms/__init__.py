"""The GEMMs: the codes that each takes, where it runs, how it multiplies.

    tensorwise   torch._scaled_mm with two numbers                          GPUs from compute capability 8.9
    rowwise      torch._scaled_mm with a scale for each row and column      GPUs from 8.9, some to bf16 only; CPU
    scaled_after torch._scaled_mm in float32, scales applied afterwards     GPUs from 8.9 if `rowwise` can't run
    blockwise    torch._scaled_mm with a scale for 128 values along k       GPUs of 9.0
    mx           torch._scaled_mm with a power of two for 32 values         GPUs from 10.0
    by_mx        `mx` with repeated scales of 128 values, or scales of 1    GPUs from 10.0 (scales of 1: 12.0)
    nvfp4        fp8compile::nvfp4_mm with an e4m3 scale for 16 values      GPUs from 10.0
    (registered) added by other packages with `register_gemm`               where the packages say
    emulated     float64 product of the exact values                        CPU without a kernel; a GPU if asked

`table` has the order in which they are tried. To add a GEMM, write a file like `blockwise.py` and add its `GemmKernel`
to `NATIVE` in `table.py`.

    interface.py        `GemmKernel`: the description of a GEMM
    gpu_support.py      the table of which GPU runs which product
    torch_scaled_mm.py  the call of torch._scaled_mm and its padding
    selection.py        the GEMM that multiplies two operands
    scaled_mm.py        the op of matrices
    grouped/            the GEMMs of groups, such as experts, and their ops
    registration/       `register_gemm` and `register_grouped_gemm` for other packages
"""
