"""quantize: make a QuantizedTensor from a tensor, or from this rank's shard of one.

    x --amax--> amax --(max over the group, where a block spans ranks)--> scale --+--> QuantizedTensor
    |                                                                             |      .codes  .scale  .group
    +----------------------------------- cast ------------------------------------+

A shard gets the codes and scales of its part of the quantized whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from fp8compile import _compat, ops
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.check_returned import shape_said
from fp8compile.tensor.check_arguments import SOURCE_DTYPES, allow_groups, not_dense, own_sizes, shown
from fp8compile.tensor.quantized_tensor import QuantizedTensor

__all__ = ["quantize"]


def _check_source(x: Any, quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"quantize: `quantizer` is {shown(quantizer)}; it must be a fp8compile.Quantizer, such as "
            "fp8compile.CurrentScaling()."
        )
    if isinstance(x, QuantizedTensor):
        raise TypeError("quantize: `x` is already quantized. Call .dequantize() first to quantize it again.")
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize: `x` is {type(x).__name__}; it must be a dense tensor.")
    if _compat.is_dtensor(x):
        raise TypeError(
            "quantize: `x` is a DTensor; it must be the local shard, x.to_local(), with group= and shard_dim=, or "
            "the full tensor, x.full_tensor()."
        )
    if (reason := not_dense(x)) is not None:
        raise TypeError(f"quantize: `x` {reason}; it must be a dense tensor.")
    if x.dtype not in SOURCE_DTYPES:
        raise TypeError(f"quantize: `x` is {x.dtype}; it must be bfloat16, float16 or float32. Cast it first.")
    if _compat.is_transformed(x):
        raise RuntimeError(
            "quantize: `x` is inside a transform of torch.func (grad, vmap, jvp) or forward-mode autograd, which "
            "do not support QuantizedTensor. Differentiate with .backward() or torch.autograd.grad, or use "
            "fp8compile.linear, which torch.func.grad supports."
        )


@_compat.asks_a_constant
def _has_outer_scale(quantizer: Quantizer) -> bool:
    return quantizer.has_outer_scale()


@_compat.asks_a_constant
def _is_local(quantizer: Quantizer) -> bool:
    return quantizer.is_local()


def _check_fits(x: Tensor, quantizer: Quantizer) -> None:
    if _compat.traces_no_constant() or not all(map(_compat.is_static, x.shape)):
        return  # `quantize` checks the shape of the result instead
    found = shape_said(quantizer, "values_shape", shape_said(quantizer, "codes_shape", x.shape))
    if found != tuple(x.shape):
        raise ValueError(_not_fitting(x, found))


def _not_fitting(x: Tensor, found: Sequence[int]) -> str:
    return (
        f"quantize: `x` has shape {tuple(x.shape)}, but this quantizer would return a tensor of shape "
        f"{tuple(found)}, because it packs or transforms several values together. Pad x with zeros to that shape; "
        "layers do this automatically."
    )


def _check_shard(x: Tensor, group: Any, shard_dim: Any, sizes: Any) -> None:
    if (group is None) != (shard_dim is None):
        raise ValueError(
            f"quantize: `group` is {group} and `shard_dim` is {shard_dim}; pass both for a shard of a distributed "
            "tensor, or neither for a full tensor."
        )
    if group is None:
        if sizes is not None:
            raise ValueError(
                f"quantize: `sizes` is {shown(sizes)}, but group is None. Pass the process group of the shards as "
                "group=, or omit sizes."
            )
        return
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"quantize: `group` must be a ProcessGroup, such as mesh.get_group(), got {shown(group)}.")
    if type(shard_dim) is not int:
        raise TypeError(f"quantize: `shard_dim` is {shown(shard_dim)}; it must be an int.")
    if not -x.ndim <= shard_dim < x.ndim:
        raise ValueError(f"quantize: `shard_dim` is {shard_dim}, but x has {x.ndim} dims.")
    if sizes is not None:
        own_sizes("quantize", "sizes", sizes, group, x.shape[shard_dim], f"the entries of x along dim {shard_dim}")


def _block_spans_ranks(x: Tensor, quantizer: Quantizer, group: ProcessGroup, shard_dim: Any) -> bool:
    """Whether blocks span all of dim ``shard_dim``, so that each block has elements on all ranks.

    Raises:
        ValueError: This rank's shard ``x`` ends within a block that does not span the dim.
    """
    last = shard_dim == x.ndim - 1
    block = quantizer.block[1 if last else 0]
    if block in (1, -1):
        return block == -1
    length = x.shape[-1] if last else x.shape[shard_dim:-1].numel()
    # if leading dims are flattened into the rows, other rows follow the last shard too
    ends_tensor = group.rank() == group.size() - 1 and (last or x.shape[:shard_dim].numel() == 1)
    if length % block and not ends_tensor:
        raise ValueError(
            f"quantize: a shard of {length} elements along dim {shard_dim} on rank {group.rank()} of {group.size()} "
            f"splits blocks of {block}. On all ranks, pass the size of each shard, sizes=(...); or shard in "
            f"multiples of {block} (the last rank may have less)."
        )
    return False


def _quantize_shard(
    x: Tensor, quantizer: Quantizer, group: Any, shard_dim: Any, sizes: tuple[int, ...]
) -> QuantizedTensor:
    """Quantize this rank's shard ``x`` of a tensor; shards may end within blocks.

    ``sizes`` has the length of each rank's shard along ``shard_dim``.
    """
    part = Plain(x, TensorLayout((DimSharding(group, group.rank(), shard_dim, sizes),)))
    found = quantize_part(part, quantizer)
    shape = part.whole_shape() if any(found.has_scales_of_whole) else x.shape
    scale = found.scale.view(quantizer.scale_shape(shape))
    return QuantizedTensor(found.codes, scale, found.quantizer, x.dtype, group, shard_dim, sizes, found.outer_scale)


def _quantized(
    x: Tensor, quantizer: Quantizer, group: ProcessGroup | None, shard_dim: int | None, sizes: Sequence[int] | None
) -> QuantizedTensor:
    if sizes is not None:
        return _quantize_shard(x, quantizer, group, shard_dim, tuple(sizes))
    if group is not None and not _is_local(quantizer):
        raise ValueError(
            "quantize: this quantizer depends on the position of a value in the full tensor, as in stochastic "
            "rounding. On all ranks, pass the size of each shard: sizes=(...)."
        )
    amax = ops.amax(x, quantizer)
    if group is not None and _block_spans_ranks(x, quantizer, group, shard_dim):
        amax = all_reduce_amax(amax, group)
    if _has_outer_scale(quantizer):
        outer_amax = ops.outer_amax(amax, quantizer)
        outer_amax = outer_amax if group is None else all_reduce_amax(outer_amax, group)
        multiplier, scale, outer = ops.two_scales(amax, outer_amax, quantizer)
    else:
        (multiplier, scale), outer = ops.scale(amax, quantizer), None
    codes = ops.cast(x, multiplier, quantizer)
    return QuantizedTensor(codes, scale, quantizer, x.dtype, group, shard_dim, outer_scale=outer)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    group: ProcessGroup | None = None,
    shard_dim: int | None = None,
    sizes: Sequence[int] | None = None,
) -> QuantizedTensor:
    """Quantize a tensor, or this rank's shard of a tensor.

    With a group, the result is this rank's shard of the quantized full tensor, bit for bit. Amaxes are reduced over
    the group if blocks span several ranks, or if there is a global scale. Otherwise nothing is communicated.

    The gradient is straight-through: the gradient of ``x`` is the gradient of the result, a plain tensor.

    Args:
        x: Any shape, bfloat16, float16 or float32. At least one dim if the quantizer has two levels of scales.
        quantizer: The quantizer, which defines format, blocks, scales and rounding.
        group: The ranks over which the tensor is sharded; ``x`` is this rank's shard. All these ranks must call this.
        shard_dim: The dim along which the tensor is sharded; required with ``group``.
        sizes: Number of entries that each rank has along ``shard_dim``. Required if a shard begins or ends within a
            block, or if rounding is stochastic, because a rank can't infer the sizes of the other ranks. Either all
            ranks pass the same sizes, or none passes any.

    Returns:
        A QuantizedTensor with the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not a dense tensor of these dtypes, or another argument has a wrong type.
        ValueError: Only one of ``group`` and ``shard_dim`` is given, or ``x`` has no such dim. Sizes do not match, or
            are missing although they are required. Sizes are given, but the format is packed and
            ``quantizer.unpacked()`` is None. The shape of ``x`` can't be packed or transformed by the quantizer.
        RuntimeError: A group is given on PyTorch 2.11, or ``x`` is inside a transform of ``torch.func`` or
            forward-mode autograd.
    """
    _check_source(x, quantizer)
    _check_shard(x, group, shard_dim, sizes)
    if x.ndim == 0 and _has_outer_scale(quantizer):
        raise ValueError(
            "quantize: `x` has shape (), but this quantizer has scales of blocks in addition to one of the tensor. "
            "Add a dim: x.reshape(1)."
        )
    if group is not None and shard_dim is not None:
        allow_groups()
        shard_dim %= x.ndim
    if sizes is None:  # with sizes, all ranks unpack codes, and raise together if they can't
        _check_fits(x, quantizer)
    found = _quantized(x.detach(), quantizer, group, shard_dim, sizes)
    if sizes is None and found.shape != x.shape:
        raise ValueError(_not_fitting(x, found.shape))
    return ops.straight_through(found, x, quantizer)
