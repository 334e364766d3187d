"""Triton kernels for what Inductor's own code takes more passes for; each behind an op, with a twin in PyTorch."""
