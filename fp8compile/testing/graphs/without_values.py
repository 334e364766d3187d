"""Runs a module without computing: parameters, buffers and arguments become fake tensors.

A fake tensor has a shape and a dtype, but no values and no memory. So a report that reads only graphs also works
for a model on the meta device, and takes no longer for formats that a CPU emulates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, maybe_get_fake_mode
from torch.utils import _pytree as pytree

from fp8compile.testing.graphs.compiler_log import one_line
from fp8compile.testing.graphs.kept_state import kept_state

__all__ = ["on_meta", "values_needed", "without_values"]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def on_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer has no real values, because it is on the meta device or fake."""
    return any(tensor.is_meta or maybe_get_fake_mode(tensor) is not None for tensor in _tensors(module))


class _Exchange:
    """Maps tensors to fake tensors; a tensor in several places, such as a tied weight, gets one fake."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself, whose id would be used again

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or maybe_get_fake_mode(value) is not None:
            return value
        if id(value) not in self.made:
            self.made[id(value)] = value, self._made(value)
        return self.made[id(value)][1]

    def _made(self, value: Tensor) -> Tensor:
        if not value.is_meta:
            return self.mode.from_tensor(value, static_shapes=True)
        with self.mode:
            fake: Tensor = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
        if isinstance(value, nn.Parameter):
            return nn.Parameter(fake, requires_grad=value.requires_grad)
        return fake.requires_grad_(value.requires_grad)


def _is_fake(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


@contextmanager
def _exchanged(module: nn.Module, exchange: _Exchange) -> Iterator[None]:
    """Context in which fake tensors replace a module's parameters and buffers.

    At exit, parameters and buffers are those of before, and so are attributes that the forward set to fake tensors.
    """
    modules = list(module.modules())
    before = [(dict(each._parameters), dict(each._buffers), dict(each.__dict__)) for each in modules]
    try:
        for each, (parameters, buffers, _) in zip(modules, before, strict=True):
            each._parameters.update({name: exchange(value) for name, value in parameters.items()})
            each._buffers.update({name: exchange(value) for name, value in buffers.items()})
        yield
    finally:
        for each, (parameters, buffers, attributes) in zip(modules, before, strict=True):
            each._parameters.clear()
            each._parameters.update(parameters)
            each._buffers.clear()
            each._buffers.update(buffers)
            for name, value in list(each.__dict__.items()):
                if attributes.get(name, each) is not value and _is_fake(value):
                    each.__dict__.pop(name)
                    each.__dict__.update({name: attributes[name]} if name in attributes else {})


@contextmanager
def without_values(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Context in which a module's parameters and buffers, and every new tensor, are fake.

    Args:
        module: The module. Its tensors may be in memory, on the meta device (the fake tensors are then on the
            CPU), or fake already.
        args: Arguments of a call.
        kwargs: Keyword arguments of the call.

    Yields:
        The arguments with fake tensors in place of tensors.
    """
    leaves = [*_tensors(module), *pytree.tree_leaves((args, kwargs))]
    modes = (maybe_get_fake_mode(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    # tensors that are no parameters and no buffers stay as they are
    mode = next((each for each in modes if each is not None), None) or FakeTensorMode(allow_non_fake_inputs=True)
    exchange = _Exchange(mode)
    given: Any = pytree.tree_map(exchange, (args, kwargs))
    with _exchanged(module, exchange), mode:
        yield given


def values_needed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Call a module with fake tensors; return the reason if the call fails, else an empty text.

    The call fails if the forward reads values (``if x.sum() > 0``, ``.item()``, ``.tolist()``, ``nonzero()``), and for
    any error that a call with values would raise too.
    """
    try:
        with kept_state(module, (args, kwargs)), without_values(module, args, kwargs) as (fake_args, fake_kwargs):
            module(*fake_args, **fake_kwargs)
    except Exception as error:  # the user's code may raise anything; the caller judges it by a call with values
        return f"{type(error).__name__}: {one_line(str(error))[:300]}"
    return ""
