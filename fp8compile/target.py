"""The device for which code is made: the tensors' device, or a device that `pretend_target` sets.

A machine without a GPU can show the code for a GPU by tracing on the CPU. All choices that depend on the device (the
GEMM, its padding, an index) therefore call `target_of` instead of reading the tensor's device.
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

__all__ = ["CAPABILITIES", "CASTS_BY_FLOAT16", "Build", "Target", "pretend_target", "target_called", "target_of"]

CASTS_BY_FLOAT16 = (8, 9)  # Triton casts float32 toward zero to float16, then to float8, on this GPU (triton#11753)


@dataclass(frozen=True)
class Build:
    """The PyTorch build that runs the code; by default the Linux wheel of the installed version for CUDA 13.0.

    Attributes:
        torch: Version of PyTorch, (major, minor).
        cuda: Version of CUDA of the build, (major, minor); None for a build without CUDA.
        rocm: Version of ROCm of the build, (major, minor); None for a build without ROCm.
        is_windows: Whether this is a build for Windows.
        has_mslk: Whether the build has MSLK, Meta's kernels.
    """

    torch: tuple[int, ...] = TORCH_VERSION
    cuda: tuple[int, ...] | None = (13, 0)
    is_windows: bool = False
    has_mslk: bool = True
    rocm: tuple[int, ...] | None = None

    @staticmethod
    @cache
    def here() -> Build:
        """The PyTorch build of this process."""
        return Build(
            TORCH_VERSION,
            _version(torch.version.cuda),
            platform.system() == "Windows",
            "MSLK" in torch.__config__.show().upper(),
            _version(torch.version.hip),
        )


def _version(text: str | None) -> tuple[int, ...] | None:
    """Parse a version such as "7.0.51831" to (major, minor); None for None."""
    return None if text is None else tuple(int(part) for part in text.split(".")[:2])


@dataclass(frozen=True)
class Target:
    """The properties of a device that decide which code is made for it.

    Attributes:
        type: "cpu", "cuda" or another device type.
        capability: Compute capability of a GPU, such as (9, 0); (0, 0) for any other device.
        hip: Version of ROCm for an AMD GPU, which also has the ``type`` "cuda" and a ``capability``; None for any
            other device.
        build: The PyTorch build that runs the code on the device.
        gcn: AMD's name of an AMD GPU's architecture, such as "gfx950"; empty for any other device.
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    hip: str | None = None
    build: Build = Build()
    gcn: str = ""

    @property
    def architecture(self) -> tuple[int, int] | str:
        """The GPU's architecture: its compute capability, or AMD's name such as "gfx950"."""
        return self.capability if self.hip is None else self.gcn

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one Triton program may have, on AMD or NVIDIA GPUs (8.0 or later).

        Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; ROCm documentation,
        "Accelerator and GPU hardware specifications" (LDS).
        """
        if self.hip is not None:
            return (160 if self.gcn == "gfx950" else 64) << 10
        major = self.capability[0]
        kib = 99 if major == 12 or self.capability in ((8, 6), (8, 9)) else 163 if major == 8 else 227
        return kib << 10


# Compute capabilities of GPUs by name. Source: CUDA C++ Programming Guide, table of compute capabilities.
CAPABILITIES = {
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "b300": (10, 3),
    "rtx4090": (8, 9),
    "l40s": (8, 9),
    "rtx5090": (12, 0),
    "rtx_pro_6000": (12, 0),
    "gb10": (12, 1),
}


def target_called(name: str) -> Target:
    """Return the target with this name and the default `Build`.

    ``name`` is ``"cpu"`` or a key of ``CAPABILITIES``.

    Raises:
        ValueError: There is no such name.
    """
    if name == "cpu":
        return Target("cpu")
    if name not in CAPABILITIES:
        raise ValueError(f"`target` is {name!r}; it must be one of 'cpu', {', '.join(map(repr, CAPABILITIES))}.")
    return Target("cuda", CAPABILITIES[name])


_PRETENDED: ContextVar[Target | None] = ContextVar("pretended target", default=None)


_made = cache(Target)  # cached, because an eager call comes here five times


def target_of(device: torch.device) -> Target:
    """The target for code on tensors of this device; inside of `pretend_target`, that context's target."""
    pretended = _PRETENDED.get()
    if pretended is not None:
        return pretended
    if device.type != "cuda":
        return _made(device.type)
    capability, hip = torch.cuda.get_device_capability(device), torch.version.hip
    gcn = "" if hip is None else torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return _made(device.type, capability, hip, Build.here(), gcn)


@contextmanager
def pretend_target(target: Target) -> Iterator[None]:
    """Context in which code is made for ``target``, whatever the device of the tensors."""
    token = _PRETENDED.set(target)
    try:
        yield
    finally:
        _PRETENDED.reset(token)
