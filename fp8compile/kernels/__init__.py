"""Triton kernels that read or write memory less often than Inductor's code, and grouped GEMMs that PyTorch lacks.

The op that calls a kernel also has a PyTorch implementation. Codes and scales have the same bits, unless a GPU's own
instruction rounds (`fp8compile.kernels.stochastic_cvt`).
"""
