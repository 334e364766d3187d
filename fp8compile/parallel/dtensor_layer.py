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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8compile import _compat
from fp8compile.layout.cuts import Sharding, axis_blocks, split_axes
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.ops.inductor_hints import snapshot
from fp8compile.ops.layer import LAYER_OPS, OPS_OF_LAYERS, delayed_scaling_state
from fp8compile.ops.layer.delayed_scaling_placements import Delayed, DelayedForGradient
from fp8compile.ops.layer.fsdp_delayed_amaxes import fsdp_tokens
from fp8compile.ops.layer.fsdp_gather_high_precision import reduced
from fp8compile.ops.layer.fsdp_rows import Rows, placed_cuts
from fp8compile.ops.layer.kept_input import keep_input, kept_input_as_quantized, packed_while_kept
from fp8compile.ops.layer.multiply_over_ranks import multiply_parts
from fp8compile.ops.layer.operands import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, STEPS, Operands, Phase
from fp8compile.ops.layer.placements import (
    RowsOverFsdpBase,
    RowsOverFsdpForGradInput,
    RowsOverFsdpForGradWeight,
    SharedScale,
    Whole,
)
from fp8compile.ops.layer.quantize_over_ranks import part_amax
from fp8compile.ops.layer.register_layer import LayerOp
from fp8compile.ops.layer.statistics.observe import OBSERVE_OPS, ObserveOp
from fp8compile.ops.layer.statistics.pieces import Seen, counted
from fp8compile.parallel.dtensor_placements import check_one_mesh, part_of, placements_of, whole_of
from fp8compile.quantizers import DelayedScaling, Gemm, Quantizer, Recipe
from fp8compile.tensor import check_serves, codes_seen, has_codes

__all__ = ["HANDLERS"]

OVER_FSDP = RowsOverFsdpBase, RowsOverFsdpForGradInput, RowsOverFsdpForGradWeight
ON_MESHES = Whole, SharedScale, Delayed, DelayedForGradient, *OVER_FSDP  # other placements take no DTensors


@dataclass(frozen=True)
class _Right:
    """The right operand of a GEMM (weight or input): this rank's shard, perhaps its codes, and the result's width."""

    # This rank's part and its cuts. For a weight under graph_fsdp: this rank's rows of its tensor parallel part.
    part: Plain
    columns: int  # number of columns of the whole product
    # arguments of `Operands` that say where codes come from, if not from the part alone
    given: dict[str, Any] = field(default_factory=dict)


def _codes_of(gemm: Gemm, weight: Plain, recipe: Recipe) -> Quantized:
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
            f"{function}: weight has a QuantizedTensor of shape {tuple(part)} with scales "
            f"{tuple(local.scale.shape)} on this rank; cut like this, blocks {local.quantizer.block} have scales "
            f"{local.quantizer.scale_shape(shape)}. Quantize each rank's part by fp8compile.quantize with group=, "
            "shard_dim= and sizes=."
        )
    codes, quantizer = one_a_byte(local.codes, local.quantizer) if weight.cuts else (local.codes, local.quantizer)
    return replace(local, codes=codes, quantizer=quantizer, layout=weight.layout, has_scales_of_whole=whole)


def _weight(gemm: Gemm, weight: DTensor, recipe: Recipe) -> _Right:
    """Make the right operand of ``gemm`` from a weight that is a DTensor of values or of codes."""
    part, columns = part_of(gemm.name, weight), weight.shape[gemm is GRAD_INPUT]
    if not has_codes(part.local):
        return _Right(part, columns)
    codes = _codes_of(gemm, part, recipe)
    return _Right(part, columns, {"weight": codes, "weight_in_turns": part.local.in_memory is not None})


def _rows(gemm: Gemm, tokens: DTensor, shard: Tensor, place: Any) -> _Right:
    """Make the right operand of ``gemm`` from a weight under graph_fsdp; the GEMM gathers its codes.

    Tensor parallelism shards the weight first; ``shard`` has this rank's rows of that shard. ``place`` says which rows
    each rank has, and ``tokens`` is the left operand.
    """
    mesh = tokens.device_mesh
    cuts = placed_cuts(place.rows.placed, [mesh.get_group(index) for index in range(mesh.ndim)])
    part = Plain(shard.to(tokens.dtype), TensorLayout(cuts))
    shape = [sum(place.rows.sizes), shard.shape[1]]
    for cut in reversed(part.cuts):
        if cut is not None:
            shape[cut.dim] = cut.total
    return _Right(part, shape[gemm is GRAD_INPUT], {"weight_amax": place.amax, "rows": place.rows})


def _kept(codes: DTensor, scale: DTensor, outer_scale: DTensor, recipe: Recipe, rows: int) -> _Right:
    """Make grad_weight's right operand, the input, from the codes and scales that the forward kept.

    A byte holds two codes. ``rows`` is the number of rows of this rank's shard of grad_output.
    """
    packed = part_of("grad_weight", codes)
    quantizer: Any = recipe.quantizer_read(GRAD_WEIGHT.b)
    dim = packed_while_kept(packed.layout, quantizer) % codes.ndim
    cuts = tuple(
        replace(cut, sizes=tuple(2 * size for size in cut.sizes)) if cut is not None and cut.dim == dim else cut
        for cut in packed.cuts
    )
    kept = packed.local, *(_compat.local_itself(each) for each in (scale, outer_scale))
    x = kept_input_as_quantized(kept, quantizer, TensorLayout(cuts), rows)
    return _Right(Plain(x.codes, x.layout), codes.shape[-1] * (1 + (dim == codes.ndim - 1)), {"input": x})


