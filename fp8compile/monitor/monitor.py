"""Monitor: statistics of the operands of FP8 layers' GEMMs, computed inside of compiled code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fp8compile.monitor.definitions import (
    NUMEL,
    PASSES,
    STATISTICS,
    VALUED,
    is_sum,
    names_of_columns,
    totals_of,
)
from fp8compile.monitor.execution_order import ExecutionOrder
from fp8compile.monitor.nonfinite import NonFinite, NonFiniteError, is_finite_on_all_ranks
from fp8compile.monitor.observe import Observer
from fp8compile.monitor.statistics_over_ranks import agreed, over_ranks, rank
from fp8compile.nn.layer.functional import check_recipe
from fp8compile.nn.layer.observed_module import Observed
from fp8compile.ops.layer.check_recipe_of_groups import check_recipe_of_groups
from fp8compile.quantizers import TENSORS, Recipe
from fp8compile.quantizers.recipe import ROLES

__all__ = ["STATISTICS", "TE_NAMES", "Monitor", "NonFiniteError", "Observed", "Reading", "flat"]

MONITORED: WeakSet[nn.Module] = WeakSet()
Reading = dict[str, dict[str, dict[str, Any]]]  # {layer: {operand: {statistic: value}}}
# names of TransformerEngine's statistics of FP8 tensors, debug/features/utils/stats_computation.py at d0067d0; those
# that end in "%" are percents of all elements
TE_NAMES = {
    "underflow": "underflows%",
    "saturation": "overflows%",
    "scale_min": "scale_inv_min",
    "scale_max": "scale_inv_max",
    "mse": "mse",
}


class Product(NamedTuple):
    """A weight of a module, and the buffers for statistics of the GEMMs with it.

    Attributes:
        module: The module that multiplies by the weight.
        weight: Name of the weight in the module.
        matrices: Number of experts; 0 if the weight is one matrix.
        observer: The buffers.
    """

    module: Observed
    weight: str
    matrices: int
    observer: Observer


class Monitor:
    """Collects statistics on the operands of a model's FP8 layers, every n steps.

    A monitored step runs a second graph that also computes statistics, such as amaxes and the underflow of casts. All
    other steps run the same graph as without a monitor. The backward pass writes the statistics, so a step without a
    backward pass has none. The first step is monitored.

    All layers created by `fp8compile.convert` are monitored, and all modules that derive from
    `fp8compile.nn.Observed`. Statistics describe the full tensors, across all ranks of the default process group. For
    FP8 parameters and for weights that FSDP2 all-gathers in FP8, only statistics of scales and FP8 data are available.

    Args:
        model: A model with FP8 layers.
        statistics: Names, see ``docs/monitor.md``.
        every: Number of steps between two monitored steps.
        layers: `fnmatch` patterns for the names of layers to monitor; None for all.
        operands: The recipe's fields to monitor, such as ``"grad_output"``; None for all. Fewer operands cost less
            time.
        stop_at_nonfinite: Whether `step` raises a `NonFiniteError` one step after a monitored step found a NaN or an
            infinity. All ranks raise it. The check does not synchronize with the device in the step itself.
        as_if: A recipe whose quantizers are evaluated on the same operands, without changing what the model computes.
            FP8 parameters are skipped, unless the recipe quantizes them in the same way.

    Raises:
        ValueError: The name of a statistic or operand is unknown, ``every`` is less than 1, or no layer can be
            monitored. Or ``as_if`` has delayed scaling, or quantizers that the model's experts do not support.
        TypeError: ``statistics`` or ``operands`` is a single string, or ``as_if`` is not a recipe.
        RuntimeError: Another monitor already observes a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        statistics: Sequence[str] = ("amax", "saturation", "underflow"),
        *,
        every: int = 100,
        layers: Sequence[str] | None = None,
        operands: Sequence[str] | None = None,
        stop_at_nonfinite: bool = False,
        as_if: Recipe | None = None,
    ) -> None:
        _check_names("statistics", statistics, STATISTICS)
        _check_names("operands", operands or (), ROLES)
        if every < 1:
            raise ValueError(
                f"Monitor: `every` must be the number of steps between readings, at least 1, not {every}."
            )
        self._statistics, self._operands, self._every = tuple(statistics), operands or ROLES, every
        self._totals = totals_of((*statistics, *(("nonfinite",) if stop_at_nonfinite else ())), operands)
        self._products = _products(model, layers or ("*",), self._totals, as_if)
        self._modules = list({id(each.module): each.module for each in self._products.values()}.values())
        for module in self._modules:
            if module in MONITORED:
                raise RuntimeError("Monitor: the model already has a monitor. Call its remove() first.")
        MONITORED.update(self._modules)
        self._steps = 0
        self._matrices: dict[str, int] = {}  # the layers of all ranks, from the first reading on
        self._order = ExecutionOrder([each.observer.sums for each in self._products.values()])
        self._search = NonFinite(self._totals) if "nonfinite" in names_of_columns(self._totals) else None
        self._stops = stop_at_nonfinite
        self._switch(on=self.is_reading)

    @property
    def steps(self) -> int:
        """Number of completed steps, counted by `step`. Set it when you resume a run."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        if self.is_reading:
            self._reset()
        self._switch(on=self.is_reading)

    @property
    def is_reading(self) -> bool:
        """Whether the current step is monitored."""
        return self._steps % self._every == 0

    def step(self) -> None:
        """Advance to the next step. Call it on all ranks after each optimizer step, and after any `read`.

        Raises:
            NonFiniteError: ``stop_at_nonfinite`` is set, and an earlier monitored step found a NaN or an infinity.
        """
        if self._stops and self._search is not None:
            self._search.raise_found()
            if self.is_reading:
                self._search.send(self.steps, self._ordered(), self._agreed())
        self.steps += 1

    def check(self, loss: Tensor, replay: Callable[[], object] | None = None) -> None:
        """Raise a NonFiniteError if a loss is not finite; the message names the first operand that is not finite.

        Call this before the optimizer step. It synchronizes with the device to read the loss. If this step is not
        monitored, ``replay`` runs the same batch again with all layers monitored. Gradients of both runs are then
        accumulated.

        Args:
            loss: This rank's loss. All ranks must call this, and all raise if any rank's loss is not finite.
            replay: A function that runs forward and backward on the batch that produced the loss.

        Raises:
            NonFiniteError: Any rank's loss is not finite.
            ValueError: The monitor neither collects the statistic ``"nonfinite"`` nor has ``stop_at_nonfinite`` set.
        """
        if self._search is None:
            raise ValueError(
                "Monitor.check: this monitor does not search for NaN or infinite elements. Create the Monitor with "
                'stop_at_nonfinite=True, or with "nonfinite" in `statistics`.'
            )
        if not is_finite_on_all_ranks(loss):
            if not self.is_reading and replay is not None:
                self._reset()
                self._switch(on=True)
                replay()
            elif not self.is_reading:
                raise NonFiniteError(
                    f"Monitor: step {self.steps}: the loss is not finite. This step is not one that the monitor "
                    "reads, and no replay= was passed to run the same batch again, so the layer is unknown. Pass "
                    "replay=, a function that runs forward and backward on the same batch."
                )
            self._search.send(self.steps, self._ordered(), self._agreed())
            self._search.raise_found()
            raise NonFiniteError(
                f"Monitor: step {self.steps}: the loss is not finite, but all observed operands of FP8 layers are. "
                "The first NaN or infinity arises after the last of them, for example in the head or in the loss "
                "itself."
            )

    def read(self) -> Reading:
        """Return the statistics of the last monitored step, over all its micro-batches.

        This synchronizes with the device. If `torch.distributed` is initialized, all ranks must call it; it runs two
        all-reduces, a sum and a maximum.

        Returns:
            ``{layer: {operand: {statistic: value}}}``. Each expert is a layer, such as ``"experts.down_proj.3"``. If
            the model itself is a converted layer, its name is ``""``. The result omits operands in high precision,
            operands not reached by a backward pass, and statistics that need high-precision values if only FP8 data is
            available.
        """
        found: Reading = {}
        observers, matrices = {name: each.observer for name, each in self._products.items()}, self._agreed()
        for name, (sums, maxima) in over_ranks(observers, matrices).items():
            both = torch.cat((sums, maxima.double()), 1)
            for matrix in range(both.shape[2]):
                layer = name if not self._is_stack(name) else f"{name}.{matrix}"
                found[layer] = self._of_layer(both[..., matrix].tolist())
        return found

    def scalars(self, names: Mapping[str, str] | None = None) -> dict[str, float]:
        """Return the scalars of `read` as one flat dict for loggers; lists are omitted.

        Args:
            names: Other names for statistics, such as `TE_NAMES`.
        """
        return {name: each for name, each in flat(self.read(), names).items() if not isinstance(each, list)}

    def write(self, path: str | Path, **others: Any) -> None:
        """Append this step's statistics to a file as one line of JSON, if the step is monitored.

        All ranks must call it; rank 0 writes.

        Args:
            path: Path of the file.
            others: Further scalars to write, such as ``loss=``. ``step=`` replaces `steps`.
        """
        if not self.is_reading:
            return
        row = {"step": self.steps, **others, **flat(self.read())}
        if rank() == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps(row) + "\n")

    def remove(self) -> None:
        """Stop monitoring, and restore the model."""
        self._switch(on=False)
        MONITORED.difference_update(self._modules)
        self._products, self._modules = {}, []

    def _switch(self, *, on: bool) -> None:
        for module in self._modules:
            vars(module).pop("_observers", None)  # the attribute itself goes, so that the graph is that of before
        for product in self._products.values() if on else ():
            given: dict[str, Observer] = vars(product.module).setdefault("_observers", {})
            given[product.weight] = product.observer

    def _reset(self) -> None:
        for product in self._products.values():
            product.observer.reset()

    def _agreed(self) -> dict[str, int]:
        if not self._matrices:
            own = {name: each.matrices for name, each in self._products.items()}
            self._matrices = agreed(own, {"statistics": self._statistics, "every": self._every})
        return self._matrices

    def _ordered(self) -> dict[str, Observer]:
        every = list(self._products.items())
        return {every[index][0]: every[index][1].observer for index in self._order.sorted()}

    @property
    def _columns(self) -> list[str]:
        return names_of_columns(self._totals)

    def _is_stack(self, name: str) -> bool:
        return self._matrices[name] > 0

    def _of_layer(self, rows: list[list[float]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for role, row in zip(ROLES, rows, strict=True):
            if role not in self._operands:
                continue
            totals = _once(dict(zip(self._columns, row, strict=True)), role)
            names = [name for name in self._statistics if totals[VALUED] or STATISTICS[name].of_codes()]
            if totals[NUMEL] and names:
                found[role] = {name: STATISTICS[name].finish(totals) for name in names}
        return found


def _once(totals: dict[str, float], role: str) -> dict[str, float]:
    """Divide a weight's sums by how often micro-batches and replicas have added the same weight.

    Totals of operands that are no weights are returned unchanged; ``role`` is the operand's field in the recipe.
    """
    if role not in TENSORS["weight"] or not (passes := totals[PASSES]):
        return totals
    passes = round(passes) if abs(passes - round(passes)) < 1e-6 else passes  # it adds up parts, such as thirds
    return {name: value / passes if is_sum(name) else value for name, value in totals.items()}


def flat(reading: Reading, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a reading as one flat dict with keys ``fp8/<layer>/<operand>/<statistic>``.

    Args:
        reading: What `Monitor.read` returned.
        names: Other names for statistics, such as `TE_NAMES`. Numbers under names that end in "%" are percents.
    """
    names = names or {}
    return {
        f"fp8/{layer}/{role}/{names.get(name, name)}": value * 100 if names.get(name, "").endswith("%") else value
        for layer, roles in reading.items()
        for role, found in roles.items()
        for name, value in found.items()
    }


