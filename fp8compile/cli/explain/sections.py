"""The sections of an explanation: titled tables of plain text, for the terminal and for the HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8compile.testing.explain import Explanation, GemmExplanation, GpuExplanation, Roofline
    from fp8compile.testing.explain.sends import Sends

__all__ = ["Section", "sections"]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of an explanation: a title, lines of text and a table.

    Attributes:
        title: The title.
        lines: Lines of text above the table.
        columns: Headings of the table; empty if there is no table.
        rows: Cells of the table, row by row.
        loud: Indices of the rows to highlight; if there is no table, indices of the lines.
    """

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    loud: frozenset[int] = frozenset()


def _layers(found: Explanation) -> Section:
    columns = ("layer", "out x in", "converted", "output", "grad_input", "grad_weight")
    rows = []
    for layer in found.layers:
        converted = f"yes, {layer.recipe}" if layer.converted else f"no: {layer.reason}"
        size = f"{layer.out_features} x {layer.in_features}"
        rows.append((layer.name, size, converted, *map(str, layer.gemms)))
    loud = {
        number for number, layer in enumerate(found.layers) if any(gemm.status == "fell back" for gemm in layer.gemms)
    }
    line = "FP8 formats are those of the two operands in the graphs; a dtype alone means high precision."
    return Section(
        title="linears, and what their GEMMs really run in",
        lines=(line,),
        columns=columns,
        rows=tuple(rows),
        loud=frozenset(loud),
    )


def _sends(sent: Sends) -> Section:
    columns, *rows = sent.cells()
    line = (
        'One forward and backward of one rank, by the plan\'s placements; "plan": what a style of it moves around the '
        "layer. In compiled code, layers that read one tensor may share what they send."
    )
    return Section(title="what layers send", lines=(line,), columns=columns, rows=tuple(rows))


def _small(found: Explanation) -> Section:
    """The section on layers in FP8 that the default filter would leave out on the GPU."""
    rows = tuple(
        (layer.name, f"{layer.out_features} x {layer.in_features}", f"{layer.size}", f"{layer.least_gaining}")
        for layer in found.layers
        if layer.converted and layer.is_small
    )
    if not rows:
        return Section(title="small layers", lines=("none: by the GPU's peaks each layer in FP8 can gain",))
    line = (
        "By the GPU's peaks the casts of these layers cost more than their GEMMs gain; where the weights lie on the "
        "GPU, the default filter of convert leaves them in high precision."
    )
    columns = ("layer", "out x in", "K N / (K + N)", "FP8 gains from")
    return Section(title="small layers", lines=(line,), columns=columns, rows=rows)


def _padded(gemm: GemmExplanation) -> bool:
    return (gemm.padded_k, gemm.padded_n) != (gemm.k, gemm.n)


def _padding(found: Explanation) -> Section:
    rows = tuple(
        (
            layer.name,
            gemm.gemm,
            f"{gemm.m} x {gemm.k} x {gemm.n}",
            f"{gemm.m} x {gemm.padded_k} x {gemm.padded_n}",
            f"{gemm.padding_flops:.1%}",
        )
        for layer in found.layers
        for gemm in layer.gemms
        if _padded(gemm)
    )
    if not rows:
        return Section(title="padding", lines=("no FP8 GEMM is padded: sums and columns are what it takes",))
    return Section(title="padding", columns=("layer", "GEMM", "m x k x n", "padded to", "more flops"), rows=rows)


def _casts(gpu: GpuExplanation) -> Section:
    rows = []
    for cast in gpu.casts:
        if not cast.kernel:
            where = "-"
        else:
            where = f"fused with {', '.join(cast.fused_with)}" if cast.is_fused else "on its own"
        rows.append((cast.layer or "(unknown)", cast.gemm, cast.operand, where, str(cast.serves)))
    columns = ("layer", "GEMM", "operand", "cast", "GEMMs served")
    return Section(title=f"casts on {gpu.gpu}", columns=columns, rows=tuple(rows))


def _launches(gpu: GpuExplanation) -> Section:
    rows = []
    for name, costs in (("this model", gpu.costs), ("unconverted", gpu.bf16_costs)):
        for cost in costs:
            direction = "backward" if cost.backward else "forward"
            numbers = (cost.kernels, cost.gemms, cost.fp8_gemms, cost.opaque)
            rows.append((name, direction, *map(str, numbers), f"{cost.bytes:,}"))
    lines: tuple[str, ...] = ("From the code that Inductor generates; nothing was launched.",)
    if gpu.gemms:
        lines += (f"GEMMs of converted layers: {', '.join(f'{name} ({count})' for name, count in gpu.gemms)}.",)
    if gpu.bf16_problem:
        lines += (f"No unconverted model beside it: {gpu.bf16_problem}",)
    columns = ("model", "graph", "kernels", "GEMMs", "of them FP8", "other", "bytes moved")
    return Section(title=f"launches on {gpu.gpu}", lines=lines, columns=columns, rows=tuple(rows))


def _roofline(bound: Roofline) -> Section:
    lines = (
        "A bound from published peaks, not a measurement: no kernel is faster, every real one is slower. GEMMs of "
        "linears and their casts only; the ratio of two bounds is no speed-up.",
    )
    rows = (
        ("GEMMs", f"{bound.gemm_seconds * 1e6:.3f}", f"{bound.bf16_seconds * 1e6:.3f}"),
        ("casts", f"{bound.cast_seconds * 1e6:.3f}", "-"),
        ("together", f"{bound.seconds * 1e6:.3f}", f"{bound.bf16_seconds * 1e6:.3f}"),
        ("bf16 / this model", f"{bound.ratio:.2f}", "1.00"),
    )
    columns = ("least time of a step (us)", "this model", "all in bf16")
    return Section(title=f"roofline of {bound.gpu}", lines=lines, columns=columns, rows=rows)


def sections(found: Explanation) -> Iterator[Section]:
    """All sections of an explanation, the answer first.

    Args:
        found: The explanation.
    """
    yield Section(
        title="is this really running in FP8?",
        lines=(found.verdict, *(f"FELL BACK: {line}" for line in found.fell_back)),
        loud=frozenset(range(1, 1 + len(found.fell_back))),
    )
    yield _layers(found)
    if found.sends is not None:
        yield _sends(found.sends)
    yield _padding(found)
    if any(layer.least_gaining for layer in found.layers):
        yield _small(found)
    if found.gpu is not None and found.gpu.problem:
        yield Section(title=f"launches on {found.gpu.gpu}", lines=(f"no generated code: {found.gpu.problem}",))
    elif found.gpu is not None:
        if found.gpu.casts:
            yield _casts(found.gpu)
        yield _launches(found.gpu)
    if found.roofline is not None:
        yield _roofline(found.roofline)
    yield Section(title="graphs", lines=tuple(str(found.graphs).splitlines()))
