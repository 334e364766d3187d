"""The recipe that each layer should take, with errors and costs; usable as `convert`'s recipe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8compile.quantizers import GEMMS, Recipe
from fp8compile.tables import folded, paragraph, table_lines, terminal_width
from fp8compile.testing.numerics.decibels import shown_decibels
from fp8compile.testing.numerics.product_costs import Cost
from fp8compile.testing.numerics.product_errors import Errors

__all__ = ["HIGH_PRECISION", "Advice", "LayerAdvice", "least_of"]

HIGH_PRECISION = "unconverted"  # the name of "no recipe" among the names of recipes
PRODUCTS = tuple(gemm.name for gemm in GEMMS)


def least_of(errors: Errors) -> float:
    """Return the smallest ratio in dB among a layer's GEMMs that were measured (not None).

    The result is ``inf`` if no GEMM was measured, and ``nan`` if a ratio is NaN.
    """
    known = [each for each in errors if each is not None]
    return math.nan if any(map(math.isnan, known)) else min(known, default=math.inf)


@dataclass(frozen=True, kw_only=True)
class LayerAdvice:
    """Errors and costs of one layer in each recipe, and the recommended recipe.

    Attributes:
        name: Fully qualified name.
        matrices: Shape (out_features, in_features) of each weight that a row is multiplied with.
        rows: Number of rows that the layer multiplied in all calls together.
        sampled: Number of these rows that the errors were measured on.
        groups: Number of experts that received rows, and number of all experts; None for a linear layer.
        errors: For each recipe's name, the signal-to-noise ratios of output, grad_input and grad_weight in dB, against
            float64: the smallest over calls and matrices; None for a GEMM that the backward does not compute or whose
            exact value is 0. The entry ``"unconverted"`` has the error of the operands' own dtype.
        costs: For each recipe's name, bytes and minimum time of GEMMs and casts in one step.
        refused: For each recipe that the layer or the GPU doesn't support, the reason.
        takes: Name of the recommended recipe, or ``"unconverted"``.
    """

    name: str
    matrices: tuple[tuple[int, int], ...]
    rows: int
    sampled: int
    groups: tuple[int, int] | None
    errors: Mapping[str, Errors]
    costs: Mapping[str, Cost]
    refused: Mapping[str, str]
    takes: str = HIGH_PRECISION

    def allowed(self) -> list[str]:
        """Names of the recipes that the layer supports, and ``"unconverted"``."""
        return [name for name in self.errors if name not in self.refused]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommended recipes for a model's layers. Pass it to `fp8compile.convert` as ``recipe``; prints as a table.

    Attributes:
        layers: The layers that were measured, in the order of the model.
        recipes: The recipes by name.
        budget: The criterion: ``{"sqnr": dB}`` or ``{"time": share}``.
        gpu: Name of the GPU whose peak rates determine the minimum times.
        rows_factor: Factor by which rows were multiplied for bytes and times.
        left_out: The layers that stay in high precision regardless of the budget, each with the reason.
    """

    layers: tuple[LayerAdvice, ...]
    recipes: Mapping[str, Recipe]
    budget: Mapping[str, float]
    gpu: str
    rows_factor: float
    left_out: Mapping[str, str]

    def __call__(self, module: nn.Module, fqn: str) -> Recipe | None:
        """The recipe of a layer, or None for high precision.

        Args:
            module: The layer.
            fqn: Its fully qualified name in the model that was measured.

        Raises:
            ValueError: The model that was measured has no such layer.
        """
        taken = next((layer.takes for layer in self.layers if layer.name == fqn), None)
        if taken is None and fqn not in self.left_out:
            raise ValueError(
                f"advice: {fqn!r} is not a layer of the model that was measured. Call advise with the model that is "
                "converted."
            )
        return None if taken is None else self.recipes.get(taken)

    def total(self, name: str | None = None) -> Cost:
        """The total cost of all layers, with the recommended recipes or with a single recipe.

        Args:
            name: Name of a recipe, or ``"unconverted"``; layers that don't support the recipe stay unconverted. None
                for the recommended recipes.
        """
        total = Cost(0, 0)
        for layer in self.layers:
            taken = layer.takes if name is None else name if name in layer.allowed() else HIGH_PRECISION
            total += layer.costs[taken]
        return total

    def lines_of_data(self) -> list[str]:
        """Sentences that describe how much data the errors were measured on."""
        counts = sorted({layer.sampled for layer in self.layers})
        rows = sorted({layer.rows for layer in self.layers})
        shown, all_rows = (f"{each[0]}" if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in (counts, rows))
        lines = [f"Errors were measured on one batch: {shown} rows per layer, of {all_rows}."]
        experts = [layer for layer in self.layers if layer.groups is not None]
        idle = sum(layer.groups[1] - layer.groups[0] for layer in experts if layer.groups is not None)
        if idle:
            lines.append(f"{idle} experts had no rows in this batch, so their errors are unknown.")
        forward_only = sum(all(each is None for each in layer.errors[HIGH_PRECISION][1:]) for layer in self.layers)
        if forward_only:
            lines.append(f"{forward_only} layers had no gradient, so only their outputs count.")
        return lines

    def lines_of_result(self) -> list[str]:
        """Sentences that describe the budget and what the recommended recipes achieve."""
        plain, advised = self.total(HIGH_PRECISION), self.total()
        (kind, value), *_ = self.budget.items()
        wanted = (
            f"the fastest recipe whose three GEMMs have {value:g} dB each"
            if kind == "sqnr"
            else f"the least noise within {value:g} of the time without FP8"
        )
        counts = Counter(layer.takes for layer in self.layers)
        parts = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        ratio = advised.seconds / plain.seconds if plain.seconds else 1.0
        moved = advised.bytes / plain.bytes if plain.bytes else 1.0
        factor = "" if self.rows_factor == 1 else f", with {self.rows_factor:g} times these rows"
        lines = [
            f"Budget: {wanted}.",
            f"Layers: {parts}. According to the peak rates of an {self.gpu}{factor}, GEMMs and casts take at least "
            f"{ratio:.2f} of the time without FP8, and {moved:.2f} of the bytes (a lower bound, not a measurement).",
        ]
        refused = {reason: name for layer in self.layers for name, reason in layer.refused.items()}
        lines += [f"{name} is not supported: {reason}" for reason, name in refused.items()]
        if self.left_out:
            reasons = Counter(self.left_out.values()).most_common()
            left = "; ".join(f"{count} ({reason})" for reason, count in reasons)
            lines.append(f"Left out: {left}.")
        return lines

    def table(self, *, products: bool = False) -> tuple[list[str], list[tuple[str, ...]]]:
        """Headings and rows of the table; time and bytes are relative to the same layer without FP8.

        Args:
            products: Whether to show one row per GEMM. If False, each layer has one row, with the smallest ratio.
        """
        names = list(self.recipes)
        columns = ["layer", "out x in", *(["GEMM"] if products else []), *names, "picks", "time", "bytes"]
        rows: list[tuple[str, tuple[str, ...]]] = []
        for layer in self.layers:
            sizes = ", ".join(f"{n} x {k}" for n, k in layer.matrices)
            plain, own = layer.costs[HIGH_PRECISION], layer.costs[layer.takes]
            costs = [
                f"{mine / other:.2f}" if other else "-"
                for mine, other in ((own.seconds, plain.seconds), (own.bytes, plain.bytes))
            ]
            for place, product in enumerate(PRODUCTS) if products else ((None, ""),):
                shown = [
                    "-"
                    if name not in layer.errors
                    else shown_decibels(least_of(layer.errors[name]) if place is None else layer.errors[name][place])
                    for name in names
                ]
                rows.append((layer.name, (sizes, *([product] if products else []), *shown, layer.takes, *costs)))
        return columns, [(name, *cells) for name, cells in folded(rows)]

    def text(self, *, products: bool = False, width: int | None = None) -> str:
        """Format the advice as sentences and a table.

        Args:
            products: Whether to show one row per GEMM, as in `table`.
            width: Width in characters; None for the terminal's.
        """
        width = terminal_width() if width is None else width
        columns, rows = self.table(products=products)
        above = "Signal-to-noise ratio in dB against float64" + (
            "." if products else ", the smallest of the three GEMMs."
        )
        lines = [
            *(line for each in [*self.lines_of_data(), above] for line in paragraph(each, width=width)),
            *table_lines(columns, rows, width=width),
            *(line for each in self.lines_of_result() for line in paragraph(each, width=width)),
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        """The table with one row per layer, and the sentences of `lines_of_data` and `lines_of_result`."""
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Everything but the recipes as JSON-serializable values; an infinite ratio (no error) is ``"inf"``."""

        def plain(value: float | None) -> Any:
            return value if value is None or math.isfinite(value) else str(value)

        return {
            "gpu": self.gpu,
            "budget": dict(self.budget),
            "rows_factor": self.rows_factor,
            "left_out": dict(self.left_out),
            "layers": [
                {
                    "name": layer.name,
                    "matrices": [list(each) for each in layer.matrices],
                    "rows": layer.rows,
                    "sampled": layer.sampled,
                    "groups": layer.groups and list(layer.groups),
                    "sqnr": {
                        name: dict(zip(PRODUCTS, map(plain, errors), strict=True))
                        for name, errors in layer.errors.items()
                    },
                    "bytes": {name: cost.bytes for name, cost in layer.costs.items()},
                    "seconds": {name: cost.seconds for name, cost in layer.costs.items()},
                    "refused": dict(layer.refused),
                    "takes": layer.takes,
                }
                for layer in self.layers
            ],
        }
