"""Differences between PyTorch versions, measured on 2.11.0, 2.13.0 and 2.15.0.

constants of a graph     register_opaque_type(typ="value") up to 2.13, register_custom_class(typ="constant") in 2.15
group in a subclass      ProcessGroup as a tensor's attribute: not in 2.11, in 2.13 after registration, in 2.15 always
rowwise GEMM on a CPU    `torch._scaled_mm` takes a scale for each row from 2.13 on
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._library import opaque_object

__all__ = [
    "ADDCDIV_IS_EXACT",
    "asks_a_constant",
    "traces_no_constant",
    "KNOWN_VERSIONS",
    "has_groups",
    "OpaqueBase",
    "TORCH_VERSION",
    "all_gather_single",
    "allow_group_in_subclass",
    "as_region",
    "concatenated",
    "cpu_has_rowwise_gemm",
    "declare_grad_dtype",
    "default_reduce_dtype",
    "is_constant_type",
    "is_exporting",
    "reduce_scatter_single",
    "register_constant_type",
    "root_mesh",
    "strided_shard",
    "with_floats_pinned",
]

if TYPE_CHECKING:

    class OpaqueBase:
        """For type checkers only: stand-in for PyTorch's base class of constants, whose name differs by version."""

else:
    try:
        from torch._custom_class_base import CustomClassBase as OpaqueBase  # 2.15
    except ImportError:
        from torch._opaque_base import OpaqueBase  # to 2.13


KNOWN_VERSIONS = ((2, 11), (2, 13), (2, 15))  # versions on which the tests run
F = TypeVar("F", bound=Callable[..., Any])
GROUPS_ALLOWED: list[bool] = []  # not empty after PyTorch was told to allow process groups in subclasses
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


# whether compiled code on a GPU rounds the quotient in `torch.addcdiv` correctly; before 2.13 it is 2 ulp off
ADDCDIV_IS_EXACT = TORCH_VERSION >= (2, 13) and torch.version.hip is None