# ---------------------------------------------------------------------------------- products


def _product(op: LayerOp, gemm: Gemm, *args: Any) -> Any:
    """Run ``op``, a layer's op that computes ``gemm``, on DTensors; ``args`` are the op's arguments.

    Under graph_fsdp the weight in ``args`` is this rank's shard, a plain tensor.
    """
    split: Any = op.split(args)
    tensors, _, place, recipe = split
    left, over_fsdp = tensors[0], isinstance(place, OVER_FSDP)
    if not over_fsdp:
        names = {name: getattr(place, name) for name in place.updates}
        check_one_mesh("linear" if gemm is OUTPUT else gemm.name, dict(zip(op.names, tensors, strict=True)) | names)
    if gemm is OUTPUT:
        place.check(left, recipe)
    multiplier: Any = _whole_state(place.multiplier if place.has_state else place.given().get("multiplier"))
    multiplier = snapshot(multiplier) if place.has_state else multiplier
    a = part_of(gemm.name, left)
    if op.kind == "grad_weight":
        right = _Right(part_of("grad_weight", tensors[1]), tensors[1].shape[-1])
    elif op.kind == "grad_weight_of_codes":
        codes, scale, outer_scale = tensors[1:]
        right = _kept(codes, scale, outer_scale, recipe, a.local.shape[0])
    else:
        right = _rows(gemm, left, tensors[1], place) if over_fsdp else _weight(gemm, tensors[1], recipe)
        if (shared := place.given().get("outer_amax")) is not None:
            right.given["outer_amax"] = _whole_state(shared)
    operands = Operands(recipe, Phase.of(gemm, a.local), multiplier, **right.given)
    if gemm is GRAD_WEIGHT:
        whole = _grad_weight(left, a, right, operands)
        return _reduced(whole, place.dtype, place.rows) if over_fsdp else whole
    bias = part_of(gemm.name, tensors[2]) if gemm is OUTPUT and tensors[2] is not None else None
    y = _of_tokens(gemm, left, a, right, operands, bias)
    return (y, *_beside(left, tensors[1], place, recipe, multiplier)) if place.has_state else y


def _of_tokens(
    gemm: Gemm, tokens: DTensor, a: Plain, right: _Right, operands: Operands, bias: Plain | None
) -> DTensor:
    """Compute the output (..., N) or grad_input (..., K) as a DTensor from tokens (..., features).

    ``a`` is this rank's shard of ``tokens``, and ``right`` the other operand.
    """
    product, mesh = multiply_parts(gemm, a, right.part, operands, bias), tokens.device_mesh
    rows: list[Any] = [None if cut is None else cut.dim for cut in product.cuts]
    placements = placements_of(product.steps, {"m": rows, "n": [tokens.ndim - 1] * mesh.ndim})
    local = product.local.view(*product.shape[:-1], product.local.shape[1])
    return whole_of(local, mesh, placements, (*tokens.shape[:-1], right.columns))


def _grad_weight(grad_output: DTensor, a: Plain, right: _Right, operands: Operands) -> DTensor:
    product, mesh = multiply_parts(GRAD_WEIGHT, a, right.part, operands), grad_output.device_mesh
    placements = placements_of(product.steps, {"m": [0] * mesh.ndim, "n": [1] * mesh.ndim})
    return whole_of(product.local, mesh, placements, (grad_output.shape[-1], right.columns))


def _kept_input(x: DTensor, quantizer: Quantizer) -> tuple[DTensor, DTensor, DTensor]:
    """Quantize the input for grad_weight; return codes, scales and outer scales as DTensors.

    Codes, two per byte, are sharded as the input. Scales and outer scales are replicated.
    """
    part, mesh = part_of("kept_input", x), x.device_mesh
    codes, *scales = keep_input(part, quantizer, STEPS[Phase.EAGER])
    shape, placements = list(x.shape), [Replicate() if p.is_partial() else p for p in x.placements]
    shape[packed_while_kept(part.layout, quantizer)] //= 2
    scale, outer_scale = (whole_of(each, mesh, [Replicate()] * mesh.ndim, each.shape) for each in scales)
    return whole_of(codes, mesh, placements, shape), scale, outer_scale


# ---------------------------------------------------------------------------------- statistics


def _counts(cuts: Sharding, mesh: DeviceMesh) -> bool:
    """Whether this rank counts its elements in statistics; of ranks with the same elements, only the first does.

    ``cuts`` says how each dim of ``mesh`` shards the tensor.
    """
    return all(cut is not None or mesh.get_local_rank(index) == 0 for index, cut in enumerate(cuts))


