"""FSDP2's ``reshard_after_forward=N`` for tensors with all-gather hooks.

    forward     shards of all ranks  --all-gather--> gathered bytes --each of N ranks keeps a part-->
    backward    parts of N ranks     --all-gather--> the same gathered bytes

FSDP2 supports this only for plain tensors. Here the gathered data is cut as bytes, whatever the bytes encode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fp8compile._compat.inductor import when_imported

__all__ = ["keeps_parts_after_forward"]

Class = TypeVar("Class")
_MARK = "_fp8compile_keeps_parts"


def keeps_parts_after_forward(
    check_dim: Callable[[str, int, int], object], check_writes: Callable[[str, int, bool], object]
) -> Callable[[type[Class]], type[Class]]:
    """Class decorator that allows FSDP2's `reshard_after_forward=N` for tensors with all-gather hooks.

    Args:
        check_dim: Called with the parameter's name, N, and the dim along which it is sharded; it raises if FSDP2 can't
            put N parts together along this dim.
        check_writes: Called with the parameter's name, N, and whether the parameter was written to since its parts
            were kept; it raises if it was.
    """

    def mark(cls: type[Class]) -> type[Class]:
        setattr(cls, _MARK, (check_dim, check_writes))
        when_imported("torch.distributed.fsdp._fully_shard._fsdp_param", _extend)
        return cls

    return mark


def _is_marked(parameter: Any) -> bool:
    fewer = parameter.post_forward_mesh_info
    return fewer not in (None, parameter.mesh_info) and hasattr(parameter._sharded_local_tensor, _MARK)


def _name_and_size(parameter: Any) -> tuple[str, int]:
    return parameter._module_info.param_name, parameter.post_forward_mesh_info.shard_mesh_size


def _check_dim(parameter: Any) -> None:
    check_dim, _ = getattr(parameter._sharded_local_tensor, _MARK)
    check_dim(*_name_and_size(parameter), parameter.fsdp_placement.dim)


def _writes(parameter: Any) -> tuple[int, ...]:
    local = parameter._sharded_local_tensor
    counter = getattr(local, "write_counter", None)
    return parameter.sharded_param._version, local._version, 0 if counter is None else counter.count


@functools.cache
def _extend() -> None:
    """Patch FSDPParam to keep parts of the gathered bytes after the forward, and gather them for the backward."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

    def to_sharded_post_forward(self: Any) -> None:
        if self.is_dtensor or not _is_marked(self):  # is_dtensor: from tensor parallelism, which FSDP2 refuses here
            return theirs_to_sharded(self)
        _check_dim(self)
        fewer, self._writes_when_kept = self.post_forward_mesh_info, _writes(self)
        # the attribute in which FSDP2 keeps the part of a plain tensor, and which it frees in the backward
        self._sharded_post_forward_param_data = [
            arrived.chunk(fewer.shard_mesh_size)[fewer.shard_mesh_rank].clone() for arrived in self.all_gather_outputs
        ]
        self.to_sharded()
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD
        return None

    def init_unsharded_param(self: Any) -> None:
        extensions = getattr(self, "_extensions_data", None)
        if extensions is not None and _is_marked(self):
            if self.sharded_state == ShardedState.SHARDED:
                self._arrived = extensions.all_gather_metadata, extensions.all_gather_input_sizes
            else:
                extensions.all_gather_metadata, extensions.all_gather_input_sizes = self._arrived
        theirs_init(self)

    def all_gather_inputs(self: Any) -> list[torch.Tensor]:
        if self.sharded_state == ShardedState.SHARDED_POST_FORWARD and _is_marked(self):
            _, check_writes = getattr(self._sharded_local_tensor, _MARK)
            check_writes(*_name_and_size(self), _writes(self) != self._writes_when_kept)
            return self._sharded_post_forward_param_data
        return theirs_inputs(self)

    theirs_to_sharded, theirs_init = FSDPParam.to_sharded_post_forward, FSDPParam.init_unsharded_param
    theirs_inputs = vars(FSDPParam)["all_gather_inputs"].fget
    FSDPParam.to_sharded_post_forward = to_sharded_post_forward
    FSDPParam.init_unsharded_param = init_unsharded_param
    FSDPParam.all_gather_inputs = property(all_gather_inputs)  # type: ignore[assignment]  # FSDPParam's is a property
