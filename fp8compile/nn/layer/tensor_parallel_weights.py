"""Quantized weights under tensor parallelism: codes of each rank's shard, scales of the whole weight.

`convert`               shard of a DTensor --amax over its ranks--> codes, scale --> DTensor of a QuantizedParameter
`parallelize_module`    whole codes, scale --> codes of a shard, same scale ---------> DTensor of a QuantizedParameter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding, chunk_sizes, split_axes
from fp8compile.layout.four_bit_packing import two_a_byte
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.nn.layer.redistribute_like import wrapped_like
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.quantizers import DelayedScaling, Quantizer
from fp8compile.tensor import (
    QuantizedParameter,
    QuantizedTensor,
    in_place_of,
    is_quantized_parameter,
    quantize,
    sharded_dims,
    sharding_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "PLAIN_STYLE",
    "not_placed",
    "place_codes",
    "placements_of_outer_scale",
    "placements_of_scale",
    "quantized_part",
    "unwritten",
]

PLAIN_STYLE = "_fp8compile_plain_style"  # attribute of a layer in high precision that a style of ours was applied to


def _why_not(shape: Sequence[int], mesh: Any, placements: Sequence[Any], quantizer: Quantizer) -> str | None:
    dims = sharded_dims(placements)
    if len(dims) > 1 or any(each.is_partial() for each in placements):
        return f"has placements {tuple(placements)}; quantized weights can only be sharded along one dim of a mesh"
    for index, dim in dims:
        sizes, block = chunk_sizes(shape[dim], mesh.size(index)), quantizer.block
        own = [*shape[:dim], sizes[0], *shape[dim + 1 :]]
        if any(split_axes(own, (DimSharding("", 0, dim, sizes),), block)):
            return (
                f"is sharded along dim {dim} as {sizes}, which splits blocks {block}; each size except the last "
                f"nonzero one must be a multiple of {block[dim]}"
            )
    return None


def not_placed(weight: DTensor, quantizers: Sequence[Quantizer]) -> str | None:
    """Return why codes can't have a DTensor's placements, as when a shard ends within a block; None if they can."""
    reasons = (_why_not(weight.shape, weight.device_mesh, weight.placements, each) for each in quantizers)
    return next((reason for reason in reasons if reason is not None), None)


def placements_of_scale(weight: DTensor, own: Quantized) -> list[Any]:
    """Return the placements of the scale that belongs to ``own``, a DTensor's codes.

    The scale is replicated on mesh dims whose ranks share blocks, and placed like the codes on all others.
    """
    from torch.distributed.tensor import Replicate

    found, cut = list(weight.placements), sharded_dims(weight.placements, weight.ndim)
    for index, dim in cut:
        # FSDP2 has the first mesh dims and may cut blocks; tensor parallelism has the last dims and may not
        if _compat.local_itself(weight).block_along(own, dim) == -1 or (own.has_all_scales and index == cut[0][0]):
            found[index] = Replicate()
    return found


def placements_of_outer_scale(weight: DTensor) -> list[Any]:
    """Return the placements of a quantized DTensor's outer scales.

    Outer scales are placed like the codes on mesh dims that shard stacked matrices, and replicated on all others.
    """
    from torch.distributed.tensor import Replicate

    found = list(weight.placements)
    for index, dim in sharded_dims(weight.placements, weight.ndim):
        found[index] = found[index] if dim < weight.ndim - 2 else Replicate()
    return found


def quantized_part(weight: DTensor, quantizers: Sequence[Quantizer], outer_amax: Tensor | None = None) -> Tensor:
    """Quantize this rank's shard of a DTensor; return a DTensor of a QuantizedParameter.

    There are two quantizers if grad_input reads separate codes. No shard may end within a block; see `not_placed`.
    ``outer_amax`` is the amax, (1,) float32, for the weight's one scale, if other weights share the scale. All ranks
    that share a scale call this.
    """
    local, mesh = _compat.local_itself(weight).detach(), weight.device_mesh
    options = {}
    for index, dim in sharded_dims(weight.placements):
        sizes = chunk_sizes(weight.shape[dim], mesh.size(index))
        options = {"group": mesh.get_group(index), "shard_dim": dim, "sizes": sizes}
    part = Plain(local, TensorLayout(sharding_of(weight)))
    sets = [_codes_of(part, quantizer, options, outer_amax) for quantizer in quantizers]
    options.pop("sizes", None)
    return wrapped_like(QuantizedParameter.of_sets(sets, local.dtype, **options), weight)


def _codes_of(part: Plain, quantizer: Quantizer, options: dict[str, Any], outer_amax: Tensor | None) -> Quantized:
    """Quantize a rank's shard of a weight, of which no block is on two ranks.

    ``options`` are the arguments of `quantize` that describe the shard. ``outer_amax`` is that of `quantized_part`.
    """
    found: QuantizedTensor | Quantized
    if outer_amax is None:
        found = quantize(part.local, quantizer, **options)
    else:
        found = quantize_part(part, quantizer, outer_amax=outer_amax)
    own = quantizer.for_shape(part.local.shape)
    codes = found.codes if own == found.quantizer else two_a_byte(found.codes, own)
    return Quantized(codes=codes, scale=found.scale, quantizer=own, outer_scale=found.outer_scale)


def unwritten(weight: Tensor, quantizer: DelayedScaling) -> Tensor:
    """Return a new QuantizedParameter of ``quantizer``, placed like ``weight``, whose codes are all 0."""
    local, ones = _compat.local_itself(weight), torch.ones(quantizer.scale_shape(weight.shape), device=weight.device)
    codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
    found = QuantizedParameter(codes, quantizer.scale_of(ones), quantizer, local.dtype)
    cuts: Sequence[Any] = sharding_of(weight)
    if cuts:
        found.share_scale(cuts[0].group, cuts[0].dim, cuts[0].total)
    return wrapped_like(found, weight)


def place_codes(layer: nn.Module, mesh: Any, placement: Any, source: int | None, name: str = "weight") -> None:
    """Shard the quantized weight ``name`` of a layer over a mesh with one dim; all ranks call this.

    ``placement`` is ``Shard(dim)``, for experts' stacked weights ``Shard(0)``. ``source`` is the rank whose weight is
    sent to all ranks; None if all ranks have the same weight. A weight that is not quantized is not changed. Raises a
    ValueError if a shard would end within a block.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    weight, dim = getattr(layer, name), placement.dim
    if not is_quantized_parameter(weight):
        return
    for own in weight.sets() if weight.ndim == 2 else ():
        if (reason := _why_not(weight.shape, mesh, [placement], own.quantizer)) is not None:
            raise ValueError(f"tensor parallel: a quantized weight {reason}. Use weight_lifetime='call' for it.")

    def part(tensor: Tensor, where: Any) -> Tensor:
        return distribute_tensor(tensor, mesh, [where], src_data_rank=source).to_local()

    sets = []
    for own in weight.sets():
        scale = part(own.scale, Replicate() if weight.block_along(own, dim) == -1 else placement)
        of_matrices = placement if dim < weight.batch else Replicate()
        outer = None if own.outer_scale is None else part(own.outer_scale, of_matrices)
        sets.append(replace(own, codes=part(own.codes, placement), scale=scale, outer_scale=outer))
    local = QuantizedParameter.of_sets(sets, weight.dtype, batch=weight.batch)
    local.gathers, local.state, local.frozen = weight.gathers, weight.state, weight.frozen
    if weight.ndim == 2:  # ranks share no scale of an expert
        local.share_scale(mesh.get_group(), dim, weight.shape[dim])
    if weight.initial is not None:
        local.initial = part(weight.initial.to(weight.device), placement)
    whole = DTensor.from_local(local, mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride())
    setattr(layer, name, in_place_of(weight, whole))
