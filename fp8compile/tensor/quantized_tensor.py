"""QuantizedTensor, the class.

A wrapper subclass: to autograd and shapes it is a tensor of the source's dtype; only ops that keep what it stands for
without touching a number work on it. Everything else raises: nothing dequantizes in silence.

    batch    leading dims over which matrices are stacked, each quantized by itself. Without a batch (0), blocks lie
             over the matrix of all rows, and the rows of a tensor are all its leading dims.
    sets     one set of codes, or two of the same values: the output's products read the first, grad_input's the last

             for the output        blocks along the rows of w_NK (rowwise: 1 x K, MX: 1 x 32)     y  = x @ w^T
             for grad_input        blocks along its columns    (rowwise: N x 1, MX: 32 x 1)       dx = dy @ w

The process group travels as an inner value of flatten and unflatten. PyTorch guards only on its type and bakes its
size into graphs, so name, size and rank are in the metadata: a graph made for one group never runs on another.

A shard that begins or ends within a block has codes of that block, whose other elements are on other ranks. It holds
the scales of all blocks of the whole along the dim that is cut, and ``sizes``, which tell where among them it is.
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
from fp8compile.layout.packing import one_a_byte
from fp8compile.layout.quantized import Quantized, TensorLayout
from fp8compile.ops.layer.over_ranks import gather
from fp8compile.ops.layer.quantize import dequantized
from fp8compile.quantizers import GEMMS, Gemm, Quantizer
from fp8compile.tensor.agreement import check_agreement
from fp8compile.tensor.arguments import own_sizes, shown
from fp8compile.tensor.codes import Codes
from fp8compile.tensor.pass_in_memory import PassInMemory
from fp8compile.tensor.refusals import refuse_operators

__all__ = ["HANDLERS", "LAYERS", "VIEWS", "QuantizedTensor", "cuts_blocks", "has_codes", "no_meaning"]

# What works on one: filled by the files that say how.
HANDLERS: dict[Any, Callable[..., Any]] = {}  # ops of PyTorch whose first argument it is
VIEWS: set[Any] = set()  # those of them whose result is a view of it
LAYERS: dict[Any, Callable[..., Any]] = {  # our own ops that take one in any place
    # what is known is the result; nothing is computed, and a graph holds no such op
    ops.straight_through: lambda func, values, *others: values.detach(),
}
PARTS = ("codes", "scale", "outer_scale")
ENDS = ("", "_for_grad_input")  # of the names of the parts of each set
INNER = tuple(f"{part}{end}" for end in ENDS for part in PARTS)


def _parts_to_gather(x: QuantizedTensor, dim: int, sizes: Sequence[int] | None) -> DimSharding:
    """The parts that the ranks have, if `QuantizedTensor.all_gather` can put them together."""
    if x.group is None:
        raise ValueError(
            "all_gather: this QuantizedTensor has no group, so it is no part of anything. Make it by "
            "fp8compile.quantize(x, quantizer, group=..., shard_dim=...)."
        )
    if x.codes.shape != x.shape:
        raise TypeError(
            f"all_gather: {x.quantizer!r} packs codes of several values in a byte; gather before quantizing."
        )
    if x.shard_dim is None:
        raise ValueError(
            "all_gather: this is a view without the dim along which the ranks have parts. Gather first, then take "
            "the view."
        )
    if type(dim) is not int or dim not in (x.shard_dim, x.shard_dim - x.ndim):
        raise ValueError(f"all_gather: dim is {shown(dim)}; the ranks have parts along dim {x.shard_dim}.")
    given = x.sizes if sizes is None else sizes
    what = f"its entries along dim {x.shard_dim}"
    sizes = own_sizes("all_gather", "sizes", given, x.group, x.shape[x.shard_dim], what)
    if x.sizes is not None and sizes != x.sizes:
        raise ValueError(f"all_gather: sizes is {sizes}, and this was quantized as one of {x.sizes}.")
    check_agreement("all_gather", x.codes, x.group, sizes=sizes)
    found = DimSharding(x.group, x.group.rank(), x.shard_dim, sizes)
    if x.sizes is None and any(split_axes(x.shape, (found,), x.quantizer.block)):
        raise ValueError(
            f"all_gather: parts of {found.sizes} along dim {x.shard_dim} cut blocks {x.quantizer.block}, and each was "
            "quantized as whole blocks. Say so when quantizing: fp8compile.quantize(..., sizes=...)."
        )
    return found


class QuantizedTensor(Tensor):
    """Codes and scales that stand for a tensor: ``codes * scale``, block by block.

    Made by ``fp8compile.quantize``. Works with ``detach``, ``clone``, ``t``, ``view`` and ``reshape`` that leave the
    last dim alone (any, if tensorwise), ``slice``, ``select``, ``split`` and ``chunk`` that cut no block, and ``to``
    another device. Any other op raises a TypeError; call ``dequantize()`` for a plain tensor.

    Attributes:
        codes: uint8, ``quantizer.codes_shape(shape)``. To read, like ``scale``: a compiled graph does not see that a
            change in place of one of them changes this tensor.
        scale: What codes are multiplied by, ``quantizer.scale_shape(shape)``: float32, or uint8 for E8M0. In a stack
            (E, blocks, blocks), that of each matrix. A shard that cuts blocks has that of the whole tensor's shape.
        quantizer: The immutable quantizer that made it.
        group: The process group whose ranks share its scales, or None.
        shard_dim: The dim along which these ranks have parts of a whole; None without a group, and where a view has
            no such dim any more.
        sizes: What every rank has along it, where ``fp8compile.quantize`` was told; else None.
        outer_scale: What all of it is multiplied by beside ``scale``, (1,) float32, or (E,) of a stack, if the
            quantizer has two levels of scales (``fp8compile.TwoLevelScaling``); else None.
        batch: Number of leading dims over which matrices are stacked.
        quantizer_for_grad_input: The quantizer of a second set of codes, which grad_input multiplies; None without
            one. The parts of that set have names with the same end.
        in_memory: Says which set is in memory, if both share one; else None.
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
    in_memory: PassInMemory | None
    scales_of_whole: tuple[tuple[bool, bool], ...] = ((False, False),) * 2  # of each set, as `Codes` has it
    instead_of_cutting: str = "call .dequantize() first."
    ends_in_padding = False  # whether nothing is lost where a view ends within a block
    may_cut_blocks = False  # whether a view may begin or end within a block, and then have the scales of all blocks

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        codes: Tensor,
        scale: Tensor,
        quantizer: Quantizer,
        dtype: torch.dtype,
        group: ProcessGroup | None = None,
        shard_dim: int | None = None,
        sizes: tuple[int, ...] | None = None,
        outer_scale: Tensor | None = None,
        batch: int = 0,
        second: Codes | None = None,
        in_memory: PassInMemory | None = None,
    ) -> QuantizedTensor:
        """Wrap codes and scales that a quantizer made of a tensor of this dtype; ``quantize`` is the usual way."""
        # views of a tensor that was made outside of inference mode have its version counter, inside of it too
        with torch.inference_mode(torch.is_inference_mode_enabled() and codes.is_inference()):
            shape = (*codes.shape[:batch], *quantizer.values_shape(codes.shape[batch:]))
            strides, offset = _place_of_values(codes, shape)
            return Tensor._make_wrapper_subclass(
                cls,
                shape,
                strides=strides,
                storage_offset=offset,
                dtype=dtype,
                device=codes.device,
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
        batch: int = 0,
        second: Codes | None = None,
        in_memory: PassInMemory | None = None,
    ) -> None:
        if quantizer.has_outer_scale() != (outer_scale is not None):
            raise TypeError(
                f"{type(self).__name__} of {type(quantizer).__name__}: outer_scale is {outer_scale!r}. A quantizer of "
                "two levels of scales makes one, one of one level none."
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
    def of_sets(cls, sets: Sequence[Codes], dtype: torch.dtype, **others: Any) -> Self:
        """Wrap one set of codes or two; other arguments as of the class."""
        first, second = sets[0], sets[1] if len(sets) == 2 else None
        own = first.codes, first.scale, first.quantizer, dtype
        found = cls(*own, outer_scale=first.outer_scale, second=second, **others)
        found.scales_of_whole = tuple(each.has_scales_of_whole for each in (first, sets[-1]))
        return found

    # ------------------------------------------------------------------ its codes

    def _sets_named(self, before: str) -> tuple[Codes, ...]:
        found = []
        quantizers = self.quantizer, self.quantizer_for_grad_input
        for end, quantizer, of_whole in zip(ENDS, quantizers, self.scales_of_whole, strict=True):
            if quantizer is not None:
                parts = {part: getattr(self, f"{before}{part}{end}") for part in PARTS}
                layout = TensorLayout(batch=self.batch)
                found.append(Codes(**parts, quantizer=quantizer, layout=layout, has_scales_of_whole=of_whole))
        return tuple(found)

    def sets(self) -> tuple[Codes, ...]:
        """All sets of codes that it has, one or two, whichever of them is in memory."""
        return self._sets_named("")

    def stored(self) -> tuple[Codes, ...]:
        """All sets of codes, as they are in memory: of a parameter, before what a running step has computed."""
        return self.sets()

    def set_of(self, gemm: Gemm) -> Codes:
        """The set of codes that a product of a layer multiplies.

        Raises:
            RuntimeError: Its memory holds the other one.
        """
        if self.in_memory is not None:
            self.in_memory.check(gemm)
        return self.sets()[-1 if gemm is GEMMS[1] else 0]

    def cuts_blocks(self) -> bool:
        """Whether this is a shard with elements of blocks that other ranks have elements of, along ``shard_dim``.

        Of blocks that span that dim, every rank has the one scale, and none is cut.
        """
        return cuts_blocks(self)

    def parts(self) -> tuple[Tensor, ...]:
        """The plain tensors that it is made of: codes, scale, and of two levels the outer scale, of each set."""
        return tuple(part for own in self.sets() for part in own.parts())

    # ------------------------------------------------------------------ what torch.compile asks

    @property
    def codes_in_forward(self) -> Tensor:
        """The codes for the output, where both sets share memory: raises in a forward that is repeated."""
        self.in_memory.check_forward()  # type: ignore[union-attr]  # asked of sets that share memory
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
        identity = (self.group.group_name, self.group.size(), self.group.rank(), self.shard_dim, self.sizes)
        return [*names, "group"], (*how, identity)

    def _stable_hash_for_caching(self) -> str:
        """What stands for an argument in the key of AOTAutograd's cache.

        PyTorch's own holds of a constant its class only: e4m3 and e5m2 would share code. The quantizer's text has its
        fields, and the salt.
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
            Codes(
                codes=parts[f"codes{end}"],
                scale=parts[f"scale{end}"],
                outer_scale=parts.get(f"outer_scale{end}"),
                quantizer=quantizer,
            )
            for quantizer, end in zip(quantizers, ENDS, strict=False)
        ]
        shard = {} if identity is None else {"group": inner["group"], "shard_dim": identity[3], "sizes": identity[4]}
        return cls.of_sets(sets, dtype, batch=batch, in_memory=PassInMemory() if shares_memory else None, **shard)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], metadata: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        return QuantizedTensor._unflattened(inner, metadata)

    def __coerce_tangent_metadata__(self) -> QuantizedTensor:
        # AOTAutograd asks an output of a graph for the gradient that it will get, and expects one of the same class
        raise TypeError(
            "a QuantizedTensor that asks for a gradient can't leave a compiled graph: its gradient is a plain tensor, "
            "and PyTorch wants one of the same class. Return .detach(), or .dequantize() inside the graph."
        )

    # ------------------------------------------------------------------ what it stands for

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Codes times scale in float32, rounded once; of two sets of codes those for the output.

        Gradients pass straight through.

        Args:
            dtype: Of the result; the source's by default.

        Returns:
            A plain tensor of this shape.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dequantize: dtype is {dtype}; codes stand for numbers of a floating point dtype.")
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

    def cuts_of(self, own: Codes) -> Sharding:
        """How ranks cut this tensor, if they cut blocks of a set of its codes; else none.

        Of blocks that span the dim that is cut, every rank has the one scale, and none is cut.
        """
        return (self.shards(),) if _cuts_blocks_of(self, own.quantizer) else ()

    def block_along(self, own: Codes, dim: int) -> int:
        """How many elements along a dim share a scale of a set; -1 for all of them."""
        return 1 if dim < self.batch else own.quantizer.block[int(dim == self.ndim - 1)]

    def shards(self) -> DimSharding:
        """How ranks cut the whole tensor, where ``sizes`` are known."""
        group: Any = self.group  # whoever has sizes has all three
        dim: Any = self.shard_dim
        sizes: Any = self.sizes
        return DimSharding(group, group.rank(), dim, sizes)

    def all_gather(self, dim: int, sizes: Sequence[int] | None = None) -> QuantizedTensor:
        """The whole tensor, of the parts that the ranks of its group have. All of them call this.

        Codes travel, one byte each, and scales only where ranks have different ones. Nothing is quantized again.

        Args:
            dim: Along which the ranks have parts: ``shard_dim``, or counted from the end.
            sizes: Of every rank's part along it, where they differ and ``fp8compile.quantize`` was not told.

        Returns:
            Without a group.

        Raises:
            ValueError: There is no group, the ranks have no parts along ``dim``, or sizes do not fit; or ranks give
                different sizes, which they compare in the first call with a group.
            TypeError: Sizes are no ints, codes are packed, several to a byte, or a gradient is asked for.
        """
        if self.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                "all_gather: this QuantizedTensor asks for a gradient, and a gather of codes has none. Call "
                ".detach() first, or gather the source and quantize that."
            )
        shards = _parts_to_gather(self, dim, sizes)
        is_column, cuts = shards.dim == self.ndim - 1, cuts_blocks(self)
        whole = (cuts and not is_column, cuts and is_column)
        part = Quantized(
            codes=self.codes,
            scale=self.scale,
            quantizer=self.quantizer,
            layout=TensorLayout((shards,)),
            has_scales_of_whole=whole,
        )
        gathered = gather(part, 0)
        scale = gathered.scale.view(self.quantizer.scale_shape(gathered.codes.shape))
        return QuantizedTensor(gathered.codes, scale, self.quantizer, self.dtype, outer_scale=self.outer_scale)

    @property
    def data(self) -> QuantizedTensor:
        """The same tensor, without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise TypeError(
            "assigning .data of a QuantizedTensor would leave its codes as they are. Make a new one by "
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
                "a QuantizedTensor with a process group can't be pickled: a group lives in one process. Pickle "
                ".dequantize(), or its .codes and .scale."
            )
        if self.batch or self.quantizer_for_grad_input is not None:
            raise TypeError(
                "a QuantizedTensor of a stack, or of two sets of codes, is what FSDP2 gathered, for a while; save its "
                "module's state_dict()."
            )
        outer = () if self.outer_scale is None else (self.outer_scale,)
        return self.load, (self.codes, self.scale, self.quantizer, self.dtype, *outer)

    load: Callable[..., QuantizedTensor]  # what its pickles call, set by `fp8compile.tensor.saved`

    # ------------------------------------------------------------------ views

    def like(self, sets: Sequence[Codes]) -> Self:
        """One of the same shape, by other codes or by views of these."""
        where: dict[str, Any] = {"group": self.group, "shard_dim": self.shard_dim, "sizes": self.sizes}
        return self.of_sets(sets, self.dtype, batch=self.batch, in_memory=self.in_memory, **where)

    def view_of(self, sets: Sequence[Codes], shard_dim: int | None, *, along_batch: bool = False) -> Self:
        """A view of another shape.

        Args:
            sets: Its codes.
            shard_dim: The dim of the view along which ranks have parts; it keeps sizes if it has all of the dim.
            along_batch: Whether it has some of the matrices, all of each.
        """
        codes, own = sets[0].codes, self.stored()[0].codes
        before: Any = self.shard_dim  # where the view has such a dim
        has_all = shard_dim is not None and codes.shape[shard_dim] == own.shape[before]
        where: dict[str, Any] = {
            "group": self.group,
            "shard_dim": shard_dim,
            "sizes": self.sizes if has_all else None,
        }
        return self.of_sets(sets, self.dtype, batch=self.batch, in_memory=self.in_memory, **where)

    if TYPE_CHECKING:  # its views are what it is

        def t(self) -> Self:
            """The transposed matrix, a view."""

        def detach(self) -> Self:
            """The same tensor without its history, a view."""

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
        if handler is None and func._can_decompose():  # below autograd, composites come here before what they are of
            return func.decompose(*args, **kwargs)
        if handler is None or not isinstance(args[0], QuantizedTensor):
            raise TypeError(no_meaning(func, next((each for each in args if isinstance(each, QuantizedTensor)), None)))
        result = handler(func, *args, **kwargs)
        if func in VIEWS:
            return return_and_correct_aliasing(func, args, kwargs, result)
        return result


def has_codes(tensor: object) -> TypeGuard[QuantizedTensor]:
    """Whether a tensor is made of codes."""
    return isinstance(tensor, QuantizedTensor)


def _place_of_values(codes: Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], int | torch.SymInt]:
    """Strides and offset of the values that codes stand for, as if each value had a place in a memory of its own.

    Where several neighbours along one dim share a byte, that memory has as many times the places, in the same order.
    """
    shared = [dim for dim in range(codes.ndim) if codes.shape[dim] != shape[dim]]
    if not shared:
        return codes.stride(), codes.storage_offset()
    if len(shared) > 1 or shape[shared[0]] % codes.shape[shared[0]]:
        return torch.empty(shape, device="meta").stride(), 0  # no rule for such codes, and no view of a part
    (dim,) = shared
    per_byte, step, offset = shape[dim] // codes.shape[dim], codes.stride(dim) or 1, codes.storage_offset()
    strides = [stride * per_byte if stride >= step else stride for stride in codes.stride()]
    strides[dim] = step
    return tuple(strides), offset // step * step * per_byte + offset % step


