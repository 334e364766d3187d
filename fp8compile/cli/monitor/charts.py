"""Matplotlib charts of a run's monitor readings, as PNG files and as SVGs in the HTML page."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fp8compile.cli.errors import UserError
from fp8compile.cli.monitor.readings import Readings

__all__ = ["Chart", "ColorScale", "charts", "png_of", "svg_of"]

INK = "#0a0b0c"  # stands for the color of the page's text in an SVG
WIDTH = 7.0  # inches
ROW = 0.16  # inches of a layer in a heat map
MOST_ROWS = 120  # more layers than this get thinner rows
LONGEST = 46  # characters of a layer's name
TITLE = 60  # characters of a line of a panel's title

Rows = dict[str, Any]  # by layer

# powers of two from the largest value of a format to its smallest one that is not 0: log2(max / smallest)
FORMATS = {
    "e2m1": math.log2(6 / 0.5),
    "e4m3": math.log2(448 / 2.0**-9),
    "e5m2": math.log2(57344 / 2.0**-16),
}


@dataclass(frozen=True)
class ColorScale:
    """What the colors of a heat map mean.

    Attributes:
        norm: matplotlib's norm, from values to [0, 1].
        cmap: matplotlib's color map, from [0, 1] to colors.
        label: What the values are.
        ticks: Values with their texts.
    """

    norm: Any
    cmap: Any
    label: str
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Chart:
    """A matplotlib figure with a title and a caption.

    Attributes:
        name: A word for file names.
        title: The title.
        caption: What the figure shows, in a sentence or two.
        figure: The matplotlib figure.
        scale: What its colors mean, if it is a heat map. The page shows the scale next to the figure; a PNG has it
            inside.
    """

    name: str
    title: str
    caption: str
    figure: Any
    scale: ColorScale | None = None


def _matplotlib() -> Any:
    try:
        import matplotlib as found
        import matplotlib.figure  # for `matplotlib.figure`, which the package does not import by itself
    except ImportError as error:
        raise UserError("drawing requires matplotlib, which is not installed. Run pip install matplotlib.") from error
    assert matplotlib.figure
    return found


def _figure(rows: int, panels: int, extra: float = 0.0) -> Any:
    height = panels * (min(rows, MOST_ROWS) * ROW + 0.9) + extra
    return _matplotlib().figure.Figure(figsize=(WIDTH, max(2.4, height)), layout="constrained")


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"...{name[3 - LONGEST :]}"


def _title(axes: Any, operands: str, pad: float = 6) -> None:
    axes.set_title("\n".join(textwrap.wrap(operands, TITLE)), fontsize=9, loc="left", pad=pad)


def _label_rows(axes: Any, names: Sequence[str]) -> None:
    shown = range(0, len(names), max(1, -(-len(names) // MOST_ROWS)))
    axes.set_yticks(shown, [_short(names[at]) or "the model" for at in shown])
    axes.tick_params(axis="y", labelsize=7)


def _label_steps(axes: Any, steps: Sequence[int]) -> None:
    shown = range(0, len(steps), max(1, -(-len(steps) // 8)))
    axes.set_xticks(shown, [str(steps[at]) for at in shown])
    axes.tick_params(axis="x", labelsize=7)


# ---------------------------------------------------------------------------------- heat maps


def _grid(rows: Rows) -> Any:
    import numpy

    return numpy.array([[math.nan if each is None else each for each in row] for row in rows.values()])


def _panels(readings: Readings, statistic: str, rows_of: Callable[[str, str], Rows]) -> dict[str, Rows]:
    """Map operands to ``rows_of(operand, statistic)``; operands with equal rows share a key, their joined names."""
    panels: dict[str, Rows] = {}
    for operand in readings.operands(statistic):
        rows = rows_of(operand, statistic)
        same = next((name for name, other in panels.items() if other == rows), None)
        if same is not None:
            panels = {(f"{name}, {operand}" if name == same else name): other for name, other in panels.items()}
        else:
            panels[operand] = rows
    return panels


def _colors(name: str) -> Any:
    return _matplotlib().colormaps[name].with_extremes(bad=(0.5, 0.5, 0.5, 0.35))


def _heat_map(readings: Readings, statistic: str) -> tuple[Any, ColorScale]:
    panels = _panels(readings, statistic, readings.rows)
    grids = {operand: _grid(rows) for operand, rows in panels.items()}
    scale = HEAT_MAPS[statistic].scale(list(grids.values()))
    figure = _figure(max(map(len, panels.values())), len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (operand, grid) in zip(all_axes, grids.items(), strict=True):
        values = grid.clip(scale.norm.vmin, scale.norm.vmax)  # 0 has no logarithm, and a ratio may be infinite
        axes.imshow(values, aspect="auto", interpolation="nearest", cmap=scale.cmap, norm=scale.norm)
        _title(axes, operand)
        _label_rows(axes, list(panels[operand]))
        _label_steps(axes, readings.steps)
    all_axes[-1].set_xlabel("step", fontsize=8)
    return figure, scale


def _log_scale(least: float, most: float, cmap: str, label: str) -> ColorScale:
    """Return a logarithmic scale with a tick at each power of ten, or at a few of them."""
    from matplotlib.colors import LogNorm

    decades = range(round(math.log10(least)), math.floor(math.log10(most) + 1e-9) + 1)
    shown = [10.0**each for each in decades[:: -(-len(decades) // 4)]]
    if most > 2 * shown[-1]:  # else the labels would overlap
        shown.append(most)
    ticks = tuple((each, f"{'≤ ' if each == least else ''}{100 * each:.3g}%") for each in shown)
    return ColorScale(LogNorm(least, most), _colors(cmap), label, ticks)


def _fractions(grids: list[Any]) -> ColorScale:
    """Return a logarithmic scale for fractions of elements; 0 gets the color of the scale's lower end."""
    import numpy

    positive = numpy.concatenate([grid[numpy.isfinite(grid) & (grid > 0)] for grid in grids])
    least = max(1e-8, float(positive.min())) if positive.size else 1e-6
    least = 10.0 ** math.floor(math.log10(least))
    most = max(10 * least, float(positive.max()) if positive.size else 0.0)
    return _log_scale(least, min(1.0, most), "plasma", "fraction of elements")


