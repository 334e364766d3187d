"""Quantized weights that tensor parallel ranks have parts of: codes of a part, and the scale of the whole.

a DTensor of values --convert--> part --amax over its ranks--> codes, scale --+--> a DTensor of a QuantizedParameter
whole codes --ColwiseParallel, RowwiseParallel--> their part, the same scale--+
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fp8compile import _compat
from fp8compile.nn.local import wrapped_like
from fp8compile.ops.layer.shards import DimSharding, Sharding, chunk_sizes, split_axes
from fp8compile.quantizers import Quantizer
from fp8compile.tensor import QuantizedPairParameter, QuantizedParameter, in_place_of, quantize

__all__ = ["not_placed", "place_codes", "quantized_part", "sharding_of"]


def _sharded_dims(placements: Sequence[Any]) -> list[tuple[int, int]]:
    """Dims of the mesh over which a matrix is cut, and along which of its own."""
    return [(index, each.dim % 2) for index, each in enumerate(placements) if each.is_shard()]


def _why_not(shape: Sequence[int], mesh: Any, placements: Sequence[Any], quantizer: Quantizer) -> str | None:
    dims = _sharded_dims(placements)
    if len(dims) > 1 or any(each.is_partial() for each in placements):
        return f"has placements {tuple(placements)}; codes are cut over one dim of a mesh"
    for index, dim in dims:
        sizes, block = chunk_sizes(shape[dim], mesh.size(index)), quantizer.block
        own = [*shape[:dim], sizes[0], *shape[dim + 1 :]]
        if any(split_axes(own, (DimSharding("", 0, dim, sizes),), block)):
            return (
                f"is cut along dim {dim} into {sizes}, which cuts blocks {block}; all ranks but the last one with any "
                f"have a multiple of {block[dim]}"
            )
    return None


def sharding_of(weight: Tensor) -> Sharding:
    """How ranks cut a weight, if it is a DTensor: by tensor parallelism, and then by FSDP2, whose dims come first."""
    if not _compat.is_dtensor(weight):
        return ()
    mesh, size, cuts = weight.device_mesh, list(weight.shape), []
    for index, dim in reversed(_sharded_dims(weight.placements)):
        sizes = chunk_sizes(size[dim], mesh.size(index))
        cuts.append(DimSharding(mesh.get_group(index), mesh.get_local_rank(index), dim, sizes))
        size[dim] = cuts[-1].length
    return tuple(cuts)


def not_placed(weight: Tensor, quantizer: Quantizer) -> str | None:
    """Why a DTensor can't become codes, its parts cutting blocks for one, or None if it can."""
    return _why_not(weight.shape, weight.device_mesh, weight.placements, quantizer)


def quantized_part(weight: Tensor, quantizer: Quantizer) -> Tensor:
    """A DTensor of codes, of one of values whose parts cut no block; ranks that share a scale all call this."""
    local, mesh = _compat.local_itself(weight).detach(), weight.device_mesh
    options = {}
    for index, dim in _sharded_dims(weight.placements):
        sizes = chunk_sizes(weight.shape[dim], mesh.size(index))
        options = {"group": mesh.get_group(index), "shard_dim": dim, "sizes": sizes}
    q = quantize(local, quantizer, **options)
    found = QuantizedParameter(q.codes, q.scale, quantizer, local.dtype, q.group, q.shard_dim)
    return wrapped_like(found, weight)


def place_codes(layer: nn.Linear, mesh: Any, placement: Any, source: int | None) -> None:
    """Cut a layer's weight over the ranks of a mesh of one dim, if it is whole codes; else leave it as it is.

    Args:
        layer: Of any kind.
        mesh: All its ranks call this.
        placement: Of the weight.
        source: The rank in the mesh whose weight it is; None if all have the same, and nothing has to be sent.

    Raises:
        ValueError: A block would be cut.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    weight = layer.weight
    if isinstance(weight, QuantizedPairParameter):
        raise ValueError(
            "tensor parallel: a quantized weight has two sets of codes, for the output and for grad_input, which only "
            "FSDP2 cuts. Leave this layer out of quantized_parameters, or take recipes.tensorwise() or blockwise()."
        )
    if not isinstance(weight, QuantizedParameter):
        return
    quantizer, dim = weight.quantizer, placement.dim
    if (reason := _why_not(weight.shape, mesh, [placement], quantizer)) is not None:
        raise ValueError(
            f"tensor parallel: a quantized weight {reason}. Leave this layer out of quantized_parameters."
        )

    def part(tensor: Tensor, where: Any) -> Tensor:
        return distribute_tensor(tensor, mesh, [where], src_data_rank=source).to_local()

    scale = part(weight.scale, Replicate() if quantizer.block[dim] == -1 else placement)
    local = QuantizedParameter(part(weight.codes, placement), scale, quantizer, weight.dtype)
    local.share_scale(mesh.get_group(), dim, weight.shape[dim])
    if weight.initial is not None:
        local.initial = part(weight.initial.to(weight.device), placement)
    whole = DTensor.from_local(local, mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride())
    layer.weight = in_place_of(weight, whole)
