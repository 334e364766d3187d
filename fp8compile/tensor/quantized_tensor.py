"""QuantizedTensor: codes and scales that autograd sees as a tensor of the dtype that was quantized.

Views, copies and moves between devices work, because they compute nothing. fp8compile's own ops, such as those of
layers, read the codes. Every other op raises a TypeError, so that nothing dequantizes unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile import ops
from fp8compile.layout.cuts import DimSharding, Sharding, split_axes
from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.layout.quantized import Quantized, TensorLayout
from fp8compile.ops.layer.gather_operands import gather
from fp8compile.ops.layer.quantize_over_ranks import dequantized
from fp8compile.quantizers import GEMMS, Gemm, Quantizer
from fp8compile.tensor.check_arguments import own_sizes, shown
from fp8compile.tensor.check_sizes_over_ranks import check_agreement
from fp8compile.tensor.fsdp2_gather_policy import BufferOwner
from fp8compile.tensor.refused_operators import refuse_operators

__all__ = ["HANDLERS", "LAYERS", "VIEWS", "QuantizedTensor", "cuts_blocks", "has_codes", "no_meaning"]

# The ops that work on a QuantizedTensor. The other files of this package fill these tables.
HANDLERS: dict[Any, Callable[..., Any]] = {}  # PyTorch ops whose first argument is a QuantizedTensor
VIEWS: set[Any] = set()  # the keys of HANDLERS that return a view of their first argument
LAYERS: dict[Any, Callable[..., Any]] = {  # fp8compile's ops, which take a QuantizedTensor as any argument
    # the result is `values`, so nothing is computed, and no such op is in a graph
    ops.straight_through: lambda func, values, *others: values.detach(),
}
PARTS = ("codes", "scale", "outer_scale")
ENDS = ("", "_for_grad_input")  # suffix of the attribute names for each set
INNER = tuple(f"{part}{end}" for end in ENDS for part in PARTS)


def _parts_to_gather(x: QuantizedTensor, dim: int, sizes: Sequence[int] | None) -> DimSharding:
    if x.group is None:
        raise ValueError(
            "all_gather: this QuantizedTensor has no group, so it is not a shard. Create it with "
            "fp8compile.quantize(x, quantizer, group=..., shard_dim=...)."
        )
    if x.codes.shape != x.shape:
        raise TypeError(
            f"all_gather: {x.quantizer!r} stores several values per byte, which an all-gather does not support. "
            "All-gather the tensor before quantizing it."
        )
    if x.shard_dim is None:
        raise ValueError(
            "all_gather: this QuantizedTensor is a view without the sharded dim. Call all_gather on the original "
            "tensor, then take the view."
        )
    if type(dim) is not int or dim not in (x.shard_dim, x.shard_dim - x.ndim):
        raise ValueError(
            f"all_gather: `dim` is {shown(dim)}, but the tensor is sharded along dim {x.shard_dim}. Pass "
            f"dim={x.shard_dim}."
        )
    given = x.sizes if sizes is None else sizes
    what = f"its entries along dim {x.shard_dim}"
    sizes = own_sizes("all_gather", "sizes", given, x.group, x.shape[x.shard_dim], what)
    if x.sizes is not None and sizes != x.sizes:
        raise ValueError(
            f"all_gather: `sizes` is {sizes}, but the tensor was quantized with sizes {x.sizes}. Omit sizes, or pass "
            "the same."
        )
    check_agreement("all_gather", x.codes, x.group, sizes=sizes)
    found = DimSharding(x.group, x.group.rank(), x.shard_dim, sizes)
    if x.sizes is None and any(split_axes(x.shape, (found,), x.quantizer.block)):
        raise ValueError(
            f"all_gather: shards of sizes {found.sizes} along dim {x.shard_dim} split blocks {x.quantizer.block}, "
            "but each shard was quantized as full blocks. Pass the sizes when quantizing: fp8compile.quantize(..., "
            "sizes=...)."
        )
    return found


class QuantizedTensor(Tensor):
    """A quantized tensor: FP8 or FP4 data and scales, with the values ``codes * scale`` in each block.

    Created by ``fp8compile.quantize``. It supports ``detach``, ``clone``, ``t`` and ``to`` another device. ``view``
    and ``reshape`` are supported if they keep the last dim or if the full tensor is one block. ``slice``, ``select``,
    ``split`` and ``chunk`` are supported at block boundaries. Any other PyTorch op raises a TypeError. Call
    ``dequantize()`` to get a plain tensor.

    Attributes:
        codes: The quantized data, uint8, ``quantizer.codes_shape(shape)``. Do not write to ``codes`` or ``scale`` in
            place, because a compiled graph does not notice that this changes the tensor.
        scale: The scale of each block, ``quantizer.scale_shape(shape)``: float32, or uint8 for E8M0. Stacked weights
            of E experts have (E, blocks along rows, blocks along columns). If shard boundaries divide blocks, these
            are the scales of the full tensor.
        quantizer: The immutable quantizer that produced the data.
        group: The process group over which the tensor is sharded, or over which FSDP2 all-gathered it; or None.
        shard_dim: The dim along which the full tensor is sharded. None if there is no group, if FSDP2 all-gathered the
            tensor, or if a view has lost the dim.
        sizes: Number of entries that each rank has along ``shard_dim``. None if unknown, as after
            ``fp8compile.quantize`` without ``sizes``.
        outer_scale: The global scale of the tensor, float32, (1,), or (E,) for stacked weights of E experts. None
            unless the quantizer has two levels of scales (``fp8compile.TwoLevelScaling``).
        batch: Number of leading dims over which matrices are stacked: 1 for stacked weights of experts, else 0.
        quantizer_for_grad_input: The quantizer of a separate quantized copy for the GEMM of grad_input; None if the
            GEMMs of output and grad_input read the same data. ``codes_for_grad_input`` and so on are the data and
            scales of this copy.
        in_memory: If the data for output and grad_input share a buffer, records which of the two it holds; else None.
    """

    codes: Tensor
    scale: Tensor
    outer_scale: Tensor | None
    quantizer: Quantizer
    codes_for_grad_input: Tensor | None
    scale_for_grad_input: Tensor | None
    outer_scale_for_grad_input: Tensor | None
    quantizer_for_grad_input: Quantizer | None
    group: ProcessGroup | None
    shard_dim: int | None
    sizes: tuple[int, ...] | None
    batch: int
    in_memory: BufferOwner | None
    scales_of_whole: tuple[tuple[bool, bool], ...] = ((False, False),) * 2  # `has_scales_of_whole` of each set
    instead_of_cutting: str = "call .dequantize() first."
    ends_in_padding = False  # whether a view may end within a block because only padding follows
    may_cut_blocks = False  # whether a view may begin or end within a block; it then keeps the scales of all blocks

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        codes: Tensor,
        scale: Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        *others: Any,
        batch: int = 0,
        **named: Any,
    ) -> QuantizedTensor:
        """Wrap ``codes`` and ``scale`` that ``quantizer`` made from a tensor of ``dtype``, without a copy.

        ``batch`` is the number of leading dims over which matrices are stacked: 1 for weights of experts, else 0. Only
        ``__init__`` reads ``others`` and ``named``. Users call ``fp8compile.quantize`` instead.
        """
        # in inference mode too, views of a tensor that was made outside of it keep that tensor's version counter
        with torch.inference_mode(torch.is_inference_mode_enabled() and codes.is_inference()):
            shape = (*codes.shape[:batch], *quantizer.values_shape(codes.shape[batch:]))
            strides, offset = _place_of_values(codes, shape)
            return Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=codes.device
            )

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        shard_dim: int | None = None,
        sizes: tuple[int, ...] | None = None,
        outer_scale: Tensor | None = None,
        *,
        batch: int = 0,
        second: Quantized | None = None,
        in_memory: BufferOwner | None = None,
    ) -> None:
        if quantizer.has_outer_scale() != (outer_scale is not None):
            raise TypeError(
                f"{type(self).__name__} of {type(quantizer).__name__}: `outer_scale` is {outer_scale!r}; it must be "
                "a tensor for a quantizer with two levels of scales, and None for one level."
            )
        self.codes = codes
        self.scale = scale
        self.outer_scale = outer_scale
        self.quantizer = quantizer
        self.codes_for_grad_input = None if second is None else second.codes
        self.scale_for_grad_input = None if second is None else second.scale
        self.outer_scale_for_grad_input = None if second is None else second.outer_scale
        self.quantizer_for_grad_input = None if second is None else second.quantizer
        self.group = group
        self.shard_dim = shard_dim
        self.sizes = sizes
        self.batch = batch
        self.in_memory = in_memory

    @classmethod
    def of_sets(cls, sets: Sequence[Quantized], dtype: torch.dtype, **others: Any) -> Self:
        """Wrap the quantized data of a tensor of ``dtype``; ``others`` are keyword arguments of the class.

        ``sets`` has one entry, or two if grad_input reads a separate quantized copy.
        """
        first, second = sets[0], sets[1] if len(sets) == 2 else None
        own = first.codes, first.scale, first.quantizer, dtype
        found = cls(*own, outer_scale=first.outer_scale, second=second, **others)
        found.scales_of_whole = tuple(each.has_scales_of_whole for each in (first, sets[-1]))
        return found

    # ------------------------------------------------------------------ its codes

    def _sets_named(self, before: str) -> tuple[Quantized, ...]:
        found = []
        quantizers = self.quantizer, self.quantizer_for_grad_input
        for end, quantizer, of_whole in zip(ENDS, quantizers, self.scales_of_whole, strict=True):
            if quantizer is not None:
                parts = {part: getattr(self, f"{before}{part}{end}") for part in PARTS}
                layout = TensorLayout(batch=self.batch)
                found.append(Quantized(**parts, quantizer=quantizer, layout=layout, has_scales_of_whole=of_whole))
        return tuple(found)

    def sets(self) -> tuple[Quantized, ...]:
        """Return quantized data with scales: one entry, or two if grad_input reads a separate quantized copy.

        The data for the output comes first. If both share a buffer, both are returned, although the buffer holds only
        one of them at a time; `set_of` raises a RuntimeError for the other.
        """
        return self._sets_named("")

    def stored(self) -> tuple[Quantized, ...]:
        """Return the same as `sets`.

        During an optimizer step, a `QuantizedParameter` returns the data from before the step.
        """
        return self.sets()

    def set_of(self, gemm: Gemm) -> Quantized:
        """Return the quantized data and scales that ``gemm`` of a layer reads.

        Raises:
            RuntimeError: Output and grad_input share a buffer, which currently holds the data for the other GEMM.
        """
        if self.in_memory is not None:
            self.in_memory.check(gemm)
        return self.sets()[-1 if gemm is GEMMS[1] else 0]

    def cuts_blocks(self) -> bool:
        """Whether a rank's shard begins or ends within a block of this tensor along ``shard_dim``."""
        return cuts_blocks(self)

    def parts(self) -> tuple[Tensor, ...]:
        """Return the inner tensors: data, scale and any global scale, then the same for grad_input."""
        return tuple(part for own in self.sets() for part in own.parts())

    # ------------------------------------------------------------------ what torch.compile asks

    @property
    def codes_in_forward(self) -> Tensor:
        """The data for the output, if it shares a buffer with the data for grad_input.

        Raises:
            RuntimeError: The buffer currently holds the data for grad_input, because the backward recomputes a
                forward.
        """
        self.in_memory.check_forward()  # type: ignore[union-attr]  # only read if both sets share their memory
        return self.codes

    def _inner_names(self) -> list[str]:
        sets = zip(self.stored(), ENDS, strict=False)
        return [f"{part}{end}" for own, end in sets for part in PARTS[: len(own.parts())]]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names, quantizers = self._inner_names(), tuple(own.quantizer for own in self.stored())
        if self.in_memory is not None:
            names[0] = "codes_in_forward"
        how = quantizers, self.dtype, self.batch, self.in_memory is not None
        if self.group is None:
            return names, (*how, None)
        # PyTorch guards only on the type of the group, and bakes its size into graphs
        identity = (self.group.group_name, self.group.size(), self.group.rank(), self.shard_dim, self.sizes)
        return [*names, "group"], (*how, identity)

    def _stable_hash_for_caching(self) -> str:
        """Return a text for AOTAutograd's cache key, which includes the arguments of the quantizers.

        PyTorch's default has only the quantizer's class, so that e4m3 and e5m2 would share compiled code.
        """
        names, (quantizers, _, *metadata) = self.__tensor_flatten__()
        inner = [(t.shape, t.stride(), t.dtype, t.device) for t in (getattr(self, n) for n in names if n != "group")]
        texts = [quantizer.__fx_repr__()[0] for quantizer in quantizers]
        values = (type(self).__name__, names, self.shape, self.requires_grad, *texts)
        return hashlib.blake2b(repr((*values, inner, metadata)).encode(), digest_size=16).hexdigest()

    @classmethod
    def _unflattened(cls, inner: dict[str, Any], metadata: tuple[Any, ...]) -> Self:
        quantizers, dtype, batch, shares_memory, identity = metadata
        parts = {name.removeprefix("_").replace("codes_in_forward", "codes"): each for name, each in inner.items()}
        sets = [
            Quantized(
                codes=parts[f"codes{end}"],
                scale=parts[f"scale{end}"],
                outer_scale=parts.get(f"outer_scale{end}"),
                quantizer=quantizer,
            )
            for quantizer, end in zip(quantizers, ENDS, strict=False)
        ]
        shard = {} if identity is None else {"group": inner["group"], "shard_dim": identity[3], "sizes": identity[4]}
        return cls.of_sets(sets, dtype, batch=batch, in_memory=BufferOwner() if shares_memory else None, **shard)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], metadata: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        return QuantizedTensor._unflattened(inner, metadata)

    def __coerce_tangent_metadata__(self) -> QuantizedTensor:
        # AOTAutograd calls this on an output of a graph, and expects the gradient to have the output's class
        raise TypeError(
            "a QuantizedTensor that requires a gradient can't be an output of a compiled graph, because its "
            "gradient is a plain tensor, and PyTorch requires one of the same class. Return .detach(), or "
            ".dequantize() inside the graph."
        )

    # ------------------------------------------------------------------ what it stands for

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Convert to a plain tensor: multiply by the scales in float32, then round once to ``dtype``.

        If there is a separate quantized copy for grad_input, the data for the output is used. The gradient is passed
        through unchanged (straight-through).

        Args:
            dtype: Dtype of the result, a floating point dtype; by default the dtype of this tensor.

        Returns:
            A plain tensor of this shape.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dequantize: `dtype` is {dtype}; it must be a floating point dtype.")
        return ops.straight_through(self._values(dtype or self.dtype), self, self.quantizer)

    def _values(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]  # Tensor._values is of sparse ones
        own = self.set_of(GEMMS[0])
        cuts = self.cuts_of(own)
        if not cuts and not self.batch:
            return ops.dequantize(own.codes, own.scale, own.quantizer, dtype, *own.scales[1:])
        codes, quantizer = one_a_byte(own.codes, own.quantizer)
        layout = TensorLayout(cuts, self.batch)
        whole = split_axes(self.shape, cuts, quantizer.block, self.batch)
        part = replace(own, codes=codes, quantizer=quantizer, layout=layout, has_scales_of_whole=whole)
        return dequantized(part, dtype).local

    def cuts_of(self, own: Quantized) -> Sharding:
        """Return how ranks shard this tensor, if a shard ends within a block of ``own``; else ().

        A block that spans the full dim does not count, because every rank has its scale.
        """
        return (self.shards(),) if _cuts_blocks_of(self, own.quantizer) else ()

    def block_along(self, own: Quantized, dim: int) -> int:
        """Return how many elements along ``dim`` share a scale of ``own``; -1 for all of them."""
        return 1 if dim < self.batch else own.quantizer.block[int(dim == self.ndim - 1)]

    def shards(self) -> DimSharding:
        """How ranks shard the full tensor. Only call this if ``sizes`` is not None."""
        group: Any = self.group  # a tensor with sizes has a group and a shard_dim
        dim: Any = self.shard_dim
        sizes: Any = self.sizes
        return DimSharding(group, group.rank(), dim, sizes)

    def all_gather(self, dim: int, sizes: Sequence[int] | None = None) -> QuantizedTensor:
        """All-gather the full tensor from its shards. All ranks of ``group`` must call this.

        Ranks communicate quantized data, at most one byte per element, and scales only if they differ between ranks.
        Nothing is requantized.

        Args:
            dim: The dim along which the tensor is sharded: ``shard_dim``, or the same dim counted from the end.
            sizes: Number of entries that each rank has along ``dim``. Needed if ranks have different numbers and
                ``fp8compile.quantize`` was called without sizes.

        Returns:
            The full tensor, with ``group`` None.

        Raises:
            ValueError: There is no group, the tensor is not sharded along ``dim``, or sizes do not match. Or ranks
                pass different sizes; the first call with a group compares them.
            TypeError: Sizes are not ints, several values are packed into a byte, or this tensor requires a gradient.
        """
        if self.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                "all_gather: this QuantizedTensor requires a gradient, but an FP8 all-gather has no derivative. "
                "Call .detach() first, or gather the source and quantize that."
            )
        shards = _parts_to_gather(self, dim, sizes)
        is_column, cuts = shards.dim == self.ndim - 1, cuts_blocks(self)
        whole = (cuts and not is_column, cuts and is_column)
        part = replace(self.sets()[0], outer_scale=None, layout=TensorLayout((shards,)), has_scales_of_whole=whole)
        gathered = gather(part, 0)
        scale = gathered.scale.view(self.quantizer.scale_shape(gathered.codes.shape))
        return QuantizedTensor(gathered.codes, scale, self.quantizer, self.dtype, outer_scale=self.outer_scale)

    @property
    def data(self) -> QuantizedTensor:
        """The same tensor, detached from autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise TypeError(
            "assigning .data of a QuantizedTensor would not change its quantized data. Create a new one with "
            "fp8compile.quantize."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        group = "None" if self.group is None else repr(self.group.group_name)
        shard = "" if self.sizes is None else f", shard_dim={self.shard_dim}, sizes={self.sizes}"
        batch = f", batch={self.batch}" if self.batch else ""
        second = self.quantizer_for_grad_input
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"quantizer={self.quantizer!r}, group={group}{shard}{batch}"
            f"{'' if second is None else f', quantizer_for_grad_input={second!r}'})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.group is not None:
            raise TypeError(
                "a QuantizedTensor with a process group can't be pickled, because a process group belongs to one "
                "process. Pickle .dequantize(), or its .codes and .scale."
            )
        if self.batch or self.quantizer_for_grad_input is not None:
            raise TypeError(
                "a QuantizedTensor of a stack, or with two sets of quantized data, is temporary data of an FSDP2 "
                "all-gather and can't be pickled. Save its module's state_dict()."
            )
        outer = () if self.outer_scale is None else (self.outer_scale,)
        return self.load, (self.codes, self.scale, self.quantizer, self.dtype, *outer)

    load: Callable[..., QuantizedTensor]  # the function that pickles call; `fp8compile.tensor.saved` sets it

    # ------------------------------------------------------------------ views

    def like(self, sets: Sequence[Quantized]) -> Self:
        """Return a tensor of the same shape and group with other quantized data.

        ``sets`` has the data for the output and, if different, for grad_input.
        """
        return self._wrapped(sets, self.shard_dim, self.sizes)

    def _wrapped(self, sets: Sequence[Quantized], shard_dim: int | None, sizes: tuple[int, ...] | None) -> Self:
        place: dict[str, Any] = {"group": self.group, "shard_dim": shard_dim, "sizes": sizes}
        return self.of_sets(sets, self.dtype, batch=self.batch, in_memory=self.in_memory, **place)

    def view_of(self, sets: Sequence[Quantized], shard_dim: int | None, *, along_batch: bool = False) -> Self:
        """Return a view of another shape, built from views of the data and scales.

        Args:
            sets: The view's data and scales for the output and, if different, for grad_input.
            shard_dim: The dim of the view along which ranks have shards, or None.
            along_batch: Whether the view selects complete matrices of stacked weights.
        """
        codes, own = sets[0].codes, self.stored()[0].codes
        before: Any = self.shard_dim  # not None if the view has a shard_dim
        has_all = shard_dim is not None and codes.shape[shard_dim] == own.shape[before]
        return self._wrapped(sets, shard_dim, self.sizes if has_all else None)

    if TYPE_CHECKING:  # views are of the same class

        def t(self) -> Self:
            """The transposed matrix, as a view."""

        def detach(self) -> Self:
            """A view of the same tensor, detached from autograd."""

        T: Self

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as PyTorch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS:
            return LAYERS[func](func, *args)
        handler = HANDLERS.get(func)
        if handler is None and func._can_decompose():  # below autograd, composite ops arrive here undecomposed
            return func.decompose(*args, **kwargs)
        if handler is None or not isinstance(args[0], QuantizedTensor):
            raise TypeError(no_meaning(func, next((each for each in args if isinstance(each, QuantizedTensor)), None)))
        result = handler(func, *args, **kwargs)
        if func in VIEWS:
            return return_and_correct_aliasing(func, args, kwargs, result)
        return result


def has_codes(tensor: object) -> TypeGuard[QuantizedTensor]:
    """Whether a tensor is a QuantizedTensor."""
    return isinstance(tensor, QuantizedTensor)


def _place_of_values(codes: Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], int | torch.SymInt]:
    """Return strides and offset of the values, as if they lay in memory in the order of the codes.

    ``shape`` is the shape of the values. If a byte holds several values, each counts as one element.
    """
    shared = [dim for dim in range(codes.ndim) if codes.shape[dim] != shape[dim]]
    if not shared:
        return codes.stride(), codes.storage_offset()
    if len(shared) > 1 or shape[shared[0]] % codes.shape[shared[0]]:
        return torch.empty(shape, device="meta").stride(), 0  # no rule for such codes: take contiguous strides
    (dim,) = shared
    per_byte, step, offset = shape[dim] // codes.shape[dim], codes.stride(dim) or 1, codes.storage_offset()
    strides = [stride * per_byte if stride >= step else stride for stride in codes.stride()]
    strides[dim] = step
    return tuple(strides), offset // step * step * per_byte + offset % step


def _cuts_blocks_of(x: QuantizedTensor, quantizer: Quantizer) -> bool:
    if x.sizes is None or x.shard_dim is None:
        return False
    shards = DimSharding("", 0, x.shard_dim, x.sizes)  # neither the group nor the rank changes the answer
    return any(split_axes(x.shape, (shards,), quantizer.block, x.batch))


def cuts_blocks(x: QuantizedTensor) -> bool:
    """Whether a rank's shard begins or ends within a block of any codes of ``x``.

    This is a function because Dynamo does not trace a tensor's method that returns a bool.
    """
    second = x.quantizer_for_grad_input
    return _cuts_blocks_of(x, x.quantizer) or (second is not None and _cuts_blocks_of(x, second))


def no_meaning(op: object, x: QuantizedTensor | None) -> str:
    """Return the error text for an op that ``x`` does not support; ``x`` is None if not known."""
    if x is not None and x.batch:
        return (
            f"{op} of quantized expert weights is not supported, because it does not keep full matrices, and tensors "
            "are never dequantized implicitly. Use fp8compile.grouped_linear or grouped_mm, or call .dequantize()."
        )
    if x is not None and x.quantizer_for_grad_input is not None:
        return (
            f"{op} is not supported for a weight with two sets of quantized data, and tensors are never dequantized "
            "implicitly. Use it in fp8compile.linear, or keep that layer's weight in high precision."
        )
    return (
        f"{op} is not supported for a QuantizedTensor, and tensors are never dequantized implicitly. Call "
        ".dequantize() first; for matrix multiplication use fp8compile.linear or fp8compile.scaled_mm."
    )


refuse_operators(QuantizedTensor, no_meaning)
