"""What a graph's run holds in memory from its first allocation to its last, and the largest moment of it.

Equal blocks: the moment in which a backward of N blocks has done b of them holds what is kept for N - b blocks and the
gradients of b blocks, beside the same temporaries for each b. So one block more adds to it what one keeps, or what one
has of gradients, or something between. The largest moment stays the largest for any number of blocks if it grows by no
less than the run's begin, where all blocks are kept, and its end, where all gradients are made. In a forward likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

__all__ = ["OWNERS", "Moment", "Timeline", "largest_of_blocks"]


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
        return max(self.moments(), key=lambda each: each.bytes)


def largest_of_blocks(runs: Sequence[Timeline], count: int) -> Moment | None:
    """The largest moment of a model with equal blocks.

    Args:
        runs: The runs of the model with 2, 3 and 4 blocks.
        count: Number of blocks.

    Returns:
        The moment; None if it depends otherwise on how many blocks there are.
    """
    largest = [each.largest() for each in runs]
    if largest[0].plus(2, largest[1], largest[0]) != largest[2]:
        return None
    ends = [(each.start.bytes, each.moments()[-1].bytes) for each in runs[:2]]
    growth = largest[1].bytes - largest[0].bytes
    if any(growth < more - few for few, more in zip(*ends, strict=True)):
        return None
    return largest[0].plus(count - 2, largest[1], largest[0])
