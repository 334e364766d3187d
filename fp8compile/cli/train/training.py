"""A run from its flags to its table: every arm, one after the other, fresh or resumed.

    flags --check--> text --> run folder --> arm --> arm --> ... --> table, loss.png, verdict

Nothing is written before the folder. An arm trains, evaluates, saves, and adds a "done" row.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import fp8compile as f8
from fp8compile.cli.errors import Failed, Stopped, UserError
from fp8compile.cli.train.config import BF16, TrainConfig, arms, config_from_json, extended
from fp8compile.cli.train.criterion import Baseline, Verdict, counting_level
from fp8compile.cli.train.graphs import check_backend
from fp8compile.cli.train.interrupts import Interrupts
from fp8compile.cli.train.layout import layout_of
from fp8compile.cli.train.progress import ProgressLine
from fp8compile.cli.train.ranks import Ranks
from fp8compile.cli.train.run_folder import (
    RunFolder,
    existing_run_folder,
    new_run_folder,
    write_atomically,
)
from fp8compile.cli.train.summary import complaints, loss_picture, print_summary
from fp8compile.cli.train.text import Text, load_text
from fp8compile.cli.train.trainer import Trainer, model_shape, named_recipe, reproducible
from fp8compile.nn.experts import cannot_take_experts
from fp8compile.nn.quantized_weights import not_codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8compile.cli.train.config import Arm
    from fp8compile.cli.train.rows import Row

__all__ = ["resolved", "resumed_run", "start_run"]


def _device(name: str, ranks: Ranks) -> str:
    if ranks.size > 1 and ":" in name:
        raise UserError(f"--device {name}: each process has a GPU of its own; it is cpu or cuda")
    if name == "":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise UserError(f"--device {name}: no such device; it is cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: FP8 GEMMs run on cpu and cuda only")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: PyTorch finds no GPU; leave it out to use the CPU")
    return name


def resolved(config: TrainConfig, ranks: Ranks | None = None) -> TrainConfig:
    """Fill in device, threads and how many processes share the batch, and check what only PyTorch can.

    Args:
        config: As typed.
        ranks: The processes of the run; None for this one alone.

    Returns:
        The configuration to run and to keep.

    Raises:
        UserError: Not as many ranks as it takes, no such recipe, backend or device, or sizes that do not go together.
    """
    ranks = Ranks() if ranks is None else ranks
    layout = layout_of(config, ranks)
    model_shape(config)
    for arm in arms(config):
        recipe = named_recipe(arm.recipe)
        is_quantized = config.quantized_parameters and recipe is not None
        if is_quantized and (reason := not_codes(recipe)) is not None:
            raise UserError(
                f"--quantized-parameters with --recipe {arm.recipe}, which {reason}; leave one of them out"
            )
        if config.experts and recipe is not None and (reason := cannot_take_experts(recipe)) is not None:
            raise UserError(f"--experts {config.experts} with --recipe {arm.recipe}: {reason}")
    if config.compile:
        check_backend(config.backend)
    threads = config.threads or torch.get_num_threads()
    return replace(config, device=_device(config.device, ranks), threads=threads, dp=layout.dp)


def _load_text(config: TrainConfig, ranks: Ranks) -> Text:
    source = None if config.data is None else Path(config.data)
    text = load_text(source, batch=config.batch, seq=config.seq)
    if ranks.same(lambda: text.sha256) != text.sha256:
        raise UserError(f"rank {ranks.rank} finds another text than rank 0; give all of them one by --data")
    skipped = f", {text.num_skipped} binary left out" if text.num_skipped else ""
    print(
        f"text: {(len(text.train) + len(text.held_out)) / 2**20:.1f} MiB in {text.num_files} "
        f"files{skipped}; {len(text.held_out) / 2**10:,.0f} KiB held out",
        flush=True,
    )
    return text


def _provenance(config: TrainConfig, text: Text) -> Row:
    return {
        "train": asdict(config),
        "text_sha256": text.sha256,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# -------------------------------------------------------------------- one arm


def _train_step(trainer: Trainer, config: TrainConfig, folder: RunFolder, arm: Arm, interrupts: Interrupts) -> Row:
    row = trainer.gradients()
    # Update, row and checkpoint belong together: a signal waits until all are done.
    with interrupts.held():
        trainer.update()
        folder.append(row)
        folder.is_fresh = False
        if trainer.step % config.checkpoint_every == 0 or trainer.step == config.steps:
            trainer.save(folder.checkpoint(arm.name))
    return row


def _train(trainer: Trainer, config: TrainConfig, folder: RunFolder, arm: Arm, interrupts: Interrupts) -> None:
    evaluated = {row["step"] for row in folder.rows() if row["kind"] == "eval" and row["arm"] == arm.name}
    with ProgressLine(arm.name, first=trainer.step, steps=config.steps) as progress:
        while True:
            # Before the next step, not after the last: a run may have died between the two.
            is_due = trainer.step == config.steps or (trainer.step and trainer.step % config.eval_every == 0)
            if is_due and trainer.step not in evaluated:
                row = trainer.evaluate()
                folder.append(row)
                progress.evaluated(trainer.step, row["loss"])
            if trainer.step == config.steps:
                return
            interrupts.turn()
            row = _train_step(trainer, config, folder, arm, interrupts)
            progress.trained(trainer.step, row["loss"], trainer.tokens_per_second)


def _run_arm(
    config: TrainConfig, arm: Arm, text: Text, folder: RunFolder, interrupts: Interrupts, ranks: Ranks
) -> None:
    trainer = Trainer(config, arm, text, named_recipe(arm.recipe), ranks)
    trainer.load(folder.checkpoint(arm.name))
    _drop_rows_after(folder, arm, trainer.step)
    try:
        _train(trainer, config, folder, arm, interrupts)
        folder.append(trainer.summary())
    except Stopped as stopped:
        if folder.is_fresh:
            raise
        interrupts.clear()
        with interrupts.held():
            trainer.save(folder.checkpoint(arm.name))
            message = f"stopped after step {trainer.step} of {arm.name}"
            raise Stopped(message, exit_code=stopped.exit_code) from None


def _drop_rows_after(folder: RunFolder, arm: Arm, step: int) -> None:
    """Forget what a kill left behind the checkpoint; the resumed run writes it again."""
    rows = folder.rows()
    kept = [row for row in rows if row["arm"] != arm.name or (row["kind"] != "done" and row["step"] <= step)]
    folder.replace_rows(kept)  # without a row too: a first one that was cut short would be the next one's beginning


# -------------------------------------------------------------------- the run


def _is_done(rows: list[Row], arm: Arm, steps: int) -> bool:
    last = {row["kind"] for row in rows if row["arm"] == arm.name and row["step"] == steps}
    return {"eval", "done"} <= last


def _verdict(config: TrainConfig, rows: list[Row], text: Text) -> Verdict:
    last = {row["arm"]: row["loss"] for row in rows if row["kind"] == "eval"}
    bf16 = tuple(last[arm.name] for arm in arms(config) if arm.recipe == BF16)
    level = counting_level(text)
    return Verdict(
        name=config.recipe,
        loss=last[config.recipe],
        baseline=Baseline(level=level, bf16_losses=bf16),
    )


def _finish(config: TrainConfig, text: Text, folder: RunFolder, ranks: Ranks) -> int:
    rows, trained = folder.rows(), arms(config)
    if not ranks.is_first:
        return 0
    write_atomically(folder.path / "loss.png", loss_picture(rows, trained))
    print_summary(rows, [arm for arm in trained if arm.seed == config.seed])  # the others are there for the spread
    found = complaints(rows, trained)
    for complaint in found:
        print(f"fp8compile train: {complaint}", file=sys.stderr)
    print(f"run folder: {folder.path}")
    if config.check:
        verdict = _verdict(config, rows, text)
        print(verdict.baseline)
        print(verdict, flush=True)
        if not verdict.passed:
            raise Failed(f"the criterion does not hold for {config.recipe}")
        if found:
            raise Failed("the losses are right, but what ran is not what was asked for")
    return 0


@contextmanager
def _mended(folder: RunFolder) -> Iterator[None]:
    """Leave nothing of a run that did no step, and say how to go on with any other."""
    try:
        yield
    except BaseException as error:
        if folder.is_fresh:
            folder.discard()
        if isinstance(error, Stopped):
            rest = (
                " before the first step was done; nothing is kept"
                if folder.is_fresh
                else f"; go on with: {folder.resume_command}"
            )
            raise Stopped(f"{error}{rest}", exit_code=error.exit_code) from None
        if isinstance(error, UserError) and not folder.is_fresh:
            message = f"{error}; mend that, then go on with: {folder.resume_command}"
            raise UserError(message) from error
        raise


def _run_all(config: TrainConfig, text: Text, folder: RunFolder, ranks: Ranks) -> int:
    if torch.device(config.device).type == "cuda":
        if ranks.size > 1:
            torch.cuda.set_device(ranks.rank)
        # cuBLAS is reproducible only with a workspace of its own; PyTorch insists on it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with _mended(folder), Interrupts(ranks) as interrupts, reproducible(threads=config.threads):
        for arm in arms(config):
            if not _is_done(folder.rows(), arm, config.steps):
                _run_arm(config, arm, text, folder, interrupts, ranks)
        return _finish(config, text, folder, ranks)


def start_run(config: TrainConfig, out: Path | None, ranks: Ranks) -> int:
    """Start a run.

    Args:
        config: As typed.
        out: Its folder; None for a new one below ``runs``.
        ranks: The processes of the run.

    Returns:
        The exit code.

    Raises:
        UserError: Something the user can mend; no folder is left.
        Failed: A check finds the criterion unmet or something else run than asked for, or a loss is not finite.
        Stopped: By a signal.
    """
    config = resolved(config, ranks)
    text = _load_text(config, ranks)
    path = ranks.same(lambda: out or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    with new_run_folder(path, ranks) as folder:
        with _mended(folder):
            folder.write_config({"fp8compile": f8.__version__, **_provenance(config, text)})
        return _run_all(config, text, folder, ranks)


def resumed_run(path: Path, explicit: dict[str, object], ranks: Ranks) -> int:
    """Go on with a run.

    Args:
        path: Its folder.
        explicit: Fields whose flags were typed.
        ranks: The processes of the run.

    Returns:
        The exit code.

    Raises:
        UserError: There is no such run, a flag contradicts it, or its text has changed.
        Failed: A check finds the criterion unmet or something else run than asked for, or a loss is not finite.
        Stopped: By a signal.
    """
    with existing_run_folder(path, ranks) as folder:
        stored = folder.read_config()
        config = resolved(extended(config_from_json(stored.get("train"), folder.config), explicit), ranks)
        text = _load_text(config, ranks)
        if text.sha256 != stored.get("text_sha256"):
            raise UserError(f"the text of {path} has changed since the run began; start a new one")
        if stored.get("torch") != torch.__version__:
            print(f"note: begun with PyTorch {stored.get('torch')}, this is {torch.__version__}: bits may differ")
        folder.rows()  # what can't be used is said before anything is written
        if asdict(config) != stored["train"]:
            folder.write_config({**stored, "train": asdict(config)})
        return _run_all(config, text, folder, ranks)