def register_constant_type(cls: type[Any]) -> None:
    """Register a class whose instances are constants to torch.compile, as quantizers are.

    Graphs compare instances by ``==`` and print instances by ``__fx_repr__``.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    by_name = getattr(opaque_object, "_OPAQUE_TYPES_BY_NAME", {})
    if name in by_name:
        # a notebook cell that runs again makes a new class of the same name, which replaces the old class
        by_name.pop(name)
        torch._C._unregister_opaque_type(name)  # type: ignore[attr-defined]  # in no stub
    if hasattr(opaque_object, "register_custom_class"):
        opaque_object.register_custom_class(cls, typ="constant")
    else:
        opaque_object.register_opaque_type(cls, typ="value")


def is_constant_type(cls: type[Any]) -> bool:
    """Whether the class was registered by `register_constant_type` (or PyTorch's own functions)."""
    ask = getattr(opaque_object, "is_custom_class", None) or opaque_object.is_opaque_type
    return ask(cls)


def as_region(function: Callable[..., Any], often: int) -> Callable[..., Any]:
    """Wrap a function in `torch.compiler.nested_compile_region`, which compiles it once for all calls in a graph.

    ``often`` is how many versions of the function, for different inputs, one graph may need. From PyTorch 2.13 on, a
    graph that needs more than ``often`` (at least 8) versions raises.
    """
    if TORCH_VERSION < (2, 13):
        return torch.compiler.nested_compile_region(function)
    return torch.compiler.nested_compile_region(function, max_reuse_entries=max(often, 8))


def with_floats_pinned(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled callable so that Dynamo treats floats as constants instead of symbols.

    A compiled region can't compare a symbolic float with 0.
    """

    @functools.wraps(call)
    def pinned(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(specialize_float=True):
            return call(*args, **kwargs)

    return pinned


def is_exporting() -> bool:
    """Whether `torch.export` is tracing; always False before PyTorch 2.13, where nothing tells."""
    return TORCH_VERSION >= (2, 13) and torch.compiler.is_exporting()


def all_gather_single(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """Call PyTorch's functional all-gather of one tensor, which PyTorch 2.13 renamed."""
    from torch.distributed import _functional_collectives as funcol

    return (getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor)(x, dim, group)


def reduce_scatter_single(x: torch.Tensor, reduction: str, dim: int, group: Any) -> torch.Tensor:
    """Call PyTorch's functional reduce-scatter of one tensor, which PyTorch 2.13 renamed."""
    from torch.distributed import _functional_collectives as funcol

    return (getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor)(x, reduction, dim, group)


def declare_grad_dtype(ctx: Any, dtype: torch.dtype, used: torch.dtype) -> None:
    """Let an all-gather op's backward receive gradients in ``dtype``; unrounded if ``dtype`` is wider than ``used``.

    From PyTorch 2.15 on, a float32 gradient of a bfloat16 weight is summed over ranks unrounded, as in FSDP2. Before,
    this function does nothing, and autograd rounds the gradient to the weight's dtype.

    Args:
        ctx: Context of the op, in its ``setup_context``.
        dtype: Dtype in which ranks sum gradients.
        used: Dtype of the op's result.
    """
    if TORCH_VERSION >= (2, 15) and ctx.needs_input_grad[0]:
        ctx.set_output_grad_dtype(None if dtype.itemsize > used.itemsize else dtype)


def default_reduce_dtype(own: torch.dtype, used: torch.dtype) -> torch.dtype:
    """Return the dtype in which FSDP2 sums gradients by default: ``own``, or before PyTorch 2.15 ``used``.

    ``own`` is the parameter's dtype, ``used`` its dtype in the forward.
    """
    return own if TORCH_VERSION >= (2, 15) else used


def allow_group_in_subclass() -> bool:
    """Let compiled code use tensor subclasses with a ProcessGroup attribute; return False on PyTorch 2.11."""
    if GROUPS_ALLOWED:
        return True
    if TORCH_VERSION < (2, 12):
        return False
    from torch.distributed import device_mesh

    if hasattr(device_mesh, "_register_distributed_opaque_types"):  # 2.13; PyTorch 2.15 does it at import
        device_mesh._register_distributed_opaque_types()
    GROUPS_ALLOWED.append(True)
    return True


# Dynamo calls this function instead of tracing it: tracing would warn of a cache, and guard the list that is written
allow_group_in_subclass._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_groups(mesh: Any) -> bool:
    """Whether a DeviceMesh has process groups; a mesh made only to compute placements has none."""
    return hasattr(mesh, "_dim_group_names")  # no public attribute tells; get_group raises without groups


def concatenated(first: Any, second: Any) -> Any:
    """Return the DeviceMesh with the dims of ``first`` and ``second``, which must be slices of one mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate([first, second])


def root_mesh(mesh: Any) -> Any:
    """Return the DeviceMesh that a mesh was sliced from; the mesh itself if it is not a slice."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, parts: int) -> Any:
    """Return the DTensor placement for a mesh dim that shards each of ``parts`` shards of ``dim`` again."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def cpu_has_rowwise_gemm() -> bool:
    """Whether `torch._scaled_mm` on a CPU takes a scale for each row."""
    return TORCH_VERSION >= (2, 13)


def traces_no_constant() -> bool:
    """Whether Dynamo of PyTorch 2.11 is tracing; it can't trace methods of constants such as quantizers."""
    return TORCH_VERSION < (2, 12) and torch.compiler.is_compiling()


def asks_a_constant(fn: F) -> F:
    """Decorator that lets traced code call ``fn``, which calls a method of a constant such as a quantizer.

    PyTorch 2.11 can't trace the method: there Dynamo calls ``fn`` and stores the result in the graph.
    """
    if TORCH_VERSION < (2, 12):
        fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn
