"""Tells torchtitan, and FP8 layers, how delayed-scaling states are distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import spmd_types as spmd
import torch.distributed as dist
from torch import nn
from torchtitan.distributed.parallel_dims import ParallelDims, SpmdLayout

from fp8compile.nn import Linear
from fp8compile.nn.layer.linear import STATE

__all__ = ["declare_states", "share_states"]


def _with_state(model: nn.Module) -> Iterator[Linear]:
    for module in model.modules():
        if isinstance(module, Linear) and module.delayed_state() is not None:
            yield module


def declare_states(model: nn.Module) -> None:
    """Declare each layer's delayed-scaling state as replicated in the layer's torchtitan sharding config."""
    for layer in _with_state(model):
        sharding: Any = layer._sharding_config
        if sharding is not None:
            everywhere = SpmdLayout(dict.fromkeys(sharding.state_shardings["weight"].axes(), spmd.R))
            states = {**sharding.state_shardings, **dict.fromkeys(STATE, everywhere)}
            layer._sharding_config = replace(sharding, state_shardings=states)


def _group(parallel_dims: ParallelDims) -> dist.ProcessGroup | None:
    """Return the process group over which amaxes are reduced: the loss mesh's, or None without a loss mesh.

    With spmd_types and tensor parallelism: WORLD.
    """
    if parallel_dims.spmd_backend != "spmd_types" or not parallel_dims.tp_enabled:
        mesh = parallel_dims.get_optional_mesh("loss")
        return None if mesh is None else mesh.get_group()
    if parallel_dims.pp_enabled:
        raise ValueError(
            "delayed scaling with tensor parallelism and pipeline parallelism is not supported with spmd_types, "
            "because torchtitan has no process group of exactly the ranks of one stage. Use "
            "parallelism.spmd_backend='partial_dtensor', or a recipe with current scaling."
        )
    return dist.group.WORLD


def share_states(model: nn.Module, parallel_dims: ParallelDims) -> None:
    """Make delayed scaling reduce amaxes over all ranks that have a part of the same tensor.

    Call this on a built model, before the model is parallelized.

    Raises:
        ValueError: A layer has delayed scaling, ``spmd_backend`` is spmd_types, and tensor and pipeline parallelism
            are both enabled.
    """
    layers = list(_with_state(model))
    group = _group(parallel_dims) if layers else None
    for layer in layers:
        layer.amax_group = None if group is None else group.group_name
