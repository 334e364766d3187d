"""`kill -9` at any moment of `fp8compile train`, again and again: what the run prints in the end has the same bits."""

from __future__ import annotations

import json
import random
import shlex
import time

import pytest
from commands import started

RUN = shlex.split(
    "--dim 16 --layers 1 --heads 2 --kv-heads 1 --hidden 32 --seq 16 --batch 4 --eval-every 50 "
    "--eval-sequences 6 --checkpoint-every 3 --threads 1 --device cpu --recipe rowwise --compare bf16 --no-compile"
)


def finished(process, printed):
    process.join(300)
    assert process.exitcode == 0, printed.read_text()


def lines(folder):
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def kill_at(process, folder, wanted, delay):
    """Kill the run ``delay`` seconds after it wrote its ``wanted``-th line."""
    while lines(folder) < wanted:
        assert process.is_alive(), "ended by itself"
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.join()


def results(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["arm"], row["kind"], row["step"], row["loss"]) for row in rows if row["kind"] != "done"]


# a row a step of two arms: more than the kills wait for, which is 30 rows each at most
@pytest.mark.parametrize(("kills", "steps"), [(3, 160), pytest.param(20, 400, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed(tmp_path, kills, steps):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} squared is {number**2}\n" for number in range(700)))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = (*RUN, "--steps", steps, "--data", text)
    printed = tmp_path / "printed"
    finished(started(["train", *arguments, "--out", whole], printed), printed)

    moments = random.Random(0)
    process = started(["train", *arguments, "--out", killed], printed)
    for _ in range(kills):
        # some 3 ms a step, some of them in the middle of writing a checkpoint
        kill_at(process, killed, lines(killed) + moments.randint(1, 30), moments.uniform(0, 0.03))
        process = started(["train", "--resume", killed], printed)
    finished(process, printed)
    assert results(killed) == results(whole)
