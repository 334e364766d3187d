"""conversion_report: which layers of a model run in FP8, and why the others don't."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fp8compile import recipes
from fp8compile._compat import is_fsdp_managed
from fp8compile.nn.check_model import check_model
from fp8compile.nn.convert.why_not_converted import LEFT_OUT, ROUTER
from fp8compile.nn.convertible.convertible_layers import is_converted, is_layer, matrices, weight_slots
from fp8compile.nn.experts.known_modules import layout_of
from fp8compile.nn.experts.routers import routers
from fp8compile.nn.parameter_uses.past_forward import PAST_FORWARD, past_forward
from fp8compile.nn.parameter_uses.uses import Kind, Uses, uses_seen
from fp8compile.nn.report.called_layers import called_layers
from fp8compile.quantizers import GEMMS, Recipe
from fp8compile.tables import Cell, Note, folded, table_lines, terminal_width
from fp8compile.tensor import GATHERED, PLAIN, shown

__all__ = ["ConversionReport", "ConversionRow", "conversion_report"]


def _why_no_gemm(recipe: Recipe | None) -> str:
    if recipe is None or not recipe.dequantized_output:
        return "the recipe has no quantizers"
    read = " and ".join(role for role in ("input", "weight") if getattr(recipe, role) is not None)
    return f"the output is computed in high precision from the dequantized {read} (dequantized_output)"


@dataclass(frozen=True, kw_only=True)
class ConversionRow:
    """The report on one layer: a linear, a module of experts, or a weight that other code multiplies.

    Attributes:
        fqn: Fully qualified name of the layer in the model.
        module: Name of the layer's class.
        converted: Whether the layer is in FP8.
        reason: The reason why the layer is not in FP8; empty if it is.
        recipe: The layer's recipe; None if it is not in FP8.
        in_features: Columns of the matrix; for experts, columns of their first matrix. For a 3-D weight of experts
            that ``convert`` doesn't know, the last dim.
        out_features: Rows of the same matrix; for a 3-D weight that ``convert`` doesn't know, the dim before the last.
        experts: Number of experts; 0 for a linear, and for a weight that other code multiplies.
        matrices: (out_features, in_features) of each matrix by which a row is multiplied; for experts, the matrices of
            one expert.
        gathered: What FSDP2 gathers for the weights: a text that begins with ``"quantized data"``, or with
            ``"param_dtype: "`` and the reason. Empty before ``fp8compile.parallel.fsdp_float8_all_gather`` was called.
        sharded: Whether ``fully_shard`` was called for the layer. If not, ``gathered`` tells what FSDP2 will gather.
        quantized_weight: Whether the weight is an FP8 parameter, from ``weight_lifetime="parameter"`` of
            ``fp8compile.convert``.
        past_forward: The method that multiplies a converted layer's weight without calling the layer, so that the
            product is not in FP8. Empty if neither the first forward nor the report's forward had such a product.
        called: Whether the report's forward called a converted layer, or the GEMMs of converted experts. If the report
            was given no forward: False if the first forward multiplied the weight past the layer and never in FP8,
            else None. None for layers that are not converted.
    """

    fqn: str
    module: str
    converted: bool
    reason: str
    recipe: Recipe | None
    in_features: int
    out_features: int
    experts: int = 0
    matrices: tuple[tuple[int, int], ...] = ()
    gathered: str = ""
    sharded: bool = False
    quantized_weight: bool = False
    past_forward: str = ""
    called: bool | None = None

    def float8_gemms(self) -> tuple[str, ...]:
        """Return the names of the GEMMs that the recipe puts in FP8."""
        return tuple(g.name for g in GEMMS if self.recipe is not None and self.recipe.quantizers(g))

    def _size(self) -> str:
        if not self.experts:
            return f"{self.out_features} x {self.in_features}"
        return f"{self.experts} x ({', '.join(f'{n} x {k}' for n, k in self.matrices)})"

    def _gathered_cell(self) -> Cell:
        """Return the table's cell for what FSDP2 gathers; before ``fully_shard``, that the layer is not sharded."""
        if self.sharded or not self.gathered:
            kind, *why = re.split("; |: ", self.gathered, maxsplit=1)
            return Note(why[0], kind) if why else kind
        plain = [words for words in self.gathered.split("; ") if words.startswith(f"{PLAIN}:")]
        return Note(f"then {'; then '.join(plain)}", NOT_SHARDED) if plain else NOT_SHARDED

    def _gemms_cell(self) -> Cell:
        if not self.converted:
            return Note(self.reason)
        past = f"{self.past_forward} {PAST_FORWARD}" if self.past_forward else ""
        if self.called is False:
            what = "the GEMMs of these experts" if self.experts else "this layer"
            return Note(past or f"the forward never called {what}", "none")
        names = self.float8_gemms()
        if not names:
            return Note(_why_no_gemm(self.recipe), "none")
        words = [ALL_GEMMS if len(names) == len(GEMMS) else ", ".join(names)]
        words += ["FP8 parameter"] if self.quantized_weight else []
        text = "; ".join(words)
        return Note(past, text) if past else text

    def _cells(self) -> tuple[Cell, ...]:
        """Return all cells of the row in the report's table except the layer's name."""
        recipe = recipes.describe(self.recipe) if self.recipe else "-"
        return self.module, self._size(), recipe, self._gemms_cell(), self._gathered_cell()


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """The result of `conversion_report`. Print it to see a table with one line per group of identical layers.

    Attributes:
        rows: One row per layer, in model order.
    """

    rows: tuple[ConversionRow, ...]

    def __str__(self) -> str:
        columns = ("layer", "module", "out x in", "recipe", "GEMMs in FP8", "FSDP2 gathers")
        found = folded((row.fqn or "(the model)", row._cells()) for row in self.rows)
        shown = len(columns) if any(row.gathered for row in self.rows) else len(columns) - 1
        cells = [(name, *rest)[:shown] for name, rest in found]
        converted = sum(row.converted and row.called is not False for row in self.rows)
        idle = sum(row.called is False for row in self.rows)
        never = f", {idle} more converted but never called" if idle else ""
        lines = table_lines(columns[:shown], cells, width=terminal_width())
        return "\n".join([*lines, f"{converted} of {len(self.rows)} converted{never}"])


