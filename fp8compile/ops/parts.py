"""A tensor that is spread over ranks, seen from one of them: this rank's part, and how it lies in the whole.

    Shards   one dim of a tensor, cut over the ranks of a group, in their order; sizes may differ and be 0
    Side     rows or columns of the local matrix among the blocks of the whole one
    Part     a rank's part of a tensor, in its own dtype
    Codes    a rank's part of a quantized tensor: codes and scales are those of the whole

Whether ranks have to talk follows from the block and the cut alone, so all of them come to the same answer:

    block along the cut dim    what the amax needs                            kind
    1                          nothing                                        "own"
    -1                         a maximum over the ranks                       "shared"
    n, cut between blocks      nothing                                        "own"
    n, cut through blocks      a maximum over the ranks of the whole grid     "cut"

Where blocks are cut, a rank lays its elements where they are in blocks of the whole, with zeros around them: a zero is
never the largest, its code adds nothing to a product, and any quantizer's steps run on such a window as on any tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from fp8compile.ops.amax import amax
from fp8compile.ops.async_tp import on_the_wire
from fp8compile.ops.cast import cast
from fp8compile.ops.collectives import all_gather, all_reduce_amax
from fp8compile.ops.gemm import Operand
from fp8compile.ops.registry import OPS
from fp8compile.ops.scale import scale
from fp8compile.quantizers import Quantizer
from fp8compile.quantizers.blocks import as_matrix

__all__ = [
    "OPS_OF_STEPS",
    "PYTHON_OF_STEPS",
    "Codes",
    "Part",
    "Shards",
    "Side",
    "Steps",
    "cast_part",
    "chunks",
    "is_aligned_part",
    "part_amax",
    "quantize_part",
    "sides_of",
    "whole_amax",
]


@dataclass(frozen=True)
class Shards:
    """One dim of a tensor, cut over the ranks of a group, in their order.

    Attributes:
        group: The ranks, or the name of their group.
        rank: This one's number in the group.
        dim: Of the tensor, counted from 0.
        sizes: Of every rank's part along it.
    """

    group: ProcessGroup | str
    rank: int
    dim: int
    sizes: tuple[int, ...]

    @property
    def start(self) -> int:
        """Where this rank's part begins."""
        return sum(self.sizes[: self.rank])

    @property
    def length(self) -> int:
        """Of this rank's part."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        """Of the whole."""
        return sum(self.sizes)

    def is_even(self) -> bool:
        """Whether all ranks have as much."""
        return all(size == self.sizes[0] for size in self.sizes)

    def by_name(self) -> Shards:
        """The same, with the name of the group: a group can be neither copied nor pickled."""
        return self if isinstance(self.group, str) else replace(self, group=self.group.group_name)

    def matches(self, other: Shards | None) -> bool:
        """Whether a dim of another tensor is cut in the same places, by the same ranks."""
        return other is not None and self.sizes == other.sizes


def chunks(total: int, ranks: int) -> tuple[int, ...]:
    """Sizes of the parts of a dim, as DTensor and FSDP2 cut it: full ones first, then the rest, then nothing."""
    if total % ranks == 0:
        return (total // ranks,) * ranks
    full = -(-total // ranks)
    return tuple(max(0, min(full, total - rank * full)) for rank in range(ranks))


Cuts = tuple[Shards | None, ...]


# ---------------------------------------------------------------------------------- sides


@dataclass(frozen=True)
class Side:
    """Rows or columns of a rank's matrix, among the blocks of the whole one.

    Attributes:
        kind: ``"own"``, ``"shared"`` or ``"cut"``, as the head of this file has it.
        groups: Who has elements of the same blocks.
        block: Elements that share a scale.
        sizes: Leading to trailing, the dims that this side flattens: (start, length, total) of each.
    """

    kind: str
    groups: tuple[ProcessGroup | str, ...]
    block: int
    sizes: tuple[tuple[int, int, int], ...]

    @property
    def length(self) -> int:
        """Elements on this rank."""
        return math.prod([length for _, length, _ in self.sizes])

    @property
    def total(self) -> int:
        """Elements of the whole."""
        return math.prod([total for _, _, total in self.sizes])

    @property
    def first(self) -> int | None:
        """Where this rank's elements begin, if they are one run of the whole; None if they are several."""
        run, first, inner = True, 0, 1
        for start, length, total in reversed(self.sizes):
            if not run and length != 1:
                return None
            first += start * inner
            inner *= total
            run = run and length == total
        return first

    def _positions(self, device: torch.device) -> Tensor:
        """Where each of this rank's elements is in the whole."""
        found = torch.zeros((1,), dtype=torch.int64, device=device)
        for start, length, total in self.sizes:
            found = (found.unsqueeze(1) * total + torch.arange(start, start + length, device=device)).flatten()
        return found

    def embed(self, matrix: Tensor, dim: int) -> Tensor:
        """The window: this rank's elements where they are in whole blocks, zeros around them."""
        if self.kind == "own":
            return matrix
        if self.first is None:
            shape = list(matrix.shape)
            shape[dim] = self.total
            return matrix.new_zeros(shape).index_copy(dim, self._positions(matrix.device), matrix)
        before = 0 if self.kind == "own" else self.first % self.block
        return pad(matrix, (0, 0, before, 0) if dim == 0 else (before, 0)) if before else matrix

    def extract(self, window: Tensor, dim: int) -> Tensor:
        """This rank's elements of a window."""
        if self.kind == "own":
            return window
        if self.first is None:
            return window.index_select(dim, self._positions(window.device))
        return window.narrow(dim, self.first % self.block, self.length)

    def _blocks(self) -> tuple[int, int, int]:
        """First block of the window, how many it has, how many there are."""
        every = -(-self.total // self.block)
        if self.first is None:
            return 0, every, every
        # an own part begins with a block, or is empty and lies behind the last one, whole or not
        before = 0 if self.kind == "own" else self.first % self.block
        return self.first // self.block, -(-(before + self.length) // self.block), every

    def widen(self, grid: Tensor, dim: int) -> Tensor:
        """The grid of a window, or of blocks that are this rank's own, among zeros, as the grid of the whole."""
        first, count, every = self._blocks()
        if self.kind == "own" and self.first is None:
            shape = list(grid.shape)
            shape[dim] = every
            blocks = self._positions(grid.device)[:: self.block] // self.block
            return grid.new_zeros(shape).index_copy(dim, blocks, grid)
        after = every - first - count
        return pad(grid, (0, 0, first, after) if dim == 0 else (first, after)) if first or after else grid

    def window(self, grid: Tensor, dim: int) -> Tensor:
        """The grid of this rank's window, of that of the whole."""
        if self.kind == "own" and self.first is None:
            return grid.index_select(dim, self._positions(grid.device)[:: self.block] // self.block)
        first, count, _ = self._blocks()
        return grid.narrow(dim, first, count)


def _side(dims: range, shape: Sequence[int], cuts: Cuts, block: int) -> Side:
    own = [[cut for cut in cuts if cut is not None and cut.dim == dim] for dim in dims]
    sizes = tuple(
        (sum(cut.start for cut in found), shape[dim], found[0].total if found else shape[dim])
        for dim, found in zip(dims, own, strict=True)
    )
    groups = tuple(cut.group for found in own for cut in found)
    if not groups or block == 1:
        return Side("own", (), block, sizes)
    if block == -1:
        return Side("shared", groups, block, sizes)
    innermost = max(index for index, found in enumerate(own) if found)
    if not all(cut.is_even() for cut in own[innermost][:-1]):
        return Side("cut", groups, block, sizes)  # ranks cut parts of different sizes: none knows where others cut
    inner = math.prod([total for _, _, total in sizes[innermost + 1 :]])
    outer = math.prod([total for _, _, total in sizes[:innermost]])
    smallest = own[innermost][-1]
    starts = [sum(smallest.sizes[:rank]) for rank in range(1, len(smallest.sizes))]
    boundaries = [start * inner for start in starts if start < smallest.total]  # behind the end, ranks have nothing
    followed = outer > 1 or len(own[innermost]) > 1  # the last part, too, is followed by elements of another one
    if followed:
        boundaries.append(smallest.total * inner)
    cut = any(boundary % block for boundary in boundaries)
    return Side("cut" if cut else "own", groups, block, sizes)


def sides_of(shape: Sequence[int], cuts: Cuts, block: tuple[int, int]) -> tuple[Side, Side]:
    """Rows and columns of a rank's matrix.

    Args:
        shape: Of the rank's part, any rank of dims from 1.
        cuts: Of the tensor.
        block: Over the (M, K) view of the whole.
    """
    last = len(shape) - 1
    return _side(range(last), shape, cuts, block[0]), _side(range(last, last + 1), shape, cuts, block[1])


# ---------------------------------------------------------------------------------- parts


def _without(cuts: Cuts, index: int) -> Cuts:
    return (*cuts[:index], None, *cuts[index + 1 :])


def _cut_again(cuts: Cuts, index: int, dim: int) -> int | None:
    """The last group, behind this one, that cuts a dim: parts of parts, to be put together before it is cut anew."""
    return next((i for i in reversed(range(index + 1, len(cuts))) if cuts[i] is not None and cuts[i].dim == dim), None)


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor.

    Attributes:
        local: The elements, in the order of the whole.
        cuts: An entry for each group in play, the same ones in the same order for all tensors of a layer; None for a
            group whose ranks have the same elements. Empty for a matrix that is whole.
    """

    local: Tensor
    cuts: Cuts = ()

    def whole_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape of what this group and those after it have together; for the first one, of the whole."""
        shape = list(self.local.shape)
        for cut in reversed(self.cuts[index:]):
            if cut is not None:
                shape[cut.dim] = cut.total
        return tuple(shape)

    def gather(self, index: int) -> Part:
        """Put together what the ranks of one group have, and before, along the same dim, of those behind it."""
        cut = self.cuts[index]
        if (again := _cut_again(self.cuts, index, cut.dim)) is not None:
            return self.gather(again).gather(index)
        return Part(all_gather(self.local, cut.dim, cut.sizes, cut.group), _without(self.cuts, index))

    def narrow(self, index: int, cut: Shards) -> Part:
        """Of what all ranks of a group have, this one's part; groups behind it do not cut this dim any more."""
        if (again := _cut_again(self.cuts, index, cut.dim)) is not None:
            return self.gather(again).narrow(index, cut)
        local = self.local.narrow(cut.dim, cut.start, cut.length)
        return Part(local, (*self.cuts[:index], cut, *self.cuts[index + 1 :]))


@dataclass(frozen=True)
class Codes:
    """A rank's part of a quantized tensor.

    Attributes:
        local: Codes, uint8.
        scale: Of the local blocks, or along rows or columns of the whole's.
        quantizer: What made them.
        cuts: As of a ``Part``.
        whole: Whether rows and columns of ``scale`` are those of the whole tensor's grid.
    """

    local: Tensor
    scale: Tensor
    quantizer: Quantizer
    cuts: Cuts
    whole: tuple[bool, bool] = (False, False)

    def gather(self, index: int) -> Codes:
        """Put together codes, and scales where ranks have different ones; the order is that of ``Part.gather``."""
        _check_not_packed(self.quantizer, self.local.shape, self.quantizer.values_shape(self.local.shape))
        cut = self.cuts[index]
        if (again := _cut_again(self.cuts, index, cut.dim)) is not None:
            return self.gather(again).gather(index)
        sent = on_the_wire(self.local, self.quantizer)
        codes = all_gather(sent, cut.dim, cut.sizes, cut.group)
        codes = codes if sent is self.local else codes.view(torch.uint8)
        return replace(self, local=codes, scale=self._gathered_scale(cut), cuts=_without(self.cuts, index))

    def _gathered_scale(self, cut: Shards) -> Tensor:
        last = self.local.ndim - 1
        is_column = cut.dim == last
        block = self.quantizer.block[is_column]
        if block == -1 or self.whole[is_column]:
            return self.scale
        if block == 1:
            return all_gather(self.scale, -1 if is_column else cut.dim, cut.sizes, cut.group)
        shape = self.local.shape
        inner = 1 if is_column else math.prod(shape[cut.dim + 1 : last])
        counts = [-(-size * inner // block) for size in cut.sizes]
        if is_column:
            return all_gather(self.scale, -1, counts, cut.group)
        outer = math.prod(shape[: cut.dim])
        grid = self.scale.view(outer, counts[cut.rank], self.scale.shape[-1])
        return all_gather(grid, 1, counts, cut.group).flatten(0, 1)

    def narrow(self, index: int, cut: Shards) -> Codes:
        """Of what all ranks of a group have, the part that falls to this one, as ``Part.narrow`` does."""
        _check_not_packed(self.quantizer, self.local.shape, self.quantizer.values_shape(self.local.shape))
        if (again := _cut_again(self.cuts, index, cut.dim)) is not None:
            return self.gather(again).narrow(index, cut)
        is_column = cut.dim == self.local.ndim - 1
        block, whole, found = self.quantizer.block[is_column], list(self.whole), self.scale
        if block == 1:
            found = found.narrow(-1 if is_column else cut.dim, cut.start, cut.length)
        elif block != -1 and not whole[is_column]:
            # other groups may cut other dims of this side: then these are the scales of their own blocks alone
            side = sides_of(self.local.shape, self.cuts, self.quantizer.block)[is_column]
            found, whole[is_column] = side.widen(found, int(is_column)), True
        local = self.local.narrow(cut.dim, cut.start, cut.length)
        cuts = (*self.cuts[:index], cut, *self.cuts[index + 1 :])
        return replace(self, local=local, scale=found, cuts=cuts, whole=(whole[0], whole[1]))

    def operand(self) -> tuple[Operand, Side | None, Side | None]:
        """The matrix that a GEMM takes, and the sides along which it is a window."""
        if not self.cuts:
            return Operand(codes=self.local, scale=self.scale, quantizer=self.quantizer), None, None
        codes = as_matrix(self.local)
        grid = self.scale.reshape(self.scale.shape[:-1].numel(), self.scale.shape[-1])
        windows: list[Side | None] = [None, None]
        sides = sides_of(self.local.shape, self.cuts, self.quantizer.block)
        for dim, (side, whole) in enumerate(zip(sides, self.whole, strict=True)):
            if whole and side.groups:
                codes, grid = side.embed(codes, dim), side.window(grid, dim)
                windows[dim] = side
        return Operand(codes=codes, scale=grid, quantizer=self.quantizer), windows[0], windows[1]


def _window(part: Part, sides: tuple[Side, Side]) -> Tensor:
    """The part, or where it cuts blocks the matrix of it in whole blocks, with zeros around."""
    if all(side.kind != "cut" for side in sides):
        return part.local
    window = as_matrix(part.local)
    for dim, side in enumerate(sides):
        window = side.embed(window, dim) if side.kind == "cut" else window
    return window


def _extracted(codes: Tensor, part: Part, sides: tuple[Side, Side]) -> Tensor:
    """The part's own codes, of those of its window."""
    if all(side.kind != "cut" for side in sides):
        return codes
    for dim, side in enumerate(sides):
        codes = side.extract(codes, dim) if side.kind == "cut" else codes
    return codes.reshape(part.local.shape)


def _check_not_packed(quantizer: Quantizer, codes: Sequence[int], values: Sequence[int]) -> None:
    if tuple(codes) != tuple(values):
        raise ValueError(
            f"{quantizer!r} packs codes of several values in a byte, and the tensor, or one that it is multiplied by, "
            "is spread over ranks, which it has no rule for. Quantize and multiply whole tensors with it."
        )


def part_amax(part: Part, quantizer: Quantizer) -> Tensor:
    """The amax of the blocks of a part, over all ranks that have elements of them: see `quantize_part`."""
    return _window_and_amax(part, quantizer, OPS_OF_STEPS)[1]


def _check_part(part: Part, quantizer: Quantizer) -> None:
    if any(part.cuts):
        _check_not_packed(quantizer, quantizer.codes_shape(part.local.shape), part.local.shape)


def _window_and_amax(
    part: Part, quantizer: Quantizer, steps: Steps, local_amax: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Side, Side]]:
    sides = sides_of(part.local.shape, part.cuts, quantizer.block)
    _check_part(part, quantizer)
    window = _window(part, sides)
    found = steps.amax(window, quantizer) if local_amax is None else local_amax
    if window is not part.local:
        for dim, side in enumerate(sides):
            found = side.widen(found, dim) if side.kind == "cut" else found
    for group in dict.fromkeys(group for side in sides if side.kind != "own" for group in side.groups):
        found = all_reduce_amax(found, group)
    return window, found, sides


@dataclass(frozen=True)
class Steps:
    """The three steps that quantize a tensor: the ops, or their Python implementations.

    Below the dispatcher no mode sees an op, and each dispatch costs 10 us: eager kernels take the implementations.
    """

    amax: Callable[[Tensor, Quantizer], Tensor]
    scale: Callable[[Tensor, Quantizer], tuple[Tensor, Tensor]]
    cast: Callable[[Tensor, Tensor, Quantizer], Tensor]


OPS_OF_STEPS = Steps(amax, scale, cast)
PYTHON_OF_STEPS = Steps(*(OPS[op.name()].impl for op in (amax, scale, cast)))


def is_aligned_part(part: Part, quantizer: Quantizer) -> bool:
    """Whether all blocks that a part has elements of are its own, so that ranks need not talk to quantize it."""
    return not any(part.cuts) or all(
        side.kind == "own" for side in sides_of(part.local.shape, part.cuts, quantizer.block)
    )


def quantize_part(
    part: Part,
    quantizer: Quantizer,
    steps: Steps = OPS_OF_STEPS,
    *,
    local_amax: Tensor | None = None,
    whole_amax: Tensor | None = None,
) -> Codes:
    """Quantize a part as the whole tensor would be, by the same codes and scales.

    Args:
        part: All ranks of its groups call this with theirs.
        quantizer: How.
        steps: By which steps.
        local_amax: Amaxes of the part's own elements, where no block is cut, if they are known.
        whole_amax: Amaxes of all blocks of the whole, if they are known: then ranks exchange none.

    Returns:
        Codes of the part's elements.
    """
    if not any(part.cuts):
        amax = whole_amax if whole_amax is not None else local_amax
        multiplier, scales = steps.scale(steps.amax(part.local, quantizer) if amax is None else amax, quantizer)
        return Codes(steps.cast(part.local, multiplier, quantizer), scales, quantizer, part.cuts)
    if whole_amax is not None:
        return _by_whole_amax(part, quantizer, steps, whole_amax)
    window, found, sides = _window_and_amax(part, quantizer, steps, local_amax)
    multiplier, scales = steps.scale(found, quantizer)
    for dim, side in enumerate(sides):
        multiplier = side.window(multiplier, dim) if side.kind == "cut" else multiplier
    codes = _extracted(steps.cast(window, multiplier, quantizer), part, sides)
    return Codes(codes, scales, quantizer, part.cuts, (sides[0].kind == "cut", sides[1].kind == "cut"))


def _by_whole_amax(part: Part, quantizer: Quantizer, steps: Steps, whole_amax: Tensor) -> Codes:
    multiplier, scales = steps.scale(whole_amax, quantizer)
    sides = sides_of(part.local.shape, part.cuts, quantizer.block)
    for dim, side in enumerate(sides):
        scales = side.window(scales, dim) if side.kind == "own" and side.block != -1 else scales
    codes = cast_part(part, multiplier, quantizer, steps)
    return Codes(codes, scales, quantizer, part.cuts, (sides[0].kind == "cut", sides[1].kind == "cut"))


# ---------------------------------------------------------------------------------- many parts, one message


def whole_amax(part: Part, quantizer: Quantizer) -> Tensor:
    """What this rank knows of the amaxes of the whole: their maximum over all ranks is the amax of every block.

    With it, ranks reduce the amaxes of many tensors in one message, and each then has the scales of all blocks.

    Args:
        part: Of a matrix.
        quantizer: How it will be quantized.

    Returns:
        ``quantizer.scale_shape`` of the whole matrix, float32; 0 where this rank has no element of a block.
    """
    sides = sides_of(part.local.shape, part.cuts, quantizer.block)
    _check_part(part, quantizer)
    found = amax(_window(part, sides), quantizer)
    for dim, side in enumerate(sides):
        found = found if side.block == -1 else side.widen(found, dim)
    return found


def cast_part(part: Part, multiplier: Tensor, quantizer: Quantizer, steps: Steps = OPS_OF_STEPS) -> Tensor:
    """Codes of a part, by the multipliers of all blocks of the whole.

    Args:
        part: Of a matrix.
        multiplier: ``quantizer.scale_shape`` of the whole matrix, float32.
        quantizer: How.
        steps: By which steps.

    Returns:
        uint8, the shape of the part.
    """
    sides = sides_of(part.local.shape, part.cuts, quantizer.block)
    for dim, side in enumerate(sides):
        multiplier = multiplier if side.block == -1 else side.window(multiplier, dim)
    return _extracted(steps.cast(_window(part, sides), multiplier, quantizer), part, sides)
