"""A rank's shard of a weight, in high precision, which FSDP2 gathers as codes.

A weight is a matrix, or stacked weights of experts (E, N, K): E matrices with N out_features and K in_features, each
with its own scales. FSDP2 shards a stack along experts or, if there are more ranks than experts, along another dim.

If each block lies on one rank, and forward and backward multiply different codes, scales of blocks are sent beside the
codes. Otherwise all ranks compute these scales from the amaxes that they exchanged in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding, Sharding, chunk_sizes
from fp8compile.layout.four_bit_packing import two_a_byte
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.layout.shapes import scale_shape, scale_shapes
from fp8compile.nn.experts.known_modules import as_it_lies
from fp8compile.ops.layer.quantize_over_ranks import (
    cast_part,
    is_aligned,
    is_cut_within,
    local_scales,
    scales_of,
    whole_amax,
)
from fp8compile.quantizers import GEMMS, STEP, Gemm, Quantizer
from fp8compile.tensor import (
    FullyShardHooks,
    GatherPolicy,
    SetToGather,
    attributes_of_others,
    cut_dim,
    in_place_of,
    written_arguments,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["ShardedWeight", "WriteCounter", "part_of_weight"]

aten: Any = torch.ops.aten
PAIR = GEMMS[:2]  # the products that read a weight


class WriteCounter:
    """Counter of the writes to one memory, shared by all `ShardedWeight` views of the memory."""

    def __init__(self) -> None:
        self.count = 0


class ShardedWeight(FullyShardHooks, Tensor):
    """A tensor that FSDP2 gathers as codes; for all other code it acts as the plain tensor that it wraps.

    FSDP2 asks the local tensor of a parameter how to gather it, which is why this is a subclass. Ops in `VIEWS` and
    `COPIES` keep the subclass. Other ops return plain tensors, so optimizer states are plain. Pickles and compilers
    see a plain tensor.
    """

    name: str = "weight"  # name of the parameter in its module; a tensor has a property of this name
    gathers: GatherPolicy | None  # what each gather brings; None if forward and backward multiply the same codes
    cuts: Sharding  # how tensor parallelism cut the weight, before FSDP2 shards it
    write_counter: WriteCounter  # FSDP2 reads a parameter through views that have their own version counters
    _fake: Tensor | None

    @staticmethod
    def __new__(cls: type[ShardedWeight], plain: Tensor, *_: Any, **__: Any) -> ShardedWeight:
        """Create the subclass on the memory of ``plain``, without a copy."""
        if type(plain) is Tensor:
            return Tensor._make_subclass(cls, plain)
        # a fake tensor has no memory to share, and belongs to a Python object already
        return Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
            pin_memory=plain.is_pinned(),
        )

    def __init__(
        self,
        plain: Tensor,
        name: str = "weight",
        gathers: GatherPolicy | None = None,
        cuts: Sharding = (),
        write_counter: WriteCounter | None = None,
    ) -> None:
        self._fake = None if type(plain) is Tensor else plain
        self.name, self.gathers, self.cuts = name, gathers, cuts
        self.write_counter = WriteCounter() if write_counter is None else write_counter

    @property
    def plain(self) -> Tensor:
        """A plain tensor on the same memory, with the same version counter and without autograd history."""
        return _compat.plain_alias(self) if self._fake is None else self._fake

    def like(self, plain: Tensor, write_counter: WriteCounter | None = None) -> ShardedWeight:
        """Wrap another tensor with this weight's name, `GatherPolicy` and tensor parallel sharding.

        ``write_counter`` is this weight's if ``plain`` is a view of its memory; None starts a new one.
        """
        return ShardedWeight(plain, self.name, self.gathers, self.cuts, write_counter)

    # ------------------------------------------------------------------ what a tensor with a dispatch refuses

    def _without_class(self) -> Tensor:
        """Return a plain tensor or parameter on the same memory, with the attributes that other code has set."""
        plain = self.plain.detach()
        if isinstance(self, Parameter):
            return in_place_of(self, plain)
        vars(plain).update(attributes_of_others(self))
        return plain.requires_grad_(self.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array on the same memory; PyTorch's method refuses subclasses like this one."""
        return self._without_class().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists; PyTorch's method refuses subclasses like this one."""
        return self._without_class().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.plain})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._without_class().__reduce_ex__(protocol)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as PyTorch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda weight: weight.plain, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        for weight in written_arguments(func, args, kwargs):
            if isinstance(weight, ShardedWeight):
                weight.write_counter.count += 1
        if func._schema.is_mutable:
            return return_and_correct_aliasing(func, args, kwargs, out)
        if func not in VIEWS and func not in COPIES:
            return out
        source = args[0]
        if not isinstance(source, ShardedWeight):
            return out
        write_counter = source.write_counter if func in VIEWS else None
        out = tree_map_only(Tensor, lambda tensor: source.like(tensor, write_counter), out)
        return return_and_correct_aliasing(func, args, kwargs, out) if func in VIEWS else out

    # ------------------------------------------------------------------ how the weight is quantized

    @property
    def batch(self) -> int:  # type: ignore[override]
        """Number of leading dims over which matrices are stacked: 1 for stacked weights of experts, else 0."""
        return self.ndim - 2

    def quantizers_of(self, module: nn.Module) -> dict[Gemm, Quantizer]:
        """Return the weight's quantizer for the output's GEMM, and for grad_input's if it reads other codes.

        ``module`` has the weight. A module that stores matrices transposed gets transposed quantizers.
        """
        gemms = PAIR[:1] if self.gathers is None else PAIR
        return {gemm: as_it_lies(module, getattr(module.recipe, gemm.b)) for gemm in gemms}

    def quantizers_over_ranks(self, module: nn.Module, part: Plain) -> dict[str, Quantizer]:
        """Return, by recipe field, the quantizers whose amaxes ranks exchange before a gather.

        ``module`` has the weight, and ``part`` is this rank's shard and its layout.
        """
        every = self.quantizers_of(module).items()
        return {gemm.b: quantizer for gemm, quantizer in every if not all(self.own_levels(part, quantizer))}

    def own_levels(self, part: Plain, quantizer: Quantizer) -> tuple[bool, ...]:
        """Return, for each level of scales, whether each rank alone computes its shard's scales and sends them.

        The levels are the scales of blocks and, if there are any, the outer scales of matrices. All are False if
        forward and backward multiply the same codes: ranks then exchange amaxes and know every scale.
        """
        levels = 2 if quantizer.has_outer_scale() else 1
        if self.gathers is None:
            return (False,) * levels
        return (is_aligned(part, quantizer), not is_cut_within(part))[:levels]

    # ------------------------------------------------------------------ what FSDP2 asks

    def values_to_gather(self, mp_policy: MixedPrecisionPolicy) -> Tensor:
        """Return the shard's values in ``mp_policy.param_dtype``, as FSDP2's own gather casts them."""
        return self.plain.to(mp_policy.param_dtype or self.dtype)

    def sets_to_gather(
        self, mesh: DeviceMesh, size: tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[DimSharding, list[SetToGather]]:
        """Return how FSDP2 shards the weight, and a `SetToGather` for each set of its codes.

        ``SetToGather.make`` quantizes when it is called. For the arguments see `FullyShardHooks.sets_to_gather`.
        """
        part = Plain(self.plain, _layout_of_shard(self, mesh, size))
        values = cache(partial(self.values_to_gather, mp_policy))  # one cast for all sets, or none
        every = self.quantizers_of(module).items()
        own: Any = part.cuts[-1]  # FSDP2 cuts last
        return own, [self._to_gather(part, values, size, module, *each) for each in every]

    def place_of_gathered(self, shards: DimSharding) -> dict[str, Any]:
        """Return arguments for the gathered QuantizedTensor that say which ranks share its scales.

        The arguments name the weight's tensor parallel group, or FSDP2's group without tensor parallelism. The result
        is empty for stacked experts.
        """
        if self.batch:
            return {}
        resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
        if not self.cuts:
            return {"group": resolve(shards.group)}
        cut: Any = self.cuts[0]
        return {"group": resolve(cut.group), "shard_dim": cut.dim, "sizes": cut.sizes}

    def _to_gather(
        self,
        part: Plain,
        values: Callable[[], Tensor],
        size: tuple[int, ...],
        module: nn.Module,
        gemm: Gemm,
        quantizer: Quantizer,
    ) -> SetToGather:
        is_own = self.own_levels(part, quantizer)
        blocks, *outer = scale_shapes(size, quantizer)
        if not is_own[0]:
            of_whole = torch.empty(scale_shape(part.whole_shape(), quantizer), device="meta")
            blocks = tuple(self._scale_of(of_whole, size, quantizer).shape)

        def make_now(as_sent: Quantizer) -> tuple[Tensor, ...]:
            by: Any = self._by_own_blocks if is_own[0] else self._by_known_scales
            codes, *scales = by(replace(part, local=values()), size, module, gemm, quantizer)
            return two_a_byte(codes, as_sent), *(each for each in scales if each is not None)

        def make(as_sent: Quantizer) -> tuple[Tensor, ...]:
            layer: Any = module
            if layer.recipe.weight_lifetime != STEP:
                return make_now(as_sent)
            return layer.weight_scales.sent(layer, self.name, (gemm, as_sent), partial(make_now, as_sent))

        return SetToGather(gemm, quantizer, is_own, (blocks, *outer), make)

    def _by_own_blocks(
        self, part: Plain, size: tuple[int, ...], module: Any, gemm: Gemm, quantizer: Quantizer
    ) -> tuple[Tensor | None, ...]:
        """Quantize a shard whose blocks all lie on this rank; return codes, one per byte, and scales.

        For the arguments see `_by_known_scales`. If ranks shard within a matrix, the outer amax is the maximum
        over these ranks.
        """
        own, outer_amax = Plain(part.local, TensorLayout(batch=self.batch)), None
        if not all(self.own_levels(part, quantizer)):
            outer_amax = module.weight_scales.outer_amax(module, self.name, gemm.b).to(self.device)
        multiplier, *scales = scales_of(whole_amax(own, quantizer), quantizer, outer_amax=outer_amax, batch=self.batch)
        return cast_part(own, multiplier, quantizer).contiguous(), *scales

    def _by_known_scales(
        self, part: Plain, size: tuple[int, ...], module: Any, gemm: Gemm, quantizer: Quantizer
    ) -> tuple[Tensor | None, ...]:
        """Cast the shard ``part`` by scales that all ranks know; return codes, one per byte, and scales.

        ``size`` is the shape of the tensor that FSDP2 shards, ``module`` has the weight, and ``gemm`` reads the codes.
        """
        multiplier, scale, outer_scale = module.weight_scales.of(module, self.name, gemm.b)
        codes = cast_part(part, multiplier.to(self.device), quantizer)
        return codes, self._scale_of(scale, size, quantizer), outer_scale

    def _scale_of(self, scale: Tensor, size: tuple[int, ...], quantizer: Quantizer) -> Tensor:
        """Return the part of the whole weight's ``scale`` for a rank's tensor parallel shard, of shape ``size``."""
        return local_scales(scale, size, self.cuts, quantizer) if self.cuts else scale


def part_of_weight(
    weight: ShardedWeight, mesh: DeviceMesh, size: Sequence[int], mp_policy: MixedPrecisionPolicy
) -> Plain:
    """Return this rank's shard of a weight, and its layout, in ``mp_policy.param_dtype``.

    ``size`` is the shape of the tensor that FSDP2 shards over ``mesh``. Raise a ValueError if FSDP2 shards a dim along
    which codes can't be gathered.
    """
    return Plain(weight.values_to_gather(mp_policy), _layout_of_shard(weight, mesh, size))


def _layout_of_shard(weight: ShardedWeight, mesh: DeviceMesh, size: Sequence[int]) -> TensorLayout:
    ranks, rank, dim = mesh.size(), mesh.get_local_rank(), cut_dim(weight, size) if weight.batch else 0
    sizes = chunk_sizes(size[dim], ranks)
    if tuple(weight.shape) != (*size[:dim], sizes[rank], *size[dim + 1 :]):
        raise ValueError(
            f"fsdp_float8_all_gather: rank {rank} of {ranks} has shape {tuple(weight.shape)} of a weight "
            f"{tuple(size)}, but weights that are all-gathered in FP8 must be sharded along dim 0. Omit "
            "shard_placement_fn for them."
        )
    shards = DimSharding(mesh.get_group().group_name, rank, dim, sizes)
    return TensorLayout((*weight.cuts, shards), weight.batch)


VIEWS = {
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
}
COPIES = {
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
}
