"""The state of a training on disk: all that the next step depends on, and nothing else.

Batches and learning rate are functions of the step, and nothing draws random numbers after the
start, so parameters, optimizer state and step are the whole of it. Of a model that is cut over ranks a checkpoint
has whole tensors, in one file, which a kill can't leave half new.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_map

from fp8compile.cli.errors import UserError
from fp8compile.cli.run_folder import write_atomically
from fp8compile.cli.tensor_parallel import placed_like, whole

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_checkpoint", "plain_name", "save_checkpoint", "whole_state"]

VERSION = 1


def plain_name(name: str) -> str:
    """Return the name of a parameter without what `torch.compile` of a block adds to it."""
    return name.replace("_orig_mod.", "")


def whole_state(*, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what a checkpoint holds; of a model that is cut over ranks, all of them call this.

    Args:
        step: Updates done.
        model: Its state.
        optimizer: Likewise.
    """
    state = {
        "version": VERSION,
        "step": step,
        "model": {plain_name(name): value for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    return tree_map(whole, state)


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    """Write a checkpoint in one go: whenever the process dies, a whole one is there.

    Args:
        path: The file.
        state: Of :func:`whole_state`.

    Raises:
        UserError: It cannot be written; the previous checkpoint is intact.
    """
    # By way of memory: a writer that meets a full disk inside torch.save ends the process.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getbuffer())


def _placed_optimizer(state: dict[str, object], optimizer: torch.optim.Optimizer) -> dict[str, object]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    placed = {
        number: {name: placed_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": placed}


def load_checkpoint(path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put a checkpoint's state into a model and its optimizer.

    Args:
        path: The file; if it does not exist nothing is loaded.
        model: Of the sizes and the recipe that the checkpoint was made with.
        optimizer: Over the parameters of the model.

    Returns:
        Updates done; 0 without a checkpoint.

    Raises:
        UserError: The file is damaged or belongs to another model.
    """
    if not path.exists():
        return 0
    try:
        # weights_only: a checkpoint may come from anywhere, and must not run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["version"] != VERSION:
            raise ValueError(f"version {state['version']}, this is {VERSION}")
        own = {plain_name(name): (name, value) for name, value in model.state_dict().items()}
        if own.keys() != state["model"].keys():
            raise ValueError(
                f"its parameters are not those of this model: {sorted(own.keys() ^ state['model'].keys())}"
            )
        placed = {own[name][0]: placed_like(value, own[name][1]) for name, value in state["model"].items()}
        model.load_state_dict(placed)
        optimizer.load_state_dict(_placed_optimizer(state["optimizer"], optimizer))
        return int(state["step"])
    except Exception as error:
        raise UserError(
            f"cannot use {path}: {type(error).__name__}: {error}; deleting it starts this training over"
        ) from error
