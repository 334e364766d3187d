"""Find the first operand with a NaN or an infinity, its layer and its rank.

a step that is read    counts of all layers and ranks --one gather--> memory of the host, without waiting
the step after it      the host looks at the counts
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8compile.monitor.definitions import NUMEL, names_of_columns
from fp8compile.monitor.observe import Observer
from fp8compile.monitor.statistics_over_ranks import num_ranks
from fp8compile.quantizers import TENSORS
from fp8compile.quantizers.recipe import ROLES

__all__ = ["NonFinite", "NonFiniteError", "is_finite_on_all_ranks"]

FORWARD = tuple(role for role in ROLES if role not in TENSORS["grad_output"])


class NonFiniteError(FloatingPointError):
    """Raised by `fp8compile.Monitor` if an operand, or the loss, is NaN or infinite."""


class PendingCounts(NamedTuple):
    """Counts of elements that are not finite, while they are copied to the host.

    Attributes:
        step: The step whose statistics were read.
        matrices: The layers of all ranks, in the order of ``counts``, and the number of matrices of each layer.
        order: Names of these layers in the order in which they run; layers of other ranks come last.
        counts: (ranks, layers, operands, 2, E): for each of E matrices, the number of elements, and how many of them
            are not finite.
        arrived: CUDA event at which the counts are on the host; None if they are there.
    """

    step: int
    matrices: dict[str, int]
    order: list[str]
    counts: Tensor
    arrived: Any


class NonFinite:
    """Looks for the first operand with a NaN or an infinity, without making the host wait for the device.

    ``totals`` are the names of the sums in a statistics buffer; one of these names is ``"nonfinite"``.
    """

    def __init__(self, totals: str) -> None:
        names = names_of_columns(totals)
        self._columns = [names.index(NUMEL), names.index("nonfinite")]
        self._totals = totals
        self._pending: PendingCounts | None = None

    def send(self, step: int, observers: Mapping[str, Observer], matrices: Mapping[str, int]) -> None:
        """Gather all ranks' counts of elements that are not finite, and start their copy to the host.

        ``observers`` are the statistics buffers of this rank's layers, in the order in which the layers run.
        ``matrices`` has the number of matrices of each layer of all ranks.
        """
        like = next(iter(observers.values()))
        most = max(1, *matrices.values())
        parts = []
        for name in matrices:  # the same order on all ranks
            found = observers.get(name)
            own = like.sums.new_zeros(len(ROLES), 2, most)
            if found is not None:
                own[..., : found.sums.shape[2]] = found.sums[:, self._columns]
            parts.append(own)
        counts = torch.stack(parts).unsqueeze(0)
        if num_ranks() > 1:
            gathered = counts.new_empty((num_ranks(), *counts.shape[1:]))
            dist.all_gather_into_tensor(gathered, counts)
            counts = gathered
        order = [*observers, *(name for name in matrices if name not in observers)]
        self._pending = PendingCounts(step, dict(matrices), order, *_to_host(counts))

    def raise_found(self) -> None:
        """Raise a `NonFiniteError` if the counts that `send` gathered have an element that is not finite."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if pending.arrived is not None:
            pending.arrived.synchronize()
        forward = [ROLES.index(role) for role in FORWARD]
        backward = [ROLES.index(role) for role in ROLES if role not in FORWARD]
        order = [(name, role) for name in pending.order for role in forward]
        order += [(name, role) for name in reversed(pending.order) for role in backward]
        rows = {name: row for row, name in enumerate(pending.matrices)}
        for name, role in order:
            numbers = pending.counts[:, rows[name], role]  # (ranks, 2, E)
            places = (numbers[:, 1] > 0).nonzero().tolist()
            if not places:
                continue
            rank, expert = places[0]
            size, count = numbers[rank, :, expert].tolist()
            others = sorted({each for each, _ in places} - {rank})
            layer = f"{name}.{expert}" if pending.matrices[name] else name
            raise NonFiniteError(
                f"Monitor: step {pending.step}, rank {rank}: {layer or 'the model'}, {ROLES[role]}: {int(count)} of "
                f"{int(size)} elements are NaN or infinite. No operand before it, in the order in which layers run, "
                f"has any{f'; ranks {others} also have NaN or infinite elements in this operand' if others else ''}."
            )


def _to_host(counts: Tensor) -> tuple[Tensor, Any]:
    if counts.device.type != "cuda":
        return counts.cpu(), None
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def is_finite_on_all_ranks(loss: Tensor) -> bool:
    """Return whether ``loss`` is finite on all ranks; this waits for the device."""
    found = (~torch.isfinite(loss.detach())).any().to(torch.int32)
    if num_ranks() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return not bool(found)
