"""A GPU's code without a GPU: kernels as Inductor makes them, programs that are executed, PTX, bytes."""

from fp8compile.testing.gpu.kernels import GpuCode, Launch, gpu_kernels
from fp8compile.testing.gpu.program import EagerRun, eager_run, run_gpu_program

__all__ = ["EagerRun", "GpuCode", "Launch", "eager_run", "gpu_kernels", "run_gpu_program"]
