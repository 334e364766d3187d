"""Restores a module's state after a run that only served a report."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["kept_state"]


def _put_back(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad(), torch.inference_mode(mode=tensor.is_inference()):
        tensor.copy_(before)


def _is_expanded(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


@contextmanager
def _buffers_kept(modules: list[nn.Module]) -> Iterator[None]:
    owned = [dict(module._buffers) for module in modules]
    found = dict.fromkeys(buffer for buffers in owned for buffer in buffers.values() if buffer is not None)
    values = [(buffer, buffer.clone()) for buffer in found if not _is_expanded(buffer)]
    try:
        yield
    finally:
        for module, buffers in zip(modules, owned, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, before in values:
            _put_back(buffer, before)


@contextmanager
def _gradients_kept(tensors: list[Tensor]) -> Iterator[None]:
    leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    gradients = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]
    try:
        yield
    finally:
        for leaf, gradient, before in gradients:
            leaf.grad = gradient
            if gradient is not None and before is not None:
                _put_back(gradient, before)


@contextmanager
def kept_state(fn: Any, arguments: Any = ()) -> Iterator[None]:
    """Context that restores a module's modes, buffers and gradients, gradients of arguments, and random states.

    Arguments that the block changes in place stay changed.

    Args:
        fn: A module. For a function, only gradients of arguments and random states are restored.
        arguments: The arguments that ``fn`` will be called with, in any nesting.
    """
    modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
    modes = [module.training for module in modules]
    parameters = list(fn.parameters()) if modules else []
    given = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    python = random.getstate()
    try:
        with torch.random.fork_rng(), _buffers_kept(modules), _gradients_kept([*parameters, *given]):
            yield
    finally:
        random.setstate(python)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
