"""`fp8compile train --resume` on a folder that may come from anywhere: what can't be used is one line, exit code 2."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8compile.cli import main
from fp8compile.cli.train.config import MAX_THREADS

ROOT = Path(__file__).parents[2]
SIZES = [
    "--dim", 16, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--hidden", 32, "--seq", 16, "--batch", 4,
    "--eval-every", 3, "--eval-sequences", 6, "--checkpoint-every", 2, "--threads", 1, "--device", "cpu",
    "--no-compile",
]  # fmt: skip
CHECKPOINT = "checkpoint-tensorwise.pt"


def train(*words):
    return main(["train", *map(str, words)])


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of four steps that is to go on, with codes for weights, so that its optimizer has masters too."""
    folder = tmp_path_factory.mktemp("begun")
    text = folder / "text.txt"
    text.write_text("".join(f"{number} squared is {number**2}\n" for number in range(700)))
    flags = ("--steps", 4, "--recipe", "tensorwise", "--quantized-parameters")
    assert train(*SIZES, *flags, "--data", text, "--out", folder / "run") == 0
    return folder / "run"


@pytest.fixture
def run(begun, tmp_path):
    return Path(shutil.copytree(begun, tmp_path / "run"))


def refused(capsys, run):
    """The line by which a run is refused; nothing is lost by it."""
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    capsys.readouterr()
    assert train("--resume", run, "--steps", 6) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    # a run that is extended says so before its training is loaded; rows that it will write again are dropped
    assert {name for name in before if before[name] != after.get(name)} <= {"config.json", "metrics.jsonl"}
    return complaint


def first(state):
    return state["optimizer"]["state"][0]


def master(state):
    return next(each for each in state["optimizer"]["state"].values() if "master" in each)


def group(state):
    return state["optimizer"]["param_groups"][0]


