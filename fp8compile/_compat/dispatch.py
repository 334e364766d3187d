"""Private interfaces of PyTorch's dispatcher: lets our kernels run below the same dispatch keys as PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["as_kernel"]

ABOVE_KERNELS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
)


def as_kernel(impl: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``impl`` run like PyTorch's own kernels, below autocast and autograd.

    Rowwise `torch._scaled_mm` on a CPU is a float32 matmul, which autocast would turn into a bfloat16 matmul. A kernel
    that ends in a reshape would return a view, and autograd would forbid writes to the view, such as those of a
    ReLU(inplace=True) that follows.
    """

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(ABOVE_KERNELS):
            return impl(*args)

    return kernel