def _check_as_if(as_if: object, *, has_experts: bool) -> None:
    if as_if is None:
        return
    check_recipe("Monitor", as_if)
    recipe: Any = as_if
    if recipe.history():
        raise ValueError(
            "Monitor: `as_if` uses delayed scaling, whose scales come from previous steps; it must be a recipe with "
            "current scaling, such as fp8compile.recipes.rowwise()."
        )
    if has_experts:
        check_recipe_of_groups(recipe)


def _products(model: nn.Module, patterns: Sequence[str], totals: str, as_if: Recipe | None) -> dict[str, Product]:
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
                found[name] = Product(
                    module, weight, matrices, Observer.empty(totals, max(matrices, 1), device, as_if)
                )
    if not known:
        raise ValueError("Monitor: the model has no FP8 layers. Call fp8compile.convert first.")
    if not found:
        raise ValueError(
            f"Monitor: no layer matches {', '.join(map(repr, patterns))}; the FP8 layers are {', '.join(known)}."
        )
    _check_as_if(as_if, has_experts=any(each.matrices for each in found.values()))
    return found


def _check_names(what: str, given: Sequence[str], known: Any) -> None:
    if isinstance(given, str):
        raise TypeError(f"Monitor: `{what}` is {given!r}; it must be a sequence of names, such as ({given!r},).")
    if unknown := [each for each in given if each not in known]:
        raise ValueError(f"Monitor: `{what}` has {', '.join(map(repr, unknown))}; allowed are {', '.join(known)}.")
