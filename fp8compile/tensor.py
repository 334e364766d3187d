"""QuantizedTensor: codes and scales that stand for a tensor, and `quantize`, which makes them.

    x --amax--> amax --(max over the group, where a block spans ranks)--> scale --+--> QuantizedTensor
    |                                                                             |      .codes  .scale  .group
    +----------------------------------- cast ------------------------------------+

A wrapper subclass: to autograd and shapes it is a tensor of the source's dtype; only ops that keep what it stands for
without touching a number work on it. Everything else raises: nothing dequantizes in silence.

The process group travels as an inner value of flatten and unflatten. PyTorch guards only on its type and bakes its
size into graphs, so name, size and rank are in the metadata: a graph made for one group never runs on another.

A shard that begins or ends within a block has codes of that block, whose other elements are on other ranks. It holds
the scales of all blocks of the whole along the dim that is cut, and ``sizes``, which tell where among them it is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import return_and_correct_aliasing

from fp8compile import _compat, ops
from fp8compile.ops.collectives import all_reduce_amax
from fp8compile.ops.gemm import Operand
from fp8compile.ops.linear import (
    Quantize,
    as_read,
    layer_grad_input,
    layer_output,
    quantize_by_amax,
    quantize_for_gradients,
)
from fp8compile.ops.parts import Codes, Part, Shards, quantize_part, sides_of
from fp8compile.quantizers import GemmConfig, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix

__all__ = [
    "SOURCE_DTYPES",
    "QuantizedTensor",
    "check_serves",
    "checked_sizes",
    "not_dense",
    "own_sizes",
    "quantize",
    "scaled_mm",
    "shown",
]

aten = torch.ops.aten
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@_compat.constant_when_traced
def shown(value: object) -> str:
    """What an error says of a wrong value: its repr."""
    return repr(value)


def not_dense(x: Tensor) -> str | None:
    """What keeps a tensor from being a plain dense one, in words, or None."""
    if x.layout != torch.strided:
        return f"has layout {x.layout}"
    if x.is_nested:
        return "is a nested tensor"
    return None


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
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer
    group: ProcessGroup | None
    shard_dim: int | None
    sizes: tuple[int, ...] | None

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
    ) -> QuantizedTensor:
        """Wrap codes and scales that a quantizer made of a tensor of this dtype; ``quantize`` is the usual way."""
        return Tensor._make_wrapper_subclass(
            cls,
            quantizer.values_shape(codes.shape),
            strides=codes.stride(),
            storage_offset=codes.storage_offset(),
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
    ) -> None:
        self.codes = codes
        self.scale = scale
        self.quantizer = quantizer
        self.group = group
        self.shard_dim = shard_dim
        self.sizes = sizes

    # ------------------------------------------------------------------ what torch.compile asks

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        if self.group is None:
            return ["codes", "scale"], (self.quantizer, self.dtype, None)
        identity = (self.group.group_name, self.group.size(), self.group.rank(), self.shard_dim, self.sizes)
        return ["codes", "scale", "group"], (self.quantizer, self.dtype, identity)

    def _stable_hash_for_caching(self) -> str:
        """What stands for an argument in the key of AOTAutograd's cache.

        PyTorch's own holds of a constant its class only: e4m3 and e5m2 would share code. The quantizer's text has its
        fields, and the salt.
        """
        names, (_, dtype, identity) = self.__tensor_flatten__()
        inner = [(t.shape, t.stride(), t.dtype, t.device) for t in (self.codes, self.scale)]
        parts = (names, self.shape, self.requires_grad, inner, self.quantizer.__fx_repr__()[0], dtype, identity)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    @staticmethod
    def __tensor_unflatten__(inner: dict, metadata: tuple, outer_size: Any, outer_stride: Any) -> QuantizedTensor:
        quantizer, dtype, identity = metadata
        if identity is None:
            return QuantizedTensor(inner["codes"], inner["scale"], quantizer, dtype)
        return QuantizedTensor(inner["codes"], inner["scale"], quantizer, dtype, inner["group"], *identity[-2:])

    # ------------------------------------------------------------------ what it stands for

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Codes times scale in float32, rounded once.

        Args:
            dtype: Of the result; the source's by default.

        Returns:
            A plain tensor of this shape.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dequantize: dtype is {dtype}; codes stand for numbers of a floating point dtype.")
        dtype = dtype or self.dtype
        if not self.cuts_blocks():
            return ops.dequantize(self.codes, self.scale, self.quantizer, dtype)
        codes, scale = as_matrix(self.codes), self.scale.reshape(-1, self.scale.shape[-1])
        is_column = int(self.shard_dim == self.ndim - 1)
        side = sides_of(self.shape, (self._shards(),), self.quantizer.block)[is_column]
        window = ops.dequantize(side.embed(codes, is_column), side.window(scale, is_column), self.quantizer, dtype)
        return side.extract(window, is_column).reshape(self.shape)

    def cuts_blocks(self) -> bool:
        """Whether this is a shard with elements of blocks that other ranks have elements of, along ``shard_dim``.

        Of blocks that span that dim, every rank has the one scale, and none is cut.
        """
        return _cuts_blocks(self)

    def _shards(self) -> Shards:
        return Shards(self.group, self.group.rank(), self.shard_dim, self.sizes)

    def all_gather(self, dim: int, sizes: Sequence[int] | None = None) -> QuantizedTensor:
        """The whole tensor, of the parts that the ranks of its group have. All of them call this.

        Codes travel, one byte each, and scales only where ranks have different ones. Nothing is quantized again.

        Args:
            dim: Along which the ranks have parts: ``shard_dim``, or counted from the end.
            sizes: Of every rank's part along it, where they differ and ``fp8compile.quantize`` was not told.

        Returns:
            Without a group.

        Raises:
            ValueError: There is no group, the ranks have no parts along ``dim``, or sizes do not fit.
            TypeError: Sizes are no ints, or codes are packed, several to a byte.
        """
        shards = _parts_to_gather(self, dim, sizes)
        is_column = shards.dim == self.ndim - 1
        whole = (self.cuts_blocks() and not is_column, self.cuts_blocks() and is_column)
        gathered = Codes(self.codes, self.scale, self.quantizer, (shards,), whole).gather(0)
        scale = gathered.scale.view(self.quantizer.scale_shape(gathered.local.shape))
        return QuantizedTensor(gathered.local, scale, self.quantizer, self.dtype)

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
        return QuantizedTensor, (self.codes, self.scale, self.quantizer, self.dtype)

    def _like(self, codes: Tensor, scale: Tensor) -> QuantizedTensor:
        return QuantizedTensor(codes, scale, self.quantizer, self.dtype, self.group, self.shard_dim, self.sizes)

    def _view(
        self, codes: Tensor, scale: Tensor, shard_dim: int | None, quantizer: Quantizer | None = None
    ) -> QuantizedTensor:
        """A view whose ranks have parts along this dim of it; it keeps sizes where it has all of the dim."""
        whole_dim = shard_dim is not None and codes.shape[shard_dim] == self.codes.shape[self.shard_dim]
        sizes = self.sizes if whole_dim else None
        return QuantizedTensor(codes, scale, quantizer or self.quantizer, self.dtype, self.group, shard_dim, sizes)

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


def _cuts_blocks(x: QuantizedTensor) -> bool:
    """`QuantizedTensor.cuts_blocks`, as a function: Dynamo traces no method of a tensor that returns a bool."""
    if x.sizes is None or x.shard_dim is None:
        return False
    shards = Shards("", 0, x.shard_dim, x.sizes)  # which ranks, and which of them, makes no difference
    return "cut" in [side.kind for side in sides_of(x.shape, (shards,), x.quantizer.block)]


def _no_meaning(op: object) -> str:
    return (
        f"{op} has no FP8 meaning for a QuantizedTensor, and nothing dequantizes in silence. Call .dequantize() "
        "first; for products use fp8compile.linear or fp8compile.scaled_mm."
    )


def _refuse_operator(name: str) -> None:
    """Operators of Tensor turn a TypeError into NotImplemented, and Python then hides its text (and `==` is False)."""

    def refuse(self: QuantizedTensor, *others: Any) -> Any:
        raise TypeError(_no_meaning(f"Tensor.{name}"))

    setattr(QuantizedTensor, name, refuse)


for _operator in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]:
    for _form in ("", "r", "i"):
        _refuse_operator(f"__{_form}{_operator}__")
for _operator in ["eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert"]:
    _refuse_operator(f"__{_operator}__")
_refuse_operator("share_memory_")  # a wrapper has no storage of its own, and PyTorch would read address 0
QuantizedTensor.__hash__ = Tensor.__hash__  # type: ignore[method-assign]

# ---------------------------------------------------------------------------------- ops that keep the meaning


def _same(func: Any, x: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    return x._like(func(x.codes, **kwargs), func(x.scale))


def _check_keeps_blocks(func: Any, x: QuantizedTensor) -> None:
    if x.cuts_blocks():
        raise TypeError(
            f"{func} of a QuantizedTensor whose first or last block lies on other ranks too, being a shard of sizes "
            f"{x.sizes} along dim {x.shard_dim} with block {x.quantizer.block}: no view of it knows where its blocks "
            "begin. Call .all_gather() or .dequantize() first."
        )


def _transpose(func: Any, x: QuantizedTensor, *dims: int) -> QuantizedTensor:
    if x.ndim < 2:
        return x._like(func(x.codes, *dims), aten.alias.default(x.scale))
    if x.ndim != 2:
        raise TypeError(
            f"{func} of a QuantizedTensor takes a matrix, this has shape {tuple(x.shape)}: its blocks lie over "
            "flattened leading dims. Flatten them with .reshape, or call .dequantize() first."
        )
    if dims and dims[0] % 2 == dims[1] % 2:
        return x._like(func(x.codes, *dims), func(x.scale, *dims))
    shard_dim = None if x.shard_dim is None else 1 - x.shard_dim
    return x._view(func(x.codes, *dims), func(x.scale, *dims), shard_dim, x.quantizer.transposed())


def _permute(func: Any, x: QuantizedTensor, dims: list[int]) -> QuantizedTensor:
    if x.ndim == 2 and dims[0] % 2 != dims[1] % 2:
        return _transpose(aten.t.default, x)
    return _transpose(func, x)  # raises: more dims than a matrix has


def _dim_after(dim: int | None, before: Sequence[int], after: Sequence[int]) -> int | None:
    """Where a view that keeps the last dim has another one, so that parts along it still make the whole; or None."""
    if dim is None or dim == len(before) - 1:
        return None if dim is None else len(after) - 1
    outer = math.prod(before[:dim])
    found = [each for each in range(len(after) - 1) if math.prod(after[:each]) == outer]
    same = [each for each in found if after[each] == before[dim]]
    return next(iter([*same, *found]), None)


def _reshaped(func: Any, x: QuantizedTensor, codes: Tensor) -> QuantizedTensor:
    if codes.shape == x.codes.shape:
        return x._like(codes, aten.alias.default(x.scale))
    _check_keeps_blocks(func, x)
    tensorwise = x.quantizer.block == (-1, -1)
    keeps_last_dim = x.ndim > 0 and codes.ndim > 0 and codes.shape[-1] == x.shape[-1]
    if not (tensorwise or keeps_last_dim):
        raise TypeError(
            f"{func} from {tuple(x.shape)} to {tuple(codes.shape)} moves elements between blocks "
            f"{x.quantizer.block}. Keep the last dim as it is, or call .dequantize() first."
        )
    shard_dim = _dim_after(x.shard_dim, x.shape, codes.shape) if keeps_last_dim else None
    return x._view(codes, x.scale.view(x.quantizer.scale_shape(codes.shape)), shard_dim)


def _view(func: Any, x: QuantizedTensor, *args: Any) -> QuantizedTensor:
    return _reshaped(func, x, func(x.codes, *args))


def _as_strided(
    func: Any, x: QuantizedTensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> QuantizedTensor:
    """The view with this size and stride, found among the others: AOTAutograd asks so for views that leave a graph."""
    size, stride = tuple(size), tuple(stride)
    if _compat.TORCH_VERSION >= (2, 14) and x.storage_offset():
        raise TypeError(
            f"{func} of a QuantizedTensor that starts inside another one: this PyTorch adds the offset twice where "
            "such a view leaves a compiled graph. Clone it before the graph, or call .dequantize() first."
        )
    offset = 0 if storage_offset is None else storage_offset - x.storage_offset()
    if x.ndim == len(size) == 2 and x.stride() != stride == x.stride()[::-1]:
        return _as_strided(func, _transpose(aten.t.default, x), size, stride, storage_offset)
    if x.stride() == stride and x.ndim:
        starts = _position(offset, stride)
        if all(start + length <= full for start, length, full in zip(starts, size, x.shape, strict=True)):
            for dim, (start, length) in enumerate(zip(starts, size, strict=True)):
                if length != x.shape[dim]:
                    x = _slice(aten.slice.Tensor, x, dim, start, start + length)
            return x._like(aten.alias.default(x.codes), aten.alias.default(x.scale))
    flat = torch.empty(size, device="meta")
    if offset == 0 and x.is_contiguous() and flat.numel() == x.numel() and flat.stride() == stride:
        return _view(aten.view.default, x, size)
    raise TypeError(
        f"{func} with size {size} and stride {stride} of a QuantizedTensor with shape {tuple(x.shape)} and stride "
        f"{tuple(x.stride())} is no view that keeps its blocks. Call .dequantize() first."
    )


def _position(offset: int, stride: tuple[int, ...]) -> list[int]:
    """Indices of the element at ``offset``."""
    indices = [0] * len(stride)
    for dim in sorted(range(len(stride)), key=lambda d: -stride[d]):
        indices[dim], offset = divmod(offset, stride[dim]) if stride[dim] else (0, offset)
    return indices


def _block_along(x: QuantizedTensor, dim: int) -> int:
    """Elements along ``dim`` that share a scale, -1 for all of them, where scales can be cut along that dim."""
    rows, columns = x.quantizer.block
    if dim == x.ndim - 1:
        return columns
    if rows in (1, -1) or x.ndim == 2:
        return rows
    raise TypeError(
        f"a QuantizedTensor of shape {tuple(x.shape)} with block {x.quantizer.block} can't be cut along dim {dim}: "
        "its blocks lie over flattened leading dims. Flatten them with .reshape, or call .dequantize() first."
    )


def _slice(
    func: Any,
    x: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedTensor:
    if not x.ndim:
        raise IndexError(f"{func} of a QuantizedTensor of 0 dims: there is nothing to cut.")
    dim %= x.ndim
    _check_keeps_blocks(func, x)
    size, block = x.shape[dim], _block_along(x, dim)
    # blocks over several leading dims: the grid has two dims, whatever x has
    scale_dim = -1 if dim == x.ndim - 1 else dim
    codes = func(x.codes, dim, start, end, step)
    if block == -1:
        return x._view(codes, aten.alias.default(x.scale), x.shard_dim)
    if block == 1:
        return x._view(codes, func(x.scale, scale_dim, start, end, step), x.shard_dim)
    first, last, _ = slice(start, end).indices(size)
    if step != 1 or first % block or (last % block and last != size):
        raise TypeError(
            f"{func} [{first}:{last}:{step}] along dim {dim} of {size} cuts blocks of {block}. Cut at multiples of "
            f"{block}, or call .dequantize() first."
        )
    return x._view(codes, func(x.scale, scale_dim, first // block, -(-last // block), 1), x.shard_dim)


def _select(func: Any, x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    dim %= x.ndim
    _check_keeps_blocks(func, x)
    block = _block_along(x, dim)
    if dim == x.ndim - 1 or block not in (1, -1):
        raise TypeError(
            f"{func} along dim {dim} of a QuantizedTensor with block {x.quantizer.block} leaves no block. Call "
            ".dequantize() first."
        )
    shard_dim = None if x.shard_dim in (None, dim) else x.shard_dim - (x.shard_dim > dim)
    return x._view(func(x.codes, dim, index), func(x.scale, dim, index if block == 1 else 0), shard_dim)


def _split(func: Any, x: QuantizedTensor, sizes: int | list[int], dim: int = 0) -> list[QuantizedTensor]:
    size = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, max(size, 1), max(sizes, 1))]
    if sum(sizes) != size:
        raise RuntimeError(f"{func}: sizes {sizes} do not sum to {size}, the size of dim {dim}.")
    parts, start = [], 0
    for length in sizes:
        parts.append(_slice(aten.slice.Tensor, x, dim, start, start + length))
        start += length
    return parts


def _to_copy(func: Any, x: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, x.dtype):
        raise TypeError(
            f"a QuantizedTensor of {x.dtype} can't be cast to {dtype}: its codes have their own format. Call "
            f".dequantize({dtype}) for a plain tensor."
        )
    return x._like(func(x.codes, **kwargs), func(x.scale, **kwargs))


VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.as_strided.default,
    aten.view.default,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
HANDLERS: dict[Any, Callable] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.as_strided.default: _as_strided,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _view,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten._to_copy.default: _to_copy,
}


# ---------------------------------------------------------------------------------- as the weight of a layer


@_compat.constant_when_traced
def unserved(quantizer: Quantizer, recipe: Recipe) -> str | None:
    """Why a layer with this recipe can't run on a weight's codes that a quantizer made, as text; None if it can."""
    if recipe.shares_weight_codes() and quantizer == recipe.weight:
        return None
    return (
        f"weight is a QuantizedTensor of {quantizer!r}; the recipe quantizes weights by {recipe.weight!r} for the "
        f"output and by {recipe.weight_for_grad_input!r} for grad_input. Codes serve a recipe that has their "
        "quantizer in both places and no delayed scaling, as fp8compile.recipes.tensorwise() and blockwise() do. "
        "Take such a recipe and quantize by its weight, or pass weight.dequantize()."
    )


def check_serves(function: str, weight: QuantizedTensor, recipe: Recipe) -> None:
    """Raise a ValueError, in the name of ``function``, if a layer with this recipe can't run on these codes."""
    if (reason := unserved(weight.quantizer, recipe)) is not None:
        raise ValueError(f"{function}: {reason}")


