"""Emulates functional collectives; tensors of other ranks are computed from this rank's tensor.

The tensor of rank ``r`` is this rank's tensor with elements rotated by ``r`` minus this rank's number. So ranks have
different values, and generated code and its reference get the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["MESSAGES", "message"]


def _ranks(group: Any) -> tuple[int, int]:
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group
    found = resolve(group) if isinstance(group, str) else group
    return found.size(), found.rank()


def _of_rank(x: Tensor, other: int) -> Tensor:
    """Return the emulated tensor of another rank: ``x``, this rank's tensor, with elements rotated by ``other``."""
    integers = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    return integers.flatten().roll(other).view(x.shape).view(x.dtype)


def _of_all(x: Tensor, group: Any) -> list[Tensor]:
    size, rank = _ranks(group)
    return [x.clone() if each == rank else _of_rank(x, each - rank) for each in range(size)]


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "avg": lambda x: x.mean(0, dtype=x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}


def _reduced(x: Tensor, reduction: str, group: Any) -> Tensor:
    if reduction not in REDUCTIONS:
        raise NotImplementedError(
            f"run_gpu_program: the reduction {reduction!r} between ranks is not supported; supported are "
            f"{', '.join(map(repr, REDUCTIONS))}."
        )
    return REDUCTIONS[reduction](torch.stack(_of_all(x, group)))


def _gathered(x: Tensor, size: int, group: Any) -> Tensor:
    return torch.cat(_of_all(x, group))


def _scattered(x: Tensor, reduction: str, size: int, group: Any) -> Tensor:
    return _reduced(x, reduction, group).chunk(size)[_ranks(group)[1]].contiguous()


def _exchanged(x: Tensor, output_sizes: list[int], input_sizes: list[int], group: Any) -> Tensor:
    rank = _ranks(group)[1]
    if len(set(output_sizes)) > 1 or list(output_sizes) != list(input_sizes):
        raise NotImplementedError(
            f"run_gpu_program: all_to_all of sizes {input_sizes} to {output_sizes} is not supported; all sizes of "
            "inputs and outputs must be equal."
        )
    return torch.cat([each.split(input_sizes)[rank] for each in _of_all(x, group)])


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args: x.copy_(function(x, *args))


MESSAGES: dict[str, Callable[..., Tensor]] = {
    "all_reduce": _reduced,
    "all_reduce_": _in_place(_reduced),
    "all_gather_into_tensor": _gathered,
    "all_gather_into_tensor_out": lambda x, size, group, *, out: out.copy_(_gathered(x, size, group)),
    "reduce_scatter_tensor": _scattered,
    "all_to_all_single": _exchanged,
    "broadcast": lambda x, source, group: _of_all(x, group)[source],
    "wait_tensor": lambda x: x,
    "_wrap_tensor_autograd": lambda x: x,
}


def message(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the result of a functional collective on this rank.

    Raises:
        NotImplementedError: The collective isn't known here.
    """
    name = op._schema.name.partition("::")[2]
    if name not in MESSAGES:
        raise NotImplementedError(
            f"run_gpu_program: collective {op} is not supported; supported are {', '.join(MESSAGES)}."
        )
    return MESSAGES[name](*args, **kwargs)
