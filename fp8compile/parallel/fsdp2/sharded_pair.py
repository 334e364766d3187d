"""A rank's shard of a weight of which forward and backward multiply different codes (rowwise, MX).

    forward     codes for the output      --FSDP2's all-gather--> the weight's memory
    backward    codes for grad_input      --FSDP2's all-gather--> the same memory: FSDP2 freed it between

A scale whose block lies on one rank travels beside the codes; one whose block has elements on several ranks is known
to all by the one message of amaxes, and so is the outer scale of two levels. Where one gather has to serve both
passes, both sets travel, or plain values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.layout.cuts import Sharding
from fp8compile.layout.packing import two_a_byte
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.layout.shapes import scale_shape, scale_shapes
from fp8compile.nn.experts import as_it_lies
from fp8compile.ops.collectives import all_gather
from fp8compile.ops.layer.quantize import is_aligned
from fp8compile.parallel.fsdp2.sharded_weight import Edits, ShardedWeight, part_of_weight
from fp8compile.quantizers import GEMMS, Gemm, Quantizer
from fp8compile.tensor import (
    BOTH,
    PLAIN,
    Gathers,
    Meaning,
    OwnCodes,
    OwnScale,
    as_pair_travels,
    as_sent,
    fill,
    made_of,
    room_for,
    sent_of,
    without_codes,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["ShardedPair"]

PAIR = GEMMS[:2]


class ShardedPair(ShardedWeight):
    """A `ShardedWeight` whose forward and backward gather different codes.

    Attributes:
        gathers: What its gathers are like.
    """

    gathers: Gathers

    def __init__(self, plain: Tensor, gathers: Gathers, cuts: Sharding = (), edits: Edits | None = None) -> None:
        super().__init__(plain, cuts, edits)
        self.gathers = gathers

    @staticmethod
    def __new__(
        cls: type[ShardedPair], plain: Tensor, gathers: Gathers, cuts: Sharding = (), edits: Edits | None = None
    ) -> ShardedPair:
        """The same memory as another tensor; no copy."""
        return ShardedWeight.__new__(cls, plain)

    def like(self, plain: Tensor, edits: Edits | None = None) -> ShardedPair:
        """Another tensor in this one's place: in the same memory, if it counts the same edits."""
        return ShardedPair(plain, self.gathers, self.cuts, edits)

    def quantizers_over_ranks(self, module: nn.Module, part: Plain) -> dict[str, Quantizer]:
        """Those with a scale of elements on several ranks."""
        every = {gemm.b: self.quantizer_for(module, gemm) for gemm in PAIR}
        return {slot: quantizer for slot, quantizer in every.items() if not all(self.own_levels(part, quantizer))}

    def quantizer_for(self, module: nn.Module, gemm: Gemm) -> Quantizer:
        """The quantizer that makes the weight's codes for one product, in the order that memory has."""
        return as_it_lies(module, getattr(module.recipe, gemm.b))

    def own_levels(self, part: Plain, quantizer: Quantizer) -> tuple[bool, ...]:
        """Whether this rank alone has the scales of a part, for each level: those of blocks, those of matrices."""
        part = self.of_a_matrix(part)
        blocks = is_aligned(part, quantizer)
        return (blocks, not any(part.cuts)) if quantizer.has_outer_scale() else (blocks,)

    def has_own_blocks(self, part: Plain, quantizer: Quantizer) -> bool:
        """Whether a rank keeps the scales of its blocks to itself until a gather, and exchanges no amaxes of them."""
        return self.own_levels(part, quantizer)[0]

    def of_a_matrix(self, part: Plain) -> Plain:
        """A part as one of the matrix whose scales no other matrix has."""
        return part

    # ------------------------------------------------------------------ what FSDP2 asks

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's codes for the pass that asks, or for both, or its values; and what the gathered ones mean."""
        (kind, gemms), size = self.gathers.now(module, self.name), tuple(outer_size)
        part = part_of_weight(self, mesh, outer_size, mp_policy)
        shards = part.cuts[-1]
        if kind == PLAIN:
            return (as_sent(part.local, shards),), size
        # FSDP2 takes tensors of another size beside the codes only if no rank pads, and none from a single rank
        # nor of a weight that it cuts along another dim, by which it lays out all that arrives
        beside = shards.is_even() and len(shards.sizes) > 1 and shards.dim == 0
        quantizers = tuple(self.quantizer_for(module, gemm) for gemm in PAIR)
        quantizers = as_pair_travels(quantizers, shards, size)
        sets = tuple(self._codes(part, module, each, quantizers, beside) for each in gemms)
        room = self._room(part, quantizers, together=kind == BOTH) if beside else 0
        shapes = tuple(self._scale_shapes(part, size, quantizer) for quantizer in quantizers)
        meaning = Meaning(without_codes(sets), len(shards.sizes), size, quantizers, shapes)
        return sent_of(sets, shards, room), (meaning, mesh.get_group())

    def _codes(
        self, part: Plain, module: nn.Module, gemm: Gemm, quantizers: tuple[Quantizer, Quantizer], beside: bool
    ) -> OwnCodes:
        """This rank's codes for one product, as the quantizers lay them down."""
        quantizer = self.quantizer_for(module, gemm)
        own = self.own_levels(part, quantizer)
        quantized = self._by_own_blocks if own[0] else self._by_known_scales
        codes, *scales = quantized(part, module, gemm)
        if not beside:
            scales = _scales_of_all_ranks(scales, part, quantizer, own)
        codes = two_a_byte(codes, quantizers[PAIR.index(gemm)])
        levels = zip(scales, own, strict=True)
        return OwnCodes(gemm, codes, tuple(OwnScale(each, travels=is_own and beside) for each, is_own in levels))

    def _by_own_blocks(self, part: Plain, module: nn.Module, gemm: Gemm) -> tuple[Tensor, ...]:
        """Codes of a part, one a byte, and all levels of its scales: no other rank has elements of its blocks."""
        quantizer, own, outer_amax = (
            self.quantizer_for(module, gemm),
            Plain(part.local, TensorLayout(batch=part.layout.batch)),
            None,
        )
        if not all(self.own_levels(part, quantizer)):
            outer_amax = module.weight_scales.outer_amax(module, self.name, gemm.b).to(self.device)
        multiplier, scale, outer_scale = self.scales_from(self.amax_of(own, quantizer), quantizer, outer_amax)
        codes = self.codes_of(own, multiplier, quantizer).contiguous()
        return (codes, scale) if outer_scale is None else (codes, scale, outer_scale)

    def _by_known_scales(self, part: Plain, module: nn.Module, gemm: Gemm) -> tuple[Tensor, ...]:
        """Codes of a part, one a byte, and all levels of scales of the whole weight, which all ranks know."""
        quantizer, size = self.quantizer_for(module, gemm), part.whole_shape(len(part.cuts) - 1)
        multiplier, scale, outer_scale = module.weight_scales.of(module, self.name, gemm.b)
        codes, scale = (
            self.codes_of(part, multiplier.to(self.device), quantizer),
            self.scale_of(scale, size, quantizer),
        )
        return (codes, scale) if outer_scale is None else (codes, scale, outer_scale)

    def _scale_shapes(self, part: Plain, size: tuple[int, ...], quantizer: Quantizer) -> tuple[tuple[int, ...], ...]:
        """The shapes of the scales of what FSDP2 gathers."""
        own, *outer = scale_shapes(size, quantizer)
        if not self.has_own_blocks(part, quantizer):
            whole = torch.empty(scale_shape(part.whole_shape(), quantizer), device="meta")
            own = tuple(self.scale_of(whole, size, quantizer).shape)
        return own, *outer

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight that the layer sees, on what was gathered."""
        if self.gathers.kind == PLAIN:
            rows, *others = metadata
            return None if out is not None else (all_gather_outputs[0].view(-1, *others)[:rows], ())
        meaning, group = metadata
        if out is not None:
            fill(_compat.local_itself(out), all_gather_outputs, meaning)
            return None
        wrap = partial(self.gathered, dtype=param_dtype, group=group)
        pair, scales = made_of(all_gather_outputs, meaning, self.gathers.turns, wrap)
        fill(pair, all_gather_outputs, meaning)
        return pair, scales

    def _room(self, part: Plain, quantizers: tuple[Quantizer, ...], *, together: bool) -> int:
        """Bytes for the scales that are a rank's own, in the gathers of both passes or in the larger one of them."""
        own = (_bytes_of_scales(part.local.shape, each, self.own_levels(part, each)) for each in quantizers)
        return room_for(own, together=together)


def _bytes_of_scales(size: Sequence[int], quantizer: Quantizer, own: Sequence[bool]) -> int:
    """Bytes of the levels of scales that are a rank's own, of a weight of this size."""
    dtypes = quantizer.scale_dtype(), torch.float32
    levels = zip(scale_shapes(size, quantizer), dtypes, own, strict=False)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype, is_own in levels if is_own)


def _scales_of_all_ranks(
    scales: Sequence[Tensor], part: Plain, quantizer: Quantizer, own: Sequence[bool]
) -> list[Tensor]:
    """All levels of scales of a weight: of those that are each rank's own, by messages of their own."""
    shards, size = part.cuts[-1], part.whole_shape(len(part.cuts) - 1)
    dim, found = shards.dim, []
    shapes = [scale_shapes((*size[:dim], each, *size[dim + 1 :]), quantizer) for each in shards.sizes]
    for scale, is_own, level in zip(scales, own, zip(*shapes, strict=True), strict=True):
        found.append(all_gather(scale, dim, [each[dim] for each in level], shards.group) if is_own else scale)
    return found
