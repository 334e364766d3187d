"""Writes an explanation as one self-contained HTML page, without external scripts, fonts or images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8compile.cli.explain.sections import GRAPHS, gpu_sections, graph_sections
from fp8compile.cli.html import document, section_html

if TYPE_CHECKING:
    from fp8compile.testing.explain import Explanation

__all__ = ["page"]

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.answer p:first-of-type { font-size: 1.1rem; font-weight: 600; }
.graphs p { font: 13px/1.4 ui-monospace, monospace; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: .5rem; font-size: .92rem; }
th, td { border: 1px solid #d5dae1; padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { background: #f2f4f7; }
.loud, .loud td { background: #fde8e6; color: #8c1208; font-weight: 600; }
footer { margin: 2rem 0; color: #5b6675; font-size: .85rem; }
"""


def page(found: Explanation, target: str) -> str:
    """Return the HTML page, well-formed XML, that shows an explanation of the model named ``target``."""
    import fp8compile

    shown = [*graph_sections(found), *gpu_sections(found)]
    names = ["answer", *("graphs" if section.title == GRAPHS else "part" for section in shown[1:])]
    return document(
        f"fp8compile explain {target}",
        "\n".join(section_html(section, name) for section, name in zip(shown, names, strict=True)),
        style=STYLE,
        footer=f"fp8compile {fp8compile.__version__}, PyTorch {found.torch}",
    )
