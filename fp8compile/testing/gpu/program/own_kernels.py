"""Handwritten Triton kernels of a function's author, launched directly or by a custom operator.

The reference runs the same kernel, one Triton program after the other. So a run checks the kernel's memory accesses,
whether the order of programs changes anything, and the code that Inductor generates around the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

__all__ = ["KNOWN", "implementation_on_gpu", "launched", "place_of"]

KNOWN = ("aten", "prims", "inductor")  # PyTorch's own namespaces; it defines prims as custom operators


def implementation_on_gpu(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The Python function that a GPU would run for an operator of ``torch.library.custom_op``; else None."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(op._schema.name) if op.namespace not in KNOWN else None
    functions = {} if found is None else found._backend_fns
    return functions.get("cuda", functions.get(None))


def _without_tuners(kernel: Any) -> Any:
    while hasattr(kernel, "configs") or hasattr(kernel, "values"):
        kernel = kernel.fn
    return kernel


def place_of(name: str, line: str) -> str | None:
    """Find the line whose text is ``line`` in the author's kernel ``name``; returns "file:number".

    None if no kernel has the name, or if not exactly one of its lines has the text.
    """
    for kernel in map(_without_tuners, kernel_side_table.id_to_kernel.values()):
        if kernel.__name__ == name:
            lines, first = inspect.getsourcelines(kernel.fn)
            same = [number for number, text in enumerate(lines, first) if text.strip() == line]
            path = kernel.fn.__code__.co_filename
            return f"{path.rpartition('/')[2]}:{same[0]}" if len(same) == 1 else None
    return None


def launched(
    *, kernel_idx: int, constant_args_idx: int, grid: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any],
    tensors_to_clone: Sequence[str], tma_descriptor_metadata: Mapping[str, Any], launch_kwargs: Sequence[str] = (),
) -> dict[str, Tensor]:  # fmt: skip
    """Compute ``torch.ops.higher_order.triton_kernel_wrapper_functional`` from its arguments.

    Call it while an `Interpreter` is active. An autotuned kernel runs in its first configuration here; in
    generated code it may run in others.

    Returns:
        The kernel's results: new tensors by the names of the arguments that the kernel writes to.

    Raises:
        NotImplementedError: The kernel takes a descriptor of ``triton.tools.experimental_descriptor``.
    """
    kernel: Any = kernel_side_table.get_kernel(kernel_idx)
    given = {**kernel_side_table.get_constant_args(constant_args_idx), **kwargs}
    given |= {name: given[name].clone() for name in tensors_to_clone}
    while hasattr(kernel, "configs") or hasattr(kernel, "values"):  # autotuned; with heuristics
        if hasattr(kernel, "configs"):
            given |= kernel.configs[0].kwargs
        else:
            given |= {name: value(given) for name, value in kernel.values.items()}
        kernel = kernel.fn
    passed = given | {name: _descriptor(given[name], made) for name, made in tma_descriptor_metadata.items()}
    kernel.run(grid=grid[0], warmup=False, **{name: passed[name] for name in kernel.arg_names})  # by the interpreter
    return {name: given[name] for name in tensors_to_clone}


def _descriptor(tensor: Tensor, made: tuple[str, tuple[Any, ...]]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    kind, given = made
    if kind != "stable":
        raise NotImplementedError(
            "run_gpu_program: a kernel uses a descriptor of triton.tools.experimental_descriptor, which is not "
            "supported. Create it with triton.tools.tensor_descriptor.TensorDescriptor.from_tensor."
        )
    return TensorDescriptor.from_tensor(tensor, list(given[0]))
