"""Inspects a GPU's code without a GPU: kernels, their PTX, the bytes they move; runs the code on the CPU."""

from fp8compile.testing.gpu.kernels import GpuCode, Launch, gpu_kernels
from fp8compile.testing.gpu.program import EagerRun, eager_run, run_gpu_program

__all__ = ["EagerRun", "GpuCode", "Launch", "eager_run", "gpu_kernels", "run_gpu_program"]
