"""fp8compile::quantize_several: codes of several matrices that are computed from the same tensors.

The backward of a feed-forward quantizes the gradients of gate and up in both directions, and the activation along
tokens. All three are pointwise code of the same two or three tensors. Inductor computes all amaxes in one kernel and
all codes in a second one, so it reads these tensors twice. This op is one kernel that computes its matrices itself.

    traced       x --amax, scale, cast--> codes, scale --noted_codes(codes, scale, x)--> product
    joint graph  for each set of notes of one read: quantize_several(matrices) --> codes, scales; other notes vanish

`fuse_noted` is the pass over the joint graph that does so, before PyTorch cuts the graph into forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fp8compile import _compat, inductor
from fp8compile.inductor import TileLaunch
from fp8compile.ops.amax import amax
from fp8compile.ops.cast import cast
from fp8compile.ops.quantize_both import LARGEST_BLOCK, empty_outputs, is_pair, two_casts
from fp8compile.ops.registry import register_op
from fp8compile.ops.scale import scale
from fp8compile.quantizers import CurrentScaling, Quantizer
from fp8compile.target import target_of

__all__ = ["fuse_noted", "is_along_columns", "noted_codes", "quantize_several"]


def is_along_columns(quantizer: Quantizer | None) -> bool:
    """Whether the GPU kernel makes a matrix's codes along columns by this quantizer, without codes along rows."""
    if type(quantizer) is not CurrentScaling or quantizer.rounding != "nearest":
        return False
    n = quantizer.block[0]
    return quantizer.block == (n, 1) and n > 1 and LARGEST_BLOCK % n == 0


# ---------------------------------------------------------------------------------- the op


