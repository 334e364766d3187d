"""Triton kernels that read or write memory less often than Inductor's code for the same steps.

Each kernel is called by an op, which has a reference in PyTorch with the same bits.
"""