def _check_weight(function: str, x: Tensor, weight: QuantizedTensor, recipe: Recipe) -> None:
    if isinstance(x, QuantizedTensor) or not isinstance(weight, QuantizedTensor):
        raise TypeError(
            f"{function}: only the weight may be a QuantizedTensor, the layer quantizes its other operands itself. "
            "Pass .dequantize() for them, or multiply quantized matrices by fp8compile.scaled_mm."
        )
    check_serves(function, weight, recipe)
    if weight.cuts_blocks():
        raise ValueError(
            f"{function}: weight is a shard of sizes {weight.sizes} along dim {weight.shard_dim}, which cuts blocks "
            f"{weight.quantizer.block}. Call .all_gather({weight.shard_dim}) first."
        )


def _as_it_is(weight: QuantizedTensor, quantize: Quantize) -> Quantize:
    """What gives a product the weight's own codes, and has its other operand quantized."""

    def quantize_others(x: Tensor, quantizer: Quantizer, slot: str) -> Operand:
        if x is weight:
            return Operand(codes=weight.codes, scale=weight.scale, quantizer=quantizer)
        return quantize(x, quantizer, slot)

    return quantize_others


def _linear(func: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    _check_weight("linear", x, weight, recipe)
    layer = _compat.as_kernel(layer_output)
    return layer(x, weight, as_read(bias), recipe, _as_it_is(weight, quantize_by_amax))


def _grad_input(func: Any, grad_output: Tensor, weight: QuantizedTensor, recipe: Recipe) -> Tensor:
    _check_weight("grad_input", grad_output, weight, recipe)
    # in a graph, as its compiler would: nothing else makes one read of what both gradients read
    compiled = type(weight.codes) is not Tensor
    quantize = quantize_for_gradients(recipe, grad_output.device) if compiled else quantize_by_amax
    return _compat.as_kernel(layer_grad_input)(grad_output, weight, recipe, _as_it_is(weight, quantize))


def _no_layer(func: Any, x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    _check_weight(func._schema.name.partition("::")[2], x, weight, args[-1])
    raise AssertionError(f"{func} is of recipes with delayed scaling, which share no codes")


LAYERS: dict[Any, Callable] = {
    ops.linear: _linear,
    ops.grad_input: _grad_input,
    ops.delayed_linear: _no_layer,
    ops.delayed_grad_input: _no_layer,
}


# ---------------------------------------------------------------------------------- making and multiplying


def _check_source(x: Any, quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"quantize: quantizer is {shown(quantizer)}; it is a fp8compile.Quantizer, such as "
            "fp8compile.CurrentScaling()."
        )
    if isinstance(x, QuantizedTensor):
        raise TypeError("quantize: x is quantized already. Call .dequantize() first if that is what you mean.")
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize: x is {type(x).__name__}; it is a dense tensor.")
    if _compat.is_dtensor(x):
        raise TypeError(
            "quantize: x is a DTensor; it is this rank's part of a tensor, x.to_local(), with group= and shard_dim=, "
            "or a whole tensor, x.full_tensor()."
        )
    if (reason := not_dense(x)) is not None:
        raise TypeError(f"quantize: x {reason}; it is a dense tensor.")
    if x.dtype not in SOURCE_DTYPES:
        raise TypeError(f"quantize: x is {x.dtype}; it is bfloat16, float16 or float32. Cast it first.")


def _check_shard(x: Tensor, group: Any, shard_dim: Any, sizes: Any) -> None:
    if (group is None) != (shard_dim is None):
        raise ValueError(
            f"quantize: group is {group}, shard_dim {shard_dim}; give both for a shard of a tensor that is spread "
            "over ranks, none for a whole tensor."
        )
    if group is None:
        if sizes is not None:
            raise ValueError(f"quantize: sizes is {shown(sizes)} and group None; sizes are those of a group's shards.")
        return
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"quantize: group is {shown(group)}; it is a torch.distributed.ProcessGroup, such as mesh.get_group()."
        )
    if type(shard_dim) is not int:
        raise TypeError(f"quantize: shard_dim is {shown(shard_dim)}; it is an int.")
    if not -x.ndim <= shard_dim < x.ndim:
        raise ValueError(f"quantize: shard_dim is {shard_dim}, x has {x.ndim} dims.")
    if sizes is not None:
        own_sizes("quantize", "sizes", sizes, group, x.shape[shard_dim], f"the entries of x along dim {shard_dim}")


def checked_sizes(function: str, argument: str, given: Any, group: ProcessGroup) -> tuple[int, ...]:
    """What a caller says that each rank of a group has; in the words of ``function``, whose argument it is.

    Raises:
        TypeError: It is no sequence of ints.
        ValueError: It has not one entry for each rank.
    """
    if not isinstance(given, Sequence) or not all(type(size) is int and size >= 0 for size in given):
        raise TypeError(f"{function}: {argument} is {shown(given)}; it is a tuple of ints from 0, one for each rank.")
    if len(given) != group.size():
        raise ValueError(
            f"{function}: {argument} is {tuple(given)}; it has one entry for each of {group.size()} ranks."
        )
    return tuple(given)


def own_sizes(function: str, argument: str, given: Any, group: ProcessGroup, own: int, what: str) -> tuple[int, ...]:
    """What each rank has, where this one's part is known: as much as this one if nothing is given.

    Raises:
        TypeError: As ``checked_sizes``.
        ValueError: As ``checked_sizes``, or this rank has something else; ``what`` names that.
    """
    if given is None:
        return (own,) * group.size()
    sizes = checked_sizes(function, argument, given, group)
    if sizes[group.rank()] != own:
        raise ValueError(
            f"{function}: {argument} is {sizes} and {what} on rank {group.rank()} are {own}; give what each rank has, "
            "the same on all of them."
        )
    return sizes


def _block_spans_ranks(x: Tensor, quantizer: Quantizer, group: ProcessGroup, shard_dim: int) -> bool:
    """Whether one block has elements on several ranks, if none is cut.

    Raises:
        ValueError: A shard boundary cuts a block.
    """
    last = shard_dim == x.ndim - 1
    block = quantizer.block[1 if last else 0]
    if block in (1, -1):
        return block == -1
    length = x.shape[-1] if last else x.shape[shard_dim:-1].numel()
    # rows of several batches are flattened: there the last shard too is followed by another one
    ends_tensor = group.rank() == group.size() - 1 and (last or x.shape[:shard_dim].numel() == 1)
    if length % block and not ends_tensor:
        raise ValueError(
            f"quantize: a shard of {length} elements along dim {shard_dim} on rank {group.rank()} of {group.size()} "
            f"cuts blocks of {block}. On all ranks, say how much each of them has: sizes=(...); or shard in multiples "
            f"of {block} (the last rank may have less)."
        )
    return False


def _quantize_shard(
    x: Tensor, quantizer: Quantizer, group: ProcessGroup, shard_dim: int, sizes: tuple[int, ...]
) -> QuantizedTensor:
    """A shard of a whole that is known: whatever of it lies on other ranks."""
    part = Part(x, (Shards(group, group.rank(), shard_dim, sizes),))
    found = quantize_part(part, quantizer)
    shape = part.whole_shape() if any(found.whole) else x.shape
    scale = found.scale.view(quantizer.scale_shape(shape))
    return QuantizedTensor(found.local, scale, quantizer, x.dtype, group, shard_dim, sizes)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    group: ProcessGroup | None = None,
    shard_dim: int | None = None,
    sizes: Sequence[int] | None = None,
) -> QuantizedTensor:
    """Quantize a tensor, or this rank's shard of one.

    With a group, codes and scales are those of the whole tensor, cut as ``x`` is: the amax is reduced over the group
    where a block has elements on several ranks, and nothing is sent where blocks lie inside a shard. The result is a
    constant to autograd; what differentiates is ``fp8compile.linear``.

    Args:
        x: Any shape, bfloat16, float16 or float32.
        quantizer: How.
        group: Ranks that a tensor is spread over, ``x`` being this rank's shard. All of them call this.
        shard_dim: The dim that the tensor is cut along; needed with ``group``.
        sizes: What every rank has along it. Needed where a shard begins or ends within a block: no rank can tell
            that of the others from its own. All ranks give the same, or none does.

    Returns:
        Of the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is no dense tensor of these dtypes, the quantizer none, the group none, or sizes no ints.
        ValueError: ``group`` without ``shard_dim`` or the reverse; sizes that do not fit, or are missing where a
            shard boundary cuts a block; sizes for a quantizer that packs codes.
        RuntimeError: A group, on PyTorch 2.11.
    """
    _check_source(x, quantizer)
    _check_shard(x, group, shard_dim, sizes)
    x = x.detach()
    if group is not None:
        _compat.allow_group_in_subclass()
        shard_dim %= x.ndim
        if sizes is not None:
            return _quantize_shard(x, quantizer, group, shard_dim, tuple(sizes))
    amax = ops.amax(x, quantizer)
    if group is not None and _block_spans_ranks(x, quantizer, group, shard_dim):
        amax = all_reduce_amax(amax, group)
    multiplier, scale = ops.scale(amax, quantizer)
    return QuantizedTensor(ops.cast(x, multiplier, quantizer), scale, quantizer, x.dtype, group, shard_dim)


