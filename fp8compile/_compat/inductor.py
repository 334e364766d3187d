"""Private interfaces of Inductor, and a fix for one bug."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fp8compile._compat.imports import when_imported
from fp8compile._compat.versions import TORCH_VERSION

__all__ = ["async_tp", "concatenated_buffers"]


def _share_constant_types() -> None:
    """Patch Inductor, so that generated code of a compiled region imports the classes of its constants.

    PyTorch (2.11 to 2.15) imports only the classes that the outermost graph names; a quantizer inside a region would
    raise a NameError.
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
    """Whether Inductor's async tensor parallelism is on, which fuses GEMMs with adjacent collectives."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and config._micro_pipeline_tp


def concatenated_buffers(parts: Sequence[Any], dim: int) -> Any:
    """Return Inductor IR that concatenates ``parts`` along ``dim``, and stores each part directly in the result."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if TORCH_VERSION >= (2, 13):
        return ir.ConcatKernel.create(parts, dim)
    # 2.11 reads the arguments of the node that is being lowered, which has to look like a concatenation
    node: Any = SimpleNamespace(args=([],))
    with V.graph.set_current_node(node):
        return ir.ConcatKernel.create(parts, dim)