def _layer_row(fqn: str, module: nn.Module, uses: Uses, called: set[nn.Module] | None) -> ConversionRow:
    converted, sizes = is_converted(module), matrices(module)
    layer: Any = module  # a Linear or ConvertedModule, if it is converted
    is_linear = isinstance(module, nn.Linear)
    not_seen = "convert() has not visited it"
    past = (past_forward(module, uses) or "") if converted else ""
    is_called = module in called if converted and called is not None else None
    if is_called is None and past and uses.in_float8.isdisjoint(weight_slots(module)):
        is_called = False
    return ConversionRow(
        fqn=fqn,
        module=type(module).__name__,
        converted=converted,
        reason="" if converted else getattr(module, LEFT_OUT, not_seen),
        recipe=layer.recipe if converted else None,
        in_features=sizes[0][1],
        out_features=sizes[0][0],
        experts=0 if is_linear else layout_of(module).num_experts,
        matrices=tuple(sizes),
        gathered=getattr(module, GATHERED, ""),
        sharded=is_fsdp_managed(module),
        quantized_weight=converted and layer.is_quantized(),
        past_forward=past,
        called=is_called,
    )


ALL_GEMMS = "all three"
NOT_SHARDED = "not sharded yet"
EXPERTS = "a 3-D parameter (experts?), not a nn.Linear"
NO_LINEAR = "not a nn.Linear"
# modules whose weights are looked up, or are the kernels of convolutions
NOT_MULTIPLIED = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)


