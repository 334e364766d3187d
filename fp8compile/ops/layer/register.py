"""Registers a product of a layer: one computation is the op's kernel and its decomposition.

    kernel          the computation in Phase.EAGER, step by step
    decomposition   the computation in the phase of compiled code: FORWARD, INFERENCE or BACKWARD

`LAYER_OPS` has every op that was registered so; flop formulas, reports and checkpoint policies read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.registry import Samples, register_op
from fp8compile.ops.sharding import Sharding
from fp8compile.quantizers import Gemm

__all__ = ["LAYER_OPS", "register_product"]

# each takes the operands of its GEMM first, as the layer holds them, and the recipe last
LAYER_OPS: dict[torch._ops.OpOverload, Gemm] = {}


def _in_phase(compute: Callable, phase: Callable[[], Phase]) -> Callable:
    """A function of all arguments of ``compute`` but the first, which is the phase."""

    def run(*args: Any) -> Any:
        return compute(phase(), *args)

    first, *others = inspect.signature(compute, eval_str=True).parameters.values()
    result = inspect.get_annotations(compute, eval_str=True)["return"]
    run.__signature__ = inspect.Signature(others, return_annotation=result)  # type: ignore[attr-defined]
    run.__annotations__ = {**{each.name: each.annotation for each in others}, "return": result}
    run.__name__, run.__module__ = compute.__name__, compute.__module__
    assert first.name == "phase"
    return run


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
    updates: tuple[str, ...] = (),
) -> torch._ops.OpOverload:
    """Make the op of one product of a family of layers.

    Args:
        name: Without namespace.
        gemm: Which of the layer's products it is.
        compute: ``(phase, *arguments)``; the annotations of the arguments are the schema.
        fake: Same arguments without the phase.
        samples: As `register_op` takes them.
        sharding: As `register_op` takes it; None if the op's tensors are one rank's.
        setup_context: As `register_op` takes it.
        backward: As `register_op` takes it; None for gradients, which have no derivative.
        updates: As `register_op` takes them.

    Returns:
        The operator.
    """
    op = register_op(
        f"fp8compile::{name}",
        _in_phase(compute, lambda: Phase.EAGER),
        fake=fake,
        setup_context=setup_context,
        backward=backward,
        decompose=_in_phase(compute, partial(Phase.compiled, gemm)),
        sharding=sharding,
        samples=samples,
        updates=updates,
    )
    LAYER_OPS[op] = gemm
    return op
