"""Calls a model with a batch as a data loader gives it, and finds the loss in the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp8compile._compat import is_dtensor
from fp8compile.nn.check_model import check_model
from fp8compile.nn.parameter_uses.first_forward import suppress_warnings
from fp8compile.testing.graphs.kept_state import kept_state
from fp8compile.testing.graphs.report import is_compiled

__all__ = ["Loss", "arguments_of", "check_eager", "check_whole", "loss_of", "mean_square", "run_aside"]

Loss = Callable[[Any], Tensor]


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split a batch into positional and keyword arguments.

    A mapping has keyword arguments, a tuple or list has positional arguments, anything else is the only argument.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _is_loss(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def loss_of(function: str, output: Any, loss: Loss | None) -> Tensor:
    """The scalar loss from which to run the backward.

    Args:
        function: Name of the public function, for errors.
        output: What the model returned.
        loss: A function of the output; None to take the output itself, its ``loss``, or its first entry.

    Raises:
        TypeError: ``output`` has no loss, ``loss`` returns no scalar, or the loss does not require grad.
    """
    found: Any
    if loss is not None:
        found = loss(output)
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        found = output[0] if output else None
    else:
        found = getattr(output, "loss", output)
    if not _is_loss(found):
        given, value = ("the model", output) if loss is None else ("loss", found)
        of_shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise TypeError(
            f"{function}: {given} returned a {type(value).__name__}{of_shape} and not a scalar loss, which is "
            "required for gradients. Pass loss=, a function of the model's output, such as loss=lambda y: "
            "y.float().square().mean()."
        )
    if not found.requires_grad:
        raise TypeError(
            f"{function}: the loss does not require grad, so no layer gets a gradient. At least one parameter must "
            "require grad, and the loss must not be detached."
        )
    return found


def mean_square(output: Any) -> Tensor:
    """Sum of the mean squares of all floating tensors in an output, a loss for models that return none."""
    leaves = [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
    if not leaves:
        raise TypeError(
            "the model returns no floating point tensor, so no gradients can be computed. It must return a loss or "
            "another floating point tensor."
        )
    return torch.stack([each.float().square().mean() for each in leaves]).sum()


def check_eager(function: str, model: object) -> None:
    """Raise a TypeError if ``model`` is no module or is compiled; ``function`` names the caller."""
    check_model(function, model)
    assert isinstance(model, nn.Module)
    compiled = next((name or "the model" for name, each in model.named_modules() if is_compiled(each)), None)
    if compiled is not None:
        raise TypeError(
            f"{function}: {compiled} is compiled, so its layers are not called one by one. Pass the model before "
            "torch.compile."
        )


def check_whole(function: str, layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise a TypeError if parameters of these named layers are DTensors: the model has to be unsharded.

    ``function`` names the caller in the text.
    """
    for name, layer in layers:
        if any(is_dtensor(parameter) for parameter in layer.parameters()):
            raise TypeError(
                f"{function}: parameters of {name!r} are DTensors, but only unsharded models are supported. Call "
                f"{function} before sharding."
            )


@contextmanager
def run_aside(model: nn.Module, arguments: Any, seed: int | None = None) -> Iterator[None]:
    """Context that restores a model's modes, buffers and gradients, and random states at exit.

    Gradients of ``arguments`` are restored too. The backward runs in the calling thread, so that dispatch modes apply
    to it. ``seed`` seeds random numbers; None leaves their state.
    """
    with (
        kept_state(model, arguments),
        suppress_warnings(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        if seed is not None:
            torch.manual_seed(seed)
        yield
