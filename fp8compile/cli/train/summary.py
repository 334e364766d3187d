"""What a run comes to: the table at its end, and the picture of its losses."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.box import ASCII2
from rich.console import Console
from rich.table import Table

from fp8compile.cli.train.gemms import GemmCount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8compile.cli.train.config import Arm
    from fp8compile.cli.train.rows import Row

__all__ = ["complaints", "loss_picture", "print_summary"]

NUM_SMOOTHED = 20  # train losses in the mean that the table shows: one batch alone is noise
TABLE_WIDTH = 120


def _of(rows: Sequence[Row], *, kind: str, arm: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind and row["arm"] == arm]


def _graphs(done: Row) -> str:
    if done["graphs"] is None:
        return "not compiled"
    return ", ".join(f"{kind} {count}" for kind, count in done["graphs"].items())


def _count(done: Row, key: str) -> str:
    return "-" if done["graphs"] is None else str(done[key])


def _gemms(done: Row) -> tuple[GemmCount, GemmCount]:
    """What the recipe asks for on this device, and what ran."""
    return GemmCount(**done["expected_gemms"]), GemmCount(**done["profiled_gemms"])


def _fallback(asked: GemmCount, seen: GemmCount) -> str | None:
    """Where the GEMMs that ran are not those asked for, in words."""
    if (asked.fp8, asked.emulated, asked.total) == (seen.fp8, seen.emulated, seen.total):
        return None
    words = f"the recipe asks for FP8 in {asked.shown('fp8', 'emulated')}; what ran is {seen.shown('fp8')}"
    if asked.emulated or seen.emulated:
        words += f", and emulated {seen.emulated} where this device has to emulate {asked.emulated}"
    return words


def _column(rows: Sequence[Row], arm: str) -> dict[str, str]:
    train, held_out = _of(rows, kind="train", arm=arm), _of(rows, kind="eval", arm=arm)
    done = _of(rows, kind="done", arm=arm)[-1]
    last = [row["loss"] for row in train[-NUM_SMOOTHED:]]
    pace = done["tokens_per_second"]
    asked, seen = _gemms(done)
    ranks = done["replicas"] * done["shards"] * done["tp"]
    on_rank = "" if ranks == 1 else ", of one rank"
    column = {
        "held-out loss (nats/byte)": f"{held_out[-1]['loss']:.4f}",
        f"train loss (mean of last {len(last)})": f"{sum(last) / len(last):.4f}" if last else "-",
        "tokens/s (median step)": "-" if pace is None else f"{pace:,.0f}",
        f"peak memory since {done['peak_memory_since']}{on_rank}": f"{done['peak_memory_bytes'] / 2**20:,.0f} MiB",
        "graphs": _graphs(done),
        "graph breaks": _count(done, "graph_breaks"),
        "recompiles beyond these": _count(done, "recompiles"),
        f"FP8 GEMMs asked for by the recipe{on_rank}": asked.shown("fp8", "emulated"),
        f"FP8 GEMMs seen by the profiler{on_rank}": seen.shown("fp8"),
    }
    if done["tp"] > 1:
        column["tensor parallel"] = f"{done['tp']} ranks{', sequence parallel' if done['sp'] else ''}"
    if done["ep"] > 1:
        column["expert parallel"] = f"{done['ep']} ranks"
    if done["weights_gathered_as"] is not None:
        replicas = f", {done['replicas']} replicas" if done["replicas"] > 1 else ""
        column["FSDP"] = f"{done['shards']} shards{replicas}"
        column["weights gathered as"] = done["weights_gathered_as"]
    if done["quantized_parameters"]:
        column["weights of FP8 layers"] = "codes, float32 masters"
    if asked.emulated or seen.emulated:
        column["emulated on this device"] = seen.shown("emulated")
    return column


def print_summary(rows: Sequence[Row], arms: Sequence[Arm]) -> None:
    """Print the table, a column for each arm.

    Args:
        rows: Of metrics.jsonl.
        arms: The trainings, all of them done.
    """
    columns = [_column(rows, arm.name) for arm in arms]
    table = Table(box=ASCII2)
    table.add_column()
    for arm in arms:
        table.add_column(arm.name, justify="right")
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "-") for column in columns))
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)  # a log has no width of its own
    console.print(table)


def complaints(rows: Sequence[Row], arms: Sequence[Arm]) -> list[str]:
    """Say where what ran is not what was asked for.

    Args:
        rows: Of metrics.jsonl.
        arms: The trainings, all of them done.

    Returns:
        One line for each; none if all is well.
    """
    found = []
    for arm in arms:
        done = _of(rows, kind="done", arm=arm.name)[-1]
        if (words := _fallback(*_gemms(done))) is not None:
            found.append(f"{arm.name}: {words}")
        if done["recompiles"]:
            found.append(f"{arm.name}: {done['recompiles']} graphs too many; TORCH_LOGS=recompiles says why")
    return found


def loss_picture(rows: Sequence[Row], arms: Sequence[Arm]) -> bytes:
    """Draw the losses over the steps.

    Args:
        rows: Of metrics.jsonl.
        arms: The trainings.

    Returns:
        A PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    for index, arm in enumerate(arms):
        train, held_out = _of(rows, kind="train", arm=arm.name), _of(rows, kind="eval", arm=arm.name)
        color = f"C{index}"
        steps, losses = [row["step"] for row in train], [row["loss"] for row in train]
        axes.plot(steps, losses, color=color, alpha=0.4, linewidth=1, label=f"{arm.name}, train")
        steps, losses = [row["step"] for row in held_out], [row["loss"] for row in held_out]
        axes.plot(steps, losses, color=color, marker="o", label=f"{arm.name}, held out")
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
