"""Ranks of a group compare what each of them is said to have, once, before they send it.

A message of another size than a rank expects raises no error: gloo ends the process, and NCCL waits for ever or reads
memory that is no part of the message. The comparison is a message too, and all ranks have to take part. So it is made
in the first call: a rank that asked again whenever its own sizes change would ask alone.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from fp8compile import _compat

__all__ = ["check_agreement"]

_AGREED: WeakKeyDictionary[ProcessGroup, set[tuple[str, ...]]] = WeakKeyDictionary()


def _of_all_ranks(numbers: list[int], group: ProcessGroup, device: torch.device) -> list[list[int]]:
    with _compat.no_dispatch():  # these numbers are no part of what is being traced
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        every = [torch.empty_like(own) for _ in range(group.size())]
        distributed.all_gather(every, own, group=group)
        return [each.tolist() for each in every]


@_compat.constant_when_traced
def _compare_once(
    function: str, group_name: str, device: torch.device, names: tuple[str, ...], sizes: tuple[tuple[int, ...], ...]
) -> None:
    # Dynamo hands over no group itself
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # names are a type of their own since 2.13
    key = (function, *names)
    agreed = _AGREED.setdefault(group, set())
    if key in agreed or distributed.get_backend(group) == "fake":  # nobody is there to ask
        return
    every = _of_all_ranks([size for each in sizes for size in each], group, device)
    for index, name in enumerate(names):
        part = slice(index * group.size(), (index + 1) * group.size())
        if any(numbers[part] != every[0][part] for numbers in every):
            said = ", ".join(f"{tuple(numbers[part])} on rank {rank}" for rank, numbers in enumerate(every))
            raise ValueError(
                f"{function}: ranks of the group disagree on {name}: {said}. Say on all of them what each one has, "
                f"{name}=(...); left out, it says that all have as much as the rank itself."
            )
    agreed.add(key)


def check_agreement(function: str, x: Tensor, group: ProcessGroup, **sizes: tuple[int, ...]) -> None:
    """Raise on all ranks of a group unless they give the same sizes; compared in a function's first call with a group.

    A compiled function compares while Dynamo traces it, so its steps send nothing more. Sizes that are symbols then
    are not compared, nor are those of fake tensors.

    Args:
        function: The name of the function that asks.
        x: The tensor that is about to be sent.
        group: The ranks. All of them call this.
        sizes: What each rank has, one entry a rank, by the name of the function's argument.

    Raises:
        ValueError: The ranks give different sizes. The text has those of each rank.
    """
    numbers = tuple([size for each in sizes.values() for size in each])
    if group.size() == 1 or x.is_meta or _compat.is_fake(x) or not all(map(_compat.is_static, numbers)):
        return
    _compare_once(function, group.group_name, x.device, tuple(sizes), tuple(sizes.values()))
