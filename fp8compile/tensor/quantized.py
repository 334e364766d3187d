"""QuantizedTensor, the class.

A wrapper subclass: to autograd and shapes it is a tensor of the source's dtype; only ops that keep what it stands for
without touching a number work on it. Everything else raises: nothing dequantizes in silence.

The process group travels as an inner value of flatten and unflatten. PyTorch guards only on its type and bakes its
size into graphs, so name, size and rank are in the metadata: a graph made for one group never runs on another.

A shard that begins or ends within a block has codes of that block, whose other elements are on other ranks. It holds
the scales of all blocks of the whole along the dim that is cut, and ``sizes``, which tell where among them it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile import ops
from fp8compile.layout.cuts import SIDES, DimSharding, axis_blocks, split_axes
from fp8compile.layout.packing import one_a_byte
from fp8compile.layout.quantized import Quantized, TensorLayout
from fp8compile.ops.layer.over_ranks import gather
from fp8compile.quantizers import Gemm, Quantizer
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.tensor.agreement import check_agreement
from fp8compile.tensor.arguments import own_sizes, shown
from fp8compile.tensor.refusals import refuse_operators
from fp8compile.tensor.saved import load_tensor

__all__ = ["HANDLERS", "LAYERS", "VIEWS", "QuantizedTensor", "alias_of", "cuts_blocks", "place_of_values"]

# What works on one: filled by the files that say how.
HANDLERS: dict[Any, Callable] = {}  # ops of PyTorch whose first argument it is
VIEWS: set[Any] = set()  # those of them whose result is a view of it
LAYERS: dict[Any, Callable] = {  # our own ops that take one in any place
    # what is known is the result; nothing is computed, and a graph holds no such op
    ops.straight_through: lambda func, values, *others: values.detach(),
}


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
        scale: What codes are multiplied by, ``quantizer.scale_shape(shape)``: float32, or uint8 for E8M0. Of a shard
            that cuts blocks, that of the whole tensor's shape.
        quantizer: The immutable quantizer that made it.
        group: The process group whose ranks share its scales, or None.
        shard_dim: The dim along which these ranks have parts of a whole; None without a group, and where a view has
            no such dim any more.
        sizes: What every rank has along it, where ``fp8compile.quantize`` was told; else None.
        outer_scale: What all of it is multiplied by beside ``scale``, (1,) float32, where the quantizer has two levels
            of scales (``fp8compile.TwoLevelScaling``); else None.
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer
    group: ProcessGroup | None
    shard_dim: int | None
    sizes: tuple[int, ...] | None
    outer_scale: Tensor | None
    instead_of_cutting = "call .dequantize() first."  # what errors advise
    ends_in_padding = False  # whether nothing is lost where a view ends within a block
    may_cut_rows = False  # whether a view of rows may cut blocks

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
    ) -> QuantizedTensor:
        """Wrap codes and scales that a quantizer made of a tensor of this dtype; ``quantize`` is the usual way."""
        # views of a tensor that was made outside of inference mode have its version counter, inside of it too
        with torch.inference_mode(torch.is_inference_mode_enabled() and codes.is_inference()):
            shape = cls._values_shape(codes, quantizer)
            strides, offset = place_of_values(codes, shape)
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
    ) -> None:
        if quantizer.has_outer_scale() != (outer_scale is not None):
            raise TypeError(
                f"{type(self).__name__} of {type(quantizer).__name__}: outer_scale is {outer_scale!r}. A quantizer of "
                "two levels of scales makes one, one of one level none."
            )
        self.codes = codes
        self.scale = scale
        self.quantizer = quantizer
        self.group = group
        self.shard_dim = shard_dim
        self.sizes = sizes
        self.outer_scale = outer_scale

    @classmethod
    def _values_shape(cls, codes: Tensor, quantizer: Quantizer) -> tuple[int, ...]:
        """The shape of what codes stand for."""
        return quantizer.values_shape(codes.shape)

    # ------------------------------------------------------------------ what torch.compile asks

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        names = ["codes", "scale", "outer_scale"] if self.quantizer.has_outer_scale() else ["codes", "scale"]
        if self.group is None:
            return names, (self.quantizer, self.dtype, None)
        identity = (self.group.group_name, self.group.size(), self.group.rank(), self.shard_dim, self.sizes)
        return [*names, "group"], (self.quantizer, self.dtype, identity)

    def _stable_hash_for_caching(self) -> str:
        """What stands for an argument in the key of AOTAutograd's cache.

        PyTorch's own holds of a constant its class only: e4m3 and e5m2 would share code. The quantizer's text has its
        fields, and the salt.
        """
        names, (_, *metadata) = self.__tensor_flatten__()
        tensors = [getattr(self, name) for name in names if name != "group"]
        inner = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        values = (type(self).__name__, names, self.shape, self.requires_grad, self.quantizer.__fx_repr__()[0])
        return hashlib.blake2b(repr((*values, inner, metadata)).encode(), digest_size=16).hexdigest()

    @staticmethod
    def __tensor_unflatten__(inner: dict, metadata: tuple, outer_size: Any, outer_stride: Any) -> QuantizedTensor:
        quantizer, dtype, identity = metadata
        shard = (None, None, None) if identity is None else (inner["group"], *identity[-2:])
        return QuantizedTensor(
            inner["codes"], inner["scale"], quantizer, dtype, *shard, outer_scale=inner.get("outer_scale")
        )

    def __coerce_tangent_metadata__(self) -> QuantizedTensor:
        # AOTAutograd asks an output of a graph for the gradient that it will get, and expects one of the same class
        raise TypeError(
            "a QuantizedTensor that asks for a gradient can't leave a compiled graph: its gradient is a plain tensor, "
            "and PyTorch wants one of the same class. Return .detach(), or .dequantize() inside the graph."
        )

    # ------------------------------------------------------------------ what it stands for

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Codes times scale in float32, rounded once.

        Gradients pass straight through.

        Args:
            dtype: Of the result; the source's by default.

        Returns:
            A plain tensor of this shape.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dequantize: dtype is {dtype}; codes stand for numbers of a floating point dtype.")
        return ops.straight_through(self._values(dtype or self.dtype), self, self.quantizer)

    def _values(self, dtype: torch.dtype) -> Tensor:
        outer = self._outer_scales()
        if not self.cuts_blocks():
            return ops.dequantize(self.codes, self.scale, self.quantizer, dtype, *outer)
        codes, quantizer = one_a_byte(self.codes, self.quantizer)
        codes, scale = as_matrix(codes), self.scale.reshape(-1, self.scale.shape[-1])
        is_column = int(self.shard_dim == self.ndim - 1)
        side = axis_blocks(self.shape, (self.shards(),), self.quantizer.block)[is_column]
        dim = SIDES[is_column]
        window = side.embed(codes, dim), side.window(scale, dim)
        window = ops.dequantize(*window, quantizer, dtype, *outer)
        return side.extract(window, dim).reshape(self.shape)

    def cuts_blocks(self) -> bool:
        """Whether this is a shard with elements of blocks that other ranks have elements of, along ``shard_dim``.

        Of blocks that span that dim, every rank has the one scale, and none is cut.
        """
        return cuts_blocks(self)

    def sets(self) -> tuple[QuantizedTensor, ...]:
        """All sets of codes that it has: this one. A `QuantizedPair` has two."""
        return (self,)

    def parts(self) -> tuple[Tensor, ...]:
        """The plain tensors that it is made of: codes, scale, and of two levels the outer scale."""
        return self.codes, self.scale, *self._outer_scales()

    def read_by(self, gemm: Gemm) -> QuantizedTensor:
        """The set of codes that a product of a layer multiplies: this one, whichever it is."""
        return self

    @property
    def is_in_turns(self) -> bool:
        """Whether its memory holds other codes in the backward than in the forward."""
        return False

    def shards(self) -> DimSharding:
        """How ranks cut the whole tensor, where ``sizes`` are known."""
        return DimSharding(self.group, self.group.rank(), self.shard_dim, self.sizes)

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
        is_column = shards.dim == self.ndim - 1
        whole = (self.cuts_blocks() and not is_column, self.cuts_blocks() and is_column)
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
    def data(self) -> QuantizedTensor:  # type: ignore[override]
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
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"quantizer={self.quantizer!r}, group={group}{shard})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.group is not None:
            raise TypeError(
                "a QuantizedTensor with a process group can't be pickled: a group lives in one process. Pickle "
                ".dequantize(), or its .codes and .scale."
            )
        return load_tensor, (self.codes, self.scale, self.quantizer, self.dtype, *self._outer_scales())

    def _outer_scales(self) -> tuple[Tensor, ...]:
        return () if self.outer_scale is None else (self.outer_scale,)

    def _like(self, codes: Tensor, scale: Tensor) -> QuantizedTensor:
        outer = alias_of(self.outer_scale)
        return QuantizedTensor(codes, scale, self.quantizer, self.dtype, self.group, self.shard_dim, self.sizes, outer)

    def _view(
        self, codes: Tensor, scale: Tensor, shard_dim: int | None, quantizer: Quantizer | None = None
    ) -> QuantizedTensor:
        """A view whose ranks have parts along this dim of it; it keeps sizes where it has all of the dim."""
        whole_dim = shard_dim is not None and codes.shape[shard_dim] == self.codes.shape[self.shard_dim]
        sizes = self.sizes if whole_dim else None
        quantizer, outer = quantizer or self.quantizer, alias_of(self.outer_scale)
        return QuantizedTensor(codes, scale, quantizer, self.dtype, self.group, shard_dim, sizes, outer)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYERS:
            return LAYERS[func](func, *args)
        handler = HANDLERS.get(func)
        if handler is None and func._can_decompose():  # below autograd, composites come here before what they are of
            return func.decompose(*args, **kwargs)
        if handler is None or not isinstance(args[0], QuantizedTensor):
            raise TypeError(_no_meaning(func))
        result = handler(func, *args, **kwargs)
        if func in VIEWS:
            return return_and_correct_aliasing(func, args, kwargs, result)
        return result


def alias_of(tensor: Tensor | None) -> Tensor | None:
    """A view of all of a tensor, if there is one. A function: of a method Dynamo makes a call in the graph."""
    return None if tensor is None else torch.ops.aten.alias.default(tensor)


def place_of_values(codes: Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
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


def cuts_blocks(x: QuantizedTensor) -> bool:
    """`QuantizedTensor.cuts_blocks`, as a function: Dynamo traces no method of a tensor that returns a bool."""
    if x.sizes is None or x.shard_dim is None:
        return False
    shards = DimSharding("", 0, x.shard_dim, x.sizes)  # which ranks, and which of them, makes no difference
    return any(split_axes(x.shape, (shards,), x.quantizer.block))


def _no_meaning(op: object) -> str:
    return (
        f"{op} has no FP8 meaning for a QuantizedTensor, and nothing dequantizes in silence. Call .dequantize() "
        "first; for products use fp8compile.linear or fp8compile.scaled_mm."
    )


refuse_operators(QuantizedTensor, _no_meaning)
