"""One script a question, one table a script: `python -m benchmarks.kernels`."""
