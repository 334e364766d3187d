"""How many bytes of tensors are alive."""

from __future__ import annotations

import gc

import torch
from torch import nn


def live_bytes():
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided:  # other tests' may be sparse
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())
