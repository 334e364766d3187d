"""Compile a model, and count what the compiler does, by Dynamo's own counters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from fp8compile.cli.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fp8compile.cli.train.config import TrainConfig

__all__ = ["CountedModel", "check_backend"]


def check_backend(name: str) -> None:
    """Check the name of a backend of ``torch.compile``.

    Args:
        name: As typed.

    Raises:
        UserError: PyTorch has no such backend.
    """
    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        raise UserError(f"--backend {name}: PyTorch has no such backend; it has {', '.join(known)}")


def _dynamo_counter(group: str, name: str | None = None) -> int:
    counter = torch._dynamo.utils.counters[group]
    return sum(counter.values()) if name is None else counter[name]


class CountedModel:
    """A model, compiled if asked, that knows how many graphs each kind of call cost.

    Attributes:
        graphs: Graphs compiled by the kind of call that needed them.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """Prepare the compilation; the first call of each kind does it.

        Args:
            model: To call; of stock FSDP2 its blocks are compiled, each by itself.
            config: The run's configuration.
        """
        self.is_compiled = config.compile
        self.graphs: Counter[str] = Counter()
        # Two models share their code, and Dynamo keeps its graphs by code.
        torch._dynamo.reset()
        self._breaks_before = _dynamo_counter("graph_break")
        # Three shapes at most (train, eval, last eval batch): a graph for each beats one for all.
        self._call = (
            torch.compile(model, fullgraph=True, dynamic=False, backend=config.backend)
            if config.compile and not config.blocks_apart
            else model
        )

    def __call__(self, kind: str, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the loss; graphs compiled on the way count for ``kind``."""
        before = _dynamo_counter("stats", "unique_graphs")
        loss = self._call(tokens_BT, targets_BT)
        made = _dynamo_counter("stats", "unique_graphs") - before
        if made:
            self.graphs[kind] += made
        return loss

    @property
    def graph_breaks(self) -> int:
        """Graph breaks since this model was compiled; ``fullgraph=True`` makes each an error."""
        return _dynamo_counter("graph_break") - self._breaks_before

    @property
    def recompiles(self) -> int:
        """Graphs beyond the first of each kind of call."""
        return sum(count - 1 for count in self.graphs.values())
