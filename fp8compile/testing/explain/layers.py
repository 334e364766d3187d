"""Explains each linear of a model: whether it is converted, and the formats of its three GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from fp8compile import recipes
from fp8compile.nn.convertible.filters import LEAST_GAINING, size_of_gain
from fp8compile.nn.experts.known_modules import layout_of
from fp8compile.nn.report.conversion_report import ConversionRow, conversion_report
from fp8compile.quantizers import GEMMS, Gemm
from fp8compile.testing.explain.attribution import Unknown
from fp8compile.testing.explain.graphs import GraphGemm, describe
from fp8compile.testing.explain.roofline import Peaks, bf16_seconds, gemm_seconds, padding
from fp8compile.testing.graphs.report import GraphReport, place_text

__all__ = [
    "ABSENT",
    "FELL_BACK",
    "FP8",
    "HIGH",
    "UNPROVEN",
    "GemmExplanation",
    "LayerExplanation",
    "layer_weights",
    "weight_parameters",
]

FP8 = "fp8"
HIGH = "high precision"
FELL_BACK = "fell back"
ABSENT = "not in the graph"
UNPROVEN = "no proof"


@dataclass(frozen=True, kw_only=True)
class GemmExplanation:
    """One of the three GEMMs of a layer.

    Attributes:
        gemm: "output", "grad_input" or "grad_weight".
        status: "fp8", "high precision", "fell back" (not as the recipe says), "not in the graph" or "no proof".
        runs: Formats and scales, or the dtype, of the operands in the graph; empty if the GEMM is in no graph.
        detail: A remark; may be empty.
        ops: Operators of the graph that prove the status, one for each call.
        places: Operators that contradict the recipe, or whose computation is unknown, with file and line.
        m: Rows of the result; 0 if the GEMM is in no graph.
        k: Size of the summed dim.
        n: Columns of the result.
        padded_k: ``k`` as a GPU pads it.
        padded_n: ``n`` as a GPU pads it.
        seconds: Least time of all calls by the GPU's peaks; 0 if no GPU was asked for.
        bf16_seconds: Least time of the same calls in bfloat16.
    """

    gemm: str
    status: str
    runs: str = ""
    detail: str = ""
    ops: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    m: int = 0
    k: int = 0
    n: int = 0
    padded_k: int = 0
    padded_n: int = 0
    seconds: float = 0.0
    bf16_seconds: float = 0.0

    @property
    def padding_flops(self) -> float:
        """Operations added by padding, as a fraction of the operations without padding."""
        return self.padded_k * self.padded_n / (self.k * self.n) - 1 if self.k * self.n else 0.0

    def __str__(self) -> str:
        if self.status in (ABSENT, UNPROVEN):
            return f"{self.status}: {self.detail}"
        runs = f"FELL BACK to {self.runs}" if self.status == FELL_BACK else self.runs
        return f"{runs}, {self.detail}" if self.detail else runs


@dataclass(frozen=True, kw_only=True)
class LayerExplanation:
    """The explanation of one linear of a model.

    Attributes:
        fqn: Name in the model, of the module or of a parameter whose module is no ``nn.Linear``.
        module: Name of the class.
        converted: Whether the linear is converted to FP8.
        reason: Why the linear is not converted; empty if it is converted.
        recipe: Name of the recipe, "custom", or empty if it is not converted.
        in_features: Number of input features, K.
        out_features: Number of output features, N.
        gemms: The three GEMMs: output, grad_input, grad_weight.
        least_gaining: Smallest K N / (K + N) at which FP8 gains by the GPU's peaks; 0 if no GPU was asked for.
    """

    fqn: str
    module: str
    converted: bool
    reason: str
    recipe: str
    in_features: int
    out_features: int
    gemms: tuple[GemmExplanation, ...]
    least_gaining: int = 0

    @property
    def size(self) -> int:
        """K N / (K + N) of the weight (N, K); the gain of FP8 over bfloat16 grows with this number."""
        return size_of_gain(self.in_features, self.out_features)

    @property
    def is_small(self) -> bool:
        """Whether the layer is so small that the default filter leaves it in high precision on the GPU."""
        return self.size < self.least_gaining

    @property
    def name(self) -> str:
        """The name that reports show: ``fqn``, or "(the model)" if that is empty."""
        return self.fqn or "(the model)"

    @property
    def is_called(self) -> bool:
        """Whether the graphs contain, or may contain, a GEMM of the layer."""
        return any(gemm.status != ABSENT for gemm in self.gemms)


def weight_parameters(module: nn.Module) -> list[nn.Parameter]:
    """A layer's weights, or the parameters from which a parametrized linear computes its weight."""
    if not isinstance(module, nn.Linear):
        return list(layout_of(module).weights.values())
    weight = module._parameters.get("weight")  # the attribute may be a computed tensor
    if weight is not None:
        return [weight]
    computed = getattr(module, "parametrizations", {})
    return list(computed["weight"].parameters(recurse=False)) if "weight" in computed else []