def _parts_to_gather(x: QuantizedTensor, dim: int, sizes: Sequence[int] | None) -> Shards:
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
    found = Shards(x.group, x.group.rank(), x.shard_dim, sizes)
    if x.sizes is None and any(side.kind == "cut" for side in sides_of(x.shape, (found,), x.quantizer.block)):
        raise ValueError(
            f"all_gather: parts of {found.sizes} along dim {x.shard_dim} cut blocks {x.quantizer.block}, and each was "
            "quantized as whole blocks. Say so when quantizing: fp8compile.quantize(..., sizes=...)."
        )
    return found


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor, *, out_dtype: torch.dtype, emulate: bool = False) -> Tensor:
    """The product of two quantized matrices; sums in float32 or better.

    Args:
        a: (m, k).
        b: (k, n). Often the ``.t()`` of one quantized as (n, k), which moves no data.
        out_dtype: bfloat16, float16 or float32.
        emulate: Whether a GPU without such a GEMM multiplies the exact values in float64, slowly, instead of raising.

    Returns:
        (m, n), a plain tensor of ``out_dtype``.

    Raises:
        TypeError: An operand is no QuantizedTensor, or ``out_dtype`` none of these.
        ValueError: Shapes or devices do not fit, or no GEMM can undo scales of such blocks.
        RuntimeError: This device has no GEMM for them.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, QuantizedTensor):
            raise TypeError(
                f"scaled_mm: {name} is a {type(operand).__name__}; it is a QuantizedTensor, made by "
                "fp8compile.quantize."
            )
        if _cuts_blocks(operand):
            raise ValueError(
                f"scaled_mm: {name} is a shard of sizes {operand.sizes} along dim {operand.shard_dim}, which cuts "
                f"blocks {operand.quantizer.block}. Call .all_gather({operand.shard_dim}) first."
            )
    if out_dtype not in SOURCE_DTYPES:
        raise TypeError(f"scaled_mm: out_dtype is {out_dtype}; it is bfloat16, float16 or float32.")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"scaled_mm: shapes {tuple(a.shape)} and {tuple(b.shape)}; they are (m, k) and (k, n).")
    if a.device != b.device:
        raise ValueError(f"scaled_mm: a is on {a.device} and b on {b.device}; move them to one device.")
    config = GemmConfig(emulate=emulate)
    return ops.scaled_mm(a.codes, b.codes, a.scale, b.scale, a.quantizer, b.quantizer, out_dtype, config)
