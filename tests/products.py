"""Write the tables of the full products into docs, each from a run of it.

    python tests/products.py [tensor-parallel] [fsdp] [pairs] [placements] [--minutes N] [--continue]

Within so many minutes a product, the columns from left to right: what the run did not get to is not in the table,
which says so. Another run can continue with that.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
sys.path.insert(0, str(Path(__file__).parent / "parallel"))
sys.path.insert(0, str(Path(__file__).parent / "pairs"))
sys.path.insert(0, str(Path(__file__).parent / "ops"))
import table_of_pairs as pairs
import table_of_placements as placements
import test_fsdp
import test_graph_fsdp
import test_tensor_parallel as layers
from gloo_ranks import shared_ranks

RESULTS = Path(__file__).parents[1] / "docs" / "results"
STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Product:
    """A table: a row for some values of a case, a column for the others.

    Attributes:
        head: What stands above it, title first.
        keys: Headings of what names a row.
        columns: By the values of a column, its heading.
        cases: Rows and columns that there are.
        outcome: Of one, in words, and whether it is as it has to be.
        file: The document, where it has another name than the product.
    """

    head: str
    keys: tuple[str, ...]
    columns: dict[Any, str]
    cases: list[tuple[tuple[str, ...], Any]]
    outcome: Callable[[tuple[str, ...], Any], tuple[str, bool]]
    file: str | None = None

    def read(self, page: str) -> dict[tuple, tuple[str, bool]]:
        """Outcomes that a document has."""
        found = {}
        for line in page.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            row, words = tuple(cells[: len(self.keys)]), cells[len(self.keys) :]
            for column, said in zip(self.columns, words, strict=False):
                if (row, column) in self.cases and said != "not run":
                    found[row, column] = said, not said.startswith("**")
        return found

    def run(self, minutes: float, found: dict[tuple, tuple[str, bool]]) -> dict[tuple, tuple[str, bool]]:
        """Outcomes of as many cases as the time allows, and those that were found before."""
        ends, found = time.monotonic() + 60 * minutes, dict(found)
        for row, column in sorted(self.cases, key=lambda case: list(self.columns).index(case[1])):
            if (row, column) in found:
                continue
            if time.monotonic() > ends:
                break
            words, is_right = found[row, column] = self.outcome(row, column)
            if not is_right:
                print(*row, self.columns[column], words, flush=True)
        return found

    def page(self, found: dict[tuple, tuple[str, bool]]) -> str:
        """The document."""
        lines = ["| " + " | ".join((*self.keys, *self.columns.values())) + " |"]
        lines.append("|---" * (len(self.keys) + len(self.columns)) + "|")
        there = set(self.cases)
        for row in dict.fromkeys(row for row, _ in self.cases):
            cells = [
                found.get((row, column), ("not run", True))[0] if (row, column) in there else ""
                for column in self.columns
            ]
            lines.append("| " + " | ".join((*row, *cells)) + " |")
        ran = "; ".join(
            f"{name} {sum(of == column for _, of in found)} of {sum(of == column for _, of in self.cases)}"
            for column, name in self.columns.items()
        )
        wrong = sum(not is_right for _, is_right in found.values())
        when = datetime.now(UTC).strftime("%Y-%m-%d")
        verdict = (
            f"Run on {when}, PyTorch {torch.__version__}, on a CPU: {ran}. {wrong} differ otherwise than they may."
        )
        return "\n\n".join([self.head, verdict, "\n".join(lines)]) + "\n"


def _in_words(problems: list[list[str]]) -> str:
    """What ranks found wrong, for a cell."""
    wrong = [f"rank {rank}: {', '.join(words)}" for rank, words in enumerate(problems) if words]
    return "**" + "; ".join(wrong).replace("|", "/") + "**" if wrong else ""


# ---------------------------------------------------------------------------------- tensor parallel

SHAPES = ", ".join(f"{name} x {x}, {n} features out" for name, (x, n) in layers.SHAPES.items())
TENSOR_PARALLEL = f"""# Tensor parallel: the full product

Written by `tests/products.py`. A layer on ranks beside the same layer in one process: its output, the gradients of
input, weight and bias, and the state of delayed scaling. Columns are modes and how many ranks.

- *same bits*: all of them have the same bits.
- *n roundings: y*: all others have; y is a sum over ranks, and within n bfloat16 roundings of the magnitudes of its
  terms. *x*, *weight* and *bias* stand for their gradients.
- *not run*: the run ended before.

Shapes: {SHAPES}."""


def _layer_on_ranks(row: tuple[str, ...], way: tuple[str | None, int]) -> tuple[str, bool]:
    answers = shared_ranks().run(layers.outcome, *row, *way, seconds=600)[: way[1]]
    if wrong := _in_words([[words] if words else [] for words, _ in answers]):
        return wrong, False
    sums = answers[0][1]
    return (f"{layers.roundings(way[1])} roundings: {', '.join(sums)}" if sums else "same bits"), True


# ---------------------------------------------------------------------------------- FSDP

FSDP = f"""# FSDP: the full product

Written by `tests/products.py`. A model is trained for {STEPS} steps of AdamW, and all losses and weights are compared,
bit for bit, with those of the same FP8 model under stock `fully_shard` that gathers its weights in `param_dtype`.

