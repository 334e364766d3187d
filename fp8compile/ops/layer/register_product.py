"""Registers a product of a layer: one computation is the op's kernel and its decomposition.

    kernel          the computation in Phase.EAGER, step by step
    decomposition   the computation in the phase of compiled code: FORWARD, INFERENCE or BACKWARD

`LAYER_OPS` has every op that was registered so; flop formulas, reports and checkpoint policies read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import torch

from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.registry import Samples, register_op
from fp8compile.ops.sharding import Sharding
from fp8compile.quantizers import Gemm

__all__ = ["LAYER_OPS", "register_product"]

# each takes the operands of its GEMM first, as the layer holds them, and the recipe last
LAYER_OPS: dict[torch._ops.OpOverload, Gemm] = {}


def _loose(function: Callable, *given: Callable[[], Any]) -> Callable:
    """A function of loose arguments, as an op's schema has them.

    Args:
        function: Its first arguments are ``given``; an argument that is a NamedTuple stands for its fields.
        given: Called at each call.
    """
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[len(given) :]
    fields = [getattr(each.annotation, "_fields", None) for each in parameters]
    is_loose = not any(fields)

    def run(*args: Any) -> Any:
        if is_loose:
            return function(*(each() for each in given), *args)
        loose = iter(args)
        packed = [
            next(loose) if names is None else each.annotation(*(next(loose) for _ in names))
            for each, names in zip(parameters, fields, strict=True)
        ]
        return function(*(each() for each in given), *packed)

    others: list[inspect.Parameter] = []
    for each, names in zip(parameters, fields, strict=True):
        hints = {each.name: each.annotation} if names is None else get_type_hints(each.annotation)
        others += [inspect.Parameter(name, each.kind, annotation=hint) for name, hint in hints.items()]
    result = inspect.get_annotations(function, eval_str=True)["return"]
    run.__signature__ = inspect.Signature(others, return_annotation=result)  # type: ignore[attr-defined]
    run.__annotations__ = {**{each.name: each.annotation for each in others}, "return": result}
    run.__name__, run.__module__ = function.__name__, function.__module__
    return run


def _loose_fake(fake: Callable) -> Callable:
    hints = inspect.get_annotations(fake, eval_str=True).values()
    return _loose(fake) if any(hasattr(each, "_fields") for each in hints) else fake


def register_product(
    name: str,
    gemm: Gemm,
    compute: Callable,
    *,
    fake: Callable,
    samples: Samples,
    sharding: Sharding | None = None,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
    prepare: Callable | None = None,
    updates: tuple[str, ...] = (),
) -> torch._ops.OpOverload:
    """Make the op of one product of a family of layers.

    Args:
        name: Without namespace.
        gemm: Which of the layer's products it is.
        compute: ``(phase, *arguments)``; the annotations of the arguments are the schema. A NamedTuple stands for its
            fields: sizes may be symbols, and a constant that traced code makes is a stand-in.
        fake: Same arguments without the phase.
        samples: As `register_op` takes them.
        sharding: As `register_op` takes it; None if the op's tensors are one rank's.
        setup_context: As `register_op` takes it.
        backward: As `register_op` takes it; None for gradients, which have no derivative.
        prepare: As `register_op` takes it.
        updates: As `register_op` takes them.

    Returns:
        The operator.
    """
    op = register_op(
        f"fp8compile::{name}",
        _loose(compute, lambda: Phase.EAGER),
        fake=_loose_fake(fake),
        setup_context=setup_context,
        backward=backward,
        prepare=prepare,
        decompose=_loose(compute, partial(Phase.compiled, gemm)),
        sharding=sharding,
        samples=samples,
        updates=updates,
    )
    LAYER_OPS[op] = gemm
    return op
