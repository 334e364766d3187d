"""Compare shard sizes over the ranks of a group, once, since a wrong size makes a collective hang.

The comparison is itself a collective of all ranks, so only the first call compares. If ranks compared when their sizes
change, a rank with new sizes would wait for ranks with unchanged sizes.
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
    with _compat.no_dispatch():  # keeps these numbers out of a graph that is being traced
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        every = [torch.empty_like(own) for _ in range(group.size())]
        distributed.all_gather(every, own, group=group)
        return [each.tolist() for each in every]


@_compat.constant_when_traced
def _compare_once(
    function: str, group_name: str, device: torch.device, names: tuple[str, ...], sizes: tuple[tuple[int, ...], ...]
) -> None:
    # Dynamo can't pass the group, so it passes the group's name
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
                f"{function}: ranks of the group disagree on {name}: {said}. Pass the sizes of all ranks on each of "
                f"them, {name}=(...); if omitted, all ranks must have the same size."
            )
    agreed.add(key)


def check_agreement(function: str, x: Tensor, group: ProcessGroup, **sizes: tuple[int, ...]) -> None:
    """Raise a ValueError on all ranks of a group if ranks give different ``sizes``.

    ``sizes`` maps names of arguments of ``function`` to a size for each rank; ``x`` is the sharded tensor. Only the
    first call with the same function, names and group compares; a compiled function compares while Dynamo traces it.
    Symbolic sizes, and sizes of fake and meta tensors, are not compared.
    """
    numbers = tuple([size for each in sizes.values() for size in each])
    if group.size() == 1 or x.is_meta or _compat.is_fake(x) or not all(map(_compat.is_static, numbers)):
        return
    _compare_once(function, group.group_name, x.device, tuple(sizes), tuple(sizes.values()))