def _decibels(grids: list[Any]) -> ColorScale:
    """Return a linear scale for decibels; an infinite ratio is drawn like the largest finite one."""
    import numpy
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    finite = numpy.concatenate([grid[numpy.isfinite(grid)] for grid in grids])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    high = high if high > low else low + 1
    ticks = tuple((each, f"{each:g}") for each in MaxNLocator(4).tick_values(low, high) if low <= each <= high)
    return ColorScale(Normalize(low, high), _colors("viridis"), "dB", ticks)


@dataclass(frozen=True)
class _HeatMap:
    title: str
    caption: str
    scale: Callable[[list[Any]], ColorScale]


HEAT_MAPS = {
    "underflow": _HeatMap(
        "Underflow", "Fraction of elements that are not zero and become zero when quantized.", _fractions
    ),
    "saturation": _HeatMap("Saturation", "Fraction of elements that are too large for the format.", _fractions),
    "sqnr": _HeatMap(
        "Signal-to-noise ratio",
        "Of the quantized values. 6 dB are one bit; lower is worse.",
        _decibels,
    ),
}


# ---------------------------------------------------------------------------------- curves and exponents


def _losses(readings: Readings) -> Any:
    names = list(readings.curves)
    figure = _figure(0, 0, extra=1.7 * len(names))
    for axes, name in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
        known = readings.curves[name]
        axes.plot(*zip(*known, strict=True), color="C0", linewidth=1.5, marker="." if len(known) < 40 else "")
        axes.set_title(name, fontsize=9, loc="left")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7)
        _whole_numbers(axes)
        for step in _bad_steps(readings):
            axes.axvline(step, color="C3", linewidth=1, linestyle="--")
    axes.set_xlabel("step", fontsize=8)
    return figure


def _whole_numbers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _bad_steps(readings: Readings) -> list[int]:
    rows = [row for (_, _, name), row in readings.values.items() if name == "nonfinite"]
    return [step for at, step in enumerate(readings.steps) if any(row[at] for row in rows)]


