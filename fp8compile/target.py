"""Which device code is made for: the tensors' own, unless a tool asks what another one would get.

Code for a GPU can be looked at on a machine without one, by tracing on the CPU. Whatever chooses by device (the GEMM,
its padding, an index) therefore asks here, and never the tensor.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

from fp8compile._compat import TORCH_VERSION

__all__ = ["Build", "Target", "pretend_target", "target_of"]


@dataclass(frozen=True)
class Build:
    """The PyTorch that runs the code. The defaults are the wheel for CUDA 13.0 on Linux, of this version of PyTorch.

    Attributes:
        torch: (major, minor).
        cuda: CUDA that it was built with, (major, minor); None for a build without.
        is_windows: Whether it is a build for Windows.
        has_mslk: Whether it has Meta's kernels.
    """

    torch: tuple[int, ...] = TORCH_VERSION
    cuda: tuple[int, ...] | None = (13, 0)
    is_windows: bool = False
    has_mslk: bool = True

    @staticmethod
    @cache
    def here() -> Build:
        """The PyTorch of this process."""
        cuda = torch.version.cuda
        return Build(
            TORCH_VERSION,
            None if cuda is None else tuple(int(part) for part in cuda.split(".")[:2]),
            platform.system() == "Windows",
            "MSLK" in torch.__config__.show().upper(),
        )


@dataclass(frozen=True)
class Target:
    """What there is to know of a device before code is made for it.

    Attributes:
        type: "cpu", "cuda" or another device type.
        capability: Compute capability of a GPU, such as (9, 0); (0, 0) for any other device.
        hip: Version of ROCm, whose GPUs are "cuda" to PyTorch and have capabilities like those of NVIDIA's; None for
            every other device.
        build: The PyTorch that runs the code there.
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    hip: str | None = None
    build: Build = Build()


_PRETENDED: ContextVar[Target | None] = ContextVar("pretended target", default=None)


_made = cache(Target)  # one for each device: an eager call asks five times


def target_of(device: torch.device) -> Target:
    """The target of code that works on tensors of this device."""
    pretended = _PRETENDED.get()
    if pretended is not None:
        return pretended
    if device.type != "cuda":
        return _made(device.type)
    return _made(device.type, torch.cuda.get_device_capability(device), torch.version.hip, Build.here())


@contextmanager
def pretend_target(target: Target) -> Iterator[None]:
    """While this runs, code is made as for this target, wherever the tensors are."""
    token = _PRETENDED.set(target)
    try:
        yield
    finally:
        _PRETENDED.reset(token)
