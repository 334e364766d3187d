"""Records a sample of the operands of layers' GEMMs, in one forward and backward of a model.

For the run, the layers are converted to FP8, because all FP8 layers call one known function, whatever library their
class is from. A function mode intercepts these calls, records their operands and multiplies in high precision, so that
the model computes the same as unconverted. The mode is active whenever a layer runs, also if activation
checkpointing runs the layer again in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8compile import recipes
from fp8compile.nn import grouped_linear, linear
from fp8compile.nn.convertible.convertible_layers import go_back, put_in_float8
from fp8compile.nn.layer.functional import in_dtype_of_autocast
from fp8compile.testing.numerics.model_calls import Loss, loss_of, run_aside

__all__ = ["LayerCall", "record_calls"]

ROWS_TOGETHER = 128  # rows are drawn in runs of this length, the longest block along tokens of the ready recipes
LEAST_OF_GROUP = 32  # rows that are taken of each group, if it has them


@dataclass
class LayerCall:
    """One call of a layer, with the operands of its GEMMs.

    Attributes:
        x: (R, K), the R sampled rows of the input with K features.
        weight: (N, K) for N output features; (E, N, K) with E groups (experts).
        ends: (E,) int32, the end offsets of the groups among the sampled rows; None without groups.
        rows: Number of rows that the layer multiplied.
        needs_x: Whether the layer computes the input's gradient.
        needs_weight: Whether the layer computes the weight's gradient.
        grad_output: (R, N), the sampled rows of the output's gradient; None if no gradient reached the output.
        filled: Number of groups that have rows; 1 without groups.
    """

    x: Tensor
    weight: Tensor
    ends: Tensor | None
    rows: int
    needs_x: bool
    needs_weight: bool
    grad_output: Tensor | None = None
    filled: int = 1


@dataclass
class _Awaited:
    call: LayerCall
    edge: GradientEdge
    sample: Tensor


def _runs(rows: int, wanted: int, device: torch.device) -> Tensor:
    """Return indices of about ``wanted`` of ``rows`` rows, in evenly spaced runs of consecutive rows."""
    if rows <= wanted:
        return torch.arange(rows, device=device)
    length = min(ROWS_TOGETHER, wanted)
    count = max(1, wanted // length)
    starts = [number * (rows - length) // max(1, count - 1) for number in range(count)] if count > 1 else [0]
    return torch.cat([torch.arange(start, start + length, device=device) for start in starts]).unique()


def _runs_of_groups(ends: list[int], wanted: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return indices of about ``wanted`` sampled rows, and the groups' ends among the sampled rows.

    ``ends`` has the end of each group among all rows.
    """
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    filled = max(1, sum(size > 0 for size in sizes))
    each = max(LEAST_OF_GROUP, wanted // filled)
    taken: list[Tensor] = []
    own: list[int] = []
    for size, end in zip(sizes, ends, strict=True):
        taken.append(end - size + _runs(size, each, device))
        own.append((own[-1] if own else 0) + len(taken[-1]))
    return torch.cat(taken), own


def _by_groups(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    parts, start = [], 0
    for group, end in enumerate(offsets.tolist()):
        parts.append(functional.linear(x[start:end], weight[group], None if bias is None else bias[group]))
        start = end
    parts.append(x.new_zeros(x.shape[0] - start, weight.shape[1]))
    return torch.cat(parts)


@dataclass
class _Listening(TorchFunctionMode):
    """Function mode that records the calls of layers, and computes their GEMMs in high precision.

    Each layer has a recipe object of its own, whose id identifies the layer of a call.
    """

    names: Mapping[int, str]
    sample: int
    records: bool = True
    calls: dict[str, list[LayerCall]] = field(default_factory=dict)
    awaited: list[_Awaited] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (linear, grouped_linear) or id(kwargs.get("recipe")) not in self.names:
            return func(*args, **kwargs)
        x, weight, *rest = args
        offsets, bias = (None, rest[0]) if func is linear else rest[:2]
        return self._multiplied(self.names[id(kwargs["recipe"])], x, weight, offsets, bias)

    def _multiplied(self, name: str, x: Tensor, weight: Tensor, offsets: Tensor | None, bias: Tensor | None) -> Tensor:
        given = in_dtype_of_autocast("advise", {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})})
        x, weight, bias = given["x"], given["weight"], given.get("bias")
        y = functional.linear(x, weight, bias) if offsets is None else _by_groups(x, weight, offsets, bias)
        if self.records:
            self._record(name, x, weight, offsets, y)
        return y

    def _record(self, name: str, x: Tensor, weight: Tensor, offsets: Tensor | None, y: Tensor) -> None:
        rows, ends, filled = x.detach().reshape(-1, x.shape[-1]), None, 1
        if offsets is None:
            sample, total = _runs(rows.shape[0], self.sample, x.device), rows.shape[0]
        else:
            all_ends = offsets.tolist()
            sample, own = _runs_of_groups(all_ends, self.sample, x.device)
            total, filled = all_ends[-1], len({*all_ends} - {0})
            ends = torch.tensor(own, dtype=torch.int32, device=x.device)
        call = LayerCall(
            x=rows[sample], weight=weight.detach(), ends=ends, rows=total, needs_x=x.requires_grad,
            needs_weight=weight.requires_grad, filled=filled,
        )  # fmt: skip
        self.calls.setdefault(name, []).append(call)
        if y.requires_grad:
            self.awaited.append(_Awaited(call, get_gradient_edge(y), sample))

    def finish(self, loss: Tensor) -> None:
        """Run the backward of ``loss`` down to the outputs of layers, and keep the sampled rows of gradients.

        No gradient of a parameter is computed.
        """
        self.records = False  # a checkpointed region runs its forward again
        edges = [each.edge for each in self.awaited]
        found = torch.autograd.grad(loss, edges, allow_unused=True) if edges else ()
        for each, grad in zip(self.awaited, found, strict=True):
            if grad is not None:
                each.call.grad_output = grad.reshape(-1, grad.shape[-1])[each.sample]
        self.awaited.clear()


@contextmanager
def _while_layers_run(layers: Mapping[str, nn.Module], mode: TorchFunctionMode) -> Iterator[None]:
    def enter(*_: Any) -> None:
        mode.__enter__()

    def leave(*_: Any) -> None:
        mode.__exit__(None, None, None)

    handles = []
    for layer in layers.values():
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _in_float8(layers: Mapping[str, nn.Module]) -> Iterator[dict[int, str]]:
    """Context in which layers are converted to FP8; yields each layer's name by the ``id`` of its recipe."""
    tags = {name: replace(recipes.rowwise()) for name in layers}
    changed = []
    try:
        for name, layer in layers.items():
            put_in_float8(layer, tags[name], None)
            changed.append(layer)
        yield {id(tag): name for name, tag in tags.items()}
    finally:
        for layer in changed:
            go_back(layer)


def record_calls(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layers: Mapping[str, nn.Module],
    *,
    loss: Loss | None,
    sample: int,
) -> dict[str, list[LayerCall]]:
    """Run a model forward and backward in high precision, and record the operands of layers' GEMMs.

    Args:
        model: The model; restored afterwards.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
        layers: The layers to record, none of them converted.
        loss: Function of the output that returns the scalar to differentiate, as in `advise`.
        sample: Number of rows that are kept of each call.

    Returns:
        The recorded calls by layer name.
    """
    with run_aside(model, (args, kwargs)), _in_float8(layers) as names:
        listening = _Listening(names, sample)
        with _while_layers_run(layers, listening):
            listening.finish(loss_of("advise", model(*args, **kwargs), loss))
    return listening.calls
