"""All pairs of features that are held to what one process or stock FSDP does: a row is a pair, a column a recipe.

A cell runs a function on ranks, which answers what differs, in words. A pair without a meaning is in ``REFUSED``, with
the text that it raises and the reason. What is not in the table was not thought of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import exact_sums
import fsdp_models as models
import pairs_of_checkpoints as checkpoints
import pairs_of_experts as experts
import pairs_of_fsdp as fsdp
import pairs_of_pipelines as pipelines
import pairs_of_tensor_parallel as tensor_parallel
from gloo_ranks import shared_ranks
from recipes_of_pairs import FOREIGN, READY

__all__ = ["CELLS", "CHEAP", "COLUMNS", "REFUSED", "Cell", "is_left_out", "outcome"]

COLUMNS = (*READY, *FOREIGN)
FOUR = ("nvfp4", models.FOUR_BITS)


@dataclass(frozen=True)
class Cell:
    """What runs on ranks.

    Attributes:
        function: Answers what differs, in words.
        arguments: Its first ones.
        within: The ranks.
        needs_folder: Whether a folder that all ranks see comes last.
    """

    function: Callable[..., list[str]]
    arguments: tuple
    within: str = "pair"
    needs_folder: bool = False


@dataclass(frozen=True)
class Refusal:
    """Pairs that raise, with what they say, because they have no meaning.

    Attributes:
        rows: What is in the name of each of these rows.
        columns: Recipes.
        text: A part of the error.
        reason: Why.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    text: str
    reason: str

    def is_about(self, row: str, column: str) -> bool:
        """Whether it is one of these."""
        return column in self.columns and all(part in row for part in self.rows)


REFUSED = (
    Refusal(("experts",), ("delayed",), "delayed scaling", "an expert without tokens has no amax of the steps before"),
    Refusal(
        ("sequence parallel", "odd"), FOUR, "applies to groups of 16 tokens", "a transform of 16 tokens is not cut"
    ),
    Refusal(
        ("expert parallel", "compiled"),  # where the layer is traced before rows are sent
        ("delayed",),
        "delayed scaling is not supported, because it keeps one amax per tensor",
        "an expert without tokens has no amax of the steps before",
    ),
    Refusal(
        ("expert parallel",),
        ("delayed",),
        "its scale comes from previous steps and",
        "an expert without tokens has no amax of the steps before",
    ),
    *(
        Refusal((where,), ("packed",), "unpacked()", "only its library can tell where a byte may be cut")
        for where in ("fsdp", "parallel", "experts")
    ),
    Refusal(
        ("checkpoints",),
        ("packed", "packed, cuttable"),
        "stores several values per byte",
        "a parameter is its codes as they lie, and FSDP2 cuts it",
    ),
)
# pairs that are not alike and say nothing, as docs/delayed-scaling.md has it
OTHERWISE = {
    ("pipeline", "delayed"): "several forwards run before their backwards, and scales come from the backwards before",
}


def is_left_out(row: str, column: str) -> bool:
    """Whether a pair is in ``OTHERWISE``."""
    return any(row.startswith(start) and column == name for start, name in OTHERWISE)


def _rows() -> dict[str, Callable[[str], Cell]]:
    found: dict[str, Callable[[str], Cell]] = {}
    names = {"1-D": "two ranks", "three": "three ranks", "HSDP": "HSDP"}
    ways = {"codes": "fsdp_float8_all_gather", "graph": "graph_fsdp"}
    for way, is_called in ways.items():
        for mesh, ranks in names.items():
            for feature in fsdp.FEATURES:
                found[f"{is_called}, {ranks}: {feature}"] = lambda column, at=(way, mesh), feature=feature: Cell(
                    fsdp.trained_alike, (*at, column, "bf16", feature), fsdp.MESHES[at[1]], needs_folder=True
                )
    for reshard in fsdp.RESHARD:
        for index, (checkpointed, offloaded) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
            for experts_too in (False, True):
                also = [reshard, *["checkpointed"] * checkpointed, *["offloaded"] * offloaded]
                also += ["experts"] * experts_too
                found[f"fsdp_float8_all_gather, four ranks: {', '.join(also)}"] = (
                    lambda column, at=(reshard, checkpointed, offloaded, experts_too), index=index: Cell(
                        fsdp.gathers_differ, (column, at[0], _mixed(column, index), *map(bool, at[1:])), "all"
                    )
                )
    for name, module, within in (
        ("tensor and sequence parallel", tensor_parallel, "pair"),
        ("expert parallel, codes travel", experts, "pair"),
        ("pipeline", pipelines, "pair"),
        ("checkpoints of FP8 parameters", checkpoints, "all"),
    ):
        for row in module.ROWS:
            found[f"{name}: {row}"] = lambda column, at=(module, within), row=row: Cell(
                at[0].alike, (column, row), at[1], needs_folder=at[0] is checkpoints
            )
    return found


