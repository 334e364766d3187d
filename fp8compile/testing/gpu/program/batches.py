"""Runs several Triton programs of a launch together, in Triton's interpreter on arrays with an extra dim.

A value of a kernel is one array for all programs of a `Batch`:

    a block of shape s      (P, *s), or (1, *s) if all programs have the same values
    a scalar                (P,), or (1,)

So one call of NumPy computes what P programs compute, and Python's overhead is paid once. An ``if`` or the bounds of a
loop need one value on the host. If the programs differ in this value, the batch is undone: memory is restored, and
the programs run again in smaller batches, each with one value.

Results are those of programs that run one after the other, unless programs race. `Access` finds every race.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle as Handle

__all__ = ["ELEMENTS", "Batch", "Diverged", "along", "arrays", "counting", "stored", "together"]

ELEMENTS = 1 << 17  # of the largest array of a batch: it fits into a core's cache


class Diverged(Exception):
    """Raised if Triton programs of a batch differ in a number that controls execution, such as a loop's bound.

    Attributes:
        values: The number of each program, (P,).
    """

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.values = values


@dataclass
class Batch:
    """P Triton programs of one kernel launch that run together; arrays have a first dim of P.

    Attributes:
        programs: Linear indices of the programs, (P,) int64, in the order in which they would run one by one.
        index: Indices of the programs along each of the grid's three dims, each (P,) int32.
        largest: Number of elements that one program has in its largest block so far.
    """

    programs: np.ndarray
    index: tuple[np.ndarray, ...]
    largest: int = 1
    _overwritten: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    @classmethod
    def of(cls, programs: Sequence[int], grid: Sequence[int]) -> Batch:
        """Create a batch from linear indices of Triton programs in a three-dim grid."""
        numbers = np.array(programs, np.int64)
        return cls(numbers, tuple(each.astype(np.int32) for each in np.unravel_index(numbers, tuple(grid))))

    def of_each(self, array: np.ndarray) -> np.ndarray:
        """Expand an array (1, *s) that all P Triton programs share to (P, *s); (P, *s) is returned unchanged."""
        return np.broadcast_to(array, (len(self.programs), *array.shape[1:]))

    def same(self, values: np.ndarray) -> Any:
        """The value that all Triton programs share; raises `Diverged` if they differ.

        ``values`` has an entry for each program, (P,), or one for all of them, (1,).
        """
        first = values.reshape(-1)[0]
        if (values != first).any():
            raise Diverged(values.reshape(-1))
        return first

    def keep(self, pointers: np.ndarray, mask: np.ndarray, width: int) -> None:
        """Save the content of memory at the addresses ``pointers`` before it is overwritten, for `undo`.

        ``mask`` is True for addresses that are written to; ``width`` is the bytes of an element.
        """
        kind = np.dtype(f"u{width}")
        before = interpreter._interpreter.load(pointers, mask, np.zeros(pointers.shape, kind), kind)
        self._overwritten.append((pointers, mask, before))

    def undo(self) -> None:
        """Restore memory that this batch has overwritten."""
        for pointers, mask, before in reversed(self._overwritten):
            interpreter._interpreter.store(pointers, before, mask)
        self._overwritten.clear()


def arrays(*handles: Handle) -> list[np.ndarray]:
    """The handles' arrays, broadcast to one number of Triton programs (dim 0); their block shapes have to be equal."""
    return list(np.broadcast_arrays(*(each.data for each in handles)))


def stored(array: np.ndarray) -> np.ndarray:
    """Make an array contiguous and writable, as Triton's loads and stores need; copies broadcast views."""
    return np.require(array, requirements=["C", "W"])


