"""A run from its options to its table: trains all arms, one after the other, fresh or resumed.

    RUN/config.json         the options, and the versions that the run used
    RUN/metrics.jsonl       a row in each line: kind ("train", "eval" or "done"), arm, step, numbers
    RUN/checkpoint-<arm>/   the newest state of a training, see checkpoint.py

A run that was killed can go on from its last checkpoints with the same bits. Rows that were written after these
checkpoints are dropped and written again.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

import fp8compile as f8
from examples.train.checkpoint import last_step
from examples.train.config import BF16, Arm, TrainConfig, UsageError, arms
from examples.train.criterion import Baseline, Verdict, counting_level
from examples.train.data import Text, load_text
from examples.train.layout import is_first, layout_of
from examples.train.table import Row, complaints, table
from examples.train.trainer import Trainer, named_recipe, reproduce_bits
from fp8compile.testing import emulation_note

LINES_PER_ARM = 10


class Run:
    """A run in its folder. The first rank writes the metrics, and all ranks keep the rows in memory."""

    def __init__(self, folder: Path, config: TrainConfig, text: Text) -> None:
        self.folder, self.config, self.text = folder, config, text
        self._metrics = folder / "metrics.jsonl"
        last = {arm.name: last_step(self._checkpoints(arm)) for arm in arms(config)}
        lines = self._metrics.read_text().splitlines(keepends=True) if self._metrics.exists() else []
        # a kill may have cut the last line short
        self.rows: list[Row] = [json.loads(line) for line in lines if line.endswith("\n")]
        self.rows = [row for row in self.rows if row["step"] <= last[row["arm"]]]
        if dist.is_initialized():
            dist.barrier()  # all ranks have read the file before the first one writes it
        if is_first():
            self._metrics.write_text("".join(map(_line, self.rows)))

    def _checkpoints(self, arm: Arm) -> Path:
        return self.folder / f"checkpoint-{arm.name}"

    def _append(self, kind: str, arm: Arm, step: int, **numbers: object) -> None:
        self.rows.append({"kind": kind, "arm": arm.name, "step": step, **numbers})
        if is_first():
            with self._metrics.open("a") as file:
                file.write(_line(self.rows[-1]))

    def _is_done(self, arm: Arm) -> bool:
        wanted = ("done", arm.name, self.config.steps)
        return any((row["kind"], row["arm"], row["step"]) == wanted for row in self.rows)

    def _train(self, trainer: Trainer, arm: Arm) -> None:
        config, steps = self.config, self.config.steps
        while trainer.step < steps:
            loss = trainer.gradients()
            trainer.update()
            step, is_last = trainer.step, trainer.step == steps
            self._append("train", arm, step, loss=loss)
            if trainer.monitor is not None:
                trainer.monitor.write(self.folder / f"monitor-{arm.name}.jsonl", step=step, loss=loss)
                trainer.monitor.step()
            if step == 1 or is_last or step % max(1, steps // LINES_PER_ARM) == 0:
                pace = trainer.tokens_per_second
                shown = "" if pace is None else f"  {pace:,.0f} tokens/s"
                print(f"{arm.name}: step {step}/{steps}  loss {loss:.4f}{shown}", flush=True)
            if is_last or step % config.eval_every == 0:
                held_out = trainer.evaluate()
                self._append("eval", arm, step, loss=held_out)
                print(f"{arm.name}: step {step}/{steps}  held-out {held_out:.4f}", flush=True)
            if is_last or step % config.checkpoint_every == 0:
                trainer.save(self._checkpoints(arm))

    def train(self) -> bool:
        """Train every arm that is not done, print the table, and return whether --check passes (True without it)."""
        recipes = {arm: named_recipe(arm.recipe) for arm in arms(self.config)}
        reproduce_bits(threads=self.config.threads)
        for arm, recipe in recipes.items():
            if not self._is_done(arm):
                try:
                    trainer = Trainer(self.config, arm, self.text, recipe)
                except ValueError as error:  # the library's text says which options can't be combined
                    raise UsageError(str(error)) from error
                trainer.load(self._checkpoints(arm))
                if note := emulation_note(trainer.model):
                    print(f"{arm.name}: {note}", flush=True)
                self._train(trainer, arm)
                self._append("done", arm, trainer.step, **trainer.summary())
        return self._finish(list(recipes))

    def _finish(self, trained: list[Arm]) -> bool:
        print(table(self.rows, [arm for arm in trained if arm.seed == self.config.seed]))  # without the spread's seeds
        found = complaints(self.rows, trained)
        for complaint in found:
            print(f"not as asked for: {complaint}")
        print(f"run folder: {self.folder}", flush=True)
        if not self.config.check:
            return True
        verdict = self._verdict(trained)
        print(verdict.baseline)
        print(verdict, flush=True)
        return verdict.passed and not found

    def _verdict(self, trained: list[Arm]) -> Verdict:
        last = {row["arm"]: row["loss"] for row in self.rows if row["kind"] == "eval"}
        bf16 = tuple(last[arm.name] for arm in trained if arm.recipe == BF16)
        baseline = Baseline(level=counting_level(self.text), bf16_losses=bf16)
        return Verdict(name=self.config.recipe, loss=last[self.config.recipe], baseline=baseline)


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def _text(config: TrainConfig) -> Text:
    text = load_text(config.data, batch=config.batch, seq=config.seq)
    size, held_out = (len(text.train) + len(text.held_out)) / 2**20, len(text.held_out) / 2**10
    print(f"text: {size:.1f} MiB in {text.num_files} files; {held_out:,.0f} KiB held out", flush=True)
    return text


def _write_config(folder: Path, config: TrainConfig, text: Text) -> None:
    kept = {
        "train": asdict(config),
        "text_sha256": text.sha256,
        "fp8compile": f8.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if dist.is_initialized():
        dist.barrier()  # all ranks have read config.json, or looked for it, before the first one writes it
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.new").write_text(json.dumps(kept, indent=2) + "\n")
        (folder / "config.new").replace(folder / "config.json")  # so that a kill leaves no incomplete file


def start_run(config: TrainConfig, folder: Path) -> Run:
    """Begin a run in a folder; raises a `UsageError` if the folder has a run, or if options can't be combined."""
    layout_of(config)
    text = _text(config)
    for arm in arms(config):
        named_recipe(arm.recipe)
    if (folder / "config.json").exists():
        raise UsageError(f"{folder} has a run; go on with it by --resume {folder}, or give another --out")
    _write_config(folder, config, text)
    return Run(folder, config, text)


def resumed_run(folder: Path, *, steps: int | None = None) -> Run:
    """Go on with a run, to its end or to more steps; a `UsageError` if there is none, or if its text has changed."""
    try:
        kept = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise UsageError(f"no run in {folder}: {error.strerror}; check --resume") from error
    config = TrainConfig(**kept["train"])
    if steps is not None and steps < config.steps:
        raise UsageError(f"--steps {steps}: the run in {folder} has {config.steps} steps and can only be extended")
    config = replace(config, steps=steps or config.steps)
    layout_of(config)
    text = _text(config)
    if text.sha256 != kept["text_sha256"]:
        raise UsageError(f"the text of {folder} has changed since the run began; start a new one")
    _write_config(folder, config, text)
    return Run(folder, config, text)
