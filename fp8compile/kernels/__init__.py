"""Triton kernels for steps in which code that Inductor generates would read or write memory more often than they do.

Each kernel is called by an op, which has a reference in PyTorch with the same bits.
"""