TAMPERED = {
    "a moment of another shape": (
        lambda s: first(s).update(exp_avg=torch.zeros(3, 3)), "exp_avg is torch.float32 (3, 3); it is a tensor of"),
    "a moment of another dtype": (
        lambda s: first(s).update(exp_avg_sq=first(s)["exp_avg_sq"].double()), "exp_avg_sq is torch.float64"),
    "a sparse moment": (lambda s: first(s).update(exp_avg=first(s)["exp_avg"].to_sparse()), "exp_avg is Tensor"),
    "a moment without memory": (
        lambda s: first(s).update(exp_avg=torch.zeros(256, 16, device="meta")), "exp_avg is Tensor"),
    "no moment": (lambda s: first(s).pop("exp_avg"), "is not that of this model: ['exp_avg']"),
    "a moment that is none": (lambda s: first(s).update(exp_avg=None), "exp_avg is NoneType"),
    "a master of another shape": (lambda s: master(s).update(master=torch.zeros(2)), "master is torch.float32 (2,)"),
    "a master without a layer": (lambda s: first(s).update(master=torch.zeros(256, 16)), "['master']"),
    "a step of the optimizer's own": (lambda s: first(s).update(step=torch.tensor(-5.0)), "of step -5.0, not 4"),
    "a parameter too many": (lambda s: s["optimizer"]["state"].update({99: {}}), "has not the state of 12 parameters"),
    "no state": (lambda s: s["optimizer"].update(state=[]), "has not the state of 12 parameters"),
    "no group": (lambda s: s["optimizer"].update(param_groups=[]), "has not 2 groups"),
    "another option": (lambda s: group(s).update(betas=(0.9, 2.0)), "betas of its optimizer's group 0 is (0.9, 2.0)"),
    "no option": (lambda s: group(s).pop("eps"), "group 0 of its optimizer has not the options"),
    "other parameters": (lambda s: group(s)["params"].append(0), "params of its optimizer's group 0 is"),
    "a step beyond the run": (lambda s: s.update(step=10**9), "step is 1000000000, of a run from 0 to 6"),
    "a negative step": (lambda s: s.update(step=-5), "step is -5, of a run from 0 to 6"),
    "a step that is none": (lambda s: s.update(step="4"), "step is '4'"),
    "a step that is true": (lambda s: s.update(step=True), "step is True"),
    "an earlier step": (lambda s: s.update(step=3), "master_steps of its optimizer's group 0 is 4; it is 3"),
    "a weight of another shape": (
        lambda s: s["model"].update({"norm.weight": torch.ones(4)}), "norm.weight is torch.float32 (4,)"),
    "a weight of another dtype": (
        lambda s: s["model"].update({"norm.weight": torch.ones(16).half()}), "norm.weight is torch.float16"),
    "no weight": (lambda s: s["model"].pop("norm.weight"), "its model is not that of this model: ['norm.weight']"),
    "no model": (lambda s: s.update(model=[]), "its model is not that of this model: list"),
    "another version": (lambda s: s.update(version=2), "version 2, this is 1"),
    "something else beside": (lambda s: s.update(more=1), "it is no checkpoint of fp8compile train"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")
@pytest.mark.parametrize("what", TAMPERED)
def test_a_checkpoint_is_checked_before_anything_is_loaded(run, capsys, what):
    tamper, complaint = TAMPERED[what]
    state = torch.load(run / CHECKPOINT)
    tamper(state)
    torch.save(state, run / CHECKPOINT)
    line = refused(capsys, run)
    assert f"cannot use {run / CHECKPOINT}: " in line
    assert complaint in line


@pytest.mark.parametrize("content", [[1], torch.zeros(3), None])
def test_what_is_no_checkpoint_is_refused(run, capsys, content):
    torch.save(content, run / CHECKPOINT)
    assert "it is no checkpoint of fp8compile train" in refused(capsys, run)


def test_one_bit_of_a_weight_that_changed_on_disk_is_seen(run, capsys):
    content = bytearray((run / CHECKPOINT).read_bytes())
    weight = torch.load(run / CHECKPOINT)["model"]["embed.weight"].numpy().tobytes()
    content[content.index(weight) + 2] ^= 1
    (run / CHECKPOINT).write_bytes(content)
    assert "its checksum is wrong" in refused(capsys, run)


def test_a_checkpoint_that_is_a_folder_is_refused(run, capsys):
    (run / CHECKPOINT).unlink()
    (run / CHECKPOINT).mkdir()
    assert f"cannot use {run / CHECKPOINT}: IsADirectoryError" in refused(capsys, run)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"steps": "many"}, "steps is a str; it is int"),
        ({"steps": True}, "steps is a bool; it is int"),
        ({"steps": None}, "steps is a NoneType; it is int"),
        ({"lr": 1}, "lr is a int; it is float"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"recipe": ["tensorwise"]}, "recipe is a list; it is str"),
        ({"data": 3}, "data is a int; it is str or null"),
        ({"compare": {}}, "compare is a dict; it is str or null"),
        ({"check": 0}, "check is a int; it is bool"),
        ({"dim": 2**60}, f"--dim is {2**60}; it has to be at most 16777216"),
        ({"seq": -1}, "--seq is -1; it has to be at least 1"),
        ({"threads": 99999999}, f"--threads is 99999999; it has to be from 1 to {MAX_THREADS}"),
        ({"unknown": 1}, "its train is not from this version of fp8compile"),
    ],
)
def test_a_configuration_is_checked(run, capsys, changes, complaint):
    path = run / "config.json"
    config = json.loads(path.read_text())
    config["train"].update(changes)
    path.write_text(json.dumps(config))
    line = refused(capsys, run)
    assert line.startswith(f"fp8compile train: cannot use {path}: ")
    assert complaint in line


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"\xff": 1}', "'utf-8' codec can't decode"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "it is no JSON object"),
        (b'{"train": 3}', "its train is not from this version"),
        (b"{}", "its train is not from this version"),
        (b"", "Expecting value"),
    ],
)
def test_a_configuration_that_is_none_is_refused(run, capsys, content, complaint):
    (run / "config.json").write_bytes(content)
    line = refused(capsys, run)
    assert f"cannot use {run / 'config.json'}: " in line
    assert complaint in line


def test_a_name_of_a_text_that_no_file_can_have_is_refused(run, capsys):
    config = json.loads((run / "config.json").read_text())
    config["train"]["data"] = "te\0xt"
    (run / "config.json").write_text(json.dumps(config))
    assert "embedded null byte; check --data" in refused(capsys, run)


