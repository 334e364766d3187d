"""One call that makes a PyTorch operator: schema, kernel, fake, decomposition, autograd, samples.

What it takes, and what each part is for:

    impl        Python, for CPU and CUDA alike; its annotations are the schema
    fake        shapes, dtypes and strides of the result, for tracing
    decompose   what Inductor sees in place of the op, so that it fuses; None: the op stays as it is
    backward    derivative; without one, a backward pass that reaches the op raises
    samples     inputs that the tests run the op on: an op without samples can't be registered
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fp8compile import _compat

__all__ = ["OPS", "Op", "decompositions", "register_op"]

Samples = Callable[[], Iterable[tuple[Any, ...]]]


@dataclass(frozen=True, kw_only=True)
class Op:
    """A registered operator, as `register_op` made it.

    Attributes:
        name: ``namespace::name``.
        overload: What to call, and what stands in graphs.
        impl: The eager kernel.
        decompose: What Inductor sees, or None.
        samples: Argument tuples for tests.
    """

    name: str
    overload: torch._ops.OpOverload
    impl: Callable
    decompose: Callable | None
    samples: Samples


OPS: dict[str, Op] = {}
LIBRARIES: dict[str, torch.library.Library] = {}  # a library that is collected takes its operators with it


def _library(namespace: str) -> torch.library.Library:
    if namespace not in LIBRARIES:
        LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return LIBRARIES[namespace]


def register_op(
    name: str,
    impl: Callable,
    *,
    fake: Callable,
    samples: Samples,
    decompose: Callable | None = None,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
) -> torch._ops.OpOverload:
    """Make an operator that torch.compile, Inductor and autograd know.

    Args:
        name: ``namespace::name``.
        impl: The kernel for all devices. Its annotated signature gives the schema; a quantizer or recipe may be an
            argument. It must not return an input or a view of one.
        fake: Same arguments; returns empty tensors like the result's.
        samples: Returns argument tuples that cover the op, for the tests.
        decompose: Same arguments; what Inductor compiles in place of the op.
        setup_context: ``(ctx, inputs, output)``; keeps what ``backward`` needs.
        backward: ``(ctx, *grads)``; a gradient or None for each argument.

    Returns:
        The operator.

    Raises:
        ValueError: The name has no namespace, or is taken.
    """
    namespace, _, op_name = name.partition("::")
    if not (namespace.isidentifier() and op_name.isidentifier()):
        raise ValueError(f"register_op: {name!r} is no operator name; write 'namespace::name'.")
    if name in OPS:
        raise ValueError(f"register_op: {name} is registered already; choose another name.")
    lib = _library(namespace)
    schema = torch.library.infer_schema(impl, mutates_args=())
    lib.define(op_name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl(op_name, _compat.without_autocast(impl), "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=lib)
    overload = getattr(getattr(torch.ops, namespace), op_name).default
    _compat.impl_autograd(lib, overload, setup_context, backward)
    if decompose is not None:
        _compat.register_decomposition(overload, decompose)
    OPS[name] = Op(name=name, overload=overload, impl=impl, decompose=decompose, samples=samples)
    return overload


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Every registered operator in terms of PyTorch's own, as ``ExportedProgram.run_decompositions`` takes it.

    What is left of a program then runs, and is saved and loaded, without this package.
    """
    return {op.overload: op.decompose or op.impl for op in OPS.values()}
