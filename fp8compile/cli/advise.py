"""`fp8compile advise`: measures a model's layers in several recipes, and prints the best for each."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from fp8compile import recipes
from fp8compile.cli.errors import UserError
from fp8compile.cli.gpu_flag_choices import GPUS
from fp8compile.cli.user_code import running

if TYPE_CHECKING:
    from fp8compile.testing.numerics import Advice

__all__ = ["add_parser"]

DESCRIPTION = """
Recommend a recipe for each layer. Runs TARGET once, forward and backward, in high precision, and measures the error of
each layer's three GEMMs in each recipe against float64, on the data that TARGET returns.
"""
TARGET = (
    "as for explain: package.module:name, FILE.py:name or FILE.py, a function that returns (model, args[, kwargs])"
)
NO_LOSS = (
    "TARGET returns no scalar loss, so gradients are those of the mean square of what it returns; for those of your "
    "training, let it return the loss."
)
REVERTED = "TARGET converts its model, which was reverted here: errors are measured against the model without FP8."
log: logging.Logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    """Add the subcommand ``advise`` to the argument parser."""
    parser = subparsers.add_parser(
        "advise", help="recommend a recipe for each layer of a model", description=DESCRIPTION,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    names = f"{', '.join(recipes.names())}, or the recipe of an installed package"
    parser.add_argument(
        "--recipes", metavar="NAME,...",
        help=f"recipes to consider: {names} (default: the built-in recipes that the GPU supports natively)",
    )  # fmt: skip
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--sqnr", type=float, metavar="DB",
        help="choose the fastest recipe whose three GEMMs have this signal-to-noise ratio, per layer (default 14)",
    )  # fmt: skip
    budget.add_argument(
        "--time", type=float, metavar="SHARE",
        help="minimize noise within this fraction of the minimum time without FP8, over all layers",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", choices=GPUS, default="h200", help="estimate times from the peak rates of this GPU (default h200)"
    )
    parser.add_argument(
        "--rows-factor", type=float, default=1.0, metavar="N",
        help="rows of a training step as a multiple of TARGET's rows, for bytes and times (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--sample", type=int, default=512, metavar="ROWS", help="rows per layer to measure errors on (default 512)"
    )
    parser.add_argument("--products", action="store_true", help="print one row per GEMM instead of one per layer")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _advice(parsed: argparse.Namespace) -> tuple[Advice, list[str]]:
    from fp8compile import revert
    from fp8compile.cli.target import load_target
    from fp8compile.nn.convertible.convertible_layers import is_converted
    from fp8compile.testing.numerics.advise import advise_call
    from fp8compile.testing.numerics.model_calls import loss_of, mean_square

    notes: list[str] = []

    def loss(output: Any) -> Any:
        try:
            return loss_of("advise", output, None)
        except TypeError:
            notes.append(NO_LOSS)
            return mean_square(output)

    log.info("loading %s", parsed.target)
    target = load_target(parsed.target)
    if any(map(is_converted, target.model.modules())):
        with running(f"{parsed.target}: reverting its model"):
            revert(target.model)
        notes.append(REVERTED)
    log.info("measuring its layers")
    budget = {"time": parsed.time} if parsed.time is not None else None
    with running(f"{parsed.target}: measuring its layers"):
        try:
            found = advise_call(
                target.model, target.args, target.kwargs, loss=loss, gpu=parsed.gpu,
                recipes=None if parsed.recipes is None else parsed.recipes.split(","),
                budget=budget if parsed.sqnr is None else {"sqnr": parsed.sqnr},
                rows_factor=parsed.rows_factor, sample=parsed.sample,
            )  # fmt: skip
        except (TypeError, ValueError, ImportError) as error:
            raise UserError(f"{parsed.target}: {error}") from error
    return found, notes


def _run(parsed: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):
        found, notes = _advice(parsed)
    if parsed.json:
        print(json.dumps({**found.to_dict(), "notes": notes}), flush=True)
        return 0
    from fp8compile.tables import paragraph, terminal_width

    print(found.text(products=parsed.products))
    for note in notes:
        print("\n".join(paragraph(note, width=terminal_width())))
    return 0
