"""Records whether autocast casts a layer's weights in forwards with gradients, and to which dtype.

    eager     each forward adds the dtype to the layer
    compiled  tracing adds it; a graph that also runs for other layers adds nothing to these

Exports and `freeze_weights` quantize in this dtype, so that they write the data that trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fp8compile._compat import autocast_dtype, constant_when_traced, local_itself
from fp8compile.nn.layer.layer_registry import CONVERTED, FORWARD_DTYPES
from fp8compile.tensor import has_codes

__all__ = ["forward_dtypes", "note_forward_dtype", "unnoted"]

IS_UNNOTED: ContextVar[bool] = ContextVar("is_unnoted", default=False)


def _add(layer: nn.Module, weight: nn.Parameter, dtype: torch.dtype | None) -> None:
    if not IS_UNNOTED.get() and not has_codes(local_itself(weight)):
        FORWARD_DTYPES[layer] = FORWARD_DTYPES.get(layer, frozenset()) | {dtype}


@constant_when_traced  # takes the weight, because a graph that takes the layer would have a guard on its identity
def _add_at_trace(weight: nn.Parameter, dtype: torch.dtype | None) -> None:
    for layer in list(CONVERTED):
        if any(each is weight for module in layer.modules() for each in module._parameters.values()):
            _add(layer, weight, dtype)


def note_forward_dtype(layer: nn.Module, name: str) -> None:
    """Record the dtype to which autocast casts a layer's weight ``name`` in a forward; nothing if grad mode is off."""
    if not torch.is_grad_enabled():
        return
    path, _, own = name.rpartition(".")
    weight: Any = (layer.get_submodule(path) if path else layer)._parameters.get(own)
    if not isinstance(weight, nn.Parameter):
        return  # it is computed in each forward
    dtype = autocast_dtype(weight)
    if torch.compiler.is_compiling():
        _add_at_trace(weight, dtype)
    elif dtype not in FORWARD_DTYPES.get(layer, ()):
        _add(layer, weight, dtype)


@contextmanager
def unnoted() -> Iterator[None]:
    """Context whose forwards are not recorded, because they are not training."""
    token = IS_UNNOTED.set(True)
    try:
        yield
    finally:
        IS_UNNOTED.reset(token)


def forward_dtypes(
    function: str, model: nn.Module, own: Mapping[nn.Module, torch.dtype], given: torch.dtype | None
) -> dict[nn.Module, torch.dtype]:
    """Return the dtype in which the forward quantizes each FP8 layer's weights, without those that are not known.

    A layer whose forward was not seen has the dtype of the others, if these agree.

    Args:
        function: The caller's name, for the texts of errors.
        model: The model.
        own: Dtype of each FP8 layer's weights without autocast.
        given: The dtype that the caller of ``function`` names for all layers; None for those that were seen.

    Raises:
        ValueError: A layer was seen in another dtype than ``given``, or in several dtypes.
    """
    names = {module: name or "the model" for name, module in model.named_modules() if module in own}
    seen = {layer: {dtype or own[layer] for dtype in FORWARD_DTYPES.get(layer, ())} for layer in names}
    for layer, dtypes in seen.items():
        text = f"the forward of {names[layer]} quantized its weight in {' and '.join(sorted(map(str, dtypes)))}"
        if given is not None and dtypes and given not in dtypes:
            raise ValueError(f"{function}: `forward_dtype` is {given}, but {text}. Omit forward_dtype.")
        if given is None and len(dtypes) > 1:
            raise ValueError(
                f"{function}: {text}, because it ran with and without autocast. Pass the dtype that training uses, "
                "such as forward_dtype=torch.bfloat16."
            )
    if given is not None:
        return dict.fromkeys(names, given)
    every = {dtype for dtypes in seen.values() for dtype in dtypes}
    found = {layer: dtypes or every for layer, dtypes in seen.items()}
    return {layer: next(iter(dtypes)) for layer, dtypes in found.items() if len(dtypes) == 1}