def layer_weights(model: nn.Module) -> dict[int, list[str]]:
    """Map the ``id`` of each weight parameter to the names of the layers that use the parameter.

    A layer also uses a parameter if a parametrization computes the layer's weight from it.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    weights: dict[int, list[str]] = {}
    for row in conversion_report(model).rows:
        module = modules.get(row.fqn)
        own = [parameters[row.fqn]] if module is None else weight_parameters(module)
        for parameter in own:
            weights.setdefault(id(parameter), []).append(row.fqn)
    return weights


def _absent(gemm: Gemm, row: ConversionRow, model: nn.Module, report: GraphReport, *, called: bool) -> GemmExplanation:
    if not called:
        if report.breaks or not report.graphs:
            why = "graph break, the layer runs outside of the graphs" if report.breaks else "nothing was compiled"
            return GemmExplanation(gemm=gemm.name, status=UNPROVEN, detail=why)
        return GemmExplanation(gemm=gemm.name, status=ABSENT, detail="the layer is not called")
    module = model.get_submodule(row.fqn) if row.fqn in dict(model.named_modules()) else None
    if all(graph.backward is None for graph in report.graphs):
        why = "there is no backward"
    elif gemm.name == "grad_input":
        why = "its input needs no gradient"
    elif isinstance(module, nn.Linear) and not module.weight.requires_grad:
        why = "its weight is frozen"
    else:
        why = "its result is not used"
    return GemmExplanation(gemm=gemm.name, status=ABSENT, detail=why)


def _judged(gemm: Gemm, row: ConversionRow, found: Sequence[GraphGemm]) -> tuple[str, str]:
    """Return status and detail of a layer's GEMM from its calls in the graphs and from the recipe."""
    wanted = describe(row.recipe, gemm) if row.recipe is not None else None
    others = [each for each in found if each.runs != wanted]
    if wanted is None:
        is_fp8 = all(each.is_fp8 for each in found)
        return (FP8 if is_fp8 else HIGH), ("as the recipe specifies" if row.converted and not is_fp8 else "")
    if not others:
        return FP8, ""
    part = f" in {len(others)} of {len(found)} calls" if len(others) < len(found) else ""
    return FELL_BACK, f"the recipe specifies {wanted}{part}"


def _explained(gemm: Gemm, row: ConversionRow, found: Sequence[GraphGemm], peaks: Peaks | None) -> GemmExplanation:
    status, detail = _judged(gemm, row, found)
    wanted = describe(row.recipe, gemm) if row.recipe is not None else None
    wrong = [each for each in found if status == FELL_BACK and each.runs != wanted]
    first = found[0]
    padded_k, padded_n = padding(first)
    return GemmExplanation(
        gemm=gemm.name,
        status=status,
        places=tuple(dict.fromkeys(f"{each.op} at {place_text(each.file, each.line)}" for each in wrong)),
        runs=" and ".join(dict.fromkeys(each.runs for each in found)),
        detail=detail,
        ops=tuple(each.op for each in found),
        m=first.m,
        k=first.k,
        n=first.n,
        padded_k=padded_k,
        padded_n=padded_n,
        seconds=sum(gemm_seconds(each, peaks) for each in found) if peaks else 0.0,
        bf16_seconds=sum(bf16_seconds(each, peaks) for each in found) if peaks else 0.0,
    )


def _doubted(part: GemmExplanation, unknown: Sequence[Unknown]) -> GemmExplanation:
    """Return a GEMM's explanation with status "no proof", because opaque operators read its weight.

    A GEMM that fell back keeps its status.
    """
    if part.status == FELL_BACK:
        return part
    places = tuple(f"{each.op} at {place_text(each.file, each.line)}" for each in unknown)
    detail = f"its weight is combined with data in {', '.join(places)}, and the graphs do not show how"
    return replace(part, status=UNPROVEN, detail=detail, places=places)


def _parts(
    row: ConversionRow,
    model: nn.Module,
    report: GraphReport,
    own: Sequence[GraphGemm],
    unknown: Sequence[Unknown],
    peaks: Peaks | None,
) -> tuple[GemmExplanation, ...]:
    called = any(each.gemm == GEMMS[0].name for each in own)
    parts = []
    for gemm in GEMMS:
        found = [each for each in own if each.gemm == gemm.name]
        parts.append(
            _explained(gemm, row, found, peaks) if found else _absent(gemm, row, model, report, called=called)
        )
    if unknown and row.float8_gemms():
        parts[0] = _doubted(parts[0], unknown)
    return tuple(parts)


def explain_layers(
    model: nn.Module,
    report: GraphReport,
    gemms: Sequence[GraphGemm],
    unknown: Sequence[Unknown],
    peaks: Peaks | None,
) -> tuple[LayerExplanation, ...]:
    """Explain each linear of a model, with its three GEMMs.

    Args:
        model: The model.
        report: Report on the model's graphs.
        gemms: The GEMMs in the model's graphs.
        unknown: Opaque operators that may be a layer's GEMM.
        peaks: Peaks of the GPU, for least times; None for no times.
    """
    explained = []
    for row in conversion_report(model).rows:
        own = [each for each in gemms if each.layer == row.fqn]
        doubts = [each for each in unknown if each.layer == row.fqn]
        explained.append(
            LayerExplanation(
                fqn=row.fqn,
                module=row.module,
                converted=row.converted,
                reason=row.reason,
                recipe=recipes.describe(row.recipe) if row.recipe else "",
                in_features=row.in_features,
                out_features=row.out_features,
                gemms=_parts(row, model, report, own, doubts, peaks),
                least_gaining=LEAST_GAINING.get(peaks.capability, 0) if peaks else 0,
            )
        )
    return tuple(explained)
