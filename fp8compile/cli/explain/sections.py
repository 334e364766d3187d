"""Sections of an explanation: titled tables of plain text, for the terminal and for the HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fp8compile.cli.section import Section
from fp8compile.tables import Cell, Note, folded
from fp8compile.testing.explain.bytes_sent_by_layer import NUMBERS
from fp8compile.testing.explain.layers import ABSENT, FELL_BACK, UNPROVEN
from fp8compile.testing.explain.roofline import PEAKS

if TYPE_CHECKING:
    from fp8compile.testing.explain import Explanation, GemmExplanation, GpuExplanation, LayerExplanation, Roofline
    from fp8compile.testing.explain.bytes_sent_by_layer import Sends

__all__ = ["GRAPHS", "gpu_sections", "graph_sections"]

GRAPHS = "graphs"  # a title


ALL_GEMMS = "all three"
OPERATORS = 3  # in a cell that says what a kernel computes; JSON has them all
# what the last word of a GEMM's formats means, where its blocks don't say it
SCALES = {
    "nvfp4": "nvfp4: 1x16 e4m3 x fp32: an e4m3 scale for each 16 values, times a float32 scale for the tensor.",
    "mxfp8": "mxfp8: 1x32 e8m0: a power-of-two scale for each 32 values.",
}
LAYER_COLUMNS = ("layer", "out x in", "recipe", "GEMMs", "really run in")


def _folded(rows: Iterable[tuple[Cell, ...]]) -> tuple[tuple[Cell, ...], ...]:
    """Merge rows that differ only in the layer's name; their names become a pattern such as ``layers.{0..3}``."""
    return tuple((name, *rest) for name, rest in folded((str(row[0]), row[1:]) for row in rows))


def _runs(gemm: GemmExplanation) -> Cell:
    """Return a GEMM's table cell: the formats in which it runs; a note if they are unknown or not the recipe's."""
    if gemm.status in (ABSENT, UNPROVEN):
        return Note(gemm.detail, gemm.status)
    if gemm.status == FELL_BACK:
        return Note(gemm.detail, f"FELL BACK to {gemm.runs}")
    return f"{gemm.runs}, {gemm.detail}" if gemm.detail else gemm.runs


def _layer_content(layer: LayerExplanation) -> tuple[Any, ...]:
    """Return a layer's table cells without its name: size, recipe, formats of GEMMs, whether a GEMM fell back."""
    ways: dict[Cell, list[str]] = {}
    for gemm in layer.gemms:
        ways.setdefault(_runs(gemm), []).append(gemm.gemm)
    gemms = tuple(
        (ALL_GEMMS if len(names) == len(layer.gemms) else ", ".join(names), way) for way, names in ways.items()
    )
    recipe = layer.recipe if layer.converted else Note(layer.reason, "-")
    return f"{layer.out_features} x {layer.in_features}", recipe, gemms, bool(_fell_back(layer))


def _fell_back(layer: LayerExplanation) -> list[GemmExplanation]:
    return [gemm for gemm in layer.gemms if gemm.status == FELL_BACK]


def _layers(found: Explanation) -> Section:
    rows: list[tuple[Cell, ...]] = []
    loud: set[int] = set()
    for name, (size, recipe, gemms, is_loud) in folded((layer.name, _layer_content(layer)) for layer in found.layers):
        begin = len(rows)
        rows += [(name, size, recipe, *gemms[0]), *(("", "", "", *rest) for rest in gemms[1:])]
        loud |= set(range(begin, len(rows))) if is_loud else set()
    runs = {gemm.runs.rpartition(" ")[2] for layer in found.layers for gemm in layer.gemms}
    line = "FP8 formats are those of the two operands in the graphs; a single dtype means high precision."
    return Section(
        title="linear layers, and what their GEMMs really run in",
        lines=(line, *(scales for kind, scales in SCALES.items() if kind in runs)),
        columns=LAYER_COLUMNS,
        rows=tuple(rows),
        loud=frozenset(loud),
    )


def _sends(sent: Sends) -> Section:
    columns, *rows = sent.cells()
    line = (
        'One forward and backward of one rank, according to the plan\'s placements; "plan" is what a style of the '
        "plan sends around the layer. In compiled code, layers that read the same tensor may share this communication."
    )
    return Section(title="what layers send", lines=(line,), columns=columns, rows=tuple(rows), numbers=NUMBERS)


def _small(found: Explanation) -> Section:
    """Return the section on FP8 layers too small to gain, which ``convert`` by default would not convert."""
    rows = _folded(
        (layer.name, f"{layer.out_features} x {layer.in_features}", f"{layer.size}", f"{layer.least_gaining}")
        for layer in found.layers
        if layer.converted and layer.is_small
    )
    if not rows:
        return Section(
            title="small layers",
            lines=("none: with enough tokens, each FP8 layer is faster according to the GPU's peak rates",),
        )
    line = (
        "According to the GPU's peak rates, the casts of these layers cost more than their GEMMs gain. If the "
        "weights are on the GPU, the default filter of convert leaves these layers in high precision."
    )
    columns = ("layer", "out x in", "K N / (K + N)", "FP8 gains from")
    return Section(title="small layers", lines=(line,), columns=columns, rows=rows, numbers=(2, 3))


