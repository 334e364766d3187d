"""Loads a wrapper, Inductor's Python code around kernels, and calls it without its device.

name in the wrapper        replaced by
async_compile              `StandIns.kernels`
extern_kernels             `StandIns.products`
empty_strided_DEVICE       `StandIns.empty`
a GPU's runtime            functions that do nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["LoadedWrapper", "StandIns"]


@dataclass(frozen=True)
class StandIns:
    """Replacements for what a wrapper uses of its device.

    Attributes:
        kernels: Replaces Inductor's ``AsyncCompile``.
        products: Replaces Inductor's ``extern_kernels``.
        empty: Replaces allocation on the device; takes sizes, strides and a dtype.
        device: Type of the device, "cuda" or "cpu".
    """

    kernels: Any
    products: Any
    empty: Callable[[Any, Any, torch.dtype], Tensor]
    device: str = "cuda"


class LoadedWrapper:
    """Wrapper that Inductor generated around kernels, with replacements for its device.

    Call the object with a list of arguments.

    Args:
        source: The Python file that Inductor generated.
        constants: Objects that the source refers to by name without defining them.
        stand_ins: The replacements.
    """

    def __init__(self, source: str, constants: Mapping[str, Any], stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._scope: dict[str, Any] = {"__name__": "generated", **constants}
        with self._runtime():
            exec(compile(source, "generated", "exec"), self._scope)
        self._scope["extern_kernels"] = stand_ins.products

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run the generated code and return its results; clears the list ``args``, to free arguments early."""
        with torch.no_grad(), self._runtime():
            return list(self._scope["call"](args))

    @contextmanager
    def _runtime(self) -> Iterator[None]:
        """Context in which functions of the device's runtime, which generated code calls, are replaced."""
        nothing: Callable[..., Any] = lambda *args, **kwargs: None  # noqa: E731
        answers = (
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (torch._C._dynamo.guards, f"_empty_strided_{self._stand_ins.device}", self._stand_ins.empty),
            (torch.cuda, "_DeviceGuard", lambda device: nullcontext()),
            (torch.cuda, "set_device", nothing),
            (torch.cuda, "synchronize", nothing),
        )
        with ExitStack() as stack:
            for owner, name, value in answers:
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
            kernels = self._stand_ins.kernels
            stack.enter_context(mock.patch("torch._inductor.async_compile.AsyncCompile", return_value=kernels))
            yield
