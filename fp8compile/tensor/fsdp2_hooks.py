"""The hooks that FSDP2 calls around the all-gather of a weight that it sends as codes.

Forward and backward each gather their own codes into the same memory, unless one gather has to serve both passes.
Scales of codes that were not gathered are NaN, so that a product with these codes would be noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import Quantized
from fp8compile.layout.shapes import codes_shape
from fp8compile.quantizers import GEMMS
from fp8compile.tensor.fsdp2_gather_policy import BOTH, PLAIN, GatherPolicy
from fp8compile.tensor.fsdp2_messages import GatherLayout, SetToGather, as_sent, codes_to_send
from fp8compile.tensor.quantized_tensor import QuantizedTensor
from fp8compile.tensor.scale_without_values import scale_without_values

__all__ = ["FullyShardHooks"]

PAIR = GEMMS[:2]  # the products that read a weight


def _check_dim(name: str, size: int, dim: int) -> None:
    if dim:
        raise ValueError(
            f"reshard_after_forward={size}: {name} is sharded along dim {dim}, but FSDP2 concatenates shards only "
            "along dim 0. Pass True or False for its module, or omit shard_placement_fn."
        )


def _check_writes(name: str, size: int, is_written: bool) -> None:
    if is_written:
        raise RuntimeError(
            f"reshard_after_forward={size}: {name} was modified after a forward without a backward, but the ranks "
            "still have shards of its previous value. Call reshard() on the FSDP modules before you modify weights."
        )


@_compat.keeps_parts_after_forward(_check_dim, _check_writes)
class FullyShardHooks:
    """Mixin with the two methods that `torch.distributed.fsdp.fully_shard` calls around its all-gather.

    Attributes:
        gathers: Policy of what gathers send if forward and backward read different codes; else None.
        batch: Number of leading dims over which matrices are stacked: 1 for stacked weights of experts, else 0.
    """

    gathers: GatherPolicy | None
    batch: int

    def sets_to_gather(
        self, mesh: Any, size: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[DimSharding, Sequence[SetToGather]]:
        """Return how ranks shard the weight, and a `SetToGather` for each set of its codes.

        ``mesh`` and ``mp_policy`` are FSDP2's mesh and ``MixedPrecisionPolicy``, ``size`` is the shape of the whole
        weight, and ``module`` is the module that has the weight.
        """
        raise NotImplementedError

    def values_to_gather(self, mp_policy: Any) -> Tensor:
        """Return this rank's shard as values, for a gather that serves forward and backward.

        ``mp_policy`` is FSDP2's ``MixedPrecisionPolicy``.
        """
        raise NotImplementedError

    def place_of_gathered(self, shards: DimSharding) -> dict[str, Any]:
        """Return the arguments group, shard_dim and sizes for the gathered QuantizedTensor, as a dict.

        The dict is empty for a whole weight. ``shards`` says how FSDP2 shards the weight.
        """
        return {}

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], GatherLayout]:
        """Return the tensors that this rank sends, and the layout by which gathered tensors are read.

        The arguments are FSDP2's: the mesh, the whole weight's shape and strides, the weight's module and the mixed
        precision policy.
        """
        size = tuple(outer_size)
        kind, gemms = (BOTH, PAIR) if self.gathers is None else self.gathers.now(module)
        shards, sets = self.sets_to_gather(mesh, size, module, mp_policy)
        if kind == PLAIN:
            return (as_sent(self.values_to_gather(mp_policy), shards),), GatherLayout(shards, size)
        return codes_to_send(sets, gemms, shards, size, together=kind == BOTH)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: GatherLayout,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the weight that the layer multiplies from the gathered tensors.

        Args:
            all_gather_outputs: The gathered tensors.
            metadata: The layout that ``fsdp_pre_all_gather`` returned.
            param_dtype: Dtype of the weight.
            out: The weight of an earlier gather, into whose memory FSDP2 has gathered the codes; new scales are
                written to this weight.

        Returns:
            The weight, and the tensors that FSDP2 frees with it. None if ``out`` is given.
        """
        if metadata.scales is None:
            rows, *others = metadata.size
            return None if out is not None else (all_gather_outputs[0].view(-1, *others)[:rows], ())
        if out is not None:
            before: Any = _compat.local_itself(out)
            _fill(before, all_gather_outputs, metadata)
            return None
        sets, own = _memory(all_gather_outputs, metadata)
        alone = len(metadata.scales) < len(sets)  # one of two sets was gathered
        in_memory = self.gathers.in_memory if alone and self.gathers is not None else None
        place = self.place_of_gathered(metadata.shards)
        weight = QuantizedTensor.of_sets(sets, param_dtype, batch=self.batch, in_memory=in_memory, **place)
        _fill(weight, all_gather_outputs, metadata)
        return weight, own  # FSDP2 frees these, too


def _memory(gathered: Sequence[Tensor], layout: GatherLayout) -> tuple[list[Quantized], tuple[Tensor, ...]]:
    """Return a gathered weight's codes, as views of the gathered tensors, with uninitialized scales.

    Also return the tensors that are allocated here, so that FSDP2 can free them. ``layout`` has the shapes.
    """
    sets, own = [], []
    with torch.inference_mode(mode=False):  # later gathers write to these tensors, in inference mode or not
        if not layout.is_alone_with_both:
            memories = [gathered[0], gathered[len(layout.scales or ()) - 1]]
        else:  # FSDP2 makes no parameter from a view that begins in the middle of its memory
            memories = [gathered[0].view(2, -1)[0], gathered[0].new_empty(gathered[0].numel() // 2)]
            own.append(memories[1])
        for memory, quantizer, shapes in zip(memories, layout.quantizers, layout.scale_shapes, strict=False):
            dtypes = quantizer.scale_dtype(), torch.float32
            scales = [
                torch.empty(shape, dtype=dtype, device=memory.device)
                for shape, dtype in zip(shapes, dtypes, strict=False)
            ]
            shape = codes_shape(layout.size, quantizer)
            # there may be padding after the last row
            codes = memory.view(-1)[: math.prod(shape)].view(shape)
            own += scales
            sets.append(
                Quantized(codes=codes, scale=scales[0], quantizer=quantizer, outer_scale=(*scales[1:], None)[0])
            )
    return sets, tuple(own)


def _fill(weight: QuantizedTensor, gathered: Sequence[Tensor], layout: GatherLayout) -> None:
    """Write the scales of the gathered codes into ``weight``, and record whose codes were gathered.

    Scales of codes that were not gathered become NaN.
    """
    arrived = layout.scales_of_whole(gathered)
    if layout.is_alone_with_both:
        codes = weight.sets()[1].codes
        _write(codes, gathered[0].view(2, -1)[1].view(codes.shape))
    for gemm, own in zip(PAIR, weight.sets(), strict=False):
        values = arrived[gemm] if gemm in arrived else _without_values(own)
        for memory, each in zip(own.scales, values, strict=True):
            _write(memory, each.view(memory.shape))
    if weight.in_memory is not None:
        gemm, *_ = layout.scales or PAIR
        weight.in_memory.gemm = gemm.name


def _write(memory: Tensor, values: Tensor) -> None:
    """Copy values to memory without incrementing its version counter, because autograd saved the weight."""
    with _compat.uncounted_write(memory):
        memory.copy_(values)


def _without_values(own: Quantized) -> list[Tensor]:
    device = own.scale.device
    levels = scale_without_values(own.quantizer, (), torch.nan, device), torch.full((), torch.nan, device=device)
    return [level.expand(scale.shape) for level, scale in zip(levels, own.scales, strict=False)]
