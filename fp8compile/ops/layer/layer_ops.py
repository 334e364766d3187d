"""The ops of linear layers: one op per GEMM. Everything else about a layer is an argument (`LayerArgs`).

    linear       the output of a linear layer
    grad_input   the gradient of the input of a linear layer
    grad_weight  the gradient of the weight of a linear layer

The arguments are operands first, then those that all ops share:

    linear         (x, weight, bias, offs, known, sizes, sharding, recipe)
    grad_input     (grad_output, weight, offs, known, sizes, sharding, recipe)
    grad_weight    (grad_output, x, weight_dtype, offs, known, sizes, sharding, recipe)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.ops.layer import output_and_gradients as gemms
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_args import LayerArgs, check_layer
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Phase
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import Gemm

__all__ = [
    "COMPUTE",
    "TAIL",
    "empty_output",
    "grad_input",
    "grad_weight",
    "gradients",
    "keep_operands",
    "linear",
    "register_layer_op",
]

COMPUTE: dict[OpOverload, Callable[..., Any]] = {}  # of an op, from the phase, its operands, and `LayerArgs`


# the last arguments of all ops
TAIL_PARAMETERS = inspect.signature(LayerArgs.of, eval_str=True).parameters.values()
TAIL = len(TAIL_PARAMETERS)


def _sign(kernel: Any, name: str, compute: Callable[..., Any]) -> None:
    """Give a kernel the signature of ``compute``, as `register_layer_op` says; it is the schema of the op."""
    computed = inspect.signature(compute, eval_str=True)
    operands = list(computed.parameters.values())[1 : list(computed.parameters).index("args")]
    taken = [each.replace(kind=each.POSITIONAL_OR_KEYWORD) for each in (*operands, *TAIL_PARAMETERS)]
    kernel.__name__, kernel.__signature__ = name, computed.replace(parameters=taken)
    kernel.__annotations__ = {each.name: each.annotation for each in taken} | {"return": computed.return_annotation}


def register_layer_op(name: str, gemm: Gemm, compute: Callable[..., Any], **others: Any) -> OpOverload:
    """Register the op ``name``; ``compute`` takes the phase, the operands, and ``args``, which are `LayerArgs`."""

    def kernel(*args: Any) -> Any:
        return compute(Phase.EAGER, *args[:-TAIL], LayerArgs.of(*args[-TAIL:]))

    def decompose(*args: Any) -> Any:
        return compute(Phase.compiled(gemm), *args[:-TAIL], LayerArgs.of(*args[-TAIL:]))

    _sign(kernel, name, compute)
    # `fp8compile.parallel.dtensor_layer` and `fp8compile.monitor.on_dtensors` handle DTensors
    op = register_op(f"fp8compile::{name}", kernel, decompose=decompose, sharding=None, **others)
    COMPUTE[op] = compute
    return op


# ---------------------------------------------------------------------------------- gradients


def _empty_grad_input(grad_output: Tensor, weight: Tensor, *tail: Any) -> Tensor:
    check_layer(args := LayerArgs.of(*tail), GRAD_INPUT)
    sharding = args.sharding
    tokens = sharding.tokens(grad_output.shape[:-1], args.sizes, all_ranks=not sharding.shards_out_features())
    return grad_output.new_empty((*tokens, weight.shape[-1]))


grad_input: OpOverload = register_layer_op(
    "grad_input",
    GRAD_INPUT,
    gemms.grad_input,
    fake=_empty_grad_input,
    backward=None,
)


def _empty_grad_weight(grad_output: Tensor, x: Tensor, dtype: torch.dtype, *tail: Any) -> Tensor:
    check_layer(args := LayerArgs.of(*tail), GRAD_WEIGHT)
    return args.sharding.empty_grad_weight(grad_output, x.shape[-1], dtype, args.offs)


grad_weight: OpOverload = register_layer_op(
    "grad_weight",
    GRAD_WEIGHT,
    gemms.grad_weight,
    fake=_empty_grad_weight,
    backward=None,
)


def keep_operands(ctx: Any, inputs: Sequence[Any], *others: Tensor | None) -> None:
    """Save what the gradients read: of x and weight those that a gradient needs, offs, what is known, and ``others``.

    ``inputs`` are the arguments of an op for the output: x, weight and bias first, those of `LayerArgs` last.
    """
    x, weight, *_ = inputs
    offs, known, *ctx.tail = inputs[-TAIL:]
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.placements, ctx.dtype, ctx.num_others = _compat.placement_of(x), weight.dtype, len(others)
    for_grad_input = Known.last_set(known) if known and needs_x else ()
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offs, *others, *for_grad_input)


def gradients(
    ctx: Any, grad_output: Tensor, saved: Sequence[Any], multiplier: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight and bias that are needed, from what `keep_operands` saved.

    ``multiplier`` are the multipliers (1 / scale) that the forward used, for delayed scaling.
    """
    x, weight, offs, *rest = saved
    for_grad_input, for_grad_weight = rest[ctx.num_others :], []
    if multiplier is not None:
        for_grad_input = [*Known(*for_grad_input)._replace(multiplier=multiplier)]
        for_grad_weight = [*Known(multiplier=multiplier)]
    sizes, sharding, recipe = ctx.tail
    recipe = gemms.for_gradients_of(recipe, x=weight is not None, weight=x is not None)
    tail = sizes, sharding, recipe
    of_x = of_weight = of_bias = None
    if weight is not None:
        of_x = grad_input(grad_output, weight, offs, for_grad_input, *tail)
    if x is not None:
        of_weight = grad_weight(grad_output, x, ctx.dtype, offs, for_grad_weight, *tail)
    if ctx.needs_input_grad[2]:
        of_bias = _compat.unwrapped(sharding).grad_bias(grad_output, offs, recipe)
    return _compat.scattered_like(of_x, ctx.placements), of_weight, of_bias


# ---------------------------------------------------------------------------------- the output


def empty_output(x: Tensor, weight: Tensor, args: LayerArgs) -> Tensor:
    """Make an uninitialized tensor like the output."""
    sharding = args.sharding
    tokens = sharding.tokens(x.shape[:-1], args.sizes, all_ranks=sharding.shards_out_features())
    return x.new_empty((*tokens, sharding.out_features(weight.shape, args.offs)))


def _empty_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *tail: Any) -> Tensor:
    check_layer(args := LayerArgs.of(*tail), OUTPUT)
    return empty_output(x, weight, args)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    return *gradients(ctx, grad_output, ctx.saved_tensors), *(None,) * TAIL


def _prepare(needs_input_grad: Sequence[bool], args: Sequence[Any]) -> Sequence[Any]:
    """Raise if the weight's codes are out of date; with groups, drop a frozen weight's quantizers for grad_weight."""
    *others, offs, known, sizes, sharding, recipe = args
    if known and known[0] is not None:
        gemms.check_unwritten(args[1])
    if offs is None:  # layers without groups make these codes in the backward
        return args
    return *others, offs, known, sizes, sharding, gemms.for_trained_weight(recipe, is_trained=needs_input_grad[1])


linear: OpOverload = register_layer_op(
    "linear",
    OUTPUT,
    gemms.output,
    fake=_empty_linear,
    setup_context=lambda ctx, inputs, output: keep_operands(ctx, inputs),
    backward=_backward,
    prepare=_prepare,
)
