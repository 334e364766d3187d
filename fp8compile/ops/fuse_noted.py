"""Graph pass that quantizes tensors computed from common inputs by one kernel, `quantize_several`.

    traced       x --amax, scale, cast--> codes, scale --noted_codes--> product
    joint graph  for each set of such tensors: quantize_several --> codes, scales; all marks are removed

The op `noted_codes` marks which tensor was quantized. The pass runs before PyTorch cuts the graph into forward and
backward; the steps that it replaces become dead code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile import inductor
from fp8compile._compat import statically_true
from fp8compile.ops.count_cast import in_halves
from fp8compile.ops.counting_kernels import COUNTED, pieces_of_counts
from fp8compile.ops.noted_codes import noted_codes, noted_counts
from fp8compile.ops.quantize_both import is_pair
from fp8compile.ops.quantize_columns import is_along_columns
from fp8compile.ops.quantize_several import quantize_several, quantize_several_counted

__all__ = ["fuse_noted"]


@dataclass(eq=False)
class _Matrix:
    """A tensor in the graph that is quantized, with the `noted_codes` and `noted_counts` nodes that say so.

    Attributes:
        source: The node that computes it.
        seen: The tensor that these nodes name: the matrix itself, or its view behind `made_of_kept`.
        rows: `noted_codes` nodes of codes along rows.
        columns: `noted_codes` nodes of codes along columns.
        counts: `noted_counts` nodes of these casts.
    """

    source: fx.Node
    seen: fx.Node
    rows: list[fx.Node] = field(default_factory=list)
    columns: list[fx.Node] = field(default_factory=list)
    counts: list[fx.Node] = field(default_factory=list)

    def notes(self) -> list[fx.Node]:
        return [*self.rows, *self.columns, *self.counts]

    def directions(self) -> list[list[fx.Node]]:
        """Return the `noted_codes` nodes of each direction: those along rows, if any, then those along columns."""
        return [self.rows, self.columns] if self.rows else [self.columns]

    def quantizers(self) -> tuple[Any, Any]:
        """Return the quantizers along rows and along columns; None for a direction with several quantizers or none."""
        rows, columns = ({note.args[3] for note in notes} for notes in (self.rows, self.columns))
        return tuple(each.pop() if len(each) == 1 else None for each in (rows, columns))  # type: ignore[return-value]

    def direction_of(self, quantizer: Any) -> int | None:
        """Return the index of the direction in which ``quantizer`` casts the matrix; None if it does not."""
        own = self.quantizers()[not self.rows :]
        return own.index(quantizer) if quantizer in own else None


def fuse_noted(graph: fx.Graph) -> None:
    """Replace quantizations by calls of `quantize_several` where that reads fewer bytes, and remove all marks.

    Matrices that are quantized in both directions and computed from a common tensor form a set. A matrix quantized
    along columns alone joins a set whose tensors it is computed from. Slices, transposes, and matrices that are
    quantized along rows and read by other nodes are left alone, because the kernel would have to store them.
    """
    matrices = _matrices(graph)
    used = _read_beside(graph, {note for each in matrices for note in each.notes()})
    computed = [each for each in matrices if inductor.is_pointwise(each.source)]
    for members in _sets([each for each in computed if each.source not in used or not each.rows]):
        _replace(graph, members)
    for op in (noted_codes, noted_counts):
        for note in graph.find_nodes(op="call_function", target=op):
            _take_away(graph, note, note.args)


def _matrices(graph: fx.Graph) -> list[_Matrix]:
    found: dict[fx.Node, _Matrix] = {}
    for note in graph.find_nodes(op="call_function", target=noted_codes):
        _, _, seen, quantizer = note.args
        source = inductor.behind_reshapes(seen)
        matrix = found.setdefault(source, _Matrix(source, seen))
        (matrix.columns if is_along_columns(quantizer) else matrix.rows).append(note)
    for note in graph.find_nodes(op="call_function", target=noted_counts):
        _, seen, quantizer, _ = note.args
        of_counts = found.get(inductor.behind_reshapes(seen))
        if of_counts is not None and of_counts.direction_of(quantizer) is not None:
            of_counts.counts.append(note)
    return list(found.values())


def _read_beside(graph: fx.Graph, notes: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the graph still reads if ``notes`` are removed."""
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in notes and (node in read or node.op == "output" or node.is_impure()):
            read.update(node.all_input_nodes)
    return read


# ---------------------------------------------------------------------------------- sets


