"""Refuse to replace parameters whose gradients DistributedDataParallel reduces."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel as DDP

__all__ = ["check_not_in_ddp"]


def _is_in_ddp(ids: set[int]) -> bool:
    # a module does not know its wrapper, and replicate() wraps the parameters, not the module
    return any(
        id(parameter) in ids
        for each in gc.get_objects()
        if issubclass(type(each), DDP) and hasattr(each, "reducer")
        for parameter in each.parameters()
    )


def check_not_in_ddp(function: str, weights: Iterable[Tensor]) -> None:
    """Raise a ValueError if DDP reduces the gradient of one of ``weights``, which ``function`` would replace."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    ids = {id(weight) for weight in weights}
    if _is_in_ddp(ids):
        gc.collect()  # a wrapper that nobody uses may wait for it
    if _is_in_ddp(ids):
        raise ValueError(
            f"{function}: the model or a part of it is already wrapped in DistributedDataParallel, which would not "
            "reduce the gradients of new parameters. Wrap the model only after this call: first call "
            "fp8compile.parallel.broadcast_parameters(model), then DistributedDataParallel(model, init_sync=False)."
        )
