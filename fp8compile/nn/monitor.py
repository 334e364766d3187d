"""Monitor: statistics of the operands of FP8 layers, from inside of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fp8compile._compat import is_dtensor
from fp8compile.nn.linear import Linear
from fp8compile.ops.layer.observe import Observer
from fp8compile.ops.layer.statistics import NUMEL, STATISTICS, columns_of, totals_of
from fp8compile.quantizers.recipe import SLOTS

__all__ = ["Monitor"]

Reading = dict[str, dict[str, dict[str, Any]]]


class Monitor:
    """Reads statistics of the operands of a model's FP8 layers, in every n-th step.

    A step in which it reads runs a second graph, whose kernels also count what the casts do. All other steps run the
    graph that the model has without a monitor. The backward writes the counts, so a step without one reads nothing.

    It takes `fp8compile.Linear` layers whose parameters are plain tensors, and numbers are those of this process. The
    first step is read.

    Args:
        model: A model with FP8 layers.
        statistics: Names, see ``docs/monitor.md``.
        every: Number of steps from one reading to the next.
        layers: Patterns of `fnmatch` that names of layers match; None for all.
        operands: The recipe's fields to return, such as ``"grad_output"``; None for all.

    Raises:
        ValueError: A statistic or operand has no such name, ``every`` is less than 1, or no layer can be observed.
        TypeError: A layer's weight is a DTensor or quantized.
    """

    def __init__(
        self,
        model: nn.Module,
        statistics: Sequence[str] = ("amax", "saturation", "underflow"),
        *,
        every: int = 100,
        layers: Sequence[str] | None = None,
        operands: Sequence[str] | None = None,
    ) -> None:
        _check_names("statistics", statistics, STATISTICS)
        _check_names("operands", operands or (), SLOTS)
        if every < 1:
            raise ValueError(f"Monitor: every is {every}; it is the number of steps to the next reading, 1 or more.")
        self._statistics, self._operands, self._every = tuple(statistics), operands or SLOTS, every
        self._layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, Linear) and any(fnmatchcase(name, each) for each in layers or ("*",))
        }
        if not self._layers:
            raise ValueError(
                "Monitor: the model has no fp8compile.Linear that the patterns of layers name. Convert it first."
            )
        for name, layer in self._layers.items():
            _check_layer(name, layer)
        totals = totals_of(self._statistics)
        self._observers = {
            name: Observer.empty(totals, 1, layer.weight.device) for name, layer in self._layers.items()
        }
        self._step = 0
        self._give(self._observers)

    def _give(self, observers: dict[str, Observer]) -> None:
        for name, layer in self._layers.items():
            layer._observer = observers.get(name)

    @property
    def is_reading(self) -> bool:
        """Whether the step that runs now is read."""
        return self._step % self._every == 0

    def step(self) -> None:
        """Say that a step has ended. Call it behind each optimizer step, after `read`."""
        self._step += 1
        if self.is_reading:
            for observer in self._observers.values():
                observer.reset()
        self._give(self._observers if self.is_reading else {})

    def read(self) -> Reading:
        """The statistics of the last step that was read, micro-batches together; this waits for the device.

        Returns:
            ``{layer: {operand: {statistic: value}}}``. An operand that stays in high precision, or that no backward
            has reached, is left out. Without names of layers, the model is the layer ``""``.
        """
        return {name: self._of_layer(observer) for name, observer in self._observers.items()}

    def scalars(self) -> dict[str, float]:
        """The same as one flat dict, ``fp8/<layer>/<operand>/<statistic>``, as loggers take it; no lists."""
        return {
            f"fp8/{layer}/{slot}/{name}": value
            for layer, slots in self.read().items()
            for slot, found in slots.items()
            for name, value in found.items()
            if not isinstance(value, list)
        }

    def remove(self) -> None:
        """Leave the model as it was without a monitor."""
        for layer in self._layers.values():
            vars(layer).pop("_observer", None)
        self._layers, self._observers = {}, {}

    def _of_layer(self, observer: Observer) -> dict[str, dict[str, Any]]:
        columns = [[total.name for total in each] for each in columns_of(observer.totals)]
        names = NUMEL, *columns[0], *columns[1]
        found: dict[str, dict[str, Any]] = {}
        both = torch.cat((observer.sums[..., 0], observer.maxima[..., 0].double()), 1)
        for slot, row in zip(SLOTS, both.tolist(), strict=True):
            totals = dict(zip(names, row, strict=True))
            if totals[NUMEL] and slot in self._operands:
                found[slot] = {name: STATISTICS[name].finish(totals) for name in self._statistics}
        return found


def _check_names(what: str, given: Sequence[str], known: Any) -> None:
    if unknown := [each for each in given if each not in known]:
        raise ValueError(f"Monitor: {what} has {', '.join(map(repr, unknown))}; it takes {', '.join(known)}.")


def _check_layer(name: str, layer: Linear) -> None:
    weight = layer._parameters.get("weight")
    if layer.is_quantized() or is_dtensor(weight) or hasattr(layer, "graph_fsdp"):
        raise TypeError(
            f"Monitor: the weight of {name!r} is spread over ranks or quantized; only layers whose weight is a plain "
            "tensor are observed. Name others by layers=, or monitor the model before it is sharded."
        )