DONE = (
    b'{"kind": "done", "arm": "tensorwise", "step": 6, "tokens_per_second": null, "peak_memory_bytes": 1, '
    b'"peak_memory_since": "first step", "expected_gemms": {}, "profiled_gemms": {}, "graphs": null, "graph_breaks": '
    b'0, "recompiles": 0, "tp": 1, "sp": false, "replicas": 1, "shards": 1, "quantized_parameters": true, '
    b'"weights_gathered_as": null}'
)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"\xff": 1}', "'utf-8' codec can't decode"),
        (b"not JSON", "Expecting value"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "it is no object with a kind of train, eval, done"),
        (b'{"kind": ["train"]}', "it is no object with a kind of train, eval, done"),
        (b'{"kind": "train"}', "train has no arm, step, loss, lr"),
        (b'{"kind": "eval", "arm": "tensorwise", "step": "4", "loss": 1.0}', "eval.step is a str; it is int"),
        (b'{"kind": "eval", "arm": "tensorwise", "step": -1, "loss": 1.0}', "step is -1"),
        (b'{"kind": "eval", "arm": "tensorwise", "step": 4, "loss": "low"}', "eval.loss is a str; it is float"),
        (DONE, "done.expected_gemms has no fp8, emulated, total"),
    ],
)
def test_the_rows_are_checked(run, capsys, line, complaint):
    path = run / "metrics.jsonl"
    path.write_bytes(b"".join([*path.read_bytes().splitlines(keepends=True)[:2], line, b"\n", path.read_bytes()]))
    found = refused(capsys, run)
    assert f"cannot use {path}: line 3: " in found
    assert complaint in found


def test_rows_in_a_folder_are_refused(run, capsys):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert f"cannot use {run / 'metrics.jsonl'}: Is a directory" in refused(capsys, run)


@pytest.mark.parametrize("rows", [b"", b"the last line\xff, cut short"])
def test_a_run_without_its_rows_goes_on(run, capsys, rows):
    (run / "metrics.jsonl").write_bytes(rows)
    assert train("--resume", run) == 0
    assert "train loss (mean of last 0)" in capsys.readouterr().out
    assert [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()] == ["eval", "done"]


def test_a_row_that_says_done_without_a_loss_is_not_believed(run, capsys):
    path = run / "metrics.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"eval"' not in line))
    assert train("--resume", run) == 0
    assert "held-out loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("config.json", "it is a file; give --resume the folder of the run"),
        ("nowhere", "No such file or directory; check --resume"),
        ("config.json/deeper", "Not a directory; check --resume"),
        ("x" * 1000, "File name too long; check --resume"),
    ],
)
def test_a_place_that_is_no_folder_is_refused(run, capsys, place, complaint):
    assert train("--resume", run / place) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--threads", 99999999), f"--threads is 99999999; it has to be from 1 to {MAX_THREADS}"),
        (("--steps", 10**12), "--steps is 1000000000000; it has to be at most 16777216"),
        (("--dim", 2**61), "it has to be at most 16777216"),
        (("--out", "x" * 1000), "File name too long"),
    ],
)
def test_numbers_that_no_machine_has_are_refused(begun, capsys, flags, complaint):
    assert train(*SIZES, "--data", begun.parent / "text.txt", *flags) == 2
    assert complaint in capsys.readouterr().err


# -------------------------------------------------------------------- two runs in one folder


def test_a_folder_in_which_a_run_is_alive_is_refused_to_another(run, tmp_path, capsys):
    new = tmp_path / "new"
    new.mkdir()
    for place, flags in ((run, ("--resume", run)), (new, (*SIZES, "--data", run.parent, "--out", new))):
        held = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert train(*flags) == 2
        finally:
            os.close(held)
        assert f"another run is alive in {place}; wait for its end, or stop it" in capsys.readouterr().err
    assert list(new.iterdir()) == []
    assert train("--resume", run) == 0


def test_where_there_are_no_locks_a_note_says_so(run, capsys, monkeypatch):
    def none(descriptor, operation):
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", none)
    assert train("--resume", run) == 0
    assert f"note: no lock on {run}: {os.strerror(38)}" in capsys.readouterr().out


def test_a_killed_run_leaves_no_lock_behind(begun, tmp_path, capsys):
    out = tmp_path / "run"
    flags = (
        *SIZES, "--steps", 100_000, "--checkpoint-every", 100_000, "--recipe", "bf16", "--data",
        begun.parent / "text.txt", "--out", out,
    )  # fmt: skip
    command = [sys.executable, "-m", "fp8compile", "train", *map(str, flags)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        next(line for line in process.stdout if "step 1/" in line)
        assert train("--resume", out) == 2
        assert "another run is alive in" in capsys.readouterr().err
        assert train(*flags) == 2
    finally:
        process.kill()
        process.communicate()
    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace("100000", "3"))
    assert train("--resume", out) == 0
