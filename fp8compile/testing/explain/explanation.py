"""explain: combines all reports on a model in FP8 into one object."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from fp8compile.nn.check_model import check_model
from fp8compile.nn.parameter_uses.first_forward import suppress_warnings
from fp8compile.testing.explain.bytes_sent_by_layer import Sends, is_spread, sends
from fp8compile.testing.explain.capture import Recorded, reported
from fp8compile.testing.explain.gpu_code import GpuExplanation, explain_gpu, missing_gemm
from fp8compile.testing.explain.graphs import graph_gemms
from fp8compile.testing.explain.layers import (
    FELL_BACK,
    FP8,
    UNPROVEN,
    GemmExplanation,
    LayerExplanation,
    explain_layers,
    layer_weights,
)
from fp8compile.testing.explain.module_stack import Names
from fp8compile.testing.explain.roofline import PEAKS, Peaks, Roofline, experts_speed, roofline
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.graphs.kept_state import kept_state
from fp8compile.testing.graphs.report import GraphReport, is_compiled
from fp8compile.testing.graphs.without_values import on_meta, values_needed, without_values

__all__ = ["Explanation", "explain", "explain_in_steps"]


log: logging.Logger = logging.getLogger(__name__)
SHOWN = 5  # names in a line; the table has them all


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Whether a model really runs in FP8, and which parts of it don't.

    Attributes:
        torch: Version of PyTorch.
        graphs: Report on the graphs of two equal calls.
        layers: An explanation of each linear.
        gpu: What a GPU would launch; None if no GPU was asked for.
        roofline: Least times by that GPU's peaks; None if no GPU was asked for, layers are sharded, or the GPU has no
            GEMM for a layer.
        sends: Messages of each layer; None if no layer is sharded.
        experts_speed: For FP8 experts, the smallest mean number of rows of an expert, and the estimated speed relative
            to bfloat16; None if there are none, or where ``roofline`` is None.
    """

    torch: str
    graphs: GraphReport
    layers: tuple[LayerExplanation, ...]
    gpu: GpuExplanation | None
    roofline: Roofline | None
    sends: Sends | None = None
    experts_speed: tuple[int, float] | None = None

    def _of_converted(self, status: str) -> dict[str, list[GemmExplanation]]:
        layers = [layer for layer in self.layers if layer.converted]
        found = {layer.name: [gemm for gemm in layer.gemms if gemm.status == status] for layer in layers}
        return {name: gemms for name, gemms in found.items() if gemms}

    @property
    def fell_back(self) -> tuple[str, ...]:
        """A line for each converted layer with a GEMM in another format than its recipe says."""
        lines = []
        for name, gemms in self._of_converted(FELL_BACK).items():
            runs = "; ".join(f"{gemm.gemm} runs in {gemm.runs}, {gemm.detail}" for gemm in gemms)
            places = dict.fromkeys(place for gemm in gemms for place in gemm.places)
            lines.append(f"{name}: {runs} ({', '.join(places)})")
        return tuple(lines)

    @property
    def unproven(self) -> tuple[str, ...]:
        """A line for each converted layer with a GEMM not proven to run in FP8, and a line on graph breaks."""
        lines = [
            f"{name}: {', '.join(gemm.gemm for gemm in gemms)}: {gemms[0].detail}"
            for name, gemms in self._of_converted(UNPROVEN).items()
        ]
        if self.graphs.breaks:
            lines.append(
                f"{_counted(len(self.graphs.breaks), 'graph break')}: what runs outside of the graphs is unknown"
            )
        return tuple(lines)

    @property
    def runs_in_fp8(self) -> bool:
        """Whether `verdict` begins with "YES"."""
        return self.verdict.startswith("YES")

    @property
    def verdict(self) -> str:
        """The answer to "is this really running in FP8?", in one line."""
        gemms = [gemm for layer in self.layers for gemm in layer.gemms]
        in_fp8 = sum(gemm.status == FP8 for gemm in gemms)
        proven = f"{in_fp8} of {sum(bool(gemm.ops) for gemm in gemms)} GEMMs of linear layers run in FP8"
        converted = [layer for layer in self.layers if layer.converted]
        idle = [layer.name for layer in converted if not layer.is_called]
        if self.fell_back:
            return f"NO: {_counted(len(self.fell_back), 'converted layer')} fell back; {proven}"
        if not converted and not in_fp8:
            return (
                f"NO: none of the {len(self.layers)} linear layers is converted"
                if self.layers
                else "NO: the model has no linear layer"
            )
        if self.gpu is not None and self.gpu.no_gemm:
            return f"NO: {self.gpu.gpu} does not support the recipe of {self.gpu.no_gemm}"
        if self.unproven:
            return f"NOT PROVEN: {'; '.join(self._doubts())}; {proven}"
        if not in_fp8:
            why = "no converted layer is called" if len(idle) == len(converted) else "no recipe uses it"
            return f"NO: {why}; {proven}"
        counts = f"{proven}, {len(converted)} of {len(self.layers)} layers are converted"
        return f"YES, as the recipes specify: {counts}" + (f"; never called: {_named(idle)}" if idle else "")

    @property
    def gain(self) -> str:
        """One line on the speed that FP8 can give by the GPU's peaks; empty if unknown or nothing is in FP8."""
        if self.roofline is None or not any(gemm.status == FP8 for layer in self.layers for gemm in layer.gemms):
            return ""
        ratio = f"{self.roofline.ratio:.2f}"
        says = "too small to benefit" if float(ratio) <= 1 else "an upper bound, not a measurement"
        return (
            f"according to the peak rates of an {self.roofline.gpu}: {ratio} of bf16's speed with these inputs, {says}"
        )

    @property
    def experts(self) -> str:
        """One line on the estimated speed of FP8 experts on this GPU; empty if there are none."""
        if self.experts_speed is None or self.roofline is None:
            return ""
        rows, ratio = self.experts_speed
        advice = ", so leave them in bf16" if ratio < 1 else ""
        return (
            f"FP8 experts with {rows} rows each: at most about {ratio:.1f} of bf16's speed on an {self.roofline.gpu}"
            f"{advice} (an estimate, not a measurement)"
        )

    def _doubts(self) -> list[str]:
        """Reasons why the verdict can't be YES, each in a few words."""
        layers = len(self._of_converted(UNPROVEN))
        doubts = [f"{_counted(layers, 'converted layer')} without proof"] if layers else []
        return [*doubts, *(line for line in self.unproven[layers:])]

    def to_dict(self) -> dict[str, Any]:
        """The explanation and its verdicts as JSON-serializable dicts, lists, strings and numbers."""
        answers = {
            "verdict": self.verdict,
            "gain": self.gain,
            "experts": self.experts,
            "fell_back": self.fell_back,
            "unproven": self.unproven,
        }
        return json.loads(json.dumps({**answers, **asdict(self)}))

    def to_json(self, *, indent: int | None = 1) -> str:
        """The explanation as a JSON object; ``indent`` is that of `json.dumps`."""
        return json.dumps(self.to_dict(), indent=indent)