- *stock*: `fully_shard` with `fsdp_float8_all_gather`, for recipes whose weight codes serve both passes.
- *graph*: `graph_fsdp`, in eager mode.
- 1-D: two ranks; three: three ranks; HSDP: two replicas of two shards; FSDP + TP: two by two.
- *same bits*: all of them have the same bits, on every rank.
- *not run*: the run ended before."""
WAYS = {
    "stock": (test_fsdp.on_and_off, test_fsdp.EVERYTHING),
    "graph": (test_graph_fsdp.graph_and_stock, test_graph_fsdp.EVERYTHING),
}


def _trained(row: tuple[str, ...], column: tuple[str, str]) -> tuple[str, bool]:
    way, mesh = column
    function, _ = WAYS[way]
    wrong = _in_words(shared_ranks().run(function, *row, mesh, STEPS, seconds=600))
    return (wrong, False) if wrong else ("same bits", True)


# ---------------------------------------------------------------------------------- pairs

NOTES = "\n".join(f"{index}. {reason}" for index, reason in enumerate(pairs.REASONS, 1))
ELSE = "\n".join(f"- {row}, {column}: {reason}." for (row, column), reason in pairs.OTHERWISE.items())
PAIRS = f"""# Pairs of features

Written by `tests/products.py pairs`, from `tests/pairs/`. A row is what users put together, a
column a recipe. Under FSDP a model is trained, and losses and weights are compared, bit for bit,
with stock `fully_shard` that gathers values and has the same feature; elsewhere outputs and
gradients with those of one process. *int8* has a GEMM that another library registers; *packed* is a
quantizer of another library with two codes a byte, *cuttable* if `unpacked()` names those of a byte
each. "four ranks" also has a `MixedPrecisionPolicy` each, in turn.

- *alike*: the same bits. Under tensor and sequence parallelism sums over ranks round nothing there
  (`tests/helpers/exact_sums.py`); recipes that have no such sums are within 2**-16 of an output's
  norm, and have the same bits with checkpointing as without.
- *refused (n)*: an error says what to do, for the reason n.
- *not run*: the run ended before.

{NOTES}

Empty, because they are not alike for a reason that the documents give:

{ELSE}"""


def _pair(row: tuple[str, ...], column: str) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        return pairs.outcome(*row, column, folder)


# ---------------------------------------------------------------------------------- placements


def _numbered(heading: str, listed: list[tuple[int, str]]) -> str:
    lines = (fill(f"{number}. {reason}", 100, subsequent_indent="   ") for number, reason in listed)
    return "\n".join([heading, "", *lines])


LISTED = [(number, each) for number, each in enumerate(placements.LISTED, 1)]
BY_MEANING = [(number, each.reason) for number, each in LISTED if each.is_meaning]
NOT_YET = [(number, each.reason) for number, each in LISTED if not each.is_meaning]
PLACEMENTS = f"""# Placements: the full product

Written by `tests/products.py placements`, from `tests/ops/table_of_placements.py`. A row is where a
layer's tensors lie, what its weight is, what the weight's scale comes from and how many levels of
scales there are; a column is what is asked for. One rank runs each cell, so a group and FSDP are
of one rank; parts on several ranks are held by the tests in `tests/parallel/`.

- *same*: output and gradients have the bits of the layer whose tensors are whole; eager mode keeps
  as many bytes for the backward; the graph for a GPU quantizes by the same ops, and has no more
  nodes. Codes that are given stand beside a frozen weight of the same recipe. Of DTensors no graph
  is made here.
- *refused (n)*: an error says so, for the reason n.
- *not done (n)*: the bits, bytes and nodes of all gradients, for the reason n.
- Empty: nothing to ask. No rank tells another one an amax of whole tensors, and codes have no
  gradient.

{_numbered("By meaning:", BY_MEANING)}

{_numbered("Not yet:", NOT_YET)}"""


PRODUCTS = {
    "tensor-parallel": Product(
        head=TENSOR_PARALLEL,
        keys=("recipe", "layout", "shape"),
        columns={
            (None, 2): "eager, 2",
            (None, 3): "eager, 3",
            ("aot_eager", 2): "aot_eager, 2",
            ("inductor", 2): "Inductor, 2",
        },
        cases=[(case[:3], case[3:]) for case in layers.EVERYTHING],
        outcome=_layer_on_ranks,
    ),
    "fsdp": Product(
        head=FSDP,
        keys=("recipe", "scale", "param_dtype", "sizes"),
        columns={(way, mesh): f"{way}, {mesh}" for way in WAYS for mesh in test_fsdp.MESHES},
        cases=[(case[:4], (way, case[4])) for way, (_, cases) in WAYS.items() for case in cases],
        outcome=_trained,
    ),
    "pairs": Product(
        head=PAIRS,
        keys=("pair",),
        columns={name: name for name in pairs.COLUMNS},
        cases=[((row,), column) for row, column in pairs.CELLS if not pairs.is_left_out(row, column)],
        outcome=_pair,
        file="pairs.md",
    ),
    "placements": Product(
        head=PLACEMENTS,
        keys=("tensors", "weight", "scale", "levels"),
        columns={name: name for name in placements.OPTIMISATIONS},
        cases=[(cell[:4], cell.optimisation) for cell in placements.CELLS],
        outcome=lambda row, column: placements.outcome(placements.Cell(*row, column)),
        file="placements.md",
    ),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", nargs="*", metavar="PRODUCT", help=", ".join(PRODUCTS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="keep what the document has")
    args = parser.parse_args()
    failed = False
    for name in args.products or PRODUCTS:
        product, page = PRODUCTS[name], RESULTS / (PRODUCTS[name].file or f"product-{name}.md")
        outcomes = product.run(args.minutes, product.read(page.read_text()) if args.goes_on and page.exists() else {})
        page.write_text(product.page(outcomes))
        failed |= any(not is_right for _, is_right in outcomes.values())
    sys.exit(failed)
