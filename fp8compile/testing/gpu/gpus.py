"""Simulated GPUs: they answer queries of PyTorch, Inductor and Triton during code generation.

Nothing can run on a simulated GPU. While simulated, it also replaces a real GPU of the machine, so that generated code
is the same everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8compile.target import Build, Target

__all__ = ["GPUS", "Gpu", "check_is_nvidia", "gpu_called", "pretend_gpu", "triton_target"]

ROCM = (7, 0)  # of the PyTorch that is pretended for an AMD GPU


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that code generation reads, named as in `torch.cuda.get_device_properties`.

    The defaults are those of an H200 SXM.

    Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; NVIDIA data sheets
    (memory, multiprocessors, cache); for AMD, ROCm documentation, "Accelerator and GPU hardware specifications".
    """

    name: str = "NVIDIA H200"
    type: str = "cuda"
    index: int = 0
    uuid: str = "none"
    gcnArchName: str = ""
    major: int = 9
    minor: int = 0
    cc: int | str = 90  # AMD's name of the architecture for an AMD GPU, as Inductor has it
    warp_size: int = 32
    multi_processor_count: int = 132
    total_memory: int = 140 << 30
    L2_cache_size: int = 60 << 20
    is_integrated: bool = False
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 227 << 10
    shared_memory_per_multiprocessor: int = 228 << 10

    @property
    def target(self) -> Target:
        """The `Target` (device type and capability) by which this package's ops choose code for this GPU."""
        if not self.is_amd:
            return Target("cuda", (self.major, self.minor))
        hip, build = ".".join(map(str, ROCM)), Build(cuda=None, rocm=ROCM)
        return Target("cuda", (self.major, self.minor), hip, build, self.gcnArchName)

    @property
    def is_amd(self) -> bool:
        """Whether this is an AMD GPU, for PyTorch with ROCm."""
        return bool(self.gcnArchName)


ADA_OR_GEFORCE: dict[str, Any] = {  # 8.9 and 12.x have less shared memory, and fewer threads, than data centre GPUs
    "max_threads_per_multi_processor": 1536,
    "shared_memory_per_block_optin": 99 << 10,
    "shared_memory_per_multiprocessor": 100 << 10,
}
AMD_COMPUTE: dict[str, Any] = {  # local data share; a workgroup may have 1024 threads, and a compute unit 2048
    "shared_memory_per_block": 64 << 10,
    "shared_memory_per_block_optin": 64 << 10,
    "shared_memory_per_multiprocessor": 64 << 10,
}
CDNA4: dict[str, Any] = dict.fromkeys(AMD_COMPUTE, 160 << 10)
GPUS = {
    "h200": Gpu(),
    "b200": Gpu(
        name="NVIDIA B200", major=10, cc=100, multi_processor_count=148, total_memory=180 << 30,
        L2_cache_size=126 << 20,
    ),
    "rtx4090": Gpu(
        name="NVIDIA GeForce RTX 4090", major=8, minor=9, cc=89, multi_processor_count=128, total_memory=24 << 30,
        L2_cache_size=72 << 20, **ADA_OR_GEFORCE,
    ),
    "l40s": Gpu(
        name="NVIDIA L40S", major=8, minor=9, cc=89, multi_processor_count=142, total_memory=48 << 30,
        L2_cache_size=96 << 20, **ADA_OR_GEFORCE,
    ),
    "h100": Gpu(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, L2_cache_size=50 << 20),
    "b300": Gpu(
        name="NVIDIA B300", major=10, minor=3, cc=103, multi_processor_count=148, total_memory=270 << 30,
        L2_cache_size=126 << 20,
    ),
    "rtx5090": Gpu(
        name="NVIDIA GeForce RTX 5090", major=12, cc=120, multi_processor_count=170, total_memory=32 << 30,
        L2_cache_size=96 << 20, **ADA_OR_GEFORCE,
    ),
    "rtx_pro_6000": Gpu(
        name="NVIDIA RTX PRO 6000 Blackwell", major=12, cc=120, multi_processor_count=188, total_memory=96 << 30,
        L2_cache_size=128 << 20, **ADA_OR_GEFORCE,
    ),
    "gb10": Gpu(
        name="NVIDIA GB10", major=12, minor=1, cc=121, multi_processor_count=48, total_memory=128 << 30,
        L2_cache_size=24 << 20, is_integrated=True, **ADA_OR_GEFORCE,
    ),
    "mi300x": Gpu(
        name="AMD Instinct MI300X", gcnArchName="gfx942", major=9, minor=4, cc="gfx942", warp_size=64,
        multi_processor_count=304, total_memory=192 << 30, L2_cache_size=4 << 20, **AMD_COMPUTE,
    ),
    "mi355x": Gpu(
        name="AMD Instinct MI355X", gcnArchName="gfx950", major=9, minor=5, cc="gfx950", warp_size=64,
        multi_processor_count=256, total_memory=288 << 30, L2_cache_size=4 << 20, **CDNA4,
    ),
    "rx9070": Gpu(
        name="AMD Radeon RX 9070 XT", gcnArchName="gfx1201", major=12, minor=0, cc="gfx1201",
        multi_processor_count=64, total_memory=16 << 30, L2_cache_size=8 << 20, **AMD_COMPUTE,
    ),
}  # fmt: skip


