"""The linear layer on DTensors: one handler for the ops of all layers.

The handler takes this rank's shards of both operands (weights also as codes), quantizes them, gathers codes where the
GEMM needs more than the shard, multiplies, and leaves a sum over ranks as a partial sum.

The result has the placements that a plain linear layer gives, so PyTorch's plans work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.layout.cuts import axis_blocks, split_axes
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer import LAYER_OPS, delayed_scaling_state
from fp8compile.ops.layer.delayed_linear import check_delayed, delayed_linear
from fp8compile.ops.layer.fsdp_delayed_amaxes import fsdp_amax_carriers
from fp8compile.ops.layer.fsdp_gather_high_precision import reduced
from fp8compile.ops.layer.fsdp_rows import Rows, placed_cuts
from fp8compile.ops.layer.layer_args import LayerArgs, check_layer
from fp8compile.ops.layer.layer_ops import TAIL
from fp8compile.ops.layer.layer_sharding import OverGroup
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Operands, Phase
from fp8compile.ops.layer.output_and_gradients import multiply_parts
from fp8compile.ops.layer.quantize_over_ranks import part_amax
from fp8compile.parallel.dtensor_placements import check_one_mesh, part_of, placements_of, whole_of
from fp8compile.quantizers import DelayedScaling, Gemm, Recipe
from fp8compile.tensor import check_serves, has_codes

__all__ = ["HANDLERS", "check_on_mesh", "codes_of_shard", "rows_over_fsdp", "whole_state"]


@dataclass(frozen=True)
class _Right:
    """The right operand of a GEMM (weight or input): this rank's shard, perhaps its codes, and the result's width."""

    # This rank's part and its cuts. For a weight under graph_fsdp: this rank's rows of its tensor parallel part.
    part: Plain
    columns: int  # number of columns of the whole product
    # arguments of `Operands` that say where codes come from, if not from the part alone
    given: dict[str, Any] = field(default_factory=dict)


def codes_of_shard(gemm: Gemm, weight: Plain, recipe: Recipe) -> Quantized:
    """Return the codes that ``gemm`` reads of this rank's shard of a quantized weight.

    Raise a ValueError if the shard's scales don't have the shape that its blocks need.
    """
    function, quantized = gemm.name, weight.local
    assert has_codes(quantized), "the weight is quantized"
    check_serves(function, quantized, recipe)
    part, local = quantized.shape, quantized.set_of(gemm)
    sides = axis_blocks(part, weight.cuts, local.quantizer.block)
    whole = split_axes(part, weight.cuts, local.quantizer.block)
    shape = tuple(side.total if split else side.length for side, split in zip(sides, whole, strict=True))
    if tuple(local.scale.shape) != local.quantizer.scale_shape(shape):
        raise ValueError(
            f"{function}: the weight is a QuantizedTensor of shape {tuple(part)} with scales "
            f"{tuple(local.scale.shape)} on this rank, but with this sharding, blocks {local.quantizer.block} "
            f"require scales {local.quantizer.scale_shape(shape)}. Quantize the shard of each rank with "
            "fp8compile.quantize, passing group=, shard_dim= and sizes=."
        )
    codes, quantizer = one_a_byte(local.codes, local.quantizer) if weight.cuts else (local.codes, local.quantizer)
    return replace(local, codes=codes, quantizer=quantizer, layout=weight.layout, has_scales_of_whole=whole)


def _weight(gemm: Gemm, weight: DTensor, recipe: Recipe) -> _Right:
    """Make the right operand of ``gemm`` from a weight that is a DTensor of values or of codes."""
    part, columns = part_of(gemm.name, weight), weight.shape[gemm is GRAD_INPUT]
    if not has_codes(part.local):
        return _Right(part, columns)
    codes = codes_of_shard(gemm, part, recipe)
    return _Right(part, columns, {"weight": codes, "weight_in_turns": part.local.in_memory is not None})


def rows_over_fsdp(gemm: Gemm, tokens: DTensor, shard: Tensor, rows: Rows) -> _Right:
    """Make the right operand of ``gemm`` from a weight under graph_fsdp; the GEMM gathers its codes.

    Tensor parallelism shards the weight first; ``shard`` has this rank's rows of that shard. ``rows`` says which rows
    each rank has, and ``tokens`` is the left operand.
    """
    mesh = tokens.device_mesh
    cuts = placed_cuts(rows.placed, [mesh.get_group(index) for index in range(mesh.ndim)])
    part = Plain(shard.to(tokens.dtype), TensorLayout(cuts))
    shape = [sum(rows.sizes), shard.shape[1]]
    for cut in reversed(part.cuts):
        if cut is not None:
            shape[cut.dim] = cut.total
    return _Right(part, shape[gemm is GRAD_INPUT], {"fsdp_shards": rows})


def check_on_mesh(name: str, layer: LayerArgs) -> None:
    """Raise a TypeError if a layer with these arguments takes no DTensors; ``name`` names the op in the error."""
    if layer.offs is None and layer.known.codes is None and not isinstance(layer.sharding, OverGroup):
        return
    raise TypeError(
        f"{name}: DTensors are not supported with `offs`, FP8 data in `known`, or `sharding`, which describe the "
        "tensors of one rank. Pass plain tensors: .full_tensor(), or .to_local() of replicated ones."
    )


# ---------------------------------------------------------------------------------- products


def _product(op: OpOverload, gemm: Gemm, *args: Any) -> Any:
    """Run ``op``, a layer's op that computes ``gemm``, on DTensors; ``args`` are the op's arguments.

    Under graph_fsdp the weight in ``args`` is this rank's shard, a plain tensor.
    """
    layer = LayerArgs.of(*args[-TAIL:])
    left, other, *more = args[:-TAIL]
    rows, recipe, known, has_state = layer.sharding.fsdp_shards(), layer.recipe, layer.known, op is delayed_linear
    check_on_mesh(op.name(), layer)
    multiplier: Any
    multiplier, history = (more[4], more[3]) if has_state else (known.multiplier, None)
    if rows is None:
        names = (
            ("x", "weight", "bias") if gemm is OUTPUT else ("grad_output", "x" if gemm is GRAD_WEIGHT else "weight")
        )
        state = {"amax_history": history, "multiplier": multiplier} if has_state else {}
        check_one_mesh("linear" if gemm is OUTPUT else gemm.name, dict(zip(names, args, strict=False)) | state)
    if has_state:
        check_delayed(left, history, multiplier, recipe)
    check_layer(layer, gemm, has_state=has_state)
    multiplier = whole_state(multiplier)
    multiplier = snapshot(multiplier) if has_state else multiplier
    a = part_of(gemm.name, left)
    if gemm is GRAD_WEIGHT:
        right = _Right(part_of("grad_weight", other), other.shape[-1])
    else:
        right = _weight(gemm, other, recipe) if rows is None else rows_over_fsdp(gemm, left, other, rows)
        right.given.update(weight_amax=known.amax, outer_amax=whole_state(known.outer_amax))
    operands = Operands(recipe, Phase.of(gemm, a.local), multiplier, **right.given)
    if gemm is GRAD_WEIGHT:
        whole = _grad_weight(left, a, right, operands)
        return whole if rows is None else _reduced(whole, more[0], rows)
    bias = part_of(gemm.name, more[0]) if gemm is OUTPUT and more[0] is not None else None
    y = _of_tokens(gemm, left, a, right, operands, bias)
    return (y, *_beside(left, other, history, recipe, multiplier)) if has_state else y


def _of_tokens(
    gemm: Gemm, tokens: DTensor, a: Plain, right: _Right, operands: Operands, bias: Plain | None
) -> DTensor:
    """Compute the output (..., N) or grad_input (..., K) as a DTensor from tokens (..., features).

    ``a`` is this rank's shard of ``tokens``, and ``right`` the other operand.
    """
    product, mesh = multiply_parts(gemm, a, right.part, operands, bias), tokens.device_mesh
    rows: list[Any] = [None if cut is None else cut.dim for cut in product.cuts]
    placements = placements_of(product.plans, {"m": rows, "n": [tokens.ndim - 1] * mesh.ndim})
    local = product.local.view(*product.shape[:-1], product.local.shape[1])
    return whole_of(local, mesh, placements, (*tokens.shape[:-1], right.columns))


def _grad_weight(grad_output: DTensor, a: Plain, right: _Right, operands: Operands) -> DTensor:
    product, mesh = multiply_parts(GRAD_WEIGHT, a, right.part, operands), grad_output.device_mesh
    placements = placements_of(product.plans, {"m": [0] * mesh.ndim, "n": [1] * mesh.ndim})
    return whole_of(product.local, mesh, placements, (grad_output.shape[-1], right.columns))


# ---------------------------------------------------------------------------------- beside products


def _amax_over_ranks(tensor: DTensor, quantizer: DelayedScaling | None, like: Tensor) -> Tensor:
    """Return the amax of the whole tensor, shape (), the same on every rank; 0 if ``quantizer`` is None.

    ``like`` is a tensor on the device of the result.
    """
    return like.new_zeros(()) if quantizer is None else part_amax(part_of("linear", tensor), quantizer).view(())


def _beside(x: DTensor, weight: Any, history: Any, recipe: Recipe, used: Tensor) -> tuple[Tensor, ...]:
    """Return what a delayed scaling layer returns beside its output: multipliers (1 / scale), amaxes of x and weight.

    The amaxes cover the whole tensors. Under graph_fsdp, where ``history`` is None, the weight's amax covers this
    rank's rows, and the backward reduces it over ranks.
    """
    (for_x, for_weight, _), mesh = recipe.delayed(), x.device_mesh
    if history is None:
        return used, _amax_over_ranks(x, for_x, used), delayed_scaling_state.amax_of(weight.to(x.dtype), for_weight)
    if for_weight is not None and has_codes(_compat.local_itself(weight)):
        whole: Any = whole_state(history)
        of_weight = delayed_scaling_state.kept_amax(whole)
    else:
        of_weight = _amax_over_ranks(weight, for_weight, used)
    found = used, _amax_over_ranks(x, for_x, used), of_weight
    return tuple(whole_of(each, mesh, [Replicate()] * mesh.ndim, each.shape) for each in found)


def whole_state(multiplier: Tensor | None) -> Tensor | None:
    """Unwrap a replicated DTensor, such as delayed scaling's multipliers (1 / scale).

    A plain tensor or None is returned unchanged. Raise a ValueError if the DTensor is sharded.
    """
    if not isinstance(multiplier, DTensor):
        return multiplier
    part = part_of("linear", multiplier)
    if any(part.cuts):
        raise ValueError(
            f"linear: the multiplier of the state has placements {multiplier.placements}; it must be replicated on "
            "all ranks, Replicate()."
        )
    return part.local


def _scatter_sum(x: DTensor, dim: int, recipe: Recipe) -> DTensor:
    return x.redistribute(placements=[Shard(dim) if p.is_partial() else p for p in x.placements])


def _reduced(grad_weight: DTensor, dtype: torch.dtype, rows: Rows) -> Tensor:
    """Reduce a weight's gradient over graph_fsdp's ranks; return this rank's rows, in ``dtype``.

    ``rows`` says which rows of a tensor parallel shard each rank has.
    """
    own = [Replicate() if cut is None else Shard(cut.dim) for cut in placed_cuts(rows.placed)]
    return reduced(grad_weight.redistribute(placements=own).to_local(), dtype, rows).contiguous()


def _fsdp_amax_carriers(origin: DTensor, amax_history: Tensor, multiplier: Tensor, recipe: Recipe) -> Sequence[Tensor]:
    return fsdp_amax_carriers(multiplier, amax_history, multiplier, recipe)  # the op never reads its first argument


# by the name of an op; `fp8compile.monitor.on_dtensors` adds its ops
HANDLERS: dict[str, Callable[..., Any]] = {
    **{op.name(): partial(_product, op, gemm) for op, gemm in LAYER_OPS.items()},
    "fp8compile::fsdp_amax_carriers": _fsdp_amax_carriers,
    "fp8compile::scatter_sum": _scatter_sum,
}
