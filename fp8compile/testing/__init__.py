"""What tests of FP8 code need: the code Inductor makes for a GPU, seen on a machine without one."""

from fp8compile.testing.gpu_code import GpuCode, gpu_code

__all__ = ["GpuCode", "gpu_code"]
