"""Rounding barrier: quantizers in compiled code read the values that eager mode would have stored.

Inductor keeps a fused bfloat16 value in float32 and drops its rounding. Viewing the bits as integers forces the
rounding; the `or` with 0 keeps Inductor from removing the pair of views, and costs no memory traffic on an H200.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.inductor import is_fusible, once_a_graph

__all__ = ["optimization_barrier", "rounded"]


def rounded(x: Tensor, *, apart: bool = False) -> Tensor:
    """Return ``x`` in float32, rounded to its own dtype even if the op that computes ``x`` is fused.

    ``apart`` selects a second barrier with the same result, so that compilers do not merge the casts of forward and
    backward. Merged casts would keep their FP8 data until the backward, which is one more copy of all activations and
    weights.
    """
    return _rounded(x, apart)


@once_a_graph  # the amax and the cast of a tensor share one barrier
def _rounded(x: Tensor, apart: bool) -> Tensor:
    if x.dtype == torch.float32:
        return (x.view(torch.int32) ^ 0).view(x.dtype) if apart else x
    bits = x.view(torch.int16)
    return (bits ^ 0 if apart else bits | 0).view(x.dtype).float()


def optimization_barrier(x: Tensor) -> Tensor:
    """Return ``x`` behind a barrier that changes no bits, for a call in the backward that reads ``x``.

    PyTorch's partitioner always saves what a call in the backward reads, even an activation that is a product of two
    saved tensors. With the barrier, it saves ``x`` only if that takes fewer bytes. A tensor that no pointwise code
    computes is returned without a barrier, which would copy it.
    """
    if not is_fusible(x):
        return x
    return (x.view(torch.int32 if x.dtype == torch.float32 else torch.int16) ^ 0).view(x.dtype)
