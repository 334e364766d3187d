"""Private interfaces of Inductor, and a fix for one bug."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fp8compile._compat.imports import when_imported
from fp8compile._compat.versions import TORCH_VERSION

__all__ = ["async_tp", "print_launch"]


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


@contextmanager
def _declared_writes(tensors: Mapping[str, Any], writes: Sequence[str]) -> Iterator[None]:
    """Context in which PyTorch is told what a kernel writes; its own analysis is wrong (docs/upstream.md)."""
    from torch._higher_order_ops import triton_kernel_wrap

    if TORCH_VERSION < (2, 13):
        with mock.patch.object(triton_kernel_wrap, "identify_mutated_tensors", return_value=list(writes)):
            yield
        return
    from torch._inductor.dependencies import ReadWrites, StarDep
    from torch.utils._ordered_set import OrderedSet

    found = triton_kernel_wrap.TensorAccesses(
        ReadWrites(
            reads=OrderedSet(StarDep(name) for name in tensors if name not in writes),
            writes=OrderedSet(map(StarDep, writes)),
            index_exprs=OrderedSet(),
        ),
        can_fuse_epilogue=False,
    )
    with mock.patch.object(triton_kernel_wrap, "identify_accessed_tensors", return_value=found):
        yield


def print_launch(
    kernel: Any,
    grids: Sequence[tuple[Any, ...]],
    tensors: Mapping[str, Any],
    others: Mapping[str, Any],
    writes: Sequence[str],
) -> None:
    """Add a launch of a Triton kernel to the graph that Inductor is lowering.

    Args:
        kernel: The kernel, under `triton.autotune`.
        grids: Numbers of programs along three axes for each configuration, SymPy expressions.
        tensors: Inductor's IR of the tensors among the arguments, by name.
        others: The other arguments by name: None, constants and SymPy expressions.
        writes: Names of the tensors that the kernel writes to.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
    from torch._inductor import lowering

    with _declared_writes(tensors, writes):
        lowering.lowerings[triton_kernel_wrapper_mutation](
            kernel_idx=kernel_side_table.add_kernel(kernel),
            constant_args_idx=kernel_side_table.add_constant_args(dict(others)),
            grid=list(grids),
            tma_descriptor_metadata={},
            kwargs=dict(tensors),
        )
