"""Does each recipe train like bf16 all the way? The loss curves of all, in one picture.

    python -m benchmarks.loss_curves [--json] [--steps 600 --layers 2 --seeds 3] [--out DIR --picture PNG] [recipe ...]

Runs `examples/train` for bf16 on each seed, then for each recipe on the first, one after the other, on the same
data. Each has a folder of its own below --out: a script that was killed goes on where it stopped, and with more
--steps it extends what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import fp8compile as f8
from benchmarks.table import Row, emit
from examples.train.config import BF16, TrainConfig
from examples.train.run import resumed_run, start_run

NUM_SMOOTHED = 50  # train losses in a mean: one batch alone is noise
Curve = dict[int, float]  # loss by step


def label(config: TrainConfig) -> str:
    return f"{config.recipe}, seed {config.seed}" if config.seed else config.recipe


def curve(rows: Sequence[Row], kind: str) -> Curve:
    return {row["step"]: row["loss"] for row in rows if row["kind"] == kind}


def trained(config: TrainConfig, out: Path) -> list[Row]:
    """Rows of a finished training, which starts or goes on if it has to."""
    path = out / label(config).replace(", ", "-").replace(" ", "")
    with contextlib.redirect_stdout(sys.stderr):  # its own table is not this script's
        is_begun = (path / "config.json").exists()
        run = resumed_run(path, steps=config.steps) if is_begun else start_run(config, path)
        run.train()
    return run.rows


def smoothed(losses: Curve) -> Curve:
    """Means over the steps before, from the first that has enough of them."""
    values = list(losses.values())
    return {
        step: statistics.fmean(values[index + 1 - NUM_SMOOTHED : index + 1])
        for index, step in enumerate(losses)
        if index + 1 >= NUM_SMOOTHED
    }


def table(runs: dict[str, list[Row]]) -> list[Row]:
    """A row a training: the losses at its end, and how far from bf16 on the first seed."""
    last = {name: list(curve(rows, "eval").values())[-1] for name, rows in runs.items()}
    return [
        {
            "training": name,
            "held out": last[name],
            "minus bf16": last[name] - last[BF16],
            f"train, mean of {NUM_SMOOTHED}": list(smoothed(curve(rows, "train")).values())[-1],
        }
        for name, rows in runs.items()
    ]


def spread(runs: dict[str, list[Row]], seeds: Sequence[str]) -> dict[int, tuple[float, float]]:
    """By step, the lowest and the highest held-out loss of bf16 over its seeds, both minus that of the first."""
    curves = [curve(runs[name], "eval") for name in seeds]
    return {
        step: (min(c[step] for c in curves) - curves[0][step], max(c[step] for c in curves) - curves[0][step])
        for step in curves[0]
    }


def picture(runs: dict[str, list[Row]], seeds: Sequence[str]) -> bytes:
    """A PNG: above the losses, below the distance of the held-out ones from bf16, within the spread of its seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), dpi=120, layout="constrained")
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    bands = spread(runs, seeds)
    gaps.fill_between(list(bands), *zip(*bands.values(), strict=True), color="0.88", label=f"bf16, {len(seeds)} seeds")
    reference = curve(runs[BF16], "eval")
    # bf16 last and black, so that it is seen where all lie on one another
    for index, name in enumerate([*(name for name in runs if name not in seeds), BF16]):
        color = "black" if name == BF16 else f"C{index}"
        train, held_out = smoothed(curve(runs[name], "train")), curve(runs[name], "eval")
        losses.plot(list(train), list(train.values()), color=color, alpha=0.5, linewidth=1)
        losses.plot(list(held_out), list(held_out.values()), color=color, marker=".", label=name)
        gaps.plot(list(held_out), [loss - reference[step] for step, loss in held_out.items()], color=color, marker=".")
    losses.set_ylabel(f"nats a byte: held out (dots), train (mean of {NUM_SMOOTHED})")
    gaps.set(ylabel="held out, minus bf16", xlabel="step")
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
        axes.legend()
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="The loss curves of all recipes beside bf16.")
    parser.add_argument("recipes", nargs="*", metavar="recipe", help="names of recipes (default all that are ready)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of bf16, whose distance is the yardstick")
    parser.add_argument("--out", type=Path, default=Path("runs/loss-curves"), help="folder of the runs")
    parser.add_argument("--picture", type=Path, default=Path("runs/loss-curves/loss-curves.png"))
    args = parser.parse_args()
    common = {"layers": args.layers, "steps": args.steps, "eval_every": 50, "threads": 1}
    bf16 = [TrainConfig(recipe=BF16, seed=seed, **common) for seed in range(args.seeds)]
    fp8 = [TrainConfig(recipe=name, **common) for name in args.recipes or f8.recipes.names()]
    runs = {label(config): trained(config, args.out) for config in (*bf16, *fp8)}
    seeds = [label(config) for config in bf16]
    args.picture.write_bytes(picture(runs, seeds))
    low, high = spread(runs, seeds)[args.steps]
    size = bf16[0].batch * bf16[0].seq
    title = (
        f"Losses in nats a byte after {args.steps} steps of {size:,} bytes, {args.layers} layers; "
        f"bf16 over {args.seeds} seeds: spread {high - low:.4f}"
    )
    emit(title, table(runs), as_json=args.json, digits=4)


if __name__ == "__main__":
    main()
