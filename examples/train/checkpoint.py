"""Checkpoints of a training, by `torch.distributed.checkpoint`. They hold all that the next step depends on.

    RUN/checkpoint-<arm>/step-<n>/    a file for each rank, and .metadata, which is written last

That is parameters, optimizer state and step, because batches and learning rate are functions of the step, and nothing
draws random numbers after the start. If a run is killed while it writes, the folder has no .metadata and is ignored. A
checkpoint is removed only when the next one is complete.
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
    """The states of model and optimizer, with the names and shapes that a single process would have."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _folders(folder: Path) -> dict[int, Path]:
    """The folders of the complete checkpoints, by step."""
    return {int(each.parent.name.removeprefix("step-")): each.parent for each in folder.glob("step-*/.metadata")}


def last_step(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max(_folders(folder), default=0)


def save_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Write the checkpoint of a step, and remove earlier ones. All ranks call this."""
    before = _folders(folder)
    with warnings.catch_warnings(action="ignore"):  # dcp warns that there is a single process
        dcp.save(_state(model, optimizer), checkpoint_id=folder / f"step-{step}")
    if is_first():
        for other, path in before.items():
            if other != step:
                shutil.rmtree(path)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Load the newest complete checkpoint, on all ranks (of any number), and return its step; 0 if there is none."""
    step = last_step(folder)
    if step:
        state = _state(model, optimizer)
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, checkpoint_id=folder / f"step-{step}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step
