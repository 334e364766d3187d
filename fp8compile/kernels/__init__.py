"""Triton kernels that read or write memory less often than the code that Inductor generates for the same steps.

Each kernel is called by an op, which has a reference in PyTorch with the same bits.
"""
