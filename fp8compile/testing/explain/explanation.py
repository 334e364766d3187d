"""explain: everything there is to know of a model in FP8, as one value."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fp8compile.testing.explain.gpu import GpuExplanation, explain_gpu
from fp8compile.testing.explain.graphs import graph_gemms, record
from fp8compile.testing.explain.layers import (
    FELL_BACK,
    FP8,
    UNPROVEN,
    GemmExplanation,
    LayerExplanation,
    explain_layers,
    layer_weights,
)
from fp8compile.testing.explain.roofline import PEAKS, Roofline, roofline
from fp8compile.testing.report import Call, GraphReport, graph_report

__all__ = ["Explanation", "explain"]


def _layers(lines: tuple[str, ...]) -> str:
    return f"{len(lines)} converted layer{'s' if len(lines) > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Whether a model really runs in FP8, and what of it doesn't.

    Attributes:
        torch: Version of PyTorch.
        graphs: What the compiler made of two equal calls.
        layers: Every linear.
        gpu: What a GPU would launch; None if not asked for.
        roofline: Least times by that GPU's peaks; None if not asked for.
    """

    torch: str
    graphs: GraphReport
    layers: tuple[LayerExplanation, ...]
    gpu: GpuExplanation | None
    roofline: Roofline | None

    def _of_converted(self, status: str) -> dict[str, list[GemmExplanation]]:
        layers = [layer for layer in self.layers if layer.converted]
        found = {layer.name: [gemm for gemm in layer.gemms if gemm.status == status] for layer in layers}
        return {name: gemms for name, gemms in found.items() if gemms}

    @property
    def fell_back(self) -> tuple[str, ...]:
        """A line for each converted layer with a GEMM that runs otherwise than its recipe says."""
        return tuple(
            f"{name}: " + "; ".join(f"{gemm.gemm} runs in {gemm.runs}, {gemm.detail}" for gemm in gemms)
            for name, gemms in self._of_converted(FELL_BACK).items()
        )

    @property
    def unproven(self) -> tuple[str, ...]:
        """A line for each converted layer with a GEMM of which no graph tells."""
        return tuple(
            f"{name}: {', '.join(gemm.gemm for gemm in gemms)}: {gemms[0].detail}"
            for name, gemms in self._of_converted(UNPROVEN).items()
        )

    @property
    def verdict(self) -> str:
        """The answer to "is this really running in FP8?", in one line."""
        gemms = [gemm for layer in self.layers for gemm in layer.gemms]
        in_graphs = [gemm for gemm in gemms if gemm.ops]
        proven = f"{sum(gemm.status == FP8 for gemm in gemms)} of {len(in_graphs)} GEMMs of linears run in FP8"
        if self.fell_back:
            return f"NO: {_layers(self.fell_back)} fell back; {proven}"
        if self.unproven:
            return f"NOT PROVEN: {_layers(self.unproven)} in no graph; {proven}"
        converted = sum(layer.converted for layer in self.layers)
        if not converted and not any(gemm.status == FP8 for gemm in gemms):
            return f"NO: none of {len(self.layers)} linears is converted"
        return f"YES, as the recipes say: {proven}, {converted} of {len(self.layers)} linears are converted"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them, the answers too."""
        answers = {"verdict": self.verdict, "fell_back": self.fell_back, "unproven": self.unproven}
        return json.loads(json.dumps({**answers, **asdict(self)}))

    def to_json(self, *, indent: int | None = 1) -> str:
        """The explanation as a JSON object."""
        return json.dumps(self.to_dict(), indent=indent)


def _no_code(report: GraphReport, layers: tuple[LayerExplanation, ...]) -> str:
    """Why there is no use in asking for generated code; empty if there is."""
    if report.breaks:
        return f"it needs one whole graph, and this model has {len(report.breaks)} graph breaks"
    odd = [f"{layer.name} ({g.gemm})" for layer in layers for g in layer.gemms if g.padded_n != g.n]
    if odd:
        # gpu_code traces on the CPU, where n is not padded, and no GPU takes such a product
        return f"columns of {', '.join(odd)} are no multiple of 16, and their padding is decided on the GPU only"
    return ""


def explain(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    gpu: str | None = "h200",
) -> Explanation:
    """Compile and run a model, and say of each linear in what its three GEMMs really run.

    The proof is the graphs: a GEMM is in FP8 if the forward or backward graph multiplies FP8 operands there. What a
    layer says of itself doesn't count. Gradients are left as they are; compiled graphs are forgotten.

    Args:
        model: Converted or not, and not compiled.
        args: Of the call that is explained; inputs that require grad have their gradient explained too.
        kwargs: Of it.
        gpu: Generate code for this one, and give its least times: a key of `PEAKS`; None leaves that out.

    Returns:
        The explanation.

    Raises:
        ValueError: No such GPU.
        TypeError: The model is none, or was compiled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain: model is a {type(model).__name__}; it is a torch.nn.Module.")
    if gpu is not None and gpu not in PEAKS:
        raise ValueError(f"explain: gpu is {gpu!r}; it is one of {', '.join(PEAKS)}, or None.")
    kwargs = kwargs or {}
    peaks = None if gpu is None else PEAKS[gpu]
    report = graph_report(model, calls=[Call(args, kwargs, name="first"), Call(args, kwargs, name="the same again")])
    names, weights = layer_weights(model)
    gemms = graph_gemms(record(model, args, kwargs), weights, names)
    layers = explain_layers(model, report, gemms, peaks)
    on_gpu = None
    if peaks is not None:
        problem = _no_code(report, layers)
        on_gpu = GpuExplanation(gpu=peaks.name, problem=problem)
        if not problem:
            on_gpu = explain_gpu(model, args, kwargs, names, name=peaks.name)
    return Explanation(
        torch=torch.__version__,
        graphs=report,
        layers=layers,
        gpu=on_gpu,
        roofline=None if peaks is None else roofline(gemms, peaks),
    )
