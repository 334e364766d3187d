"""fp8compile::checked_offsets: return the ends of groups unchanged, or raise if they are not valid.

The op checks when the graph runs, because sizes of groups are data. On a CPU it raises a ValueError. On a GPU it
asserts on the device, and the host does not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile._compat import OpOverload, assert_on_device
from fp8compile.ops.groups.padding import sizes_of_groups
from fp8compile.ops.registry import register_op

__all__ = ["checked_offsets"]

RULE = "offsets must be the end of each group: never negative or decreasing, and at most the rows of x"


def _kernel(offsets: Tensor, rows: int) -> Tensor:
    is_right = (sizes_of_groups(offsets) >= 0).all() & (offsets[-1:] <= rows).all()
    if offsets.device.type != "cpu":
        assert_on_device(is_right, f"grouped_linear: {RULE}.")
    elif not is_right:
        shown = ", ".join(map(str, offsets[:16].tolist())) + (", ..." if offsets.shape[0] > 16 else "")
        raise ValueError(f"grouped_linear: `offsets` are ({shown}), but x has {rows} rows; {RULE}.")
    return offsets.clone()


def _portable(offsets: Tensor, rows: int) -> Tensor:
    assert_on_device((sizes_of_groups(offsets) >= 0).all() & (offsets[-1:] <= rows).all(), f"grouped_linear: {RULE}.")
    return offsets.clone()


def _fake(offsets: Tensor, rows: int) -> Tensor:
    return torch.empty_like(offsets)


checked_offsets: OpOverload = register_op(
    "fp8compile::checked_offsets",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=None,
    portable=_portable,
    sharding=None,
)
