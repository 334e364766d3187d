"""Triton kernels for steps that Inductor's own code needs more passes for.

Each kernel is called by an op, which has a reference in PyTorch with the same bits.
"""