def _ranges(readings: Readings) -> Any:
    """Draw each dynamic range, log2 of largest / smallest nonzero magnitude, as a bar, and each format's as a line."""
    panels = _panels(readings, "range", readings.last)
    figure = _figure(max(map(len, panels.values())), len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (operand, rows) in zip(all_axes, panels.items(), strict=True):
        widths = [value if math.isfinite(value) else 0.0 for value in rows.values()]
        axes.barh(range(len(rows)), widths, color="C0", height=0.7)
        for number, (name, width) in enumerate(FORMATS.items()):
            axes.axvline(width, color=f"C{number + 1}", linewidth=1.2)
            axes.annotate(
                name, (width, 1), xycoords=("data", "axes fraction"), fontsize=7, ha="center", va="bottom",
                color=f"C{number + 1}",
            )  # fmt: skip
        axes.set_xlim(0, max([*widths, 34]) * 1.03)
        axes.invert_yaxis()
        _title(axes, operand, pad=12)
        _label_rows(axes, list(rows))
        axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("powers of two below the largest magnitude", fontsize=8)
    return figure


def _exponents(readings: Readings) -> tuple[Any, ColorScale]:
    """Draw how often each exponent occurs in the quantized values, as a fraction of all values."""
    import numpy

    panels = _panels(readings, "exponents", readings.last)
    figure = _figure(max(map(len, panels.values())), len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    scale = _log_scale(1e-6, 1.0, "viridis", "fraction of elements")
    for axes, (operand, rows) in zip(all_axes, panels.items(), strict=True):
        longest = max(map(len, rows.values()))
        grid = numpy.array([[*row, *[0.0] * (longest - len(row))] for row in rows.values()])
        used = max(1, int(numpy.flatnonzero(grid.any(0)).max(initial=0)) + 1)
        fractions = grid[:, :used] / numpy.maximum(grid.sum(1, keepdims=True), 1)
        fractions[fractions == 0] = math.nan
        axes.imshow(fractions, aspect="auto", interpolation="nearest", cmap=scale.cmap, norm=scale.norm)
        _title(axes, operand)
        _label_rows(axes, list(rows))
        _whole_numbers(axes)
        axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("exponent bits as a number; 0: zero and subnormal numbers", fontsize=8)
    return figure, scale


# ---------------------------------------------------------------------------------- all of them


def charts(readings: Readings) -> Iterator[Chart]:
    """Yield charts of curves, underflow, saturation, sqnr, range and exponents: those that the readings contain."""
    if readings.curves:
        marked = " Dashed lines: steps with NaN or infinite elements." if _bad_steps(readings) else ""
        yield Chart("curves", "Curves", f"{', '.join(readings.curves)} over the steps.{marked}", _losses(readings))
    for statistic, kind in HEAT_MAPS.items():
        if readings.operands(statistic):
            yield Chart(statistic, kind.title, f"{kind.caption} Gray: not read.", *_heat_map(readings, statistic))
    if readings.operands("range"):
        caption = (
            "Powers of two between the largest and the smallest nonzero magnitude, at the last reading. Elements "
            "beyond a format's line underflow if the scale maps the largest magnitude to the format's largest value."
        )
        yield Chart("ranges", "Ranges", caption, _ranges(readings))
    if readings.operands("exponents"):
        caption = "Exponents of the quantized values, at the last reading. Gray: does not occur."
        yield Chart("exponents", "Exponents", caption, *_exponents(readings))


def _color_bar(figure: Any, scale: ColorScale) -> Any:
    from matplotlib.cm import ScalarMappable

    height = figure.get_size_inches()[1]  # sizes of a color bar are parts of it
    bar = figure.colorbar(
        ScalarMappable(scale.norm, scale.cmap), ax=figure.axes, location="top", fraction=0.12 / height,
        pad=0.1 / height, aspect=40,
    )  # fmt: skip
    bar.set_ticks([value for value, _ in scale.ticks], labels=[text for _, text in scale.ticks])
    bar.minorticks_off()
    bar.set_label(scale.label, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return bar


def png_of(chart: Chart) -> bytes:
    """Render a chart as a PNG with a white background and its color scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(chart.figure)
    bar = _color_bar(chart.figure, chart.scale) if chart.scale is not None else None
    chart.figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    if bar is not None:
        bar.remove()
    return buffer.getvalue()


def _inked(figure: Any) -> None:
    """Give text and axes a placeholder color, which `svg_of` replaces by the page's text color."""
    from matplotlib.axis import Axis
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    for each in figure.findobj(lambda artist: isinstance(artist, (Axis, Spine, Text))):
        if isinstance(each, Axis):
            each.set_tick_params(color=INK, labelcolor=INK)
        elif isinstance(each, Spine):
            each.set_edgecolor(INK)
        elif each.get_color() in ("black", "k"):
            each.set_color(INK)


def svg_of(chart: Chart) -> str:
    """Render a chart as an SVG element with transparent background, in the page's text color, without color scale."""
    library = _matplotlib()
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    _inked(chart.figure)
    buffer = io.StringIO()
    FigureCanvasSVG(chart.figure)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with library.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name, "font.family": "sans-serif"}):
        chart.figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
