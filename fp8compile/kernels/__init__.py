"""Triton kernels for steps in which the code that Inductor generates would read or write memory more often.

Each kernel is called by an op, which has a reference in PyTorch with the same bits.
"""
