"""How many bytes of tensors are alive."""

from __future__ import annotations

import gc

import torch
from torch import nn

from fp8compile.parallel.fsdp2.sharded_weight import ShardedWeight

__all__ = ["bytes_since", "living"]


def living() -> dict[int, torch.UntypedStorage]:
    """The memory of every tensor that lives, by its address; as long as the answer is kept, all of it stays."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        # inner tensors of subclasses are met too, and a `ShardedWeight` has none; others may be sparse, or of a graph
        # that a compiler has traced, and then have no memory
        is_plain = type(each) in (torch.Tensor, nn.Parameter) or isinstance(each, ShardedWeight)
        if is_plain and each.layout == torch.strided and not torch._is_functional_tensor(each):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


def bytes_since(before: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of the tensors that live and did not when `living` gave the answer; what died since does not count."""
    return sum(storage.nbytes() for address, storage in living().items() if address not in before)