def _fake(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    both = [each for x in matrices[:in_both] for each in empty_outputs(x, rows, columns)]
    return both + [each for x in matrices[in_both:] for each in _empty_columns(x, others)]


def _empty_columns(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    *stack, m, k = x.shape
    codes = x.new_empty((*stack, k, m), dtype=torch.uint8).transpose(-2, -1)
    return codes, x.new_empty((*stack, quantizer.scale_shape((m, k))[0], k), dtype=quantizer.scale_dtype())


def _several_casts(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    both = [each for x in matrices[:in_both] for each in two_casts(x, rows, columns)]
    return both + [each for x in matrices[in_both:] for each in _along_columns(x, others)]


def _along_columns(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    if x.ndim == 3:
        codes, scales = zip(*(_along_columns(matrix, quantizer) for matrix in x), strict=True)
        return torch.stack([each.t() for each in codes]).transpose(-2, -1), torch.stack(scales)
    multiplier, found = scale(amax(x, quantizer), quantizer)
    return cast(x, multiplier, quantizer).t().contiguous().t(), found


def _kernel(
    matrices: Sequence[Tensor], in_both: int, rows: Quantizer, columns: Quantizer, others: Quantizer
) -> list[Tensor]:
    if target_of(matrices[0].device).type == "cpu":
        return _several_casts(matrices, in_both, rows, columns, others)
    found = _fake(matrices, in_both, rows, columns, others)
    outputs = iter(found)
    for number, x in enumerate(matrices):
        if _compat.guard_or_false(x.numel() == 0):
            break
        _launch_one(x.contiguous(), outputs, rows if number < in_both else None, columns, others)
    return found


def _launch_one(x: Tensor, outputs: Iterator[Tensor], rows: Any, columns: Any, others: Any) -> None:
    """Run the kernel on a matrix that is in memory, if Inductor could not compute it in the kernel."""
    from fp8compile.kernels.both_directions import along_columns, both_directions

    if rows is None:
        along_columns(x, others, (next(outputs).transpose(-2, -1), next(outputs)))
    else:
        codes, found, turned, column_scale = (next(outputs) for _ in range(4))
        laid_out = codes, found.movedim(-1, 0), turned.transpose(-2, -1), column_scale
        both_directions(x, rows, columns, laid_out)


def _launch(matrices: Sequence[Tensor], in_both: int, rows: Any, columns: Any, others: Any) -> TileLaunch | None:
    from fp8compile.kernels.both_directions import tiles_of_several

    if in_both == 0:  # the kernel's first result is of codes along rows
        return None
    pairs = [(rows, columns) if number < in_both else (None, others) for number in range(len(matrices))]
    m, k = matrices[0].shape
    return tiles_of_several(m, k, pairs)


def _samples() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    rows, columns = CurrentScaling(block=(1, 16)), CurrentScaling(block=(16, 1), scale="pow2")
    for dtype, in_both in ((torch.bfloat16, 2), (torch.float32, 1)):
        matrices = [torch.randn(20, 40, generator=generator).to(dtype) for _ in range(3)]
        yield matrices, in_both, rows, columns, CurrentScaling(block=(16, 1), format="e5m2")
    for x in (torch.randn(3, 20, 40, generator=generator), torch.empty(0, 32), torch.randn(24, 17).half().t()):
        yield [x], 0, columns, columns, columns


quantize_several: OpOverload = register_op(
    "fp8compile::quantize_several",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=None,
    portable=_several_casts,
    sharding=None,
    samples=_samples,
)
inductor.register_tile_kernel(quantize_several, _launch)


# ---------------------------------------------------------------------------------- notes


def _note(codes: Tensor, scale: Tensor, x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return codes.clone(), scale.clone()


def _note_samples() -> Iterator[tuple[Any, ...]]:
    quantizer = CurrentScaling(block=(1, 16))
    for x in (torch.randn(32, 48), torch.randn(16, 40).bfloat16(), torch.empty(0, 32)):
        multiplier, found = scale(amax(x, quantizer), quantizer)
        codes = cast(x, multiplier, quantizer)
        yield codes, found, x, quantizer
        yield codes.t().contiguous().t(), found.t(), x, quantizer


noted_codes: OpOverload = register_op(
    "fp8compile::noted_codes",
    _note,
    fake=lambda codes, scale, x, quantizer: (torch.empty_like(codes), torch.empty_like(scale)),
    backward=None,
    decompose=None,
    portable=_note,
    sharding=None,
    samples=_note_samples,
)
"""Returns codes and scale as they are, and notes in the graph that they are those of ``x``.

``x`` is behind a barrier (`made_of_kept`): it depends on what the graph keeps, and nothing else reads it.
"""
inductor.register_lowering(noted_codes, lambda codes, scale, x, quantizer: (codes, scale))


# ---------------------------------------------------------------------------------- the pass


@dataclass(eq=False)
class _Matrix:
    """A matrix with notes: the node that computes it, the tensor that notes name, and its notes."""

    source: fx.Node
    seen: fx.Node
    shape: tuple[Any, ...]
    rows: list[fx.Node] = field(default_factory=list)
    columns: list[fx.Node] = field(default_factory=list)

    @property
    def notes(self) -> list[fx.Node]:
        return [*self.rows, *self.columns]

    def quantizers(self) -> tuple[Any, Any]:
        """The quantizers along rows and along columns; None for a direction without notes."""
        rows, columns = ({note.args[3] for note in notes} for notes in (self.rows, self.columns))
        return next(iter(rows), None), next(iter(columns), None)


def fuse_noted(graph: fx.Graph) -> None:
    """Replace notes by calls of `quantize_several` where fewer bytes are read so, and drop all others.

    Matrices that are quantized in both directions and computed from a common tensor form a set. Matrices quantized
    along columns alone join a set whose tensors suffice for them. Inductor reads a set's tensors twice; the kernel
    reads them once. A matrix that other nodes read too stays as it was, because the kernel would have to store it.
    """
    matrices = _matrices(graph)
    notes = {note for each in matrices for note in each.notes}
    used = _read_beside(graph, notes)
    free = [each for each in matrices if each.source not in used or not each.rows]
    for members in _sets(free):
        _replace(graph, members)
    for note in graph.find_nodes(op="call_function", target=noted_codes):
        _take_away(graph, note, note.args[:2])


def _matrices(graph: fx.Graph) -> list[_Matrix]:
    found: dict[fx.Node, _Matrix] = {}
    for note in graph.find_nodes(op="call_function", target=noted_codes):
        seen: Any = note.args[2]
        quantizer: Any = note.args[3]
        source = inductor.behind_views(seen)
        matrix = found.setdefault(source, _Matrix(source, seen, tuple(seen.meta["val"].shape)))
        (matrix.columns if is_along_columns(quantizer) else matrix.rows).append(note)
    return list(found.values())


def _read_beside(graph: fx.Graph, notes: set[fx.Node]) -> set[fx.Node]:
    """Nodes that are still read if nobody makes the codes and scales that these notes are given."""
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in notes and (node in read or node.op == "output" or node.is_impure()):
            read.update(node.all_input_nodes)
    return read


def _sets(matrices: list[_Matrix]) -> list[list[_Matrix]]:
    """Sets of matrices that one kernel computes; in each, those in both directions come first."""
    leaves = {id(each): inductor.leaves_of(each.source) for each in matrices}
    sets: list[list[_Matrix]] = []
    for matrix in (each for each in matrices if is_pair(*each.quantizers())):
        joined = [members for members in sets if _fits(members[0], matrix) and _shares(members, matrix, leaves)]
        sets = [members for members in sets if all(members is not each for each in joined)]
        sets.append([*(each for members in joined for each in members), matrix])
    left = [each for each in matrices if not each.rows]
    for members in sets:
        held = set().union(*(leaves[id(each)] for each in members))
        known = [
            each for each in left if leaves[id(each)] and leaves[id(each)] <= held and _is_beside(members[0], each)
        ]
        beside = [each for each in known if _fits(known[0], each)]
        left = [each for each in left if each not in beside]
        members += beside
    return sets


def _is_beside(one: _Matrix, other: _Matrix) -> bool:
    """Whether a kernel that makes one matrix's codes may also make another one's codes along columns."""
    return one.shape == other.shape and one.quantizers()[1].block == other.quantizers()[1].block


def _fits(one: _Matrix, other: _Matrix) -> bool:
    return one.quantizers() == other.quantizers() and one.shape == other.shape


def _shares(members: list[_Matrix], matrix: _Matrix, leaves: dict[int, set[fx.Node]]) -> bool:
    return any(leaves[id(each)] & leaves[id(matrix)] for each in members)


def _replace(graph: fx.Graph, members: list[_Matrix]) -> None:
    both = [each for each in members if each.rows]
    rows, columns = both[0].quantizers()
    others = next((each.quantizers()[1] for each in members if not each.rows), columns)
    arguments = [each.seen for each in members], len(both), rows, columns, others
    with graph.inserting_after(max(each.seen for each in members)):
        call = graph.call_function(quantize_several, arguments)
    fakes = _fake([each.seen.meta["val"] for each in members], *arguments[1:])
    call.meta = {**both[0].rows[0].meta, "val": fakes}
    call.meta.pop("tensor_meta", None)
    results = iter(enumerate(fakes))
    last = call
    for each in members:
        for notes in (each.rows, each.columns) if each.rows else (each.columns,):
            pair = []
            for number, fake in (next(results), next(results)):
                with graph.inserting_after(last):
                    last = graph.call_function(getitem, (call, number))
                last.meta = {**call.meta, "val": fake}
                pair.append(last)
            for note in notes:
                _take_away(graph, note, pair)


def _take_away(graph: fx.Graph, note: fx.Node, results: Sequence[Any]) -> None:
    """Remove a note from a graph; readers of its two results read others."""
    for reader in list(note.users):
        number: Any = reader.args[1]
        reader.replace_all_uses_with(results[number])
        graph.erase_node(reader)
    graph.erase_node(note)


inductor.register_joint_pass(noted_codes, fuse_noted)
