"""Monitor: statistics of the operands of FP8 layers, from inside of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8compile.nn.observed import Observed
from fp8compile.nn.totals_of_ranks import agreed, over_ranks
from fp8compile.ops.layer.observe import Observer
from fp8compile.ops.layer.statistics import (
    NUMEL,
    PASSES,
    STATISTICS,
    VALUED,
    is_sum,
    names_of_columns,
    totals_of,
)
from fp8compile.quantizers import TENSORS
from fp8compile.quantizers.recipe import SLOTS

__all__ = ["Monitor"]

Reading = dict[str, dict[str, dict[str, Any]]]


class Product(NamedTuple):
    """A weight whose products are observed.

    Attributes:
        module: The module that multiplies by it.
        weight: Its name in the module.
        matrices: Number of experts; 0 if it is no stack.
        observer: The buffer of its statistics.
    """

    module: Observed
    weight: str
    matrices: int
    observer: Observer


class Monitor:
    """Reads statistics of the operands of a model's FP8 layers, in every n-th step.

    A step in which it reads runs a second graph, whose kernels also count what the casts do. All other steps run the
    graph that the model has without a monitor. The backward writes the counts, so a step without one reads nothing.
    The first step is read.

    It takes all layers that `fp8compile.convert` makes, and modules that derive from `fp8compile.nn.Observed`. Numbers
    are those of whole tensors over all ranks of the default process group. A weight that is kept as codes, or that
    FSDP2 gathers as codes, has no values: only statistics of scales and codes are read.

    Args:
        model: A model with FP8 layers.
        statistics: Names, see ``docs/monitor.md``.
        every: Number of steps from one reading to the next.
        layers: Patterns of `fnmatch` that names of layers match; None for all.
        operands: The recipe's fields to return, such as ``"grad_output"``; None for all.

    Raises:
        ValueError: A statistic or operand has no such name, ``every`` is less than 1, or no layer can be observed.
        RuntimeError: A layer is observed by another monitor.
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
        self._products = _products(model, layers or ("*",), totals_of(self._statistics))
        self._modules = list({id(each.module): each.module for each in self._products.values()}.values())
        for module in self._modules:
            if "_observers" in vars(module):
                raise RuntimeError(
                    "Monitor: the model has a monitor already. Call .remove() of that one first, or give it all "
                    "statistics."
                )
        self._step = 0
        self._matrices: dict[str, int] = {}  # the layers of all ranks, from the first reading on
        self._switch()

    @property
    def is_reading(self) -> bool:
        """Whether the step that runs now is read."""
        return self._step % self._every == 0

    def step(self) -> None:
        """Say that a step has ended. Call it after each optimizer step, after `read`."""
        self._step += 1
        if self.is_reading:
            for product in self._products.values():
                product.observer.reset()
        self._switch()

    def read(self) -> Reading:
        """The statistics of the last step that was read, micro-batches together; this waits for the device.

        If `torch.distributed` is initialized, all ranks call it: they exchange one sum and one maximum.

        Returns:
            ``{layer: {operand: {statistic: value}}}``. Each expert is a layer, ``"experts.down_proj.3"``. A converted
            model that is itself one layer is the layer ``""``. An operand that stays in high precision, or that no
            backward has reached, is left out; so are statistics of values that are not known.
        """
        found: Reading = {}
        if not self._matrices:
            own = {name: each.matrices for name, each in self._products.items()}
            self._matrices = agreed(own, {"statistics": self._statistics, "every": self._every})
        observers = {name: each.observer for name, each in self._products.items()}
        for name, (sums, maxima) in over_ranks(observers, self._matrices).items():
            both = torch.cat((sums, maxima.double()), 1)
            for matrix in range(both.shape[2]):
                layer = name if not self._is_stack(name) else f"{name}.{matrix}"
                found[layer] = self._of_layer(both[..., matrix].tolist())
        return found

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
        for module in self._modules:
            vars(module).pop("_observers", None)
        self._products, self._modules = {}, []

    def _switch(self) -> None:
        """Give layers their buffers in a step that is read, and take them away in others."""
        for module in self._modules:
            own = {each.weight: each.observer for each in self._products.values() if each.module is module}
            module._observers = own if self.is_reading else None

    @property
    def _columns(self) -> list[str]:
        return names_of_columns(totals_of(self._statistics))

    def _is_stack(self, name: str) -> bool:
        return self._matrices[name] > 0

    def _of_layer(self, rows: list[list[float]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for slot, row in zip(SLOTS, rows, strict=True):
            if slot not in self._operands:
                continue
            totals = _once(dict(zip(self._columns, row, strict=True)), slot)
            names = [name for name in self._statistics if totals[VALUED] or STATISTICS[name].of_codes()]
            if totals[NUMEL] and names:
                found[slot] = {name: STATISTICS[name].finish(totals) for name in names}
        return found


def _once(totals: dict[str, float], slot: str) -> dict[str, float]:
    """The totals of a weight as if it had been counted once, and not for each micro-batch and each replica."""
    if slot not in TENSORS["weight"] or not (passes := totals[PASSES]):
        return totals
    passes = round(passes) if abs(passes - round(passes)) < 1e-6 else passes  # it adds up parts, such as thirds
    return {name: value / passes if is_sum(name) else value for name, value in totals.items()}


def _products(model: nn.Module, patterns: Sequence[str], totals: str) -> dict[str, Product]:
    found: dict[str, Product] = {}
    known: list[str] = []
    for module_name, module in model.named_modules():
        if not isinstance(module, Observed):
            continue
        weights = module.weights_to_observe()
        for weight, matrices in weights.items():
            name = module_name if len(weights) == 1 and not matrices else ".".join(filter(None, (module_name, weight)))
            known.append(name)
            if any(fnmatchcase(name, each) for each in patterns):
                device = next(module.parameters()).device
                found[name] = Product(module, weight, matrices, Observer.empty(totals, max(matrices, 1), device))
    if not known:
        raise ValueError("Monitor: the model has no FP8 layer. Convert it by fp8compile.convert first.")
    if not found:
        raise ValueError(
            f"Monitor: no layer matches {', '.join(map(repr, patterns))}; the FP8 layers are {', '.join(known)}."
        )
    return found


def _check_names(what: str, given: Sequence[str], known: Any) -> None:
    if isinstance(given, str):
        raise TypeError(f"Monitor: {what} is {given!r}; it is a sequence of names, such as ({given!r},).")
    if unknown := [each for each in given if each not in known]:
        raise ValueError(f"Monitor: {what} has {', '.join(map(repr, unknown))}; it takes {', '.join(known)}.")
