"""How many bytes of tensors are alive."""

from __future__ import annotations

import gc

import torch
from torch import nn

__all__ = ["bytes_since", "living"]


def living() -> dict[int, torch.UntypedStorage]:
    """The memory of every tensor that lives, by its address; as long as the answer is kept, all of it stays."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        # inner tensors of subclasses are met too; others may be sparse, or of a graph that a compiler has traced, and
        # then have no memory
        is_plain = type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided
        if is_plain and not torch._is_functional_tensor(each):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


def bytes_since(before: dict[int, torch.UntypedStorage]) -> int:
    """Bytes of the tensors that live and did not when `living` gave the answer; what died since does not count."""
    return sum(storage.nbytes() for address, storage in living().items() if address not in before)
