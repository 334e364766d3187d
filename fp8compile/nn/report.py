"""conversion_report: which layers of a model run in FP8, and why the others don't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fp8compile import recipes
from fp8compile.nn.convert import LEFT_OUT
from fp8compile.nn.linear import GATHERED, Linear
from fp8compile.quantizers import GEMMS, Recipe

__all__ = ["ConversionReport", "ConversionRow", "aligned", "conversion_report"]


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines of a table, every column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


@dataclass(frozen=True, kw_only=True)
class ConversionRow:
    """One layer.

    Attributes:
        fqn: Its name in the model.
        module: Its class.
        converted: Whether it is a ``fp8compile.Linear``.
        reason: Why it isn't; empty where it is.
        recipe: Its recipe, or None.
        in_features: K; of expert weights and the like, the last dim.
        out_features: N; of expert weights and the like, the dim before it.
        gathered: What of its weight FSDP2 gathers, after ``fp8compile.parallel.fsdp_float8_all_gather``: ``"codes"``,
            or ``"param_dtype: "`` and why; empty before.
        quantized_weight: Whether its weight is kept as codes: ``quantized_parameters=True`` of ``fp8compile.convert``.
    """

    fqn: str
    module: str
    converted: bool
    reason: str
    recipe: Recipe | None
    in_features: int
    out_features: int
    gathered: str = ""
    quantized_weight: bool = False

    def float8_gemms(self) -> tuple[str, ...]:
        """Names of the GEMMs that the recipe puts in FP8."""
        return tuple(g.name for g in GEMMS if self.recipe is not None and self.recipe.quantizers(g))


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Rows in the order of the model; printed, a table."""

    rows: tuple[ConversionRow, ...]

    def __str__(self) -> str:
        cells = [("layer", "module", "out x in", "recipe", "GEMMs in FP8 or why not", "FSDP2 gathers")]
        for row in self.rows:
            name = recipes.describe(row.recipe) if row.recipe else "-"
            gemms = ", ".join(row.float8_gemms()) or "none: every slot of the recipe is None"
            gemms += "; weight kept as codes" if row.quantized_weight else ""
            size = f"{row.out_features} x {row.in_features}"
            why = gemms if row.converted else row.reason
            cells.append((row.fqn or "(the model)", row.module, size, name, why, row.gathered))
        known = any(row.gathered for row in self.rows)
        lines = aligned(cells if known else [row[:-1] for row in cells])
        converted = sum(row.converted for row in self.rows)
        return "\n".join([*lines, f"{converted} of {len(self.rows)} converted"])


def _linear_row(fqn: str, module: nn.Linear) -> ConversionRow:
    converted = isinstance(module, Linear)
    not_seen = "convert() has not seen it"
    return ConversionRow(
        fqn=fqn,
        module=type(module).__name__,
        converted=converted,
        reason="" if converted else getattr(module, LEFT_OUT, not_seen),
        recipe=module.recipe if converted else None,
        in_features=module.in_features,
        out_features=module.out_features,
        gathered=getattr(module, GATHERED, ""),
        quantized_weight=converted and module.is_quantized(),
    )


EXPERTS = "a 3-D parameter (experts?), no nn.Linear"
NO_LINEAR = "no nn.Linear"


def _not_linear(module: nn.Module, name: str, parameter: nn.Parameter) -> str | None:
    """Why a matrix that is multiplied without a nn.Linear can't be converted; None if it is no such matrix."""
    if parameter.ndim == 3 and parameter.shape[0] > 1 and not isinstance(module, nn.modules.conv._ConvNd):
        return EXPERTS
    looked_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return NO_LINEAR if parameter.ndim == 2 and "weight" in name and not looked_up else None


def _weight_rows(fqn: str, module: nn.Module) -> list[ConversionRow]:
    """Matrices that are multiplied without a nn.Linear: stacked experts, routers, attention's, GPT-2's Conv1D."""
    rows = []
    for name, parameter in module.named_parameters(recurse=False):
        if (reason := _not_linear(module, name, parameter)) is None:
            continue
        *_, out_features, in_features = parameter.shape
        if type(module).__name__ == "Conv1D":  # keeps its weight as (in, out)
            in_features, out_features = out_features, in_features
        rows.append(
            ConversionRow(
                fqn=f"{fqn}.{name}" if fqn else name,
                module=type(module).__name__,
                converted=False,
                reason=reason,
                recipe=None,
                in_features=in_features,
                out_features=out_features,
            )
        )
    return rows


def conversion_report(model: nn.Module) -> ConversionReport:
    """Which layers of a model run in FP8, which GEMMs of each, and why the others don't.

    Lists every ``nn.Linear`` and subclass, and what seems to multiply without one: 3-D parameters, as of experts, and
    2-D weights of other modules than embeddings, as of routers, ``Conv1D`` and ``nn.MultiheadAttention``.

    Args:
        model: Any module, converted or not.

    Returns:
        A report; ``print`` it for a table, or go through its ``rows``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"conversion_report: model is a {type(model).__name__}; it is a torch.nn.Module.")
    rows: list[ConversionRow] = []
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            rows.append(_linear_row(fqn, module))
        else:
            rows += _weight_rows(fqn, module)
    return ConversionReport(rows=tuple(rows))
