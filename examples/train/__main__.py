"""The command: ``python -m examples.train``, or ``torchrun --nproc-per-node N -m examples.train`` for N processes.

Exit codes: 0 done; 1 if --check finds the criterion not met or a loss is not finite; 2 for a mistake of the user.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch.distributed as dist

from examples.train.config import TrainConfig, UsageError, parser
from examples.train.layout import is_first, joined
from examples.train.run import Run, resumed_run, start_run
from examples.train.trainer import Diverged


def _new_folder() -> Path:
    """The default folder ``runs/<time>``; all ranks use the first rank's clock."""
    name = [time.strftime("%Y%m%d-%H%M%S")]
    if dist.is_initialized():
        dist.broadcast_object_list(name, src=0)
    return Path("runs") / name[0]


def _run(options: dict[str, object]) -> Run:
    out, resume = options.pop("out", None), options.pop("resume", None)
    if resume is None:
        if options.get("data") is not None:
            options["data"] = str(Path(options["data"]).absolute())  # a resumed run may start elsewhere
        return start_run(TrainConfig(**options), out or _new_folder())
    steps = options.pop("steps", None)
    if options or out is not None:
        given = ", ".join(["out"] * (out is not None) + list(options))
        raise UsageError(f"--resume goes on as the run began, so only --steps goes with it; leave out {given}")
    return resumed_run(resume, steps=steps)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code. By default arguments are those of the process's command line."""
    options = vars(parser().parse_args(arguments))
    with joined():
        try:
            return 0 if _run(options).train() else 1
        except (UsageError, Diverged) as error:
            if is_first():  # all ranks raise the same error
                print(f"examples.train: {error}", file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main())