def _weight_seen(part: Plain, recipe: Recipe, *, counts: bool) -> Seen:
    if not has_codes(part.local):
        return Seen(part, counts)
    read = [gemm for gemm in (OUTPUT, GRAD_INPUT) if gemm.b in codes_seen(part.local, recipe).codes]
    return Seen(None, counts, {gemm.b: _codes_of(gemm, part, recipe) for gemm in read})


def _observed(op: ObserveOp, *args: Any) -> Any:
    """Run a layer's statistics op on DTensors; ``args`` are the op's arguments.

    Totals are plain tensors, because they cover only this rank's elements.
    """
    (first, x, weight, *_), ends, place, _, later, names, recipe = op.split(args)
    tokens, mesh = first if op.gradient else x, args[0].device_mesh
    gemm, multiplier = GRAD_INPUT if op.gradient else OUTPUT, _whole_state(place.given().get("multiplier"))
    observed = {"grad_output": first if op.gradient else None, "input": x}
    parts = {name: part_of("linear", tensor) for name, tensor in observed.items() if tensor is not None}
    seen = {name: Seen(part, _counts(part.cuts, mesh)) for name, part in parts.items()}
    phase = Phase.of(gemm, next(iter(parts.values())).local)
    more: dict[str, Any] = {}
    if weight is not None and isinstance(place, OVER_FSDP):
        right = _rows(gemm, tokens, weight, place)
        more = right.given
        seen["weight"] = Seen(right.part, _counts(right.part.cuts, mesh))
    elif weight is not None:
        part = part_of("linear", weight)
        if not (op.gradient and has_codes(part.local)):  # the forward has counted the weight's codes
            seen["weight"] = _weight_seen(part, recipe, counts=_counts(part.cuts, mesh))
    is_here = partial(op.is_here, later=later)
    found = counted(seen, Operands(recipe, phase, multiplier, **more), names, is_here)
    if op.gradient:
        return op.results(ends, names, parts["grad_output"].local, found, phase)
    y = args[0]
    local, rows = op.results(ends, names, _compat.local_itself(y), found, phase)
    return whole_of(local, mesh, y.placements, y.shape), rows


# ---------------------------------------------------------------------------------- beside products


def _amax_over_ranks(tensor: DTensor, quantizer: DelayedScaling | None, like: Tensor) -> Tensor:
    """Return the amax of the whole tensor, shape (), the same on every rank; 0 if ``quantizer`` is None.

    ``like`` is a tensor on the device of the result.
    """
    return like.new_zeros(()) if quantizer is None else part_amax(part_of("linear", tensor), quantizer).view(())


def _beside(x: DTensor, weight: Any, place: Any, recipe: Recipe, used: Tensor) -> tuple[Tensor, ...]:
    """Return what a delayed scaling layer returns beside its output: multipliers (1 / scale), amaxes of x and weight.

    The amaxes cover the whole tensors. Under graph_fsdp the weight's amax covers this rank's rows, and the backward
    reduces it over ranks.
    """
    (for_x, for_weight, _), mesh = recipe.delayed(), x.device_mesh
    if isinstance(place, OVER_FSDP):
        return used, _amax_over_ranks(x, for_x, used), delayed_scaling_state.amax_of(weight.to(x.dtype), for_weight)
    if for_weight is not None and has_codes(_compat.local_itself(weight)):
        history: Any = _whole_state(place.amax_history)
        of_weight = delayed_scaling_state.kept_amax(history)
    else:
        of_weight = _amax_over_ranks(weight, for_weight, used)
    found = used, _amax_over_ranks(x, for_x, used), of_weight
    return tuple(whole_of(each, mesh, [Replicate()] * mesh.ndim, each.shape) for each in found)


def _whole_state(multiplier: Tensor | None) -> Tensor | None:
    """Unwrap a replicated DTensor, such as delayed scaling's multipliers (1 / scale).

    A plain tensor or None is returned unchanged. Raise a ValueError if the DTensor is sharded.
    """
    if not isinstance(multiplier, DTensor):
        return multiplier
    part = part_of("linear", multiplier)
    if any(part.cuts):
        raise ValueError(
            f"linear: the multiplier of the state has placements {multiplier.placements}; every rank has all of it, "
            "Replicate()."
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


def _fsdp_tokens(origin: DTensor, amax_history: Tensor, multiplier: Tensor, recipe: Recipe) -> Sequence[Tensor]:
    return fsdp_tokens(multiplier, amax_history, multiplier, recipe)  # the op never reads its first argument


HANDLERS: dict[str, Callable[..., Any]] = {
    **{
        op.name(): partial(_product, OPS_OF_LAYERS[op], gemm)
        for op, gemm in LAYER_OPS.items()
        if issubclass(OPS_OF_LAYERS[op].placement, ON_MESHES)
    },
    **{op.name(): partial(_observed, how) for op, how in OBSERVE_OPS.items() if issubclass(how.placement, ON_MESHES)},
    "fp8compile::kept_input": _kept_input,
    "fp8compile::fsdp_tokens": _fsdp_tokens,
    "fp8compile::scatter_sum": _scatter_sum,
}
