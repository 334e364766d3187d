"""`fp8compile monitor`: defines its flags and runs it."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from fp8compile.cli.errors import UserError

__all__ = ["add_parser"]

DESCRIPTION = """
Plot the statistics that fp8compile.Monitor collected in a run: a self-contained HTML page, and a PNG of each chart.
"""
log: logging.Logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``monitor`` to the argument parser."""
    parser = subparsers.add_parser(
        "monitor",
        help="plot the statistics that the monitor of a run collected",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run_file", metavar="RUN", help="a JSON Lines file written by Monitor.write, or a folder with monitor.jsonl"
    )
    parser.add_argument("--layers", metavar="PATTERN,...", default="*", help="names of layers to plot (default '*')")
    parser.add_argument(
        "--html", metavar="FILE", help="path of the HTML page (default: the name of RUN, ending in .html)"
    )
    parser.add_argument("--no-png", action="store_true", help="do not write PNGs")
    parser.set_defaults(run=_run)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    print(path)


def _run(parsed: argparse.Namespace) -> int:
    from fp8compile.cli.monitor.charts import charts, png_of
    from fp8compile.cli.monitor.page import page
    from fp8compile.cli.monitor.readings import load_readings
    from fp8compile.cli.monitor.summary import summary
    from fp8compile.cli.terminal import print_section

    readings = load_readings(Path(parsed.run_file), layers=parsed.layers.split(","))
    target = Path(parsed.html) if parsed.html is not None else readings.source.with_suffix(".html")
    found = summary(readings)
    print_section(found)
    log.info("drawing")
    drawn = list(charts(readings))
    if not parsed.no_png:
        for chart in drawn:  # before the page, for which figures get the color of its text
            _write(target.with_name(f"{target.stem}-{chart.name}.png"), png_of(chart))
    _write(target, page(f"fp8compile monitor {readings.source.name}", [found], drawn).encode())
    return 0
