"""The results of a run: the table that it prints at its end, and complaints about what ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.train.config import Arm
from examples.train.gemms import GemmCount
from fp8compile.tables import table_lines, terminal_width

Row = dict[str, Any]  # a row of metrics.jsonl

NUM_SMOOTHED = 20  # number of train losses in the mean that the table shows; a single batch's loss is noise


def _of(rows: Sequence[Row], *, kind: str, arm: Arm) -> list[Row]:
    return [row for row in rows if row["kind"] == kind and row["arm"] == arm.name]


def _column(rows: Sequence[Row], arm: Arm) -> dict[str, str]:
    train, held_out = _of(rows, kind="train", arm=arm), _of(rows, kind="eval", arm=arm)
    done = _of(rows, kind="done", arm=arm)[-1]
    last = [row["loss"] for row in train[-NUM_SMOOTHED:]]
    pace, graphs = done["tokens_per_second"], done["graphs"]
    seen = GemmCount(**done["profiled_gemms"])
    on_rank = "" if done["ranks"] == 1 else ", of one rank"
    column = {
        "held-out loss (nats/byte)": f"{held_out[-1]['loss']:.4f}",
        f"train loss (mean of last {len(last)})": f"{sum(last) / len(last):.4f}",
        "tokens/s (median step)": "-" if pace is None else f"{pace:,.0f}",
        f"peak memory{on_rank}": f"{done['peak_memory_bytes'] / 2**20:,.0f} MiB",
        "graphs": "not compiled" if graphs is None else ", ".join(f"{kind} {count}" for kind, count in graphs.items()),
        "graph breaks": "-" if graphs is None else str(done["graph_breaks"]),
        "recompiles beyond these": "-" if graphs is None else str(done["recompiles"]),
        "FP8 GEMMs asked for by the recipe": "{} of {} ({:.1%} of flops)".format(*done["asked_gemms"]),
        f"FP8 GEMMs seen by the profiler{on_rank}": seen.shown("fp8"),
    }
    if seen.emulated:
        column["emulated on this device"] = seen.shown("emulated")
    return column | done["shared"]


def table(rows: Sequence[Row], arms: Sequence[Arm]) -> str:
    """The table of a run, with a column for each arm, from the rows of metrics.jsonl. All arms have to be done."""
    columns = [_column(rows, arm) for arm in arms]
    labels = dict.fromkeys(label for column in columns for label in column)
    cells = [(label, *(column.get(label, "-") for column in columns)) for label in labels]
    names = ("", *(arm.name for arm in arms))
    return "\n".join(table_lines(names, cells, width=terminal_width(), right=range(1, len(names))))


def complaints(rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]:
    """A line for each difference between what ran and what was asked for."""
    found = []
    for arm in arms:
        done = _of(rows, kind="done", arm=arm)[-1]
        (fp8, total, _), seen = done["asked_gemms"], GemmCount(**done["profiled_gemms"])
        if (fp8, total) != (seen.fp8 + seen.emulated, seen.total):
            ran = f"{seen.shown('fp8')}, and {seen.emulated} emulated"
            found.append(f"{arm.name}: the recipe asks for FP8 in {fp8} of {total} GEMMs; what ran is {ran}")
        if done["recompiles"]:
            found.append(f"{arm.name}: {done['recompiles']} graphs too many; TORCH_LOGS=recompiles says why")
    return found
