"""Calls a function once, and computes the gradients of its arguments and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["step"]


def _leaves(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, Tensor]:
    named = dict(fn.named_parameters()) if isinstance(fn, nn.Module) else {}
    for number, arg in enumerate(args):
        inner = pytree.tree_leaves(arg)
        single = inner == [arg] if not isinstance(arg, Tensor) else True
        for place, leaf in enumerate(inner):
            named[f"args[{number}]" if single else f"args[{number}][{place}]"] = leaf
    return {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor) and leaf.requires_grad}


def _default_grad(output: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def step(
    call: Callable[..., Any], fn: Callable[..., Any], args: Sequence[Any], grad_outputs: Sequence[Tensor] | None
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Run one forward and backward, and return outputs and gradients.

    Args:
        call: The function to call, such as ``fn`` compiled.
        fn: The function or module that has the parameters.
        args: The arguments.
        grad_outputs: A gradient for each output that requires grad; None for normal numbers from a fixed seed.

    Returns:
        The output tensors, and gradients by name of the parameters of ``fn`` and of the arguments.
    """
    outputs = tuple(leaf for leaf in pytree.tree_leaves(call(*args)) if isinstance(leaf, Tensor))
    deriving = [output for output in outputs if output.requires_grad]
    leaves = _leaves(fn, args)
    if not deriving or not leaves:
        return tuple(output.detach() for output in outputs), {}
    grads = [_default_grad(output, number) for number, output in enumerate(deriving)]
    grads = grads if grad_outputs is None else list(grad_outputs)
    found = torch.autograd.grad(deriving, list(leaves.values()), grads, allow_unused=True)
    gradients = {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
    return tuple(output.detach() for output in outputs), gradients