def _no_code(model: nn.Module, report: GraphReport) -> str:
    if is_spread(model):
        return "it runs in one process, but layers of this model are sharded over ranks"
    if report.breaks:
        return f"it requires a single graph, but this model has {_counted(len(report.breaks), 'graph break')}"
    return ""


def _by_graphs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gpu: str | None, peaks: Peaks | None, names: Names
) -> tuple[Explanation, list[Recorded]]:
    """Explain a model from its graphs, without generating GPU code; also return the graphs."""
    log.info("compiling the model and calling it twice")
    report, recorded = reported(model, args, kwargs)
    log.info("reading its graphs")
    buffers = set(map(id, model.buffers()))
    gemms, unknown = graph_gemms(recorded, layer_weights(model), buffers, names)
    on_gpu, spread, missing = None, is_spread(model), ""
    if peaks is not None and gpu is not None:
        missing = missing_gemm(model, GPUS[gpu])
        on_gpu = GpuExplanation(gpu=peaks.name, problem=missing or _no_code(model, report), no_gemm=missing)
    found = Explanation(
        torch=torch.__version__,
        graphs=report,
        layers=explain_layers(model, report, gemms, unknown, peaks),
        gpu=on_gpu,
        roofline=None if peaks is None or spread or missing else roofline(gemms, peaks),
        sends=sends(model, *args, **kwargs) if spread else None,
        experts_speed=None if peaks is None or spread or missing else experts_speed(gemms, peaks),
    )
    return found, recorded