def _mixed(column: str, index: int) -> str:
    """A policy for a recipe: each recipe with each policy, over the four ways of a row."""
    names = list(fsdp.MIXED)
    return names[(COLUMNS.index(column) + index) % len(names)]


CELLS = {(row, column): make(column) for row, make in _rows().items() for column in COLUMNS}
# what `make test` runs: each kind of row once, with recipes in turn
CHEAP = {
    ("fsdp_float8_all_gather, HSDP: experts, checkpointed", models.FOUR_BITS),
    ("fsdp_float8_all_gather, HSDP: a tied FP8 head", "rowwise"),
    ("fsdp_float8_all_gather, two ranks: a rank without tokens", "int8"),
    ("fsdp_float8_all_gather, three ranks: a rank without rows", "packed"),
    ("fsdp_float8_all_gather, three ranks: a rank without rows", "mxfp8"),
    ("fsdp_float8_all_gather, four ranks: reshard to 2", "nvfp4"),
    ("fsdp_float8_all_gather, four ranks: reshard to 2, checkpointed, offloaded", "mxfp8"),
    ("fsdp_float8_all_gather, four ranks: reshard to 2, checkpointed, offloaded, experts", "rowwise"),
    ("graph_fsdp, HSDP: a tied FP8 head", "blockwise"),
    ("graph_fsdp, three ranks: resume", "mxfp8"),
    ("graph_fsdp, two ranks: a rank without rows", "delayed"),
    ("graph_fsdp, HSDP: experts, checkpointed", "packed, cuttable"),
    ("tensor and sequence parallel: odd number of tokens, checkpointed", "blockwise"),
    ("tensor and sequence parallel: odd number of tokens, checkpointed", "packed, cuttable"),
    ("tensor and sequence parallel: odd number of tokens", "nvfp4"),
    ("expert parallel, codes travel: a capacity, checkpointed", models.FOUR_BITS),
    ("pipeline: 1F1B, experts", "mxfp8"),
    ("pipeline: GPipe", "nvfp4"),
    ("checkpoints of FP8 parameters: three ranks to two", "rowwise"),
    ("checkpoints of FP8 parameters: three ranks to four", "packed"),
}
assert CELLS.keys() >= CHEAP
assert set(exact_sums.RECIPES) <= set(COLUMNS)


def outcome(row: str, column: str, folder: str) -> tuple[str, bool]:
    """What came of a cell, in words, and whether it is as it has to be."""
    cell = CELLS[row, column]
    refusal = next((each for each in REFUSED if each.is_about(row, column)), None)
    try:
        answers = shared_ranks().run(
            cell.function, *cell.arguments, *([folder] * cell.needs_folder), within=cell.within, seconds=200
        )
    except AssertionError as error:
        if refusal is not None and refusal.text in str(error):
            return "refused", True
        lines = [line for line in str(error).splitlines() if "Error: " in line] or [str(error)]
        return f"**raises: {lines[0][:300]}**".replace("|", "/"), False
    wrong = [f"rank {rank}: {', '.join(words)}" for rank, words in enumerate(answers) if words]
    if refusal is not None:
        return "**is not refused**", False
    return ("**" + "; ".join(wrong).replace("|", "/")[:300] + "**", False) if wrong else ("alike", True)
