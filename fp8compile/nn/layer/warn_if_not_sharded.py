"""Warn in the first forward if `fsdp_float8_all_gather` was called and `fully_shard` was not."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fp8compile._compat import constant_when_traced, is_fsdp_managed

__all__ = ["MARK", "warn_if_not_sharded"]

MARK = "_float8_gather"  # attribute of a layer: the number of the call of fsdp_float8_all_gather that prepared it
NOT_SHARDED = (
    "fsdp_float8_all_gather was called for this model, but fully_shard was not, so its weights are neither sharded "
    "nor all-gathered in FP8. Call fully_shard before the first forward, or omit fsdp_float8_all_gather. (Hugging "
    "Face's Trainer falls back to DDP without a GPU, and if `fsdp` is not set.)"
)
warned: set[int] = set()  # numbers of the calls that were warned about


@constant_when_traced  # keeps what it reads and changes out of a graph
def _warn(number: int) -> None:
    distributed = torch.distributed
    if number in warned or torch.compiler.is_exporting() or not distributed.is_available():
        return
    # one process has nothing to gather, with fully_shard or without
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        warned.add(number)
        warnings.warn(NOT_SHARDED, stacklevel=4)


def warn_if_not_sharded(module: nn.Module) -> None:
    """Warn if `fsdp_float8_all_gather` has prepared a layer, ``module``, that FSDP2 does not manage.

    It warns once for each call of `fsdp_float8_all_gather`; never with one process, in export or on the meta device.
    """
    marks = module.__dict__
    parameters: dict[str, Any] = module._parameters
    if MARK in marks and not is_fsdp_managed(module) and not next(iter(parameters.values())).is_meta:
        _warn(marks[MARK])