def _cuts_blocks_of(x: QuantizedTensor, quantizer: Quantizer) -> bool:
    if x.sizes is None or x.shard_dim is None:
        return False
    shards = DimSharding("", 0, x.shard_dim, x.sizes)  # which ranks, and which of them, makes no difference
    return any(split_axes(x.shape, (shards,), quantizer.block, x.batch))


def cuts_blocks(x: QuantizedTensor) -> bool:
    """Whether this is a shard with elements of blocks that other ranks have elements of, along ``shard_dim``.

    A function: Dynamo traces no method of a tensor that returns a bool.
    """
    second = x.quantizer_for_grad_input
    return _cuts_blocks_of(x, x.quantizer) or (second is not None and _cuts_blocks_of(x, second))


def no_meaning(op: object, x: QuantizedTensor | None) -> str:
    """What an op that has no meaning raises, by what the tensor is."""
    if x is not None and x.batch:
        return (
            f"{op} of the weights of experts, whose matrices are codes with scales of their own: it keeps no matrix. "
            "Nothing dequantizes in silence. Multiply by fp8compile.grouped_linear or grouped_mm, or call "
            ".dequantize()."
        )
    if x is not None and x.quantizer_for_grad_input is not None:
        return (
            f"{op} has no FP8 meaning for a weight that is two sets of codes, and nothing dequantizes in silence. "
            "Multiply by it through fp8compile.linear, or keep that layer's weight in high precision."
        )
    return (
        f"{op} has no FP8 meaning for a QuantizedTensor, and nothing dequantizes in silence. Call .dequantize() "
        "first; for products use fp8compile.linear or fp8compile.scaled_mm."
    )


refuse_operators(QuantizedTensor, no_meaning)
