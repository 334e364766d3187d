"""`kill -9` at any moment of `examples/train`, again and again: what the run prints in the end has the same bits."""

from __future__ import annotations

import random
import shlex
import time
from functools import partial

import commands
import pytest
from train_runs import losses

from examples.train.__main__ import main

RUN = shlex.split(
    "--dim 16 --layers 1 --heads 2 --kv-heads 1 --hidden 32 --seq 16 --batch 4 --eval-every 50 "
    "--eval-sequences 6 --checkpoint-every 3 --threads 1 --device cpu --recipe rowwise --compare bf16 --no-compile"
)


started = partial(commands.started, main=main)


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


# a row a step of two arms: more than the kills wait for, which is 30 rows each at most
@pytest.mark.parametrize(("kills", "steps"), [(3, 160), pytest.param(20, 400, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed(text_file, tmp_path, kills, steps):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = (*RUN, "--steps", steps, "--data", text_file)
    printed = tmp_path / "printed"
    finished(started([*arguments, "--out", whole], printed), printed)

    moments = random.Random(0)
    process = started([*arguments, "--out", killed], printed)
    for _ in range(kills):
        # some 3 ms a step, some of them in the middle of writing a checkpoint
        kill_at(process, killed, lines(killed) + moments.randint(1, 30), moments.uniform(0, 0.03))
        process = started(["--resume", killed], printed)
    finished(process, printed)
    assert losses(killed) == losses(whole)
