"""`examples/train`: what a run leaves, resumes to the bit, refuses in one line, and compiles once."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import started
from eight_bits import EIGHT_BITS
from train_runs import TINY, losses, rows_of, run_words, small_trainer, steps_of

import fp8compile as f8
from examples.train import run
from examples.train.__main__ import main
from examples.train.config import Arm, TrainConfig, UsageError, arms
from examples.train.data import held_out_batches, load_text, training_batch
from examples.train.gemms import GemmCount
from examples.train.table import complaints
from fp8compile._compat import cpu_has_rowwise_gemm

NUM_LINEARS = 7  # of one block; the head stays in bf16


def words(text_file, out, *more, recipe="bf16", compiled=False, **changes):
    mode = ("--backend", "aot_eager") if compiled else ("--no-compile",)
    return run_words(TINY, text_file, out, "--recipe", recipe, *mode, *more, **changes)


def one_line(capsys):
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert complaint.startswith("examples.train: ")
    return complaint


# -------------------------------------------------------------------- what a run leaves


def test_a_run_leaves_config_metrics_checkpoints_and_prints_a_table(text_file, tmp_path, capsys):
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
        assert [path.name for path in (out / f"checkpoint-{arm}").iterdir()] == ["step-6"]
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
    process = started(words(text_file, killed, *compare, **arguments), printed, main=main)
    while not (printed.exists() and where in printed.read_text()):
        assert process.is_alive(), f"ended before {where!r}"
        time.sleep(0.001)
    process.kill()
    process.join()
    assert main(["--resume", str(killed)]) == 0
    assert main(words(text_file, whole, *compare, **arguments)) == 0
    assert losses(killed) == losses(whole)


def test_a_metrics_line_cut_short_by_a_kill_is_written_again(text_file, tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    main(words(text_file, whole))
    main(words(text_file, cut, steps=4))
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "arm": "bf1')
    assert main(["--resume", str(cut), "--steps", "6"]) == 0
    trained = [[row for row in losses(folder) if row[1] == "train"] for folder in (cut, whole)]
    assert trained[0] == trained[1]


def test_a_checkpoint_that_a_kill_left_incomplete_is_not_read(text_file, tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    main(words(text_file, whole))
    main(words(text_file, cut, steps=4))
    checkpoints = cut / "checkpoint-bf16"
    shutil.copytree(checkpoints / "step-4", checkpoints / "step-5")
    (checkpoints / "step-5" / ".metadata").unlink()  # it is written last
    assert main(["--resume", str(cut), "--steps", "6"]) == 0
    assert losses(cut)[-3:] == losses(whole)[-3:]


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--lr", "0.5"], "only --steps goes with it; leave out lr"),
        (["--steps", "3"], "has 6 steps and can only be extended"),
        (["--out", "x"], "leave out out"),
    ],
)
def test_resume_refuses_flags_that_contradict_the_run(text_file, tmp_path, capsys, flags, fragment):
    main(words(text_file, tmp_path / "run"))
    before = losses(tmp_path / "run")
    capsys.readouterr()
    assert main(["--resume", str(tmp_path / "run"), *flags]) == 2
    assert fragment in one_line(capsys)
    assert losses(tmp_path / "run") == before


def test_resume_refuses_a_changed_text(text_file, tmp_path, capsys):
    main(words(text_file, tmp_path / "run"))
    text_file.write_text(text_file.read_text() + "more")
    capsys.readouterr()
    assert main(["--resume", str(tmp_path / "run")]) == 2
    assert "the text of" in one_line(capsys)


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--recipe", "rowise"], "rowwise"),
        (["--compare", "fp4"], "fp4"),
        (["--heads", "3"], "--dim 16 has to be a multiple of 6"),
        (["--kv-heads", "4"], "--heads 2 has to be a multiple of 4"),
        (["--steps", "0"], "--steps 0 has to be at least 1"),
        (["--lr", "-1"], "--lr -1.0 has to be a positive number"),
        (["--lr", "nan"], "--lr nan has to be a positive number"),
        (["--seed", "-1"], "--seed -1 has to be at least 0"),
        (["--threads", "0"], "--threads 0 has to be at least 1"),
        (["--check"], "--check needs --compare bf16"),
        (["--compare", "bf16"], "--compare bf16 is --recipe too"),
        (["--quantized-parameters"], "--quantized-parameters needs FP8 layers"),
        (["--recipe", "rowwise", "--quantized-parameters", "--graph-fsdp"], "--graph-fsdp takes no"),
        (["--bf16-gather"], "--bf16-gather needs --fsdp, and weights in high precision"),
        (["--data", "/no/such/place"], "cannot read /no/such/place: No such file or directory"),
        (["--batch", "5000"], "take 80018; lower --batch or --seq, or give more"),
    ],
)
def test_a_bad_argument_is_one_line_and_leaves_nothing(text_file, tmp_path, capsys, flags, fragment):
    out = tmp_path / "run"
    assert main([*words(text_file, out), *flags]) == 2
    assert fragment in one_line(capsys)
    assert not out.exists()


def test_an_unknown_backend_is_one_line(text_file, tmp_path, capsys):
    arguments = [word for word in words(text_file, tmp_path / "run") if word != "--no-compile"]
    assert main([*arguments, "--backend", "inducter"]) == 2
    assert "PyTorch has no such backend" in one_line(capsys)


def test_a_folder_with_a_run_is_not_written_to(text_file, tmp_path, capsys):
    main(words(text_file, tmp_path / "run"))
    before = losses(tmp_path / "run")
    capsys.readouterr()
    assert main(words(text_file, tmp_path / "run")) == 2
    assert "has a run; go on with it by --resume" in one_line(capsys)
    assert losses(tmp_path / "run") == before
    assert main(["--resume", str(tmp_path / "nowhere")]) == 2
    assert "No such file or directory; check --resume" in one_line(capsys)


def test_a_loss_that_is_not_finite_ends_the_run_with_1(text_file, tmp_path, capsys):
    assert main(words(text_file, tmp_path / "run", lr=1e38)) == 1
    assert "the loss of bf16 became nan at step" in one_line(capsys)


# -------------------------------------------------------------------- graphs and GEMMs


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_train_eval_and_partial_batch_compile_once_each(text_file, recipe):
    trainer = small_trainer(text_file, recipe=recipe, backend="aot_eager")
    for _ in range(3):
        trainer.gradients()
        trainer.update()
        trainer.evaluate()
    assert trainer.graphs == {"train": 1, "eval": 1, "partial eval": 1}
    assert torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_twenty_steps_are_one_graph_and_resume_to_the_bit(text_file, tmp_path, recipe, assert_bits_equal):
    first = small_trainer(text_file, recipe=recipe, backend="aot_eager", steps=20)
    whole = steps_of(first, 11)
    first.save(tmp_path)
    whole += steps_of(first, 9)
    second = small_trainer(text_file, recipe=recipe, backend="aot_eager", steps=20)
    second.load(tmp_path)
    assert len(set(whole)) == 20
    assert steps_of(second, 9) == whole[11:]
    resumed, state = second.model.state_dict(), first.model.state_dict()
    assert resumed.keys() == state.keys()
    for name, value in state.items():
        assert_bits_equal(resumed[name], value, name)
    assert first.graphs == second.graphs == {"train": 1}


def done_row(trainer, recipe):
    return {"kind": "done", "arm": recipe, "step": 0, **trainer.summary()}


def has_cpu_kernel(recipe):
    return recipe not in ("blockwise", "mxfp8") and cpu_has_rowwise_gemm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", *EIGHT_BITS])
def test_the_profiler_sees_the_gemms_that_the_recipe_asks_for_as_this_device_has_them(text_file, recipe, compiled):
    asked = {"bf16": 0}.get(recipe, (2 if recipe.endswith("bf16_wgrad") else 3) * NUM_LINEARS)
    fp8, emulated = (asked, 0) if has_cpu_kernel(recipe) else (0, asked)
    trainer = small_trainer(text_file, recipe=recipe, compile=compiled, backend="aot_eager")
    done = done_row(trainer, recipe)
    seen = GemmCount(**done["profiled_gemms"])
    assert done["asked_gemms"][:2] == (asked, 3 * NUM_LINEARS + 3)
    assert (seen.fp8, seen.emulated, seen.total) == (fp8, emulated, 3 * NUM_LINEARS + 3)
    assert complaints([done], [Arm(name=recipe, recipe=recipe, seed=0)]) == []
    assert done["recompiles"] == 0


def test_the_table_says_what_is_emulated(text_file, tmp_path, capsys):
    main(words(text_file, tmp_path / "run", recipe="blockwise"))
    printed = capsys.readouterr()
    rows = (re.split(r" {2,}", line.strip()) for line in printed.out.splitlines())
    shown = {row[0]: row[1] for row in rows if len(row) > 1}
    assert shown["FP8 GEMMs asked for by the recipe"].startswith("21 of 24 (")
    assert shown["FP8 GEMMs seen by the profiler"] == "0 of 24 (0.0% of flops)"
    assert shown["emulated on this device"].startswith("21 of 24 (")
    assert "not as asked for" not in printed.out


@pytest.fixture
def falls_back(monkeypatch):
    """Make layers run in bf16 without a word."""
    monkeypatch.setattr(f8.Linear, "forward", lambda self, x: F.linear(x, self.weight))


@pytest.mark.filterwarnings("ignore:convert. a weight is used in a GEMM outside of its layer")  # what is planted
@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_a_layer_that_falls_back_to_bf16_is_not_counted_as_fp8(text_file, recipe):
    done = done_row(small_trainer(text_file, recipe=recipe, compile=False), recipe)
    seen = GemmCount(**done["profiled_gemms"])
    assert (seen.fp8, seen.emulated) == (0, 0)
    (complaint,) = complaints([done], [Arm(name=recipe, recipe=recipe, seed=0)])
    asked = 14 if recipe.endswith("bf16_wgrad") else 21
    assert f"{recipe}: the recipe asks for FP8 in {asked} of 24" in complaint
    assert "what ran is 0 of 24 (0.0% of flops), and 0 emulated" in complaint


@pytest.mark.filterwarnings("ignore:convert. a weight is used in a GEMM outside of its layer")  # what is planted
@pytest.mark.usefixtures("falls_back")
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_check_fails_for_what_fell_back_although_its_loss_is_right(text_file, tmp_path, capsys, monkeypatch, recipe):
    monkeypatch.setattr(run, "counting_level", lambda text: 100.0)  # six steps get below that
    assert main(words(text_file, tmp_path / "run", "--compare", "bf16", "--check", recipe=recipe)) == 1
    printed = capsys.readouterr()
    assert f"PASS {recipe}" in printed.out
    assert f"not as asked for: {recipe}: the recipe asks for FP8 in 21 of 24" in printed.out


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
    assert text.num_files == 3
    content = bytes(torch.cat([text.train, text.held_out]).tolist())
    assert content == b"first " * 20 + b"\n" + b"second " * 20 + b"\n" + b"caf\xe9 " * 20


@pytest.mark.parametrize("content", [b"", b"\0\1 and more than a sequence"])
def test_a_place_without_text_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError, match="has 0 bytes of text"):
        load_text(tmp_path, batch=1, seq=1)


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")

    def denied(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(UsageError, match=r"cannot read .*file: Permission denied; check --data"):
        load_text(tmp_path, batch=1, seq=1)


def test_the_shortest_text_that_is_enough_trains(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * ((4 * 16 + 1) + (16 + 1)))
    assert main(words(path, tmp_path / "run", steps=1)) == 0
    path.write_bytes(b"x" * (4 * 16 + 1 + 16))
    assert main(words(path, tmp_path / "other", steps=1)) == 2


def test_the_default_text_is_the_standard_library():
    text = load_text(None, batch=16, seq=128)
    assert len(text.train) > 2**20


# -------------------------------------------------------------------- the options


def test_help_names_every_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert ", ".join(f8.recipes.names()) in " ".join(capsys.readouterr().out.split())


def test_configurations_are_values():
    config = TrainConfig(compare="bf16", check=True)
    assert [arm.name for arm in arms(config)] == ["rowwise", "bf16", "bf16-seed1", "bf16-seed2"]
    assert replace(config, steps=9) != config
