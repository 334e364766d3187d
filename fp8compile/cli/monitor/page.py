"""Builds the self-contained HTML page on a run's readings, without external scripts or images."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fp8compile.cli.html import document, section_html
from fp8compile.cli.monitor.charts import Chart, ColorScale, svg_of
from fp8compile.cli.section import Section

__all__ = ["page"]

HEAD = '<meta name="color-scheme" content="light dark" />\n'
STYLE = """\
:root { --text: #1c2430; --page: #fff; --line: #d5dae1; --head: #f2f4f7; --loud: #8c1208; --loud-back: #fde8e6;
  --quiet: #5b6675; }
@media (prefers-color-scheme: dark) {
  :root { --text: #dfe4ea; --page: #14181d; --line: #3a434d; --head: #1f262d; --loud: #ffb4a8; --loud-back: #4a1913;
    --quiet: #9aa5b1; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: .5rem; font-size: .92rem; }
th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { background: var(--head); }
.loud, .loud td { background: var(--loud-back); color: var(--loud); font-weight: 600; }
figure { margin: 0; }
figcaption { color: var(--quiet); font-size: .9rem; margin-bottom: .5rem; }
/* the colors' meaning stays in sight while a chart scrolls, in both directions */
.scale { position: sticky; top: 0; padding: .4rem 0 1.6rem; background: var(--page); font-size: .85rem; }
.colors { height: .8rem; border: 1px solid var(--line); }
.ticks { position: relative; }
.ticks span { position: absolute; white-space: nowrap; }
/* on a phone charts keep a size at which they can be read, and scroll; cells of a table are lines */
svg { width: 100%; min-width: 42rem; height: auto; }
@media (max-width: 40rem) {
  table, tbody, tr, td { display: block; }
  tr { border: 1px solid var(--line); margin-bottom: .5rem; padding: .2rem .6rem; }
  tr:has(th) { display: none; }
  td { border: 0; padding: 0; overflow-wrap: anywhere; }
}
footer { margin: 2rem 0; color: var(--quiet); font-size: .85rem; }
"""


def _tick(place: float, text: str) -> str:
    """Return a tick's label, moved to the left by the part of its width that its place is of the scale."""
    style = f"left: {place:.1%}; transform: translateX(-{place:.1%})"
    return f'<span style="{style}">{escape(text)}</span>'


def _scale_html(scale: ColorScale) -> str:
    from matplotlib.colors import to_hex

    colors = ", ".join(to_hex(scale.cmap(each / 16)) for each in range(17))
    ticks = "".join(_tick(float(scale.norm(value)), text) for value, text in scale.ticks)
    return (
        f'<div class="scale">{escape(scale.label)}\n<div class="colors" '
        f'style="background: linear-gradient(to right, {colors})"></div>\n<div class="ticks">{ticks}</div>\n</div>\n'
    )


def _figure(chart: Chart) -> str:
    scale = _scale_html(chart.scale) if chart.scale is not None else ""
    return (
        f"<section>\n<h2>{escape(chart.title)}</h2>\n<figure>\n<figcaption>{escape(chart.caption)}</figcaption>\n"
        f'{scale}<div class="scroll">\n{svg_of(chart)}</div>\n</figure>\n</section>'
    )


def page(title: str, sections: Sequence[Section], charts: Sequence[Chart]) -> str:
    """Return the HTML text of the page on a run's readings: sections first, then charts."""
    import fp8compile

    parts = [*(section_html(section, "part") for section in sections), *map(_figure, charts)]
    return document(title, "\n".join(parts), style=STYLE, footer=f"fp8compile {fp8compile.__version__}", head=HEAD)
