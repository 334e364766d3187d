"""A warning at the first forward of a model whose weights FSDP2 was to gather as codes, and never got."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fp8compile._compat import constant_when_traced, is_fsdp_managed

__all__ = ["MARK", "warn_if_not_sharded"]

MARK = "_float8_gather"  # on a layer: which call of fsdp_float8_all_gather, by number, it belongs to
NOT_SHARDED = (
    "fsdp_float8_all_gather was called for this model, and fully_shard was not: its weights are not sharded, and no "
    "codes travel. Call fully_shard before the first forward, or leave out fsdp_float8_all_gather. (Hugging Face's "
    "Trainer falls back to DDP without a GPU, and if `fsdp` is not set.)"
)
warned: set[int] = set()  # numbers of calls


@constant_when_traced  # what it looks at and changes is no part of a graph
def _warn(number: int) -> None:
    distributed = torch.distributed
    if number in warned or torch.compiler.is_exporting() or not distributed.is_available():
        return
    # one process has nothing to gather, with fully_shard or without
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        warned.add(number)
        warnings.warn(NOT_SHARDED, stacklevel=4)


def warn_if_not_sharded(module: nn.Module) -> None:
    """Warn, once for each call of `fsdp_float8_all_gather`, in a forward of a layer that FSDP doesn't manage.

    Several processes are needed to warn: one has nothing to gather. Export and passes of shapes alone are silent.
    """
    marks = module.__dict__
    parameters: dict[str, Any] = module._parameters
    if MARK in marks and not is_fsdp_managed(module) and not next(iter(parameters.values())).is_meta:
        _warn(marks[MARK])
