"""The state of a training on disk, by `torch.distributed.checkpoint`: all that the next step depends on.

    RUN/checkpoint-<arm>/step-<n>/    one file a rank, and .metadata, which is written last

Batches and learning rate are functions of the step, and nothing draws random numbers after the start, so parameters,
optimizer state and step are the whole of it. A kill leaves a folder without .metadata, which nobody reads: the one
before it is removed only when the next is complete.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from examples.train.layout import is_first


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict]:
    """The state of both, with the names and the whole shapes of one process."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _folders(folder: Path) -> dict[int, Path]:
    """The complete checkpoints by their step."""
    return {int(each.parent.name.removeprefix("step-")): each.parent for each in folder.glob("step-*/.metadata")}


def last_step(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max(_folders(folder), default=0)


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Write the checkpoint of a step, and remove those before it; all ranks call this."""
    before = _folders(folder)
    with warnings.catch_warnings(action="ignore"):  # one of a single process, which is no news
        dcp.save(_state(model, optimizer), checkpoint_id=folder / f"step-{step}")
    if is_first():
        for other, path in before.items():
            if other != step:
                shutil.rmtree(path)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Load the newest complete checkpoint, by whatever number of ranks, and return its step, or 0; all ranks do."""
    step = last_step(folder)
    if step:
        state = _state(model, optimizer)
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, checkpoint_id=folder / f"step-{step}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step
