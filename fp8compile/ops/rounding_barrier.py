"""The rounding barrier: what a quantizer sees is what eager mode would have stored.

Inductor keeps a fused bfloat16 value in float32 and drops its rounding, so an amax or a cast that is fused with the
norm before it would see other numbers than in eager mode. Looking at the value's bits as integers forces the
rounding; the `or` with 0 keeps Inductor from removing the pair of views. On generated H200 code it costs no byte and
no kernel.

There are two such operators for the same bits, because compilers merge only calls of one operator: see `rounded`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.inductor import once_a_graph

__all__ = ["rounded"]


def rounded(x: Tensor, *, apart: bool = False) -> Tensor:
    """``x`` in float32, rounded to its own dtype even if the op that made it was fused; for decompositions.

    Args:
        x: float32, bfloat16 or float16.
        apart: Whether to use the other operator, with the same bits, so that casts of forward and backward are not
            merged. The backward needs codes in another layout, which are as cheap to make again as to transpose; kept
            from the forward, they would hold all activations and weights in memory once more.
    """
    return _rounded(x, apart)


@once_a_graph  # the amax and the cast of a tensor both ask
def _rounded(x: Tensor, apart: bool) -> Tensor:
    if x.dtype == torch.float32:
        return (x.view(torch.int32) ^ 0).view(x.dtype) if apart else x
    bits = x.view(torch.int16)
    return (bits ^ 0 if apart else bits | 0).view(x.dtype).float()
