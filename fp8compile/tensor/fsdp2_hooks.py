"""What FSDP2 asks of a weight that travels as codes: a rank's tensors for the wire, and a weight of what arrived.

    forward     codes for the output      --FSDP2's all-gather--> the weight's memory
    backward    codes for grad_input      --FSDP2's all-gather--> the same memory: FSDP2 freed it between

One set of codes is gathered in each pass. Where one gather has to serve both passes of a weight of two sets, both
travel, or values.

FSDP2 gathers into the same memory again and again. Scales get memory of their own, which FSDP2 frees with the weight.
The scales of a set that was not gathered are NaN: whatever multiplied its codes would not go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.shapes import codes_shape
from fp8compile.quantizers import GEMMS
from fp8compile.tensor.codes import Codes
from fp8compile.tensor.gather_layout import GatherLayout, SetToGather, as_sent, codes_to_send
from fp8compile.tensor.gather_policy import BOTH, PLAIN, GatherPolicy
from fp8compile.tensor.quantized_tensor import QuantizedTensor
from fp8compile.tensor.scale_without_values import scale_without_values

__all__ = ["FullyShardHooks"]

PAIR = GEMMS[:2]  # the products that read a weight


@_compat.keeps_parts_after_forward
class FullyShardHooks:
    """The two methods that `torch.distributed.fsdp.fully_shard` calls around its all-gather.

    Attributes:
        gathers: What gatherings of a weight of two sets of codes are like; None if both passes read the same codes.
        batch: Number of leading dims over which matrices are stacked.
    """

    gathers: GatherPolicy | None
    batch: int

    def sets_to_gather(
        self, mesh: Any, size: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[DimSharding, Sequence[SetToGather]]:
        """How ranks cut the weight, and what this one may send of each set of its codes; arguments as of FSDP2."""
        raise NotImplementedError

    def values_to_gather(self, mp_policy: Any) -> Tensor:
        """This rank's values, if values are gathered where one gather serves both passes."""
        raise NotImplementedError

    def place_of_gathered(self, shards: DimSharding) -> dict[str, Any]:
        """Group, dim and sizes of the weight that is gathered, as a QuantizedTensor takes them."""
        return {}

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], GatherLayout]:
        """This rank's codes for the pass that asks, or for both, or its values; and what the gathered ones mean."""
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
        """The weight that the layer sees; with ``out``, that of the gather before, whose memory was written to."""
        if metadata.scales is None:
            rows, *others = metadata.size
            return None if out is not None else (all_gather_outputs[0].view(-1, *others)[:rows], ())
        if out is not None:
            before: Any = _compat.local_itself(out)
            _fill(before, all_gather_outputs, metadata)
            return None
        sets, own = _memory(all_gather_outputs, metadata)
        alone = len(metadata.scales) < len(sets)  # then there are two, and `gathers` says which
        in_memory = self.gathers.in_memory if alone and self.gathers is not None else None
        place = self.place_of_gathered(metadata.shards)
        weight = QuantizedTensor.of_sets(sets, param_dtype, batch=self.batch, in_memory=in_memory, **place)
        _fill(weight, all_gather_outputs, metadata)
        return weight, own  # FSDP2 frees these, too


def _memory(gathered: Sequence[Tensor], layout: GatherLayout) -> tuple[list[Codes], tuple[Tensor, ...]]:
    """The sets of codes of a weight on the memory that FSDP2 gathers into, and what of them is memory of its own."""
    sets, own = [], []
    with torch.inference_mode(mode=False):  # later gathers write to it, under whatever mode
        if not layout.is_alone_with_both:
            memories = [gathered[0], gathered[len(layout.scales or ()) - 1]]
        else:  # FSDP2 makes no parameter of a view into the middle
            memories = [gathered[0].view(2, -1)[0], gathered[0].new_empty(gathered[0].numel() // 2)]
            own.append(memories[1])
        for memory, quantizer, shapes in zip(memories, layout.quantizers, layout.scale_shapes, strict=False):
            dtypes = quantizer.scale_dtype(), torch.float32
            scales = [
                torch.empty(shape, dtype=dtype, device=memory.device)
                for shape, dtype in zip(shapes, dtypes, strict=False)
            ]
            shape = codes_shape(layout.size, quantizer)
            # behind the last row there may be padding; parts are laid along the dim that FSDP2 cut
            codes = memory.view(-1)[: math.prod(shape)].view(shape)
            own += scales
            sets.append(Codes(codes=codes, scale=scales[0], quantizer=quantizer, outer_scale=(*scales[1:], None)[0]))
    return sets, tuple(own)


def _fill(weight: QuantizedTensor, gathered: Sequence[Tensor], layout: GatherLayout) -> None:
    """Give a weight the scales of the codes that were gathered into its memory."""
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
    """As FSDP2 writes what it gathers: autograd, which saved a weight in the forward, is not to count it."""
    with _compat.uncounted_write(memory):
        memory.copy_(values)


def _without_values(own: Codes) -> list[Tensor]:
    """NaN for scales of all levels of a set whose codes were not gathered."""
    device = own.scale.device
    levels = scale_without_values(own.quantizer, (), torch.nan, device), torch.full((), torch.nan, device=device)
    return [level.expand(scale.shape) for level, scale in zip(levels, own.scales, strict=False)]
