"""The state of a training on disk: all that the next step depends on, and nothing else.

Batches and learning rate are functions of the step, and nothing draws random numbers after the
start, so parameters, optimizer state and step are the whole of it. Of a model that is cut over ranks a checkpoint
has whole tensors, in one file, which a kill can't leave half new.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING
from zipfile import ZipFile

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fp8compile.cli.errors import UserError
from fp8compile.cli.train.run_folder import write_atomically
from fp8compile.cli.train.tensor_parallel import placed_like, whole

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


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _placed_optimizer(state: dict[str, object], optimizer: torch.optim.Optimizer) -> dict[str, object]:
    parameters = _parameters(optimizer)
    placed = {
        number: {name: placed_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": placed}


def _check_sums(path: Path) -> None:
    """Compare the checksums that torch.save writes, which torch.load doesn't: a changed bit would train on."""
    with ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"it is damaged: its checksum is wrong, that of {damaged}")


def _check_tensors(found: dict[str, Tensor], wanted: dict[str, tuple[torch.Size, torch.dtype]], what: str) -> None:
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        names = sorted(map(str, found.keys() ^ wanted.keys())) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{what} is not that of this model: {names}")
    for name, (shape, dtype) in wanted.items():
        value = found[name]
        is_plain = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
        if not is_plain or (value.shape, value.dtype) != (shape, dtype):
            kind = f"{value.dtype} {tuple(value.shape)}" if is_plain else type(value).__name__
            raise ValueError(f"{what}: {name} is {kind}; it is a tensor of {dtype} {tuple(shape)}")


def _check_moments(state: dict[int, dict], own: dict[int, dict], parameters: list[Tensor], step: int) -> None:
    """Hold an optimizer's state against what AdamW keeps, which reads it unchecked, and the masters beside it."""
    if not isinstance(state, dict) or not state.keys() <= set(range(len(parameters))):
        raise ValueError(f"its optimizer has not the state of {len(parameters)} parameters")
    for number, parameter in enumerate(parameters):
        moments = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        shapes = dict.fromkeys(own.get(number, {}).keys() - moments.keys(), parameter.shape)
        if step:
            shapes |= moments
        found = state.get(number, {})
        wanted = {name: (shape, torch.float32) for name, shape in shapes.items()}
        _check_tensors(found, wanted, f"the optimizer's state of parameter {number}")
        if step and found["step"] != step:
            raise ValueError(f"the optimizer's state of parameter {number} is of step {found['step']}, not {step}")


def _check_options(groups: list[dict], own: list[dict], step: int) -> None:
    # the others never change; the learning rate is set before each update
    changing = {"lr": None, "master_steps": step}
    if not isinstance(groups, list) or len(groups) != len(own):
        raise ValueError(f"its optimizer has not {len(own)} groups of parameters")
    for number, (group, options) in enumerate(zip(groups, own, strict=True)):
        if not isinstance(group, dict) or group.keys() != options.keys():
            raise ValueError(f"group {number} of its optimizer has not the options {', '.join(options)}")
        for name, value in options.items():
            wanted = changing.get(name, value)
            if name != "lr" and (type(group[name]) is not type(wanted) or group[name] != wanted):
                raise ValueError(f"{name} of its optimizer's group {number} is {group[name]!r}; it is {wanted!r}")


def _check(state: object, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Refuse what is not a state of this training; a file may come from anywhere."""
    if not isinstance(state, dict) or state.keys() != {"version", "step", "model", "optimizer"}:
        raise ValueError("it is no checkpoint of fp8compile train")
    if state["version"] != VERSION:
        raise ValueError(f"version {state['version']}, this is {VERSION}")
    step = state["step"]
    if type(step) is not int or not 0 <= step <= steps:
        raise ValueError(f"step is {step!r}, of a run from 0 to {steps}")
    wanted = {plain_name(name): (value.shape, value.dtype) for name, value in model.state_dict().items()}
    _check_tensors(state["model"], wanted, "its model")
    found, own = state["optimizer"], optimizer.state_dict()
    if not isinstance(found, dict) or found.keys() != own.keys():
        raise ValueError("its optimizer is no state dict")
    _check_options(found["param_groups"], own["param_groups"], step)
    _check_moments(found["state"], own["state"], _parameters(optimizer), step)


def load_checkpoint(path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> int:
    """Put a checkpoint's state into a model and its optimizer.

    Args:
        path: The file; if it does not exist nothing is loaded.
        model: Of the sizes and the recipe that the checkpoint was made with.
        optimizer: Over the parameters of the model.
        steps: Of the run.

    Returns:
        Updates done, at most ``steps``; 0 without a checkpoint.

    Raises:
        UserError: The file is damaged or belongs to another training; nothing was loaded.
    """
    if not path.exists():
        return 0
    try:
        _check_sums(path)
        # weights_only: a checkpoint may come from anywhere, and must not run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
        _check(state, model, optimizer, steps)
        own = {plain_name(name): (name, value) for name, value in model.state_dict().items()}
        placed = {own[name][0]: placed_like(value, own[name][1]) for name, value in state["model"].items()}
        model.load_state_dict(placed)
        optimizer.load_state_dict(_placed_optimizer(state["optimizer"], optimizer))
    except Exception as error:
        raise UserError(
            f"cannot use {path}: {type(error).__name__}: {error}; deleting it starts this training over"
        ) from error
    return state["step"]