@contextmanager
def _for_a_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, values: bool
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Context for a call of the model: yields the arguments as given with ``values``, else as fake tensors.

    Without ``values``, the model's tensors are fake too. Its modes, buffers and gradients are restored at exit.
    """
    with kept_state(model, (args, kwargs)), suppress_warnings():
        if values:
            yield args, kwargs
            return
        with without_values(model, args, kwargs) as fakes:
            yield fakes


def _needs_values(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model has to be called with real values, not with fake tensors.

    Raises:
        ValueError: The model needs real values, but is on the meta device.
    """
    if is_spread(model):  # what is sent is listened to
        return True
    with suppress_warnings():
        why = values_needed(model, args, kwargs)
    if why and on_meta(model):
        raise ValueError(
            f"explain: the model has parameters on the meta device, and calling it fails: {why}. If its forward "
            "reads values (an if on a tensor, .item(), nonzero()), create it on a real device."
        )
    if why:
        log.info("calling it with real tensors, because it fails with fake ones (%s)", why)
    return bool(why)


def explain_in_steps(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    gpu: str | None = "h200",
    values: bool | None = None,
) -> Generator[Explanation, None, None]:
    """Yield an explanation from graphs, and then, maybe minutes later, one with GPU code too.

    Args:
        model: As `explain` takes it; its state is restored at the end.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
        gpu: The GPU, a key of `PEAKS`; None for no code.
        values: Whether the call needs real values; None if unknown, to find it out by a call with fake tensors.

    Yields:
        An explanation whose ``gpu`` has no costs and casts; then the complete one, if there is code to generate.

    Raises:
        ValueError: There is no such GPU; or the forward reads values, and the model is on the meta device.
        TypeError: The model is not a module, or is compiled.
    """
    check_model("explain", model)
    if gpu is not None and gpu not in PEAKS:
        raise ValueError(f"explain: `gpu` is {gpu!r}; it must be one of {', '.join(PEAKS)}, or None.")
    if is_compiled(model):
        raise TypeError("explain: the model is already compiled. Pass the model before torch.compile.")
    kwargs = kwargs or {}
    peaks = None if gpu is None else PEAKS[gpu]
    if values is None or is_spread(model):
        values = _needs_values(model, args, kwargs)
    names = Names.of(model)
    with _for_a_call(model, args, kwargs, values=values) as (given, named):
        found, graphs = _by_graphs(model, given, named, gpu, peaks, names)
    yield found
    if gpu is not None and peaks is not None and found.gpu is not None and not found.gpu.problem:
        log.info("generating code for %s", peaks.name)
        with _for_a_call(model, args, kwargs, values=values) as (given, named):
            on_gpu = explain_gpu(model, given, named, names, GPUS[gpu], name=peaks.name, graphs=graphs)
        yield replace(found, gpu=on_gpu)


def explain(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    gpu: str | None = "h200",
) -> Explanation:
    """Compile a model, and report for each linear in which formats its three GEMMs really run.

    Nothing is computed: the model is called with fake tensors, so it may be on the meta device. Only a forward that
    reads values, or a sharded model, is called with real tensors.

    The graphs are the proof: a GEMM runs in FP8 if the forward or backward graph multiplies FP8 operands for it. What
    a layer reports about itself doesn't count. Modes, buffers, gradients and random states are restored; arguments
    that the model changes in place are not. All earlier compiled graphs are dropped.

    Args:
        model: The model, converted or not, and not compiled.
        args: Arguments of the call that is explained. If inputs require grad, the GEMMs for their gradients are
            explained too.
        kwargs: Keyword arguments of that call.
        gpu: GPU for generated code and least times, a key of `PEAKS`; None omits both.

    Returns:
        The explanation.

    Raises:
        ValueError: There is no such GPU; or the forward reads values, and the model is on the meta device.
        TypeError: ``model`` is not a module, or is compiled.
    """
    *_, found = explain_in_steps(model, args, kwargs, gpu=gpu)
    return found
