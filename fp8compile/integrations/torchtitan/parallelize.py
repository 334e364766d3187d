"""Wrapper of torchtitan's ``parallelize_fn`` that calls `fsdp_float8_all_gather` before activation checkpointing.

A ``parallelize_fn`` takes these steps, and gets activation checkpointing as an object with a method ``apply``. The
wrapper replaces that object by one whose ``apply`` first calls `fsdp_float8_all_gather`:

    tensor and expert parallel -> activation checkpointing -> torch.compile of each block -> fully_shard
                                  ^ fsdp_float8_all_gather
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC
from torchtitan.distributed.parallel_dims import ParallelDims

from fp8compile.integrations.torchtitan.states import share_states
from fp8compile.nn import Linear
from fp8compile.ops import GEMM_OPS
from fp8compile.parallel import fsdp_float8_all_gather

__all__ = ["CheckpointingConfig", "Float8Parallelize"]

OWN_SCALES = (
    "torchtitan's spmd_types backend passes plain local tensors to each layer. With tensor parallelism, each rank "
    "then computes the scales of its own shard, while DTensors use one scale for all ranks, so losses are not "
    "bit-identical to those of one rank. For one scale on all ranks, use "
    "parallelism.spmd_backend='partial_dtensor', or recipes.delayed()."
)
NO_CODES = (
    "passes FSDP2 a mesh with dims in addition to those of FSDP2, so weights can't be all-gathered in FP8. Use "
    "parallelism.spmd_backend='partial_dtensor', or set fsdp_float8_all_gather=False to all-gather weights in "
    "param_dtype."
)


@dataclass(frozen=True)
class _BeforeCompile:
    """Object whose ``apply(model)`` calls `fsdp_float8_all_gather`, if ``gather``, then torchtitan's ``policy``."""

    policy: ActivationCheckpointing | None
    gather: bool

    def apply(self, model: nn.Module) -> None:
        if self.gather:
            fsdp_float8_all_gather(model, checkpointed=self.policy is not None)
        if self.policy is not None:
            self.policy.apply(model)


@dataclass(frozen=True)
class CheckpointingConfig:
    """Config of activation checkpointing for FP8 models; ``SelectiveAC`` also saves FP8 GEMM results.

    ``plain`` is the user's config, or None; ``gather`` tells whether FSDP2 will gather weights as codes.
    """

    plain: ActivationCheckpointing.Config | None
    gather: bool = False

    def build(self, **kwargs: Any) -> _BeforeCompile:
        """Build the object on which torchtitan calls ``apply(model)``."""
        policy = None if self.plain is None else self.plain.build(**kwargs)
        if isinstance(policy, SelectiveAC):
            own = policy.get_save_ops  # changed on this object, because the config belongs to the user
            policy.get_save_ops = lambda: {*own(), *GEMM_OPS}
        return _BeforeCompile(policy, self.gather)


def _say_whose_scales(model: nn.Module, parallel_dims: ParallelDims) -> None:
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    plain_shards = parallel_dims.spmd_backend == "spmd_types" and parallel_dims.tp_enabled
    if plain_shards and any(layer.delayed_state() is None for layer in layers):
        warnings.warn(OWN_SCALES, stacklevel=3)


@dataclass(frozen=True)
class Float8Parallelize:
    """A ``parallelize_fn`` for an FP8 model that extends the model's own function in three ways.

    - With delayed scaling, all ranks with shards of the same tensors share one scaling state.
    - ``SelectiveAC`` also saves the results of FP8 layers (``fp8compile.ops.GEMM_OPS``).
    - If ``fsdp_float8_all_gather`` is True, FSDP2 all-gathers weights in FP8.

    Attributes:
        parallelize_fn: The model's own ``parallelize_fn``.
        fsdp_float8_all_gather: Whether FSDP2 all-gathers weights in FP8.
    """

    parallelize_fn: Callable[..., nn.Module]
    fsdp_float8_all_gather: bool = False

    def __call__(self, model: nn.Module, *, parallel_dims: ParallelDims, ac_config: Any, **kwargs: Any) -> nn.Module:
        """Parallelize a model and return it; torchtitan calls this with the run's parallel dims and configs.

        Raises:
            ValueError: ``fsdp_float8_all_gather`` is set, but torchtitan's ``spmd_backend`` is not partial_dtensor; or
                delayed scaling is combined with tensor and pipeline parallelism.
        """
        gather = self.fsdp_float8_all_gather and parallel_dims.fsdp_enabled
        if gather and parallel_dims.spmd_backend != "partial_dtensor":
            raise ValueError(
                f"fsdp_float8_all_gather: parallelism.spmd_backend={parallel_dims.spmd_backend!r} {NO_CODES}"
            )
        _say_whose_scales(model, parallel_dims)
        share_states(model, parallel_dims)
        checkpointing = CheckpointingConfig(ac_config, gather)
        return self.parallelize_fn(model, parallel_dims=parallel_dims, ac_config=checkpointing, **kwargs)
