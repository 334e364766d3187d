"""QuantizedParameter: a weight that is trained as codes and scale, with no copy in high precision beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile import ops
from fp8compile._compat import counting_versions
from fp8compile.layout.cuts import Sharding, chunk_sizes
from fp8compile.layout.packing import packed_dim, two_a_byte
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.ops.layer.quantize import Scales, cast_part, positions, whole_amax
from fp8compile.quantizers import Quantizer
from fp8compile.tensor.attributes import moved
from fp8compile.tensor.fsdp import FullyShardHooks
from fp8compile.tensor.optimizer_steps import Pending, check_outside_of_graph_of_step, listen_to_optimizers, settle
from fp8compile.tensor.quantized import LAYERS, QuantizedTensor, alias_of
from fp8compile.tensor.saved import load_parameter
from fp8compile.tensor.scale_without_values import scale_without_values
from fp8compile.tensor.update import shared_with
from fp8compile.tensor.write_ops import READS, UPDATES, compute, copy

__all__ = ["QuantizedParameter", "as_leaf", "flat", "plain_like"]

aten = torch.ops.aten
EXTENTS = WHOLE, SLICE, SHARD, BLANK = ("whole", "slice", "shard", "blank")


class _Shared:
    """What all views of a parameter have in common."""

    def __init__(self) -> None:
        self.written = False
        self.blank = False  # made by new_zeros, and nothing was written to it yet
        self.outer: ProcessGroup | None = None  # tensor parallel ranks, where FSDP2 has cut the part that each has
        self.initial: Tensor | None = None  # a flat one, in which a view's values lie as its codes in their memory
        self.pending: Pending | None = None  # while an optimizer's step runs
        self.state: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None  # of delayed scaling, in its layer


class QuantizedParameter(FullyShardHooks, QuantizedTensor):
    """A QuantizedTensor that optimizers write to.

    An op in place dequantizes it, computes in its dtype, and quantizes the result anew, by an amax over all ranks that
    share its scale; a list of parameters (``foreach``) takes one message for all of them. While an optimizer's step
    runs, ops compute with values, of which the end of the step makes codes, once (`Pending`). Which ops there are is a
    list, ``UPDATES`` and ``READS``: what ``torch.optim`` needs, and what fills a tensor. Any other op raises, as on a
    QuantizedTensor.

    A class of its own, for a tensor that stands for fixed numbers has no op that writes to it, and nothing reads its
    numbers but ``dequantize``: activations and gathered weights are such tensors, and a mistake there would be silent.

    Attributes:
        extent: ``"whole"``; ``"slice"``, where elements outside of this view have the same scale, so that a value
            can't be written alone; ``"blank"``, zeros made by ``new_zeros``; or ``"shard"``, a view of such, which is
            how FSDP2 makes its shards, and whose other elements are padding. Where ranks share a scale, a shard has
            to know them before it is written to: from the first forward, or ``fp8compile.parallel.share_scales``.
        has_all_scales: Whether it has the scales of all blocks of the weight, for it is a part whose rows begin or end
            within a block, or memory for one. Once it knows its ranks, ``sizes`` says which rows it has.
    """

    extent: str = WHOLE
    has_all_scales: bool = False
    may_cut_rows = True
    _shared: _Shared
    _codes: Tensor
    _scale: Tensor
    _outer_scale: Tensor | None
    instead_of_cutting: str = (
        "leave this weight out of quantized_parameters. If this is fully_shard: shards of rows may cut blocks, of "
        "columns they may not (leave out shard_placement_fn)."
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shared = _Shared()
        super().__init__(*args, **kwargs)
        listen_to_optimizers()

    @property
    def codes(self) -> Tensor:  # type: ignore[override]
        """Its codes; in an optimizer's step, those of the values that it has computed so far."""
        self._settle()
        return self._codes

    @codes.setter
    def codes(self, codes: Tensor) -> None:
        self._codes = codes

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Its scale, which belongs to the codes."""
        self._settle()
        return self._scale

    @scale.setter
    def scale(self, scale: Tensor) -> None:
        self._scale = scale

    @property
    def outer_scale(self) -> Tensor | None:  # type: ignore[override]
        """Its outer scale, which belongs to the codes, if its quantizer has two levels of scales."""
        self._settle()
        return self._outer_scale

    @outer_scale.setter
    def outer_scale(self, outer_scale: Tensor | None) -> None:
        self._outer_scale = outer_scale

    @property
    def values(self) -> Tensor:
        """Its values in an optimizer's step, for a compiled one."""
        return self.pending.given()

    def _settle(self) -> None:
        if self._shared.pending is not None:
            settle([self])

    @property
    def pending(self) -> Pending | None:
        """What it is during an optimizer's step, if one runs."""
        return self._shared.pending

    @pending.setter
    def pending(self, value: Pending | None) -> None:
        self._shared.pending = value

    def extent_of_zeros(self, size: Sequence[int]) -> str:
        """What zeros of another size are, which FSDP2 makes its shards of."""
        return BLANK

    @property
    def ends_in_padding(self) -> bool:  # type: ignore[override]
        """Whether it is memory for a shard, of which FSDP2 takes the rows that there are."""
        return self.extent == BLANK

    @property
    def is_slice(self) -> bool:
        """Whether elements outside of it have its scale too."""
        return self.extent == SLICE

    @property
    def written(self) -> bool:
        """Whether something else than `MasterWeights` has written to it, by whatever view of it.

        On all ranks that have its scale or on none: FSDP2, which copies the shard of some of them alone to pad it,
        writes to a blank, and that is then what the shard was.
        """
        return self._shared.written

    @written.setter
    def written(self, value: bool) -> None:
        self._shared.written, self._shared.blank = value, False

    @property
    def outer(self) -> ProcessGroup | None:
        """Ranks that have its scale too, beside those of ``group``: of tensor parallelism, under FSDP2."""
        return self._shared.outer

    def row(self) -> tuple[Tensor, Tensor]:
        """What delayed scaling remembers of it, in its layer's state: history (L,) and multiplier (), float32.

        Raises:
            RuntimeError: It is of no layer.
        """
        if (found := self.state()) is None:
            raise RuntimeError(
                "values for a weight whose scale comes from the steps before (DelayedScaling), which its layer "
                "remembers, and this tensor is no layer's weight: a copy of one. Write to the weight of the layer, or "
                "to .dequantize() of the copy."
            )
        return found

    @property
    def state(self) -> Callable[[], tuple[Tensor, Tensor] | None]:
        """What gives the row of delayed scaling that is its own, or None."""
        return self._shared.state

    def belongs_to(self, state: Callable[[], tuple[Tensor, Tensor] | None]) -> None:
        """Name what gives that row."""
        self._shared.state = state

    @property
    def initial(self) -> Tensor | None:
        """The values that its codes were made of, float32 on the CPU; None if they are not kept.

        They are where ``fp8compile.convert`` was asked to, until ``fp8compile.MasterWeights`` takes them: of the shard
        alone, once FSDP2 has cut it, and what was written last. Set to None, no view has them any more.
        """
        if self._shared.initial is None:
            return None
        return self._shared.initial.as_strided(self.shape, self.stride(), self.storage_offset())

    @initial.setter
    def initial(self, values: Tensor | None) -> None:
        self._shared.initial = None
        if values is not None:
            device = "meta" if self.codes.is_meta else "cpu"
            per_byte = math.prod(self.quantizer.values_shape((2, 2))) // 4
            size = self.codes.untyped_storage().nbytes() * per_byte
            self._shared.initial = torch.zeros(size, dtype=torch.float32, device=device)
            self.keep(values)

    def keep(self, values: Tensor) -> None:
        """Take these, or what they stand for, for what its codes were made of, if that is kept."""
        if self._shared.initial is not None:
            self.initial.copy_(values.dequantize(torch.float32) if isinstance(values, QuantizedTensor) else values)

    @staticmethod
    def of(x: Tensor, quantizer: Quantizer) -> QuantizedParameter:
        """Quantize a tensor, of any dtype that ``fp8compile.quantize`` takes; on the meta device, only its shape."""
        from fp8compile.tensor.quantize import quantize

        q = quantize(x, quantizer.for_shape(x.shape))
        return QuantizedParameter(q.codes, q.scale, q.quantizer, x.dtype, outer_scale=q.outer_scale)

    def _like(self, codes: Tensor, scale: Tensor, quantizer: Quantizer | None = None) -> QuantizedParameter:
        shard = self.group, self.shard_dim, self.sizes
        found = type(self)(codes, scale, quantizer or self.quantizer, self.dtype, *shard, alias_of(self._outer_scale))
        found.extent = SHARD if self.extent == BLANK else self.extent
        found.has_all_scales = self.has_all_scales
        found._shared = self._shared
        return found

    # ------------------------------------------------------------------ how its blocks lie

    gathered_as: type[Tensor] = QuantizedTensor  # what FSDP2 makes of its codes

    def block_along(self, dim: int) -> int:
        """How many elements along a dim share a scale; -1 for all of them."""
        return self.quantizer.block[int(dim == self.ndim - 1)]

    def codes_shape(self, size: Sequence[int]) -> tuple[int, ...]:
        """The shape of the codes of a weight of this size."""
        return self.quantizer.codes_shape(size)

    def scale_shape(self, size: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scale of a weight of this size."""
        return self.quantizer.scale_shape(size)

    def is_stacked_along(self, dim: int) -> bool:
        """Whether entries along a dim have no scale in common: matrices of a stack have none."""
        return False

    def outer_amax_of(self, amax: Tensor) -> Tensor:
        """The amax that outer scales are made of, from those of blocks: (1,) float32, or one of each matrix."""
        return ops.outer_amax(amax, self.quantizer)

    def two_scales_of(self, amax: Tensor, outer_amax: Tensor) -> Scales:
        """Multipliers and scales of both levels, of the amaxes of both."""
        return ops.two_scales(amax, outer_amax, self.quantizer)

    def outer_scale_of_zeros(self, size: Sequence[int], device: torch.device) -> Tensor | None:
        """An outer scale for zeros of another size: that of the whole."""
        return None if self.outer_scale is None else self.outer_scale.to(device).clone()

    def part(self, values: Tensor) -> Plain:
        """Values of this shape, and how they lie among those of other ranks, if that cuts blocks."""
        return Plain(values, TensorLayout((self.shards(),) if self.cuts_blocks() else ()))

    def amax_of(self, values: Tensor) -> Tensor:
        """What this rank knows of the amaxes of all blocks that this has scales of, if these were its values."""
        part = self.part(values)
        return whole_amax(part, self.quantizer) if part.cuts else ops.amax(values, self.quantizer)

    def codes_of(self, values: Tensor, multiplier: Tensor, quantizer: Quantizer, cuts: Sharding) -> Tensor:
        """Codes of values of this shape; arguments as of `fp8compile.tensor.update.assign`."""
        part = self.part(values)
        if part.cuts:
            return two_a_byte(cast_part(part, multiplier, quantizer), quantizer)
        return ops.cast(values, multiplier, quantizer, *positions(Plain(values, TensorLayout(cuts)), quantizer))

    def scale_of_zeros(self, size: Sequence[int], device: torch.device) -> tuple[Tensor, bool]:
        """A scale for zeros of another size, and whether it is that of all blocks of the weight."""
        is_cut = self.has_all_scales or _will_be_cut(self, size)
        shape = self.scale_shape(size)
        if is_cut:
            return self.scale.to(device).clone(), True
        if self.quantizer.block == (-1, -1) or (self.quantizer.block[0] == -1 and self.scale.shape == shape):
            return self.scale.to(device).clone().view(shape), False
        return scale_without_values(self.quantizer, shape, 1.0, device), False

    def cut_by(self, first: int, last: int) -> bool:
        """Whether these of its rows are part of blocks, or it has cut some already."""
        block, rows = self.quantizer.block[0], self.shape[0]
        if self.has_all_scales or block == -1 or self.extent != WHOLE:
            return self.has_all_scales
        return bool(first % block or (last % block and last != rows))

    def rows_cut(self, codes: Tensor) -> QuantizedParameter:
        """The view with these codes, some of its rows, and the scales of all blocks."""
        found = self._like(codes, aten.alias.default(self.scale))
        found.has_all_scales = True
        if self.extent != BLANK and codes.shape != self.codes.shape:
            found.extent, found.group, found.shard_dim, found.sizes = SLICE, None, None, None
        return found

    def _unshared(self) -> QuantizedParameter:
        """Itself, which is a copy of what it still has things in common with, with the same ones of its own."""
        initial, written, outer = self.initial, self.written, self.outer
        self._shared = _Shared()
        self.initial, self.written, self._shared.outer = initial, written, outer
        return self

    def _view(
        self, codes: Tensor, scale: Tensor, shard_dim: int | None, quantizer: Quantizer | None = None
    ) -> QuantizedParameter:
        found = QuantizedParameter(
            codes, scale, quantizer or self.quantizer, self.dtype, outer_scale=alias_of(self._outer_scale)
        )
        if codes.numel() == self.codes.numel() or self.extent == BLANK:
            found.group, found.shard_dim, found.sizes = self.group, shard_dim, self.sizes
            found.extent = SHARD if self.extent == BLANK else self.extent
        elif scale.numel() == self.scale.numel() or found._outer_scale is not None:
            found.extent = SLICE
        else:  # fewer scales: those of blocks that lie in this view
            found.extent = self.extent
        found.has_all_scales = self.has_all_scales
        found._shared = self._shared
        return found

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        place = None if self.pending is None else self.pending.place
        if self.outer is not None and place is None:
            raise TypeError(
                "a shard of a QuantizedParameter that tensor parallel ranks have parts of too is no argument of a "
                "compiled graph, which would forget these ranks. Leave what writes to it uncompiled, unless it is the "
                "step of an optimizer."
            )
        names, metadata = super().__tensor_flatten__()
        group = [name for name in names if name == "group"]
        codes = names[: len(names) - len(group)]
        codes = codes if place is None else [f"_{name}" for name in codes]  # reading the others would round
        values = [] if place is None or self.pending.of_pair else ["values"]
        return [*codes, *values, *group], (*metadata, self.extent, place)

    @staticmethod
    def __tensor_unflatten__(inner: dict, metadata: tuple, outer_size: Any, outer_stride: Any) -> QuantizedParameter:
        return QuantizedParameter._unflattened(inner, metadata)

    @classmethod
    def _unflattened(cls, inner: dict, metadata: tuple) -> Self:
        quantizer, dtype, identity, extent, place = metadata
        shard = () if identity is None else (inner["group"], *identity[-2:])
        codes, scale, outer = (
            inner.get(name if place is None else f"_{name}") for name in ("codes", "scale", "outer_scale")
        )
        found = cls(codes, scale, quantizer, dtype, *shard, outer_scale=outer)
        found.extent = extent
        if place is not None:
            found.pending = Pending(place, values=inner.get("values"), of_pair="values" not in inner)
        return found

    _loader = staticmethod(load_parameter)  # what a pickle of it calls

    def __deepcopy__(self, memo: dict) -> QuantizedParameter:
        found = as_leaf(self.clone().detach(), self.requires_grad, isinstance(self, torch.nn.Parameter))
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.group is not None or self.outer is not None or self.has_all_scales:
            raise TypeError(
                "a QuantizedParameter whose scale ranks share can't be pickled: a group lives in one process. Save "
                "its module's state_dict(), which has codes and scale as plain tensors."
            )
        kept = self.extent, self.written, self.initial
        leaf = self.requires_grad, isinstance(self, torch.nn.Parameter)
        own = self.codes, self.scale, self.quantizer, self.dtype
        return self._loader, (*own, kept, leaf, *self._outer_scales())

    def share_scale(self, group: ProcessGroup, shard_dim: int, total: int) -> None:
        """Say whose shards these are parts of one tensor with: their scale is one from the next update on.

        Args:
            group: The ranks.
            shard_dim: Along which they have parts.
            total: Of all of them, along it.
        """
        from fp8compile import _compat

        _compat.allow_group_in_subclass()
        self.group, self.shard_dim = group, shard_dim
        if self.has_all_scales:
            self.sizes = chunk_sizes(total, group.size())

    def _check_place(self) -> None:
        if self.has_all_scales and self.sizes is None:
            raise RuntimeError(
                "values of a part of a QuantizedParameter that cuts blocks, before it knows which part it is. Call "
                "fp8compile.parallel.share_scales(model) after fully_shard, or run a forward first."
            )

    def _values(self, dtype: torch.dtype) -> Tensor:
        self._check_place()
        return super()._values(dtype)

    def _flattens_blocks(self, size: Sequence[int]) -> bool:
        """Whether a view of this size is codes in one row, which blocks do not lie in."""
        return self.extent in (SHARD, BLANK) and len(size) == 1 and self.quantizer.block != (-1, -1)

    def check_writable(self, what: object) -> None:
        """Raise unless new values can be written to this tensor alone."""
        spans = -1 in self.quantizer.block or self.has_all_scales or self.quantizer.has_outer_scale()
        if self.is_slice:
            raise RuntimeError(
                f"{what} of a part of a QuantizedParameter, whose scale the rest of it has too. Write to the whole "
                "parameter."
            )
        if self.extent == BLANK and spans and self.group is None:
            raise RuntimeError(
                f"{what} of a tensor that new_zeros or new_empty made of a QuantizedParameter: it takes codes, and no "
                "values. To compute a weight, as torch.nn.init.orthogonal_ does, take a plain tensor and copy it: "
                "weight.copy_(torch.nn.init.orthogonal_(torch.empty(weight.shape))). If fully_shard made it, as the "
                "shard of a rank without elements, call fp8compile.parallel.share_scales(model) first."
            )
        if self.extent == SHARD and spans and self.group is None:
            raise RuntimeError(
                f"{what} of a shard of a QuantizedParameter before it knows the ranks that have its scale too. Call "
                "fp8compile.parallel.share_scales(model) after fully_shard, or run a forward first."
            )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS:
            check_outside_of_graph_of_step(args, func)
            return super().__torch_dispatch__(func, types, args, kwargs)
        with counting_versions():  # of codes and scale, which a compiled layer saves for its backward
            return cls._written_or_viewed(func, types, args, kwargs)

    @classmethod
    def _written_or_viewed(cls, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        if func is aten.copy_.default:
            return copy(*args)
        if func in UPDATES or func in READS:
            return compute(func, args, kwargs)
        if func is aten.view.default and args[0]._flattens_blocks(args[1]):
            return return_and_correct_aliasing(func, args, kwargs, flat(args[0], func(args[0].codes, args[1])))
        if func is aten.cat.default:
            raise TypeError(NO_CAT)
        if func.namespace == "c10d":
            raise TypeError(f"{func} {NO_MESSAGE}")
        if func in ALIASES:  # reads no codes: an optimizer may write to p.data
            view = args[0]._like(func(args[0]._codes), func(args[0]._scale))
            return moved(func, args[0], return_and_correct_aliasing(func, args, kwargs, view))
        if func in MAKERS:
            return moved(func, args[0], MAKERS[func](func, *args, **kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in COPIES:
            result._unshared()
        return moved(func, args[0], result)


def as_leaf(found: QuantizedParameter, requires_grad: bool, is_parameter: bool) -> QuantizedParameter:
    """A new tensor as what it is a copy of: a leaf that a gradient is asked for, a parameter of a module."""
    found.requires_grad_(requires_grad)
    if is_parameter:
        found._is_param = True
    return found


ALIASES = {aten.detach.default, aten.alias.default}
COPIES = {aten.clone.default, aten._to_copy.default, aten._pin_memory.default}
NO_MESSAGE = (
    "of a QuantizedParameter: what is sent are its codes and its scale. For a plan of tensor parallelism, take "
    "fp8compile.parallel.ColwiseParallel and RowwiseParallel, or convert after parallelize_module; for all of it, "
    "fp8compile.parallel.broadcast_parameters(model)."
)
NO_CAT = (
    "aten.cat.default of QuantizedParameters has no FP8 meaning, and nothing dequantizes in silence. If this is "
    "DistributedDataParallel, which copies values of rank 0 in one message: call "
    "fp8compile.parallel.broadcast_parameters(model) and pass init_sync=False to it."
)

# ---------------------------------------------------------------------------------- tensors like it


def flat(x: QuantizedParameter, codes: Tensor) -> QuantizedParameter:
    """Codes in one row: FSDP2 keeps such a view of each shard, and reads it of plain parameters only.

    Blocks do not lie in rows, so this has no scale, and an op on its values raises.
    """
    quantizer = x.quantizer.transposed() if packed_dim(x.quantizer) == -2 else x.quantizer  # that packs along a row
    found = type(x)(codes, x.scale.new_empty(0), quantizer, x.dtype, outer_scale=alias_of(x._outer_scale))
    found.extent = SLICE
    return found


def _empty_like(func: Any, x: QuantizedParameter, **kwargs: Any) -> Tensor:
    """Codes without values; the scale is NaN until there are some."""
    if kwargs.pop("dtype", None) not in (None, x.dtype):
        raise TypeError(f"{func} of a QuantizedParameter in another dtype: take that of .dequantize().")
    codes = func(x.codes, **kwargs)
    found = x._like(codes, scale_without_values(x.quantizer, x.scale.shape, torch.nan, codes.device))
    outer = x.outer_scale
    found.outer_scale = None if outer is None else torch.full(outer.shape, torch.nan, device=codes.device)
    found._shared = _Shared()
    found._shared.outer = x.outer
    if x.initial is not None:
        found.initial = torch.tensor(torch.nan)
    return found


def plain_like(func: Any, x: QuantizedParameter, *args: Any, **kwargs: Any) -> Tensor:
    """What optimizers keep of a parameter is in high precision."""
    values = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return func(values, *args, **{"device": x.device, **kwargs})


def _will_be_cut(x: QuantizedParameter, size: Sequence[int]) -> bool:
    """Whether this is memory for some rows of a whole weight that end within a block: FSDP2 asks for it."""
    block = x.quantizer.block[0]
    is_rows = x.extent == WHOLE and len(size) == 2 and tuple(size[1:]) == tuple(x.shape[1:]) and size[0] < x.shape[0]
    return is_rows and block not in (1, -1) and bool(size[0] % block)


def _new_zeros(func: Any, x: QuantizedParameter, size: Sequence[int], **kwargs: Any) -> Tensor:
    """Zeros with a scale of their own: that of the whole, if it has one, for a rank without elements has it too."""
    if packed_dim(x.quantizer) == -2 and (len(size) < 2 or size[-2] % 2):
        raise TypeError(
            f"{func} {tuple(size)} of a QuantizedParameter whose codes share a byte with the next row's, by "
            f"{x.quantizer!r}. If this is fully_shard: give each rank an even number of rows, take "
            "fp8compile.recipes.nvfp4() with weight_block=(16, 16), or leave quantized_parameters out."
        )
    if kwargs.pop("dtype", None) not in (None, x.dtype):
        raise TypeError(f"{func} of a QuantizedParameter in another dtype: use torch.zeros.")
    codes = x.codes.new_zeros(x.codes_shape(size), **kwargs)
    scale, is_cut = x.scale_of_zeros(size, codes.device)
    outer = x.outer_scale_of_zeros(size, codes.device)
    found = type(x)(codes, scale, x.quantizer, x.dtype, outer_scale=outer)
    if x.extent == WHOLE:  # FSDP2 is about to cut it
        found._shared.outer = shared_with(x)
    else:
        found.group, found.shard_dim, found._shared.outer = x.group, x.shard_dim, x.outer
    found.has_all_scales, found.sizes = is_cut, x.sizes if is_cut else None
    found.extent, found.written, found._shared.blank = x.extent_of_zeros(size), x.written, True
    found.belongs_to(x.state)
    if x.initial is not None:
        found.initial = torch.zeros(())
    return found


MAKERS = {
    aten.empty_like.default: _empty_like,
    aten.zeros_like.default: plain_like,
    aten.ones_like.default: plain_like,
    aten.full_like.default: plain_like,
    aten.new_zeros.default: _new_zeros,
    aten.new_empty.default: _new_zeros,  # FSDP2, for a rank without elements
}
