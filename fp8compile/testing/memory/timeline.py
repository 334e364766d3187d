"""Timelines of the memory that a graph's run holds, and the moment that holds the most.

In a backward of N equal blocks that has done b of them, saved tensors of N - b blocks, gradients of b blocks and some
temporaries are held. An additional block adds to such a moment its saved tensors, its gradients, or something in
between. If the largest moment grows per block by no less than the start (all saved tensors) and the end (all
gradients) do, it is the largest for any number of blocks. The same holds for a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

__all__ = ["OWNERS", "Moment", "Timeline", "largest_of_blocks"]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Allocated bytes at one moment, by category.

    Attributes:
        parameters: Parameters and buffers.
        weight_codes: Quantized weights cached between micro-batches (``weight_lifetime="step"``).
        inputs: Arguments of the call.
        kept: Tensors that the forward saves for the backward; during the forward, those computed so far.
        results: What the forward returns; during the backward also the gradients of its results.
        gradients: Gradients of parameters and inputs that the backward has computed.
        temporaries: All other tensors of the graph.
    """

    parameters: int = 0
    weight_codes: int = 0
    inputs: int = 0
    kept: int = 0
    results: int = 0
    gradients: int = 0
    temporaries: int = 0

    @property
    def bytes(self) -> int:
        """The sum of all fields."""
        return sum(getattr(self, owner) for owner in OWNERS)

    def plus(self, times: int, more: Moment, less: Moment) -> Moment:
        """This moment plus ``times`` times the difference ``more - less``, category by category."""
        numbers = {o: getattr(self, o) + times * (getattr(more, o) - getattr(less, o)) for o in OWNERS}
        return Moment(**numbers)


OWNERS = tuple(field.name for field in fields(Moment))
Change = tuple[str, int]


@dataclass(frozen=True)
class Timeline:
    """Allocations and deallocations of the run of one graph.

    Attributes:
        start: What is held before the graph runs.
        changes: In order, the category (field of `Moment`) and bytes of each change; negative if freed.
    """

    start: Moment
    changes: tuple[Change, ...]

    def moments(self) -> list[Moment]:
        """The moments before each change, and after the last one."""
        held = {owner: getattr(self.start, owner) for owner in OWNERS}
        found = [self.start]
        for owner, size in self.changes:
            held[owner] += size
            found.append(Moment(**held))
        return found

    def largest(self) -> Moment:
        """The moment that holds the most bytes; the first such moment if there are several."""
        return max(self.moments(), key=lambda each: each.bytes)


def largest_of_blocks(runs: Sequence[Timeline], count: int) -> Moment | None:
    """Extrapolate the largest moment of a model with equal blocks.

    Args:
        runs: The runs of the model with 2, 3 and 4 blocks.
        count: Number of blocks.

    Returns:
        The moment; None if these runs don't determine it.
    """
    largest = [each.largest() for each in runs]
    if largest[0].plus(2, largest[1], largest[0]) != largest[2]:
        return None
    ends = [(each.start.bytes, each.moments()[-1].bytes) for each in runs[:2]]
    growth = largest[1].bytes - largest[0].bytes
    if any(growth < more - few for few, more in zip(*ends, strict=True)):
        return None
    return largest[0].plus(count - 2, largest[1], largest[0])
