"""Collectives that quantization needs, as nodes of the graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["all_reduce_amax"]


def all_reduce_amax(amax: Tensor, group: ProcessGroup | str) -> Tensor:
    """The largest amax over the ranks of a group; NaN where any rank has one.

    A float maximum of gloo loses the NaN of another rank. The bits of numbers that are not negative order like the
    numbers, with NaN on top, so the maximum is taken of them, as integers.

    Args:
        amax: Any shape, float32, not negative or NaN.
        group: The ranks, or the name of their group.

    Returns:
        The same shape, float32.
    """
    from torch.distributed import _functional_collectives as funcol

    bits = funcol.all_reduce(amax.view(torch.int32), "max", group)
    return funcol.wait_tensor(bits).view(torch.float32)
