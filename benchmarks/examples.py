"""What the short programs of examples/ print, on one process and on two: losses beside bf16, and the same digits.

Losses are the first and the mean of the last five steps. "gathered" is the largest difference of a step's loss between
weights gathered as codes and as values, "resumed" that between a run and one that was resumed from its middle.

    python -m benchmarks.examples [--json] [--steps 40] [--only lora own_loop_fsdp2]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.table import Row, emit

ROOT = Path(__file__).parent.parent
PROGRAMS = {  # how many processes each is run on
    "own_loop_fsdp2": (1, 2),
    "hf_trainer_fsdp2": (1, 2),
    "accelerate_fsdp2": (1, 2),
    "lightning_fsdp2": (1, 2),
    "moe_ep_fsdp2": (1, 2),
    "lora": (1,),
    "nvfp4_tail_finish": (1,),
}
LOSSES = re.compile(r"^(\S.*?)  +(\d+\.\d{5})  +(\d+\.\d{5})$", re.MULTILINE)
SAME = re.compile(r"^\w+ and ([\w ]+): largest difference (\S+)$", re.MULTILINE)


def printed_by(name: str, processes: int, steps: int) -> str:
    """Run an example as its docstring says; torchrun with one process for those that shard."""
    launch = [sys.executable, "-m"]
    if processes > 1 or name in ("own_loop_fsdp2", "moe_ep_fsdp2"):
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", f"{processes}", "-m"]
    command = [*launch, f"examples.{name}", "--steps", f"{steps}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} gave {done.returncode}:\n{done.stdout}\n{errors.read()}")
    return done.stdout


def rows_of(name: str, processes: int, steps: int) -> list[Row]:
    """A row for each training in FP8 that is no repetition of another."""
    printed = printed_by(name, processes, steps)
    losses = {training.strip(): (float(first), float(last)) for training, first, last in LOSSES.findall(printed)}
    same = dict(SAME.findall(printed))
    bf16 = losses.pop("bf16")
    return [
        {
            "example": name,
            "ranks": processes,
            "recipe": training,
            "bf16 first": bf16[0],
            "FP8 first": first,
            "bf16 last": bf16[1],
            "FP8 last": last,
            "gathered": same.get("values gathered", "-"),
            "resumed": same.get("resumed", "-"),
        }
        for training, (first, last) in losses.items()
        if training not in same
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The short programs of examples/, beside bf16.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", default=40, type=int)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    args = parser.parse_args()
    rows = [row for name in args.only for processes in PROGRAMS[name] for row in rows_of(name, processes, args.steps)]
    emit(f"{args.steps} steps", rows, as_json=args.json, digits=5)


if __name__ == "__main__":
    main()
