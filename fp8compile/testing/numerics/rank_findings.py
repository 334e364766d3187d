"""The differences between a model distributed over ranks and the model on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8compile.tables import paragraph, table_lines, terminal_width

__all__ = ["RankComparison", "RankFinding", "merged"]


@dataclass(frozen=True, kw_only=True)
class RankFinding:
    """A difference at one GEMM of one layer.

    Attributes:
        order: Number of the GEMM in execution order, from 0.
        layer: Name of the layer.
        op: ``"output"``, ``"grad_input"`` or ``"grad_weight"``.
        operand: The recipe's field for the operand, such as ``"input"`` or ``"weight_for_grad_input"``; ``"result"``
            for the GEMM's result.
        what: ``"values"`` if the operand differs from the operand in a single process; ``"scale"``, ``"global scale"``
            or ``"quantized data"`` if ranks quantize the same values differently; ``"product"`` if the same quantized
            operands give a different result.
        detail: A description of the difference, from the first of ``ranks``.
        ranks: The ranks that found the difference.
    """

    order: int
    layer: str
    op: str
    operand: str
    what: str
    detail: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The difference in one line, with its layer, GEMM, operand and ranks."""
        ranks = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {', '.join(map(str, self.ranks))}"
        return f"{self.layer or 'the model'}, {self.op}, {self.what} of {self.operand} on {ranks}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """The result of `compare_ranks`, the same on every rank. It prints as a list.

    Attributes:
        ranks: Number of ranks.
        products: Number of GEMMs that were compared.
        findings: The differences, in execution order.
    """

    ranks: int
    products: int
    findings: tuple[RankFinding, ...]

    @property
    def first(self) -> RankFinding | None:
        """The first difference, or None; later differences may follow from the first."""
        return self.findings[0] if self.findings else None

    def __str__(self) -> str:
        """The first difference in words, and all of them as a table."""
        width = terminal_width()
        if self.first is None:
            return f"{self.ranks} ranks compute the same as one process: {self.products} GEMMs, each with its operands"
        lines = paragraph(f"{self.ranks} ranks first differ from one process at {self.first}", width=width)
        rows = [
            (f"{each.order}", each.layer, each.op, f"{each.what} of {each.operand}", ", ".join(map(str, each.ranks)))
            for each in self.findings
        ]
        return "\n".join([*lines, *table_lines(("#", "layer", "op", "differs", "ranks"), rows, width=width)])


def merged(by_rank: Sequence[tuple[int, Sequence[RankFinding]]]) -> tuple[RankFinding, ...]:
    """Merge the findings of all ranks in execution order; equal findings of several ranks become one.

    Args:
        by_rank: Each rank's number, and its findings in their order.
    """
    found: dict[tuple[int, int, str, str], RankFinding] = {}
    for rank, findings in by_rank:
        for place, each in enumerate(findings):
            same = [number for number, other in enumerate(findings) if other.order == each.order]
            key = (each.order, place - same[0], each.operand, each.what)
            before = found.get(key)
            ranks = (*(before.ranks if before is not None else ()), rank)
            found[key] = replace(before or each, ranks=ranks)
    return tuple(found[key] for key in sorted(found, key=lambda key: key[:2]))
