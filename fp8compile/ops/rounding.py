"""The rounding barrier: what a quantizer sees is what eager mode would have stored.

Inductor keeps a fused bfloat16 value in float32 and drops its rounding, so an amax or a cast that is fused with the
norm before it would see other numbers than in eager mode. Looking at the value's bits as integers forces the
rounding; the `or` with 0 keeps Inductor from removing the pair of views. On generated H200 code it costs no byte and
no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rounded"]


def rounded(x: Tensor) -> Tensor:
    """``x`` in float32, rounded to its own dtype also where the op that made it was fused (decompositions only)."""
    if x.dtype == torch.float32:
        return x
    return (x.view(torch.int16) | 0).view(x.dtype).float()
