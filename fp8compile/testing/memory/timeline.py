"""What a graph's run holds in memory from its first allocation to its last, and the largest moment of it.

Equal blocks: a model of N blocks allocates and frees what one of 3 blocks does, and the part of its middle block N - 2
times. Models of 3 and of 4 blocks have the same changes up to the end of their first middle block, and from the begin
of their last middle block on. In both parts, what is held grows by the same bytes with each block more. It changes by
the same bytes from one middle block to the next too, so no moment in between is larger than the largest one in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

__all__ = ["OWNERS", "Moment", "Timeline"]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes that are held at one moment, by what they are.

    Attributes:
        parameters: Parameters and buffers.
        inputs: Arguments of the call.
        kept: Tensors that the forward saves for the backward; of the forward's own moment, those that it has made.
        results: What the forward returns and, in the backward, the gradients of that.
        gradients: Gradients of parameters and inputs that the backward has made.
        temporaries: All other tensors of the graph.
    """

    parameters: int = 0
    inputs: int = 0
    kept: int = 0
    results: int = 0
    gradients: int = 0
    temporaries: int = 0

    @property
    def bytes(self) -> int:
        """All of them together."""
        return sum(getattr(self, owner) for owner in OWNERS)

    def plus(self, times: int, more: Moment, less: Moment) -> Moment:
        """This moment with ``times`` times what ``more`` has and ``less`` has not."""
        numbers = {o: getattr(self, o) + times * (getattr(more, o) - getattr(less, o)) for o in OWNERS}
        return Moment(**numbers)


OWNERS = tuple(field.name for field in fields(Moment))
Change = tuple[str, int]


@dataclass(frozen=True)
class Timeline:
    """The run of one graph.

    Attributes:
        start: What is held before the graph runs.
        changes: Allocations and, as negative numbers, what was freed, in order: whose, and how many bytes.
    """

    start: Moment
    changes: tuple[Change, ...]

    def moments(self) -> list[Moment]:
        """What is held before each change, and after the last one."""
        held = {owner: getattr(self.start, owner) for owner in OWNERS}
        found = [self.start]
        for owner, size in self.changes:
            held[owner] += size
            found.append(Moment(**held))
        return found

    def largest(self) -> Moment:
        """The first of the largest moments."""
        return _largest(self.moments())

    def largest_of_blocks(self, more: Timeline, count: int) -> Moment | None:
        """The largest moment of a model with this number of equal blocks.

        Args:
            more: The timeline of the model with 4 blocks. This one is that with 3.
            count: Number of blocks, 3 or more.

        Returns:
            The moment; None if the two timelines are not those of equal blocks.
        """
        begin = _in_common(self.changes, more.changes)
        end = _in_common(self.changes[::-1], more.changes[::-1])
        middle = len(more.changes) - len(self.changes)
        if middle < 0 or begin + end < len(self.changes) + middle:
            return None
        few, many = self.moments(), more.moments()
        pairs = itertools.chain(
            zip(few[: begin + 1], many[: begin + 1], strict=True),
            zip(few[-end - 1 :], many[-end - 1 :], strict=True),
        )
        return _largest(three.plus(count - 3, four, three) for three, four in pairs)


def _largest(moments: Iterable[Moment]) -> Moment:
    return max(moments, key=lambda each: each.bytes)


def _in_common(few: Sequence[Change], more: Sequence[Change]) -> int:
    """Number of changes at the start that both have."""
    differing: Iterator[int] = (at for at, (a, b) in enumerate(zip(few, more, strict=False)) if a != b)
    return next(differing, min(len(few), len(more)))
