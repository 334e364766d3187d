"""Which device code is made for: the tensors' own, unless a tool asks what another one would get.

Code for a GPU can be looked at on a machine without one, by tracing on the CPU. Whatever chooses by device (the GEMM,
its padding, an index) therefore asks here, and never the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

__all__ = ["Target", "pretend_target", "target_of"]


@dataclass(frozen=True)
class Target:
    """What there is to know of a device before code is made for it.

    Attributes:
        type: "cpu", "cuda" or another device type.
        capability: Compute capability of a GPU, such as (9, 0); (0, 0) for any other device.
        hip: Version of ROCm, whose GPUs are "cuda" to PyTorch and have capabilities like those of NVIDIA's; None for
            every other device.
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    hip: str | None = None


_PRETENDED: ContextVar[Target | None] = ContextVar("pretended target", default=None)


_made = cache(Target)  # one for each device: an eager call asks five times


def target_of(device: torch.device) -> Target:
    """The target of code that works on tensors of this device."""
    pretended = _PRETENDED.get()
    if pretended is not None:
        return pretended
    if device.type != "cuda":
        return _made(device.type)
    return _made(device.type, torch.cuda.get_device_capability(device), torch.version.hip)


@contextmanager
def pretend_target(target: Target) -> Iterator[None]:
    """While this runs, code is made as for this target, wherever the tensors are."""
    token = _PRETENDED.set(target)
    try:
        yield
    finally:
        _PRETENDED.reset(token)