def _padded(gemm: GemmExplanation) -> bool:
    return (gemm.padded_k, gemm.padded_n) != (gemm.k, gemm.n)


def _padding(found: Explanation) -> Section:
    rows = _folded(
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
        return Section(
            title="padding", lines=("no FP8 GEMM is padded: all sizes are multiples of what the GEMM requires",)
        )
    columns = ("layer", "GEMM", "m x k x n", "padded to", "more flops")
    return Section(title="padding", columns=columns, rows=rows, numbers=(4,))


def _casts(gpu: GpuExplanation) -> Section:
    rows = []
    for cast in gpu.casts:
        if not cast.kernel:
            where = "-"
        else:
            more = len(cast.fused_with) - OPERATORS
            ops = [*cast.fused_with[:OPERATORS], *([f"{more} more"] if more > 0 else [])]
            where = f"fused with {', '.join(ops)}" if ops else "on its own"
        rows.append((cast.layer or "(unknown)", cast.gemm, cast.operand, where, str(cast.serves)))
    columns = ("layer", "GEMM", "operand", "cast", "GEMMs served")
    return Section(title=f"casts on {gpu.gpu}", columns=columns, rows=_folded(rows), numbers=(4,))


def _launches(gpu: GpuExplanation) -> Section:
    rows = []
    for name, costs in (("this model", gpu.costs), ("unconverted", gpu.bf16_costs)):
        for cost in costs:
            direction = "backward" if cost.backward else "forward"
            numbers = (cost.kernels, cost.gemms, cost.fp8_gemms, cost.opaque)
            rows.append((name, direction, *map(str, numbers), f"{cost.bytes:,}"))
    lines: tuple[str, ...] = ("From the code that Inductor generates; nothing was run.",)
    if gpu.gemms:
        lines += (f"GEMMs of converted layers: {', '.join(f'{name} ({count})' for name, count in gpu.gemms)}.",)
    if gpu.counted:
        lines += (
            f"{gpu.counted} have equal graphs: code was generated for 2, 3 and 4 of them, and the rest were counted.",
        )
    if gpu.bf16_problem:
        lines += (f"No comparison with the unconverted model: {gpu.bf16_problem}",)
    columns = ("model", "graph", "kernels", "GEMMs", "FP8 or FP4", "other", "bytes moved")
    right = tuple(range(2, len(columns)))
    return Section(title=f"launches on {gpu.gpu}", lines=lines, columns=columns, rows=rows, numbers=right)


def _roofline(bound: Roofline, gpu: GpuExplanation | None) -> Section:
    peaks = next(peaks for peaks in PEAKS.values() if peaks.name == bound.gpu)
    lines: tuple[str, ...] = (
        "Lower bounds from published peak rates, not measurements: every real kernel is slower. Only GEMMs of "
        "linear layers and their casts are included; the ratio of two lower bounds is not a speed-up.",
        f"Peaks: {peaks}.",
    )
    if gpu is not None and peaks.mx is None and "scaled_by_mx" in dict(gpu.gemms):
        lines += ("by_mx=True has no benefit on this GPU, because MX and plain FP8 have the same peak rate.",)
    rows = (
        ("GEMMs", f"{bound.gemm_seconds * 1e6:.3f}", f"{bound.bf16_seconds * 1e6:.3f}"),
        ("casts", f"{bound.cast_seconds * 1e6:.3f}", "-"),
        ("together", f"{bound.seconds * 1e6:.3f}", f"{bound.bf16_seconds * 1e6:.3f}"),
        ("bf16 / this model", f"{bound.ratio:.2f}", "1.00"),
    )
    columns = ("minimum time of a step (us)", "this model", "all in bf16")
    return Section(title=f"roofline of {bound.gpu}", lines=lines, columns=columns, rows=rows, numbers=(1, 2))


def graph_sections(found: Explanation) -> Iterator[Section]:
    """Yield sections about a model's graphs; the first one answers whether the model runs in FP8.

    The explanation need not contain code for a GPU yet.
    """
    answer = (found.verdict, *filter(None, [found.gain, found.experts]))
    lines = (*answer, *(f"FELL BACK: {line}" for line in found.fell_back))
    yield Section(title="is this really running in FP8?", lines=lines, loud=frozenset(range(len(answer), len(lines))))
    yield _layers(found)
    if found.sends is not None:
        yield _sends(found.sends)
    yield _padding(found)
    if any(layer.least_gaining for layer in found.layers):
        yield _small(found)
    if found.roofline is not None:
        yield _roofline(found.roofline, found.gpu)
    yield Section(title=GRAPHS, lines=tuple(str(found.graphs).splitlines()))


def gpu_sections(found: Explanation) -> Iterator[Section]:
    """Yield sections about the code for a GPU, or why there is none; nothing if no GPU was asked for."""
    if found.gpu is None:
        return
    if found.gpu.problem:
        yield Section(title=f"launches on {found.gpu.gpu}", lines=(f"no generated code: {found.gpu.problem}",))
        return
    if found.gpu.casts:
        yield _casts(found.gpu)
    yield _launches(found.gpu)
