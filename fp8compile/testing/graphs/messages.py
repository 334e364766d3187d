"""Messages between ranks in a graph: nodes that send, with bytes by dtype.

PyTorch's collectives are recognized. `register_message` adds other operators that send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fp8compile._compat import is_unbacked

__all__ = ["COLLECTIVES", "bytes_by_dtype", "is_message", "register_message", "sent_bytes", "size_of", "tensors_in"]

COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"})
BytesByDtype = Mapping[torch.dtype, int]
REGISTERED: dict[torch._ops.OpOverload, Callable[[fx.Node], BytesByDtype]] = {}


def register_message(op: torch._ops.OpOverload, sent: Callable[[fx.Node], BytesByDtype]) -> None:
    """Make reports count an operator's calls as messages between ranks.

    Args:
        op: An operator that sends from rank to rank.
        sent: Maps a call's node to the bytes that the call sends, by dtype. Nodes have fake tensors in
            ``meta["val"]``.
    """
    REGISTERED[op] = sent


def is_message(node: fx.Node) -> bool:
    """Whether a node sends a message between ranks."""
    if node.target in REGISTERED:
        return True
    return getattr(node.target, "namespace", None) in COLLECTIVES and "wait" not in str(node.target)


def sent_bytes(node: fx.Node) -> BytesByDtype:
    """Bytes of a message by dtype; a coalesced message may have several dtypes."""
    if node.target in REGISTERED:
        return REGISTERED[node.target](node)
    return bytes_by_dtype(tensors_in([arg.meta.get("val") for arg in node.all_input_nodes]), node)


def bytes_by_dtype(given: Sequence[Tensor], node: fx.Node) -> BytesByDtype:
    """Return, by dtype, the bytes of a node's inputs ``given`` or of its results, whichever are more."""
    made = tensors_in(node.meta.get("val"))
    return {
        dtype: max(_bytes([t for t in tensors if t.dtype == dtype]) for tensors in (given, made))
        for dtype in dict.fromkeys(tensor.dtype for tensor in given or made)
    }


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def size_of(size: Any) -> int:
    """A size as a number: for a symbolic size its traced value, for a data-dependent size 0."""
    if is_unbacked(size):
        return 0
    found: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return found


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(size_of(tensor.numel()) * tensor.element_size() for tensor in tensors)
