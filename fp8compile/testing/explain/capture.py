"""Records a model's graphs, each with its input tensors, among which are the model's parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import fx, nn

from fp8compile.testing.graphs.recording import KeptGraph, Recording
from fp8compile.testing.graphs.report import Call, GraphReport, examined

__all__ = ["Recorded", "record", "reported"]


@dataclass(frozen=True)
class Recorded:
    """A compiled graph, and the tensors that its first call passed as inputs."""

    kept: KeptGraph
    inputs: Sequence[Any]


class _Watching(Recording):
    """Backend that records graphs, and the input tensors of each graph's first call."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, Sequence[Any]] = {}

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = super().__call__(graph, inputs)
        name = self.graphs[-1].compile_id

        def call(*given: Any) -> Any:
            self.inputs.setdefault(name, given)
            return run(*given)

        return call

    def recorded(self, number: int) -> list[Recorded]:
        """The first ``number`` graphs, each with the input tensors of its first call."""
        return [Recorded(kept, self.inputs.get(kept.compile_id, ())) for kept in self.graphs[:number]]


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Recorded]:
    """Compile a model, forward and backward, and call it once with these arguments.

    Returns:
        The model's graphs; one if there is no graph break.
    """
    watching = _Watching()
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        torch._dynamo.config.patch(suppress_errors=False),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
    ):
        warnings.filterwarnings("ignore", module=r"torch\._dynamo")  # warnings about breaks; the report has those
        torch.compile(model, backend=watching, dynamic=False)(*args, **kwargs)
    torch._dynamo.reset()
    return watching.recorded(len(watching.graphs))


def reported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[GraphReport, list[Recorded]]:
    """Compile a model, forward and backward, and call it twice with the same arguments.

    Returns:
        The report on both calls, and the graphs of the first one.
    """
    watching = _Watching()
    calls = [Call(args, kwargs, name=name) for name in ("first", "the same again")]
    report = examined(watching, model, calls, backward=True)
    if report.breaks:  # sizes of what runs after a break may be symbols, as they change from frame to frame
        return report, record(model, args, kwargs)
    return report, watching.recorded(report.calls[0].graphs)
