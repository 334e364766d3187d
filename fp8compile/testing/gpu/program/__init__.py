"""Runs a GPU's generated programs on the CPU, bit for bit (docs/gpu-without-a-gpu.md)."""

from fp8compile.testing.gpu.program.eager import EagerRun, eager_run
from fp8compile.testing.gpu.program.run import run_gpu_program

__all__ = ["EagerRun", "eager_run", "run_gpu_program"]
