"""`fp8compile explain`: its flags. Nothing here loads PyTorch before the command runs."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from fp8compile.cli.errors import Failed, UserError

__all__ = ["add_parser"]

DESCRIPTION = """
Is this really running in FP8? Compile a model, read its graphs, and say of each linear in what its three GEMMs run,
what is padded, which casts share a kernel, and what a GPU's peaks allow. Exit code 1 if a converted layer fell back.
"""
TARGET = """
package.module:name or FILE.py:name, a function that returns (model, args) or (model, args, kwargs), or a module (or
its class) with a method example_inputs(); FILE.py alone looks for model_and_inputs, then example
"""
GPUS = ("h200",)


def add_parser(subparsers: Any) -> None:
    """Add ``explain`` to the command."""
    parser = subparsers.add_parser(
        "explain", help="say what of a model really runs in FP8", description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    parser.add_argument("--recipe", metavar="NAME", help="convert the model by this recipe first")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="generate code for this GPU (default h200)")
    parser.add_argument("--no-gpu", action="store_true", help="leave out generated code and least times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page as well")
    parser.set_defaults(run=_run)


def _convert(model: Any, name: str) -> None:
    from fp8compile import convert, recipes

    try:
        convert(model, recipes.by_name(name))
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"--recipe {name}: {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path}: {error.strerror}") from error


def _run(parsed: argparse.Namespace) -> int:
    if not parsed.json and importlib.util.find_spec("rich") is None:
        raise UserError('rich missing; pip install "fp8compile[train]", or take --json')
    from fp8compile.cli.explain_target import load_target
    from fp8compile.testing.explain import explain

    target = load_target(parsed.target)
    if parsed.recipe is not None:
        _convert(target.model, parsed.recipe)
    target.try_out()
    found = explain(target.model, target.args, target.kwargs, gpu=None if parsed.no_gpu else parsed.gpu)
    if parsed.html is not None:
        from fp8compile.cli.explain_html import page

        _write(Path(parsed.html), page(found, parsed.target))
    if parsed.json:
        print(found.to_json())
    else:
        from fp8compile.cli.explain_table import print_explanation

        print_explanation(found)
    if found.fell_back:
        raise Failed(f"fell back: {' | '.join(found.fell_back)}")
    return 0
