"""A rank's shard of a weight, in high precision, which FSDP2 gathers as codes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from fp8compile import _compat
from fp8compile.layout.cuts import DimSharding, Sharding, chunk_sizes
from fp8compile.layout.packing import two_a_byte
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.layout.shapes import codes_shape
from fp8compile.nn.experts import as_it_lies
from fp8compile.ops.layer.quantize import Scales, cast_part, local_scales, outer_amax_of, scales_of, whole_amax
from fp8compile.quantizers import Quantizer
from fp8compile.tensor import QuantizedTensor, as_it_travels, as_sent, attributes_of_others, in_place_of

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Edits", "ShardedWeight", "part_of_weight"]

aten = torch.ops.aten


class Edits:
    """How often what lies behind some tensors was written to, in any of their views."""

    def __init__(self) -> None:
        self.count = 0


@_compat.keeps_parts_after_forward
class ShardedWeight(Tensor):
    """A plain tensor that FSDP2 gathers as codes; to all else it is that tensor, in the same memory.

    A class of its own, for FSDP2 asks the local tensor of a parameter how to gather it, and keeps asking after views,
    copies and ``to``. What other ops make of it is plain, so optimizer states are, too, and it is pickled as a plain
    tensor: a checkpoint is that of a model without it. To a compiler it is a plain tensor: it has no
    ``__tensor_flatten__``, whose inner tensor would be a second one in the same memory.

    Attributes:
        name: Of the parameter in its module.
        cuts: How tensor parallelism cut the weight before FSDP2 does.
        edits: Counts writes: FSDP2 reads a parameter through views that have version counters of their own.
    """

    name: str = "weight"
    batch = 0
    cuts: Sharding
    edits: Edits
    _fake: Tensor | None

    @staticmethod
    def __new__(
        cls: type[ShardedWeight], plain: Tensor, cuts: Sharding = (), edits: Edits | None = None
    ) -> ShardedWeight:
        """The same memory as another tensor; no copy."""
        if type(plain) is Tensor:
            return Tensor._make_subclass(cls, plain)
        # a fake tensor is another Python object's already, and has no memory to share
        return Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
            pin_memory=plain.is_pinned(),
        )

    def __init__(self, plain: Tensor, cuts: Sharding = (), edits: Edits | None = None) -> None:
        self._fake = None if type(plain) is Tensor else plain
        self.cuts = cuts
        self.edits = Edits() if edits is None else edits

    @property
    def plain(self) -> Tensor:
        """A plain tensor without history on the same memory, with the same version counter."""
        return _compat.plain_alias(self) if self._fake is None else self._fake

    def like(self, plain: Tensor, edits: Edits | None = None) -> ShardedWeight:
        """Another tensor in this one's place: in the same memory, if it counts the same edits."""
        return ShardedWeight(plain, self.cuts, edits)

    # ------------------------------------------------------------------ what a tensor with a dispatch refuses

    def _without_class(self) -> Tensor:
        """The tensor or parameter that it would be without this class, with what others hang on it."""
        plain = self.plain.detach()
        if isinstance(self, Parameter):
            return in_place_of(self, plain)
        vars(plain).update(attributes_of_others(self))
        return plain.requires_grad_(self.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        """An array on the same memory, as any tensor gives one; PyTorch refuses it for classes with a dispatch."""
        return self._without_class().numpy(force=force)

    def tolist(self) -> Any:
        """The values as nested lists, as any tensor gives them; PyTorch refuses that, too."""
        return self._without_class().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.plain})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._without_class().__reduce_ex__(protocol)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda weight: weight.plain, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for weight in _written(func, args, kwargs):
                weight.edits.count += 1
            return return_and_correct_aliasing(func, args, kwargs, out)
        if func not in VIEWS and func not in COPIES:
            return out
        source = args[0]
        if not isinstance(source, ShardedWeight):
            return out
        edits = source.edits if func in VIEWS else None
        out = tree_map_only(Tensor, lambda tensor: source.like(tensor, edits), out)
        return return_and_correct_aliasing(func, args, kwargs, out) if func in VIEWS else out

    # ------------------------------------------------------------------ how it is quantized

    def quantizer_of(self, module: nn.Module) -> Quantizer:
        """The quantizer that makes codes of the weight, in the order that memory has."""
        return as_it_lies(module, module.recipe.weight)

    def quantizers_over_ranks(self, module: nn.Module, part: Plain) -> dict[str, Quantizer]:
        """Quantizers whose amaxes ranks exchange before a gather, by slot of the recipe."""
        return {"weight": self.quantizer_of(module)}

    def has_own_blocks(self, part: Plain, quantizer: Quantizer) -> bool:
        """Whether a rank keeps the scales of its blocks to itself until a gather, and exchanges no amaxes of them."""
        return False

    def amax_of(self, part: Plain, quantizer: Quantizer) -> Tensor:
        """What this rank knows of the amaxes of the whole weight, of which it has ``part``."""
        return whole_amax(part, quantizer)

    def outer_amax_of(self, amax: Tensor, quantizer: Quantizer) -> Tensor:
        """The amax that an outer scale is made of, from those of blocks."""
        return outer_amax_of(amax, quantizer)

    def scales_from(self, amax: Tensor, quantizer: Quantizer, outer_amax: Tensor | None = None) -> Scales:
        """Multipliers and scales, of the amaxes of all blocks; those of a part, with the outer amax of the whole."""
        return scales_of(amax, quantizer, outer_amax=outer_amax)

    def codes_of(self, part: Plain, multiplier: Tensor, quantizer: Quantizer) -> Tensor:
        """Codes of ``part``, by the multipliers of all blocks of the whole weight."""
        return cast_part(part, multiplier, quantizer)

    def gathered(
        self,
        codes: Tensor,
        scale: Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        group: ProcessGroup,
        outer_scale: Tensor | None = None,
    ) -> Tensor:
        """The weight that the layer sees, of the codes that a group gathered."""
        group, shard_dim, sizes = (group, None, None) if not self.cuts else _described(self.cuts[0])
        return QuantizedTensor(codes, scale, quantizer, dtype, group, shard_dim, sizes, outer_scale)

    def scale_of(self, scale: Tensor, size: tuple[int, ...], quantizer: Quantizer) -> Tensor:
        """Scales of what FSDP2 gathers, of those of the whole weight."""
        return local_scales(scale, size, self.cuts, quantizer)

    def shard_dim(self, size: torch.Size) -> int:
        """The dim along which FSDP2 cut what its ranks have together, of which this is a part."""
        return 0

    # ------------------------------------------------------------------ what FSDP2 asks

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """This rank's codes, padded to the size that all ranks send, and what the gathered ones mean."""
        size, quantizer = tuple(outer_size), self.quantizer_of(module)
        multiplier, scale, outer_scale = module.weight_scales.of(module, self.name, "weight")
        part = part_of_weight(self, mesh, outer_size, mp_policy)
        codes = self.codes_of(part, multiplier.to(self.device), quantizer)
        scale = self.scale_of(scale, size, quantizer)
        quantizer = as_it_travels(quantizer, part.cuts[-1], size)
        sent = as_sent(two_a_byte(codes, quantizer), part.cuts[-1])
        return (sent,), (scale, outer_scale, quantizer, size, mesh.get_group())

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight that the layer sees, on the codes that were gathered."""
        scale, outer_scale, quantizer, size, group = metadata
        (codes,) = all_gather_outputs
        if out is None:
            # FSDP2 laid the parts along the dim that it cut, and counts rows as if they were along the first
            shape = codes_shape(size, quantizer)
            codes = codes.view(-1)[: math.prod(shape)].view(shape)
            return self.gathered(codes, scale, quantizer, param_dtype, group, outer_scale), ()
        # FSDP2 gathered into the memory that its codes are a view of
        own = _compat.local_itself(out)
        own.scale, own.outer_scale = scale, outer_scale
        return None


def _written(func: Any, args: tuple, kwargs: dict) -> list[ShardedWeight]:
    """The weights among the arguments that an op writes to."""
    found: list[ShardedWeight] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [each for each in values if isinstance(each, ShardedWeight)]
    return found


def part_of_weight(
    weight: ShardedWeight, mesh: DeviceMesh, size: torch.Size, mp_policy: MixedPrecisionPolicy
) -> Plain:
    """What this rank has of a weight, in the dtype that the layer computes in: cast first, as a plain gather does.

    Args:
        weight: The shard.
        mesh: Of FSDP2, one dim.
        size: Of what these ranks have together.
        mp_policy: Of FSDP2.

    Raises:
        ValueError: FSDP2 shards a dim that it can't be gathered along.
    """
    ranks, rank, dim = mesh.size(), mesh.get_local_rank(), weight.shard_dim(size)
    sizes = chunk_sizes(size[dim], ranks)
    if tuple(weight.shape) != (*size[:dim], sizes[rank], *size[dim + 1 :]):
        raise ValueError(
            f"fsdp_float8_all_gather: rank {rank} of {ranks} has {tuple(weight.shape)} of a weight {tuple(size)}; "
            "weights that are gathered as codes are sharded along dim 0. Leave out shard_placement_fn for them."
        )
    shards = DimSharding(mesh.get_group().group_name, rank, dim, sizes)
    layout = TensorLayout((*weight.cuts, shards), weight.batch)
    return Plain(weight.plain.to(mp_policy.param_dtype or weight.dtype), layout)


def _described(cut: DimSharding) -> tuple:
    """Group, dim and sizes of a tensor-parallel weight, as a `QuantizedTensor` has them."""
    return torch.distributed.distributed_c10d._resolve_process_group(cut.group), cut.dim, cut.sizes


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