def _sets(matrices: list[_Matrix]) -> list[list[_Matrix]]:
    """Return sets of matrices that one kernel quantizes; in a set, matrices with both directions come first."""
    leaves = {each: inductor.leaves_of(each.source) for each in matrices}
    sets: list[list[_Matrix]] = []
    for matrix in (each for each in matrices if is_pair(*each.quantizers())):
        joined = [members for members in sets if _fits(members[0], matrix) and _shares(members, matrix, leaves)]
        sets = [members for members in sets if members not in joined]
        sets.append([*(each for members in joined for each in members), matrix])
    left = [each for each in matrices if not each.rows and is_along_columns(each.quantizers()[1])]
    for members in sets:
        held = set().union(*(leaves[each] for each in members))
        known = [each for each in left if leaves[each] and leaves[each] <= held and _is_beside(members[0], each)]
        beside = [each for each in known if _fits(known[0], each)]
        left = [each for each in left if each not in beside]
        members += beside
    return sets


def _is_beside(one: _Matrix, other: _Matrix) -> bool:
    """Whether a kernel that quantizes ``one`` in both directions may also quantize ``other`` along columns."""
    return _has_shape_of(one, other) and one.quantizers()[1].block == other.quantizers()[1].block


def _fits(one: _Matrix, other: _Matrix) -> bool:
    return one.quantizers() == other.quantizers() and _has_shape_of(one, other)


def _has_shape_of(one: _Matrix, other: _Matrix) -> bool:
    sizes = zip(*(each.seen.meta["val"].shape for each in (one, other)), strict=True)
    return all(statically_true(size == other_size) for size, other_size in sizes)


def _shares(members: list[_Matrix], matrix: _Matrix, leaves: dict[_Matrix, set[fx.Node]]) -> bool:
    return any(leaves[each] & leaves[matrix] for each in members)


# ---------------------------------------------------------------------------------- changes of the graph


def _replace(graph: fx.Graph, members: list[_Matrix]) -> None:
    both = [each for each in members if each.rows]
    rows, columns = both[0].quantizers()
    others = next((each.quantizers()[1] for each in members if not each.rows), columns)
    is_counted = any(each.counts for each in members)
    op = quantize_several_counted if is_counted else quantize_several
    seen = [each.seen for each in members]
    results = _put(graph, max(seen), lambda *xs: op(list(xs), len(both), rows, columns, others), seen, both[0].rows[0])
    left = iter(results)
    for each in members:
        for notes in each.directions():
            pair = next(left), next(left)
            for note in notes:
                _take_away(graph, note, pair)
        if is_counted:
            _replace_counts(graph, each, next(left), results[-1])


def _replace_counts(graph: fx.Graph, matrix: _Matrix, counts: fx.Node, place: fx.Node) -> None:
    for note in matrix.counts:
        _, _, quantizer, halves = note.args
        code = _pieces_of(matrix.direction_of(quantizer), halves=halves)
        _take_away(graph, note, _put(graph, place, code, [counts], note))


def _pieces_of(direction: Any, *, halves: Any) -> Callable[[Tensor], Tensor]:
    def pieces(counts: Tensor) -> Tensor:
        amax, *others = (pieces_of_counts(counts[direction], name, 1) for name in COUNTED)
        return in_halves(*others) if halves else amax

    return pieces


def _put(
    graph: fx.Graph, place: fx.Node, code: Callable[..., Any], inputs: Sequence[fx.Node], like: fx.Node
) -> list[fx.Node]:
    """Insert the nodes of ``code`` after ``place``, with the metadata of ``like``; return the nodes of the results."""
    body, end = inductor.traced(code, *(each.meta["val"] for each in inputs)), place.next
    with graph.inserting_before(end):
        results = inductor.inlined(graph, body, inputs)
    for node in _between(place, end):
        own = {name: node.meta[name] for name in ("val", "tensor_meta") if name in node.meta}
        node.meta = {name: each for name, each in like.meta.items() if name not in ("val", "tensor_meta")} | own
    return results


def _between(first: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    while (first := first.next) is not end:
        yield first


def _take_away(graph: fx.Graph, note: fx.Node, results: Sequence[Any]) -> None:
    if isinstance(note.meta["val"], torch.Tensor):
        note.replace_all_uses_with(results[0])
    else:
        for reader in list(note.users):
            number: Any = reader.args[1]
            reader.replace_all_uses_with(results[number])
            graph.erase_node(reader)
    graph.erase_node(note)