def _not_linear(kind: Kind | None, module: nn.Module, name: str, parameter: nn.Parameter) -> str | None:
    """Return why a matrix that is multiplied outside of layers can't be converted; None if it is no such matrix.

    ``kind`` is how forwards used the parameter. If it doesn't tell (None, HANDED), name, dims and module decide.
    """
    is_stack = parameter.ndim == 3 and parameter.shape[0] > 1
    if (not is_stack and parameter.ndim != 2) or isinstance(module, ParametrizationList):
        return None
    if kind in (None, Kind.HANDED):
        is_multiplied = (is_stack or "weight" in name) and not isinstance(module, NOT_MULTIPLIED)
    else:
        is_multiplied = kind == Kind.PRODUCT
    return (EXPERTS if is_stack else NO_LINEAR) if is_multiplied else None


def _weight_rows(
    fqn: str, module: nn.Module, uses: Uses, own: set[tuple[nn.Module, str]], *, is_router: bool
) -> list[ConversionRow]:
    """Make rows for matrices of a module that are multiplied outside of layers, such as attention's.

    ``own`` has the weights of layers, as (module, parameter name); these weights get no row here.
    """
    rows = []
    for name, parameter in module.named_parameters(recurse=False):
        if (module, name) in own or (reason := _not_linear(uses.kind(module, name), module, name, parameter)) is None:
            continue
        *_, out_features, in_features = parameter.shape
        if type(module).__name__ == "Conv1D":  # a copy of GPT-2's layer, which keeps its weight as (in, out)
            in_features, out_features = out_features, in_features
        rows.append(
            ConversionRow(
                fqn=f"{fqn}.{name}" if fqn else name,
                module=type(module).__name__,
                converted=False,
                reason=ROUTER if is_router else reason,
                recipe=None,
                in_features=in_features,
                out_features=out_features,
                matrices=((out_features, in_features),),
            )
        )
    return rows


def conversion_report(model: nn.Module, *, forward: Callable[[], object] | None = None) -> ConversionReport:
    """Report which layers of a model run in FP8, which GEMMs of each, and why the others do not.

    The report lists each ``nn.Linear`` and every other linear layer or experts module that ``convert`` supports. It
    also lists weights that a forward pass multiplied outside of these modules, such as those of other experts, routers
    and ``nn.MultiheadAttention``, or an embedding tied to the output head. These are recorded in the first forward
    pass after ``convert``, or in the given ``forward``. If no forward pass has run, the report instead lists 3-D
    parameters and 2-D parameters with "weight" in their name, except those of embeddings and convolutions.

    A converted layer runs in FP8 only if the model calls it. Pass ``forward`` to check this::

        print(f8.conversion_report(model, forward=lambda: model(batch)))

    Args:
        model: Any module, converted or not.
        forward: A function that calls the model. It is called once, in eager mode, and the report shows which
            converted layers were never called. Like any forward pass, it updates buffers such as running means and
            advances random number generators.

    Returns:
        The report. Print it to see a table, or iterate over its ``rows``.

    Raises:
        TypeError: ``model`` is not a module, or ``forward`` is not a function.
    """
    check_model("conversion_report", model)
    if isinstance(forward, nn.Module) or not (forward is None or callable(forward)):
        raise TypeError(
            f"conversion_report: `forward` is {shown(forward)}; it must be a function without arguments that calls "
            "the model, such as lambda: model(batch)."
        )
    uses, called = uses_seen(model.modules()), None
    if forward is not None:
        called, of_forward = called_layers(model, forward)
        uses.update(of_forward)
    rows: list[ConversionRow] = []
    own = {slot for module in model.modules() if is_layer(module) for slot in weight_slots(module)}
    scoring = routers(model)
    for fqn, module in model.named_modules():
        if is_layer(module):
            rows.append(_layer_row(fqn, module, uses, called))
        rows += _weight_rows(fqn, module, uses, own, is_router=module in scoring)
    return ConversionReport(rows=tuple(rows))
