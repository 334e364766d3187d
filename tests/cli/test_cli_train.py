"""`fp8compile train`: what it writes, resumes to the bit, refuses in one line, and compiles once."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import started
from eight_bits import EIGHT_BITS

import fp8compile as f8
from fp8compile._compat import cpu_has_rowwise_gemm
from fp8compile.cli import main
from fp8compile.cli.errors import UserError
from fp8compile.cli.train import run_folder, training
from fp8compile.cli.train import subcommand as train
from fp8compile.cli.train.checkpoint import load_checkpoint
from fp8compile.cli.train.config import Arm, TrainConfig, arms
from fp8compile.cli.train.gemms import GemmCount
from fp8compile.cli.train.progress import ProgressLine
from fp8compile.cli.train.summary import complaints
from fp8compile.cli.train.text import default_folder, held_out_batches, load_text, training_batch
from fp8compile.cli.train.trainer import Trainer, named_recipe
from fp8compile.cli.train.training import resolved

ROOT = Path(__file__).parents[2]
TINY = {
    "dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32, "seq": 16, "batch": 4,
    "steps": 6, "eval_every": 3, "eval_sequences": 6, "checkpoint_every": 2, "threads": 1,
}  # fmt: skip
NUM_LINEARS = 7  # of one block; the head stays in bf16


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} squared is {number**2}\n" for number in range(700)))
    return path


def words(text_file, out, *more, recipe="bf16", compiled=False, **changes):
    sizes = {**TINY, **changes}
    flags = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    mode = ("--backend", "aot_eager") if compiled else ("--no-compile",)
    fixed = ("--data", str(text_file), "--out", str(out), "--device", "cpu", "--recipe", recipe)
    return ["train", *flags, *mode, *fixed, *more]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [(r["arm"], r["kind"], r["step"], r["loss"]) for r in rows_of(folder) if r["kind"] != "done"]


def start(arguments):
    """Start the command in another process; its output comes line by line."""
    return subprocess.Popen(
        [sys.executable, "-m", "fp8compile", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(process, fragment):
    for line in process.stdout:
        if fragment in line:
            return
    pytest.fail(f"ended before {fragment!r}: {process.stderr.read()}")


def small_trainer(text_file, *, recipe="rowwise", **changes):
    config = resolved(TrainConfig(**{**TINY, "device": "cpu", "recipe": recipe, **changes}))
    text = load_text(text_file, batch=config.batch, seq=config.seq)
    return Trainer(config, arms(config)[0], text, named_recipe(recipe))


# -------------------------------------------------------------------- what a run leaves


def test_a_run_leaves_config_metrics_picture_and_prints_a_table(text_file, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(words(text_file, out, "--compare", "bf16", recipe="rowwise")) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["train"]["recipe"] == "rowwise"
    assert config["train"]["data"] == str(text_file)
    rows = rows_of(out)
    for arm in ("rowwise", "bf16"):
        steps = [row["step"] for row in rows if row["arm"] == arm and row["kind"] == "train"]
        assert steps == [1, 2, 3, 4, 5, 6]
        assert [r["step"] for r in rows if r["arm"] == arm and r["kind"] == "eval"] == [3, 6]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob("*.tmp"))
    table = capsys.readouterr().out
    assert f"{3 * NUM_LINEARS} of {3 * NUM_LINEARS + 3}" in table
    assert "0 of 24 (0.0% of flops)" in table


def test_both_arms_start_from_the_same_weights_and_see_the_same_batches(text_file, tmp_path):
    main(words(text_file, tmp_path / "run", "--compare", "bf16", recipe="rowwise"))
    first = {arm: loss for arm, kind, step, loss in losses(tmp_path / "run") if step == 1}
    assert first["rowwise"] == pytest.approx(first["bf16"], rel=0.02)  # FP8 has 2 to 3 digits


# -------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("recipe", "compare", "where", "compiled"),
    [
        ("bf16", [], "bf16: step 24/", False),
        ("rowwise", ["--compare", "bf16"], "rowwise: step 24/", False),
        ("rowwise", ["--compare", "bf16"], "bf16: step 24/", False),
        ("bf16", [], "bf16: step 24/", True),
    ],
)
def test_a_killed_run_resumes_to_the_bit(text_file, tmp_path, recipe, compare, where, compiled):
    sizes = {"steps": 60, "checkpoint_every": 10, "eval_every": 20}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = {"recipe": recipe, "compiled": compiled, **sizes}
    printed = tmp_path / "printed"
    process = started(words(text_file, killed, *compare, **arguments), printed)
    while not (printed.exists() and where in printed.read_text()):
        assert process.is_alive(), f"ended before {where!r}"
        time.sleep(0.001)
    process.kill()
    process.join()
    assert main(["train", "--resume", str(killed)]) == 0
    assert main(words(text_file, whole, *compare, **arguments)) == 0
    assert losses(killed) == losses(whole)


def test_a_metrics_line_cut_short_by_a_kill_is_written_again(text_file, tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    main(words(text_file, whole))
    main(words(text_file, cut, steps=4))
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "arm": "bf1')
    assert main(["train", "--resume", str(cut), "--steps", "6"]) == 0
    trained = [[row for row in losses(folder) if row[1] == "train"] for folder in (cut, whole)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_in_one_line_how_to_go_on(text_file, tmp_path, number, code):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    process = start(words(text_file, stopped, steps=60, checkpoint_every=1000))
    wait_for(process, "step 30/60  loss")
    process.send_signal(number)
    _, complaint = process.communicate()
    assert process.returncode == code
    assert complaint.count("\n") == 1
    assert f"go on with: fp8compile train --resume {stopped}" in complaint
    assert (stopped / "checkpoint-bf16.pt").exists()
    assert main(["train", "--resume", str(stopped)]) == 0
    main(words(text_file, whole, steps=60, checkpoint_every=1000))
    assert losses(stopped) == losses(whole)


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--lr", "0.5"], "--lr 0.5 (the run has 0.003)"),
        (["--seed", "0", "--batch", "9"], "--batch 9 (the run has 4)"),
        (["--steps", "3"], "--steps 3 (the run has 6; it can only be extended)"),
        (["--out", "x"], "--resume writes to the run's own folder"),
        (["--check"], "--check (the run has False)"),
    ],
)
def test_resume_refuses_flags_that_contradict_the_run(text_file, tmp_path, capsys, flags, fragment):
    main(words(text_file, tmp_path / "run"))
    before = losses(tmp_path / "run")
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path / "run"), *flags]) == 2
    assert fragment in one_line(capsys)
    assert losses(tmp_path / "run") == before


def test_resume_refuses_a_changed_text(text_file, tmp_path, capsys):
    main(words(text_file, tmp_path / "run"))
    text_file.write_text(text_file.read_text() + "more")
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "the text of" in one_line(capsys)


@pytest.mark.parametrize("content", [b"", b"junk"])
def test_a_damaged_checkpoint_is_one_line(text_file, tmp_path, capsys, content):
    main(words(text_file, tmp_path / "run"))
    (tmp_path / "run" / "checkpoint-bf16.pt").write_bytes(content)
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "8"]) == 2
    assert "deleting it starts this training over" in one_line(capsys)


# -------------------------------------------------------------------- refusals


def one_line(capsys):
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "Traceback" not in complaint
    return complaint


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--recipe", "rowise"], "rowwise"),
        (["--compare", "fp4"], "fp4"),
        (["--heads", "3"], "dim 16 is not a multiple of 2 * heads = 6"),
        (["--kv-heads", "4"], "heads 2 is not a multiple of kv_heads 4"),
        (["--steps", "0"], "--steps is 0; it has to be at least 1"),
        (["--lr", "-1"], "--lr is -1.0; it has to be a positive number"),
        (["--lr", "nan"], "--lr is nan"),
        (["--seed", "-1"], "--seed is -1"),
        (["--threads", "0"], "--threads is 0; it has to be at least 1"),
        (["--device", "tpu9"], "--device tpu9"),
        (["--device", "meta"], "FP8 GEMMs run on cpu and cuda only"),
        (["--backend", "inductor"], "--backend is one of torch.compile's, against --no-compile"),
        (["--check"], "--check judges a recipe against bf16; add --compare bf16"),
        (["--compare", "bf16"], "--compare bf16 is --recipe too"),
        (["--data", "/no/such/place"], "cannot read /no/such/place: No such file or directory"),
        (["--data", os.devnull], "neither a file nor a folder"),
        (["--batch", "5000"], "take 80018; lower --batch or --seq, or give more"),
    ],
)
def test_a_bad_argument_is_one_line_and_leaves_nothing(text_file, tmp_path, capsys, flags, fragment):
    out = tmp_path / "run"
    assert main([*words(text_file, out), *flags]) == 2
    assert fragment in one_line(capsys)
    assert not out.exists()


@pytest.mark.parametrize("flags", [["--stepz", "3"], ["--steps", "many"], ["--step", "3"], []])
def test_what_the_parser_refuses_is_one_line_too(capsys, flags):
    with pytest.raises(SystemExit) as stop:
        main(["train", *flags] if flags else [])
    assert stop.value.code == 2
    one_line(capsys)


def test_an_unknown_backend_is_one_line(text_file, tmp_path, capsys):
    arguments = [word for word in words(text_file, tmp_path / "run") if word != "--no-compile"]
    assert main([*arguments, "--backend", "inducter"]) == 2
    assert "PyTorch has no such backend; it has" in one_line(capsys)


def test_a_folder_with_a_run_or_anything_else_is_not_written_to(text_file, tmp_path, capsys):
    main(words(text_file, tmp_path / "run"))
    before = losses(tmp_path / "run")
    capsys.readouterr()
    assert main(words(text_file, tmp_path / "run")) == 2
    assert "already has a run; go on with it by --resume" in one_line(capsys)
    assert losses(tmp_path / "run") == before
    assert main(words(text_file, tmp_path)) == 2
    assert "exists and is no empty folder" in one_line(capsys)
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "cannot read config.json" in one_line(capsys)
    assert main(["train", "--resume", str(tmp_path / "nowhere")]) == 2
    assert "No such file or directory; check --resume" in one_line(capsys)


def test_missing_packages_are_named_with_the_command_that_brings_them(text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert main(words(text_file, tmp_path / "run")) == 2
    assert "rich and matplotlib missing; pip install rich matplotlib" in one_line(capsys)


def test_a_loss_that_is_not_finite_ends_the_run_with_1(text_file, tmp_path, capsys):
    assert main(words(text_file, tmp_path / "run", lr=1e38)) == 1
    assert "the loss of bf16 became nan at step" in one_line(capsys)


# -------------------------------------------------------------------- a full disk


@pytest.mark.parametrize(
    ("failing", "left"),
    [
        ("config.json", None),
        ("checkpoint-bf16.pt", {"config.json", "metrics.jsonl"}),
        ("loss.png", {"config.json", "metrics.jsonl", "checkpoint-bf16.pt"}),
    ],
)
def test_a_full_disk_is_one_line_and_tears_nothing(text_file, tmp_path, capsys, monkeypatch, failing, left):
    out = tmp_path / "run"
    real_fsync = os.fsync

    def full(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == f"{failing}.tmp":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fsync(descriptor)

    monkeypatch.setattr(run_folder.os, "fsync", full)
    assert main(words(text_file, out)) == 2
    complaint = one_line(capsys)
    assert f"cannot write {out / failing}: No space left on device" in complaint
    assert ("--resume" in complaint) == (left is not None)
    assert left == ({path.name for path in out.iterdir()} if out.exists() else None)
    monkeypatch.undo()
    if left is not None:
        assert main(["train", "--resume", str(out)]) == 0


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(text_file, tmp_path, monkeypatch):
    trainer = small_trainer(text_file, recipe="bf16", compile=False)
    path = tmp_path / "checkpoint.pt"
    trainer.save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder.os, "fsync", full)
    trainer.gradients()
    trainer.update()
    with pytest.raises(UserError, match="No space left on device"):
        trainer.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.glob("checkpoint*")] == ["checkpoint.pt"]
    assert load_checkpoint(path, model=trainer.model, optimizer=trainer._optimizer, steps=6) == 0


# -------------------------------------------------------------------- graphs and GEMMs


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_train_eval_and_partial_batch_compile_once_each(text_file, recipe):
    trainer = small_trainer(text_file, recipe=recipe, backend="aot_eager")
    for _ in range(3):
        trainer.gradients()
        trainer.update()
        trainer.evaluate()
    assert trainer.counted.graphs == {"train": 1, "eval": 1, "partial eval": 1}
    assert trainer.counted.graph_breaks == 0
    assert trainer.counted.recompiles == 0


def steps_of(trainer, count):
    """Losses of some steps."""
    found = []
    for _ in range(count):
        found.append(trainer.gradients()["loss"])
        trainer.update()
    return found


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_twenty_steps_are_one_graph_and_resume_to_the_bit(text_file, tmp_path, recipe, assert_bits_equal):
    first = small_trainer(text_file, recipe=recipe, backend="aot_eager", steps=20)
    whole = steps_of(first, 11)
    first.save(tmp_path / "checkpoint.pt")
    whole += steps_of(first, 9)
    second = small_trainer(text_file, recipe=recipe, backend="aot_eager", steps=20)
    second.load(tmp_path / "checkpoint.pt")
    assert len(set(whole)) == 20
    assert steps_of(second, 9) == whole[11:]
    resumed, state = second.model.state_dict(), first.model.state_dict()
    assert resumed.keys() == state.keys()
    for name, value in state.items():
        assert_bits_equal(resumed[name], value, name)
    for trainer in (first, second):
        counted = trainer.counted
        assert (counted.graphs, counted.graph_breaks, counted.recompiles) == ({"train": 1}, 0, 0)


def has_cpu_kernel(recipe):
    return recipe not in ("blockwise", "mxfp8") and cpu_has_rowwise_gemm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", *EIGHT_BITS])
def test_the_profiler_sees_the_gemms_that_the_recipe_asks_for_as_this_device_has_them(text_file, recipe, compiled):
    asked = {"bf16": 0, "rowwise_bf16_wgrad": 14}.get(recipe, 3 * NUM_LINEARS)
    fp8, emulated = (asked, 0) if has_cpu_kernel(recipe) else (0, asked)
    trainer = small_trainer(text_file, recipe=recipe, compile=compiled, backend="aot_eager")
    done = trainer.summary()
    for key in ("expected_gemms", "profiled_gemms"):  # flops differ: 8 columns are padded to 16
        count = GemmCount(**done[key])
        assert (count.fp8, count.emulated, count.total) == (fp8, emulated, 3 * NUM_LINEARS + 3)
    assert complaints([done], [Arm(name=recipe, recipe=recipe, seed=0)]) == []
    assert trainer.counted.recompiles == 0


def test_the_table_says_what_is_emulated(text_file, tmp_path, capsys):
    main(words(text_file, tmp_path / "run", recipe="blockwise"))
    printed = capsys.readouterr()
    shown = {
        line.split("|")[1].strip(): line.split("|")[2].strip() for line in printed.out.splitlines() if "|" in line
    }
    asked = shown["FP8 GEMMs asked for by the recipe"]
    assert asked.startswith("21 of 24 (")
    assert shown["FP8 GEMMs seen by the profiler"] == "0 of 24 (0.0% of flops)"
    assert shown["emulated on this device"] == asked
    assert printed.err == ""


@pytest.fixture
def falls_back(monkeypatch):
    """Layers that run in bf16 without a word."""
    monkeypatch.setattr(f8.Linear, "forward", lambda self, x: F.linear(x, self.weight))


@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_a_layer_that_falls_back_to_bf16_is_not_counted_as_fp8(text_file, recipe):
    done = small_trainer(text_file, recipe=recipe, compile=False).summary()
    seen = GemmCount(**done["profiled_gemms"])
    assert (seen.fp8, seen.emulated) == (0, 0)
    (complaint,) = complaints([done], [Arm(name=recipe, recipe=recipe, seed=0)])
    asked = 14 if recipe == "rowwise_bf16_wgrad" else 21
    assert f"{recipe}: the recipe asks for FP8 in {asked} of 24" in complaint
    assert "what ran is 0 of 24" in complaint
    emulation = f", and emulated 0 where this device has to emulate {asked}"
    assert complaint.endswith(emulation) != has_cpu_kernel(recipe)


@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_check_fails_for_what_fell_back_although_its_loss_is_right(text_file, tmp_path, capsys, monkeypatch, recipe):
    monkeypatch.setattr(training, "counting_level", lambda text: 100.0)  # six steps get below that
    assert main(words(text_file, tmp_path / "run", "--compare", "bf16", "--check", recipe=recipe)) == 1
    printed = capsys.readouterr()
    assert f"PASS {recipe}" in printed.out
    assert "the recipe asks for FP8 in 21 of 24" in printed.err
    assert printed.err.endswith("the losses are right, but what ran is not what was asked for\n")


# -------------------------------------------------------------------- text


def test_a_batch_depends_on_seed_and_step_alone(text_file):
    text = load_text(text_file, batch=4, seq=16)
    sizes = {"batch": 4, "seq": 16}
    tokens, targets = training_batch(text, seed=1, step=7, **sizes)
    for step in range(3):
        training_batch(text, seed=0, step=step, **sizes)
    torch.manual_seed(5)
    again, _ = training_batch(text, seed=1, step=7, **sizes)
    assert torch.equal(tokens, again)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    others = [training_batch(text, seed=s, step=t, **sizes)[0] for s, t in ((1, 8), (2, 7), (7, 1))]
    assert not any(torch.equal(tokens, other) for other in others)


def test_held_out_batches_repeat_and_end_with_a_partial_one(text_file):
    text = load_text(text_file, batch=4, seq=16)
    sizes = {"batch": 4, "seq": 16, "sequences": 6}
    first, second = list(held_out_batches(text, **sizes)), list(held_out_batches(text, **sizes))
    assert [len(tokens) for tokens, _ in first] == [4, 2]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))


def test_training_never_touches_the_held_out_tail(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a" * 950 + b"b" * 50)
    text = load_text(path, batch=2, seq=8)
    assert text.held_out.unique().tolist() == [ord("b")]
    for step in range(200):
        _, targets = training_batch(text, seed=0, step=step, batch=2, seq=8)
        assert targets.unique().tolist() == [ord("a")]


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.txt").write_text("second " * 20)
    (folder / "a.txt").write_text("first " * 20)
    (folder / "deep" / "latin").write_bytes(b"caf\xe9 " * 20)
    (folder / ".git" / "config").write_text("hidden")
    (folder / "junk.bin").write_bytes(b"\x00\xff" * 100)
    text = load_text(folder, batch=2, seq=8)
    assert (text.num_files, text.num_skipped) == (3, 1)
    content = bytes(torch.cat([text.train, text.held_out]).tolist())
    assert content == b"first " * 20 + b"\n" + b"second " * 20 + b"\n" + b"caf\xe9 " * 20


@pytest.mark.parametrize(
    ("content", "fragment"), [(b"", "no text in"), (b" \n", "no text in"), (b"\0\1", r"1 binary file\(s\) left out")]
)
def test_a_place_without_text_is_refused(tmp_path, content, fragment):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=fragment):
        load_text(tmp_path, batch=1, seq=1)


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")

    def denied(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UserError, match=r"cannot read .*file: Permission denied; check --data"):
        load_text(tmp_path, batch=1, seq=1)


def test_the_shortest_text_that_is_enough_trains(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * ((4 * 16 + 1) + (16 + 1)))
    assert main(words(path, tmp_path / "run", steps=1)) == 0
    path.write_bytes(b"x" * (4 * 16 + 1 + 16))
    assert main(words(path, tmp_path / "other", steps=1)) == 2


def test_the_default_text_is_the_standard_library():
    text = load_text(None, batch=16, seq=128)
    assert (default_folder() / "argparse.py").exists()
    assert len(text.train) > 2**20


# -------------------------------------------------------------------- the command itself


def test_importing_the_command_loads_neither_rich_nor_matplotlib_nor_inductor():
    program = "import fp8compile.cli, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert not loaded & {"rich", "matplotlib", "torch._inductor.compile_fx", "fp8compile.cli.train.trainer"}


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"fp8compile {f8.__version__}\n")


def test_help_names_every_recipe(capsys):
    for command in ("train", "explain"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert ", ".join(f8.recipes.names()) in " ".join(capsys.readouterr().out.split())


def test_the_last_line_of_a_terminal_has_the_last_evaluation(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    with ProgressLine("rowwise", first=0, steps=4) as progress:
        for step, loss, held_out in ((2, 3.0, 2.5), (4, 1.0, 0.5)):
            progress.trained(step, loss, 100.0)
            progress.evaluated(step, held_out)
    last = sys.stdout.getvalue().rpartition("rowwise: ")[2]
    assert last.startswith("step 4/4  loss 1.0000  held-out 0.5000  100 tokens/s")


def test_configurations_are_values():
    config = TrainConfig(compare="bf16", check=True)
    assert [arm.name for arm in arms(config)] == ["rowwise", "bf16", "bf16-seed1", "bf16-seed2"]
    assert replace(config, steps=9) != config
