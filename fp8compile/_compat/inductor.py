"""Inductor's private interfaces, a fix for one of its bugs, and cache keys of ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fp8compile._compat.imports import when_imported
from fp8compile._compat.versions import TORCH_VERSION

__all__ = ["async_tp", "concatenated_buffers", "rank_salt"]


def _share_constant_types() -> None:
    """Give a file of generated code the classes of constants that regions in it name.

    A call of an op with a quantizer names the quantizer's class. PyTorch (2.11 to 2.15) gives a file only the classes
    that its outermost graph names, so a call inside of a region raises a NameError when it runs.
    """
    from torch._inductor.graph import SubgraphLowering

    plain = SubgraphLowering.__init__

    @functools.wraps(plain)
    def with_types_of_parent(self: Any, parent: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, parent, *args, **kwargs)
        self.opaque_value_type_classes = parent.opaque_value_type_classes

    SubgraphLowering.__init__ = with_types_of_parent


when_imported("torch._inductor.graph", _share_constant_types)


def async_tp() -> bool:
    """Whether Inductor is asked to fuse products with the messages beside them (a private option to 2.15)."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and config._micro_pipeline_tp


def rank_salt() -> str:
    """Text that makes cache keys of different ranks differ; empty outside of torch.distributed.

    A rank's graph holds where its part of a tensor begins. The key of AOTAutograd's cache is made of the graph before
    DTensors are taken apart, which is the same on all ranks, and the ranks of one machine share a folder: on 2.13 a
    rank ran the graph of another one, with wrong numbers.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    return f"-{distributed.get_rank()}"


def concatenated_buffers(parts: Sequence[Any], dim: int) -> Any:
    """Inductor's IR of a concatenation along ``dim``, into which each tensor is stored directly."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if TORCH_VERSION >= (2, 13):
        return ir.ConcatKernel.create(parts, dim)
    # 2.11 asks that the node that is lowered is a concatenation, and reads no more of it where all parts are stored
    node: Any = SimpleNamespace(args=([],))
    with V.graph.set_current_node(node):
        return ir.ConcatKernel.create(parts, dim)
