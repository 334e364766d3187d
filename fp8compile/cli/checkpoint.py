"""The state of a training on disk: all that the next step depends on, and nothing else.

Batches and learning rate are functions of the step, and nothing draws random numbers after the
start, so parameters, optimizer state and step are the whole of it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch

from fp8compile.cli.errors import UserError
from fp8compile.cli.run_folder import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_checkpoint", "save_checkpoint"]

VERSION = 1


def save_checkpoint(path: Path, *, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint in one go: whenever the process dies, a whole one is there.

    Args:
        path: The file.
        step: Updates done.
        model: Its state is saved.
        optimizer: Likewise.

    Raises:
        UserError: It cannot be written; the previous checkpoint is intact.
    """
    state = {
        "version": VERSION,
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    # By way of memory: a writer that meets a full disk inside torch.save ends the process.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getbuffer())


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
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    except Exception as error:
        raise UserError(
            f"cannot use {path}: {type(error).__name__}: {error}; deleting it starts this training over"
        ) from error