def gpu_called(arch: str) -> Gpu:
    """Find a GPU by its key in ``GPUS``, or by architecture: ``"sm_120"`` (NVIDIA), ``"gfx950"`` (AMD).

    If several GPUs have the architecture, the first one in ``GPUS`` is returned.

    Raises:
        ValueError: No GPU has this key or architecture.
    """
    if arch in GPUS:
        return GPUS[arch]
    named = {str(gpu.cc) if gpu.is_amd else f"sm_{gpu.cc}": gpu for gpu in reversed(GPUS.values())}
    if arch not in named:
        raise ValueError(f"`arch` is {arch!r}; it must be one of {', '.join(GPUS)}, or of {', '.join(sorted(named))}.")
    return named[arch]


def check_is_nvidia(gpu: Gpu, what: str) -> None:
    """Raise a ValueError if the GPU is AMD's; ``what`` names the function that needs an NVIDIA GPU."""
    if gpu.is_amd:
        raise ValueError(
            f"{what} supports only NVIDIA GPUs, but {gpu.name} ({gpu.gcnArchName}) is an AMD GPU. Use `gpu_kernels` "
            "and `fp8compile explain --gpu` to generate its code."
        )


def triton_target(gpu: Gpu) -> Any:
    """The GPU as a target of Triton's compiler (``GPUTarget``)."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip" if gpu.is_amd else "cuda", gpu.cc, gpu.warp_size)


def _answers(gpu: Gpu) -> dict[str, object]:
    properties = dict.fromkeys(("get_device_properties", "_get_device_properties"), gpu)
    nothing = dict.fromkeys(("_lazy_init", "set_device", "synchronize", "set_rng_state"), None)
    device = dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0)
    return {
        **properties,
        **nothing,
        **device,
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "get_device_capability": (gpu.major, gpu.minor),
        "get_device_name": gpu.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }


def _always(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def _triton_driver(gpu: Gpu) -> Any:
    driver = mock.Mock(spec_set=[
        "get_current_target", "get_current_device", "get_active_torch_device", "get_device_interface", "is_active",
        "utils",
    ])  # fmt: skip
    driver.get_current_target.return_value = triton_target(gpu)
    driver.get_current_device.return_value = 0
    driver.get_active_torch_device.return_value = torch.device("cuda", 0)
    driver.get_device_interface.return_value = torch.cuda
    driver.is_active.return_value = True
    driver.utils.get_device_properties.return_value = {"max_shared_mem": gpu.shared_memory_per_block_optin}
    return driver


def _unguarded() -> dict[str, Callable[..., Any]]:
    index = Tensor.__getitem__
    return {
        "__invert__": lambda tensor: torch.bitwise_not(tensor),
        "copy_": lambda tensor, source: torch.ops.aten.copy_.default(tensor, source),
        "__getitem__": lambda tensor, at: torch.select(tensor, 0, at) if type(at) is int else index(tensor, at),
    }


@functools.cache
def _caches_of_devices() -> tuple[functools._lru_cache_wrapper[Any], ...]:
    from torch._inductor import utils
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    found = (getattr(owner, name) for owner in (DeviceProperties, utils, _triton) for name in dir(owner))
    functions = (getattr(each, "__func__", each) for each in found)  # of a classmethod
    return tuple(each for each in functions if isinstance(each, functools._lru_cache_wrapper))


def _forget_devices() -> None:
    """Clear PyTorch's caches of device properties, which may be those of another GPU."""
    for cached in _caches_of_devices():
        cached.cache_clear()


class _Pretended:
    """Replacement of a PyTorch function: returns a fixed answer until ``is_over``, then calls the function.

    A module that PyTorch imports while the function is replaced may keep the replacement forever.
    """

    def __init__(self, original: Callable[..., Any], answer: object) -> None:
        self._original, self._answer, self.is_over = original, answer, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs) if self.is_over else self._answer


@contextmanager
def pretend_triton(gpu: Gpu) -> Iterator[None]:
    """Context in which Dynamo finds this GPU in Triton, and therefore traces launches of Triton kernels.

    For compute capability 9.0 or higher, the kernels may take TMA descriptors that the host makes.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    import triton
    from torch.utils import _triton

    _caches_of_devices()
    answers = {"has_triton": True, "has_triton_tensor_descriptor_host_tma": not gpu.is_amd and gpu.major >= 9}
    stand_ins = {name: _Pretended(getattr(_triton, name), answer) for name, answer in answers.items()}
    with mock.patch.object(triton.runtime.driver, "_active", _triton_driver(gpu)), ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(_triton, name, stand_in))
        try:
            yield
        finally:
            for stand_in in stand_ins.values():
                stand_in.is_over = True


@contextmanager
def pretend_gpu(gpu: Gpu) -> Iterator[None]:
    """Context in which PyTorch finds this GPU as device ``cuda:0``, and Triton generates code for it.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor

    interface = {"is_available": True, "get_compute_capability": gpu.cc}
    worker = {"get_device_properties": gpu, "current_device": 0}
    with ExitStack() as stack:
        stack.callback(_forget_devices)
        hip = gpu.target.hip
        stack.enter_context(mock.patch.object(torch.version, "hip", hip))
        if hip is not None:
            stack.enter_context(mock.patch.object(torch.version, "cuda", None))
        # not by set_active, because reset_active, which would undo it, needs a driver that works
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _triton_driver(gpu)))
        for name, answer in _answers(gpu).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _always(answer), create=True))
        for owner, answers in ((CudaInterface, {**interface, **worker}), (CudaInterface.Worker, worker)):
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(owner, name, staticmethod(_always(answer))))
        for name, method in _unguarded().items():
            stack.enter_context(mock.patch.object(Tensor, name, method))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", _always(None), create=True))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", return_value=True))
        _forget_devices()
        yield