def along(axis: int | None, array: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the array, whose dim 0 counts Triton programs, and which of its dims is dim ``axis`` of a block.

    If ``axis`` is None, each program's block is flattened first.
    """
    if axis is None:
        return array.reshape(len(array), -1), 1
    return array, axis % (array.ndim - 1) + 1


def counting(running: Callable[[], Batch]) -> Callable[..., Any]:
    """Make the function that replaces ``range`` in kernels; bounds may differ between Triton programs.

    ``running`` returns the batch that runs. A call raises `Diverged` if programs have different numbers of iterations.
    The loop's variable is a tensor, as in a compiled kernel.
    """

    def call(start: Any, stop: Any = None, step: Any = None, **_: Any) -> Any:
        step = 1 if step is None else step
        given = (0, start, step) if stop is None else (start, stop, step)
        first, end, pace = (
            each.handle.data.astype(np.int64) if isinstance(each, tl.tensor) else np.array([int(each)])
            for each in given
        )
        turns = int(running().same(np.maximum(0, -((first - end) // pace))))
        is_long = any(isinstance(each, tl.tensor) and each.dtype == tl.int64 for each in given)
        return (_tensor(None, first + turn * pace, tl.int64 if is_long else tl.int32) for turn in range(turns))

    return call


def together(running: Callable[[], Batch]) -> Iterator[tuple[Any, ...]]:
    """Yield patches of Triton's interpreter that add a dim of programs to each value of a kernel.

    Each patch is (object, attribute, replacement).

    Args:
        running: Returns the batch that runs.
    """
    yield Builder, "create_get_program_id", lambda _, axis: Handle(running().index[axis], tl.int32)
    yield interpreter.ReduceScanOpInterface, "to_tensor", _tensor
    yield from _of_sizes(running)
    yield from _of_dims()
    yield from _of_pointers()
    yield Builder, "binary_op", _binary
    yield Builder, "ternary_op", _ternary
    yield interpreter.ScanOps, "apply_impl", _scan
    yield tl.core.tensor, "__index__", lambda number: int(running().same(number.handle.data))
    yield tl.core.tensor, "T", property(_transposed)
    yield tl, "range", counting(running)
    yield tl.core.tensor, "__bool__", lambda value: _truth(running(), value.handle.data)


def _truth(batch: Batch, data: np.ndarray) -> bool:
    if data.size != len(data):
        return True  # as in the interpreter: a block stands for itself
    return bool(batch.same(data.astype(bool)))


def _transposed(matrix: tl.tensor) -> tl.tensor:
    return _tensor(None, np.swapaxes(matrix.handle.data, -1, -2), matrix.dtype)


def _tensor(_: Any, array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    handle = Handle(np.asarray(array).astype(interpreter._get_np_dtype(dtype), copy=False), dtype.scalar)
    shape = list(handle.data.shape[1:])
    return tl.tensor(handle, tl.block_type(dtype.scalar, shape) if shape else dtype.scalar)


# ------------------------------------------------------------------------------------------------ shapes of blocks


def _of_sizes(running: Callable[[], Batch]) -> Iterator[tuple[Any, ...]]:
    def shaped(data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        batch = running()
        batch.largest = max(batch.largest, math.prod(map(int, shape)))
        return np.broadcast_to(data, (len(data), *map(int, shape)))

    def splat(_: Builder, kind: tl.block_type, scalar: Handle) -> Handle:
        data = scalar.data.astype(interpreter._get_np_dtype(scalar.dtype), copy=False)
        return Handle(shaped(data.reshape(-1, *(1,) * len(kind.shape)), kind.shape), scalar.dtype.scalar)

    def range_(_: Builder, kind: Any, start: int, stop: int) -> Handle:
        return Handle(shaped(np.arange(start, stop, dtype=np.int32)[None], (stop - start,)), tl.int32)

    yield Builder, "create_splat", splat
    yield Builder, "create_make_range", range_
    yield Builder, "create_broadcast", lambda _, x, shape: Handle(shaped(x.data, shape), x.dtype.scalar)


def _of_dims() -> Iterator[tuple[Any, ...]]:
    def on_each(change: Callable[..., np.ndarray]) -> Callable[..., Handle]:
        return lambda _, x, *args: Handle(change(x.data, *args), x.dtype.scalar)

    def transposed(data: np.ndarray, dims: Sequence[int]) -> np.ndarray:
        return np.transpose(data, (0, *(dim % len(dims) + 1 for dim in dims)))

    def joined(function: Callable[..., np.ndarray], axis: int) -> Callable[..., Handle]:
        def call(_: Builder, a: Handle, b: Handle) -> Handle:
            count = max(len(a.data), len(b.data))
            parts = [np.broadcast_to(each.data, (count, *each.data.shape[1:])) for each in (a, b)]
            return Handle(function(parts, axis=axis), a.dtype.scalar)

        return call

    def gathered(_: Builder, source: Handle, index: Handle, axis: int) -> Handle:
        count = max(len(source.data), len(index.data))
        values, places = (np.broadcast_to(each.data, (count, *each.data.shape[1:])) for each in (source, index))
        return Handle(np.take_along_axis(values, places, axis=along(axis, values)[1]), source.dtype.scalar)

    yield Builder, "create_expand_dims", on_each(lambda data, axis: np.expand_dims(data, axis + 1))
    yield Builder, "create_reshape", on_each(lambda data, shape, _: data.reshape(len(data), *shape))
    yield Builder, "create_trans", on_each(transposed)
    yield Builder, "create_unsplat", on_each(lambda data: data.reshape(len(data), -1)[:, 0])
    yield Builder, "create_cat", joined(np.concatenate, 1)
    yield Builder, "create_join", joined(np.stack, -1)
    yield Builder, "create_gather", gathered
    yield Builder, "create_histogram", _histogram


def _histogram(_: Builder, data: Handle, bins: int, mask: Handle | None) -> Handle:
    values, counted = arrays(data, mask if mask is not None else Handle(np.ones(data.data.shape, bool), tl.int1))
    rows = [
        np.bincount(own[is_counted], minlength=bins)[:bins] for own, is_counted in zip(values, counted, strict=True)
    ]
    return Handle(np.stack(rows).astype(np.int32), tl.int32)


# ---------------------------------------------------------------------------------- block pointers and descriptors


def _of_pointers() -> Iterator[tuple[Any, ...]]:
    def of_block_pointer(block: Any, checked: Sequence[int]) -> tuple[Handle, Handle]:
        return _elements(block, block.offsets, checked)

    def of_descriptor(block: Any, offsets: Sequence[Handle]) -> tuple[Handle, Handle]:
        width = block.base.dtype.element_ty.primitive_bitwidth // 8
        if (offsets[-1].data * width % 16).any():
            raise ValueError(
                "the block of a tensor descriptor must begin at an address that is a multiple of 16 bytes. Use "
                f"offsets that are multiples of {16 // width} elements along the last dim."
            )
        return _elements(block, offsets, range(block.ndim))

    def advanced(_: Builder, block: Any, steps: Sequence[Handle]) -> Any:
        offsets = [Handle(at.data + by.data, at.dtype) for at, by in zip(block.offsets, steps, strict=True)]
        return interpreter.BlockPointerHandle(
            block.base, block.shape, block.strides, offsets, block.block_shape, block.order
        )

    yield interpreter.TensorDescHandle, "materialize_pointers", of_descriptor
    if hasattr(interpreter, "BlockPointerHandle"):  # Triton 3.9 has none
        yield interpreter.BlockPointerHandle, "materialize_pointers", of_block_pointer
        yield Builder, "create_advance", advanced


def _elements(block: Any, offsets: Sequence[Handle], checked: Sequence[int]) -> tuple[Handle, Handle]:
    """Addresses of the elements that a block pointer or TMA descriptor covers, and a mask of valid ones.

    ``offsets`` is the block's position. An element is invalid if it is outside of the tensor in a dim of ``checked``.
    """
    ndim = len(block.block_shape)
    width = max(1, block.base.get_element_ty().primitive_bitwidth // 8)
    addresses = block.base.data.reshape(-1, *(1,) * ndim)
    mask = np.ones((1,) * (ndim + 1), bool)
    for dim, size in enumerate(block.block_shape):
        whole, stride, at = (
            each[dim].data.astype(np.int64).reshape(-1, *(1,) * ndim) for each in (block.shape, block.strides, offsets)
        )
        places = at + np.arange(size).reshape(-1, *(1,) * (ndim - dim - 1))
        addresses = addresses + (width * places * stride).astype(np.uint64)
        if dim in checked:
            mask = mask & (places >= 0) & (places < whole)
    addresses, mask = np.broadcast_arrays(addresses, mask)
    return Handle(addresses, block.base.dtype.scalar), Handle(mask, tl.int1)


# ------------------------------------------------------------------------------------------------ elements and scans


def _fitting(output: np.ndarray, dtype: tl.dtype) -> Handle:
    if not interpreter._validate_np_data_size(output, dtype):
        output = output.astype(interpreter._get_np_dtype(dtype))
    return Handle(output, dtype)


def _binary(_: Builder, a: Handle, b: Handle, op: Callable[..., np.ndarray]) -> Handle:
    return _fitting(op(a.data, b.data), a.dtype.scalar)


def _ternary(_: Builder, a: Handle, b: Handle, c: Handle, op: Callable[..., np.ndarray]) -> Handle:
    return _fitting(op(a.data, b.data, c.data), c.dtype.scalar)


def _scan(scan: Any, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Compute ``tl.associative_scan`` of the tensors ``inputs``, one element after the other.

    ``scan`` is the interpreter's object with axis, direction and combine function.
    """
    kinds = [each.dtype for each in inputs]
    values, axis = zip(*(along(scan.axis, each) for each in arrays(*(x.handle for x in inputs))), strict=True)
    parts = [np.moveaxis(np.flip(each, axis[0]) if scan.reverse else each, axis[0], 1) for each in values]
    results = [[part[:, 0]] for part in parts]
    for place in range(1, parts[0].shape[1]):
        before = [scan.to_tensor(result[-1], kind) for result, kind in zip(results, kinds, strict=True)]
        here = [scan.to_tensor(part[:, place], kind) for part, kind in zip(parts, kinds, strict=True)]
        found = scan.combine_fn(*before, *here)
        for result, each in zip(results, found if isinstance(found, tuple) else (found,), strict=True):
            result.append(each.handle.data)
    scanned = [np.moveaxis(np.stack(result), 0, axis[0]) for result in results]
    return [
        scan.to_tensor(np.flip(each, axis[0]) if scan.reverse else each, kind)
        for each, kind in zip(scanned, kinds, strict=True)
    ]
