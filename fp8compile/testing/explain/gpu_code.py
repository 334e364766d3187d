"""Explains what a GPU would launch for a model: kernels, GEMMs, bytes, operators fused with casts."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from fp8compile import ops
from fp8compile.nn import revert
from fp8compile.nn.convertible.convertible_layers import is_converted
from fp8compile.nn.experts.converted_class import ConvertedExperts
from fp8compile.nn.experts.known_modules import layout_of
from fp8compile.ops.gemms.grouped.table import grouped_calls
from fp8compile.ops.gemms.table import multiplying_calls
from fp8compile.target import pretend_target
from fp8compile.testing.explain.capture import Recorded
from fp8compile.testing.explain.equal_blocks import EqualBlocks, equal_blocks, shortened
from fp8compile.testing.explain.module_stack import Names, layer_of_stack
from fp8compile.testing.explain.recipe_support import GemmSupport, recipe_support
from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.schedule import Schedule, ScheduledLaunch, operator_of, schedule
from fp8compile.testing.graphs.compiler_log import one_line

__all__ = ["Cast", "GpuExplanation", "GraphCost", "explain_gpu", "missing_gemm", "unconverted"]

log: logging.Logger = logging.getLogger(__name__)
GEMM_OF = {op._opname: gemm.name for op, gemm in ops.LAYER_OPS.items()}
NO_WORK = (
    "view", "permute", "expand", "squeeze", "unsqueeze", "full", "reshape", "clone", "slice", "t", "transpose",
    "unsafe_view", "detach", "alias", "split",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cast:
    """The cast of an operand of an FP8 GEMM on a GPU.

    Attributes:
        layer: Name of the layer; None if unknown.
        gemm: "output", "grad_input" or "grad_weight".
        operand: "a" or "b" of the GEMM (m, k) by (k, n).
        kernel: The Triton kernel that writes the codes; empty if no kernel of this graph does, as for codes that
            the forward saved.
        fused_with: Operators other than quantization that the same kernel computes, such as "aten.silu".
        serves: Number of GEMMs that read these codes.
    """

    layer: str | None
    gemm: str
    operand: str
    kernel: str
    fused_with: tuple[str, ...]
    serves: int

    @property
    def is_fused(self) -> bool:
        """Whether the cast shares its kernel with other operators."""
        return bool(self.fused_with)


@dataclass(frozen=True, kw_only=True)
class GraphCost:
    """Counts of the launches of one graph.

    Attributes:
        backward: Whether the graph is the backward.
        kernels: Number of launches of Triton kernels.
        gemms: Number of matrix products by a library.
        fp8_gemms: Number of these matrix products that have FP8 operands.
        opaque: Number of other operators, whose launches are not known.
        bytes: Bytes read and written; each buffer counts once per launch.
    """

    backward: bool
    kernels: int
    gemms: int
    fp8_gemms: int
    opaque: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class GpuExplanation:
    """Counts of launches, casts and GEMMs in the generated code for a GPU.

    Attributes:
        gpu: Name of the GPU.
        problem: Why no code could be generated; empty if code was generated.
        no_gemm: A layer that the GPU has no GEMM for, and what to do; empty if there is none.
        costs: Launches of the forward, and of the backward if there is one.
        bf16_costs: Launches of the same model unconverted; empty if there are none to compare with.
        bf16_problem: Why the unconverted model has no code; empty if it has code, or if nothing is converted.
        casts: Casts of the operands of each FP8 GEMM.
        gemms: Kinds of GEMM kernels that the GPU would use for converted layers, each with the number of GEMMs.
        counted: Names of equal blocks whose numbers were extrapolated from two or three blocks, such as
            "model.layers.{1..30}"; empty if code was generated for the whole model.
    """

    gpu: str
    problem: str = ""
    no_gemm: str = ""
    costs: tuple[GraphCost, ...] = ()
    bf16_costs: tuple[GraphCost, ...] = ()
    bf16_problem: str = ""
    casts: tuple[Cast, ...] = ()
    gemms: tuple[tuple[str, int], ...] = ()
    counted: str = ""


def _support(model: nn.Module, gpu: Gpu) -> list[tuple[str, GemmSupport]]:
    layers = [(name, layer) for name, layer in model.named_modules() if is_converted(layer)]
    with pretend_target(gpu.target):
        return [
            (name or "the model", each) for name, layer in layers for each in _support_of(layer, torch.device("cuda"))
        ]


def _support_of(layer: Any, device: torch.device) -> list[GemmSupport]:
    if not isinstance(layer, ConvertedExperts):
        return list(recipe_support(layer.recipe, device, layer.weight.dtype))
    found = recipe_support(layer.recipe, device, next(layer.parameters()).dtype, grouped=True)
    named = [each if each.kind == "none" else replace(each, kind=f"{each.kind}, grouped") for each in found]
    return named * len(layout_of(layer).weights)


def missing_gemm(model: nn.Module, gpu: Gpu) -> str:
    """Name the first layer and GEMM that a GPU can't run, with the reason; empty if there is none."""
    lacking = ((name, each) for name, each in _support(model, gpu) if each.kind == "none")
    return next((f"{name}, {each.gemm}: {each.detail.removeprefix('scaled_mm: ')}" for name, each in lacking), "")


def _gemms(model: nn.Module, gpu: Gpu) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(each.kind for _, each in _support(model, gpu)).items())


def _works(op: str) -> bool:
    """Whether an operator such as "aten.silu" does other work than quantization, views and copies."""
    namespace, _, rest = op.partition(".")
    return namespace != "fp8compile" and rest.partition(".")[0].lstrip("_") not in NO_WORK


def _fused_with(found: Schedule, launch: ScheduledLaunch) -> tuple[str, ...]:
    ops = map(operator_of, found.computed(launch))
    return tuple(dict.fromkeys(".".join(op.split(".")[:2]) for op in ops if _works(op)))


def _multiplies_codes(launch: ScheduledLaunch) -> bool:
    called = launch.op or launch.name
    is_known = not (multiplying_calls() | grouped_calls()).isdisjoint(called.split("."))
    return launch.kind == "gemm" and (is_known or "scaled" in called)


def _casts(found: Schedule, names: Names) -> Iterator[Cast]:
    products = list(filter(_multiplies_codes, found.launches))
    for product in products:
        node = found.makes(product)
        if node is None:
            continue
        gemm = GEMM_OF.get(operator_of(node).rpartition(".")[2], "output")
        for operand, name in zip("ab", product.read, strict=False):
            by = found.maker.get(name)
            kernel = by if by is not None and by.kind == "triton" else None
            yield Cast(
                layer=layer_of_stack(node, names),
                gemm=gemm,
                operand=operand,
                kernel="" if kernel is None else kernel.name,
                fused_with=() if kernel is None else _fused_with(found, kernel),
                serves=sum(name in other.read[:2] for other in products),
            )


def _cost(found: Schedule, *, backward: bool) -> GraphCost:
    kinds = [launch.kind for launch in found.launches]
    return GraphCost(
        backward=backward,
        kernels=kinds.count("triton"),
        gemms=kinds.count("gemm"),
        fp8_gemms=sum(map(_multiplies_codes, found.launches)),
        opaque=kinds.count("opaque"),
        bytes=sum(launch.bytes_read + launch.bytes_written for launch in found.launches),
    )


Found = tuple[tuple[GraphCost, ...], tuple[Cast, ...]]


@dataclass(frozen=True, kw_only=True)
class _ModelCall:
    """A call of a model, and the GPU for which its code is generated; ``what`` is a phrase for the log."""

    what: str  # the model, in the words of the log
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: Names
    gpu: Gpu

    def generated(self) -> Found:
        """Generate code for the model's forward and backward; returns its launch counts and casts."""
        model, kwargs = self.model, self.kwargs
        fn = (lambda *args: model(*args, **kwargs)) if kwargs else model
        costs: list[GraphCost] = []
        casts: list[Cast] = []
        log.info("tracing %s", self.what)
        for number, graph in enumerate(gpu_graphs(fn, self.args, self.gpu)):
            log.info("fusing operators of the %s into kernels", "backward" if number else "forward")
            found = schedule(graph, self.gpu)
            costs.append(_cost(found, backward=number > 0))
            casts += _casts(found, self.names)
        return tuple(costs), tuple(casts)


def _in_all(blocks: EqualBlocks, two: GraphCost, three: GraphCost) -> GraphCost:
    numbers = {
        each.name: blocks.in_all(getattr(two, each.name), getattr(three, each.name))
        for each in fields(GraphCost)
        if each.name != "backward"
    }
    return GraphCost(backward=two.backward, **numbers)


def _casts_in_all(blocks: EqualBlocks, three: Sequence[Cast]) -> Iterator[Cast]:
    for cast in three:
        place = None if cast.layer is None else blocks.place(cast.layer)
        if place is None:
            yield cast
            continue
        number, inside = place
        numbers = {0: [0], 1: range(1, blocks.count - 1)}.get(number, [blocks.count - 1])
        yield from (replace(cast, layer=blocks.layer(each, inside)) for each in numbers)


def _counted(blocks: EqualBlocks, two: Found, three: Found) -> Found:
    costs = tuple(_in_all(blocks, few, more) for few, more in zip(two[0], three[0], strict=True))
    return costs, tuple(_casts_in_all(blocks, three[1]))


def _comparable(found: Found) -> tuple[tuple[GraphCost, ...], Counter[Cast]]:
    """Return launch counts and casts without kernels' names and order, which vary between compilations."""
    costs, casts = found
    return costs, Counter(
        replace(cast, kernel="some" if cast.kernel else "", fused_with=tuple(sorted(cast.fused_with)))
        for cast in casts
    )


def _costs(call: _ModelCall, blocks: EqualBlocks | None) -> tuple[Found, bool]:
    if blocks is not None:
        found = []
        for count in (2, 3, 4):
            with shortened(call.model, blocks, count):
                log.info("%d of %d equal blocks of %s", count, blocks.count, blocks.name or "the model")
                found.append(call.generated())
        two, three, four = found
        if _comparable(_counted(replace(blocks, count=4), two, three)) == _comparable(four):
            return _counted(blocks, two, three), True
        log.info("generating code for each block, because it depends on how many there are")
    return call.generated(), False


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error))[:200]}"


def unconverted(model: nn.Module) -> nn.Module | None:
    """A copy of a model without FP8, with the same parameters and buffers; None if nothing is converted."""
    if not any(is_converted(module) for module in model.modules()):
        return None
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return revert(copy.deepcopy(model, shared))  # nothing is computed, so nobody writes to them


def _unconverted(call: _ModelCall, blocks: EqualBlocks | None) -> tuple[tuple[GraphCost, ...], str]:
    try:
        if (plain := unconverted(call.model)) is None:
            return (), ""
        return _costs(replace(call, model=plain, what="the same model unconverted"), blocks)[0][0], ""
    except Exception as error:  # the model can't be copied or reverted; the report goes on without this part
        return (), _said(error)


def explain_gpu(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Names,
    gpu: Gpu,
    *,
    name: str,
    graphs: Sequence[Recorded] = (),
) -> GpuExplanation:
    """Explain what a GPU would launch for a model, and for the same model without FP8.

    Args:
        model: The model, without graph breaks.
        args: Arguments of a call.
        kwargs: Keyword arguments of the call.
        names: Names of the model's layers and modules.
        gpu: The GPU.
        name: Name of the GPU in reports.
        graphs: The graphs of the call. If given, numbers of equal blocks are extrapolated.

    Returns:
        The counts, or the reason why there are none.
    """
    call = _ModelCall(what="the model", model=model, args=args, kwargs=kwargs, names=names, gpu=gpu)
    try:
        blocks = equal_blocks(model, args, kwargs, graphs) if graphs else None
        (costs, casts), is_counted = _costs(call, blocks)
    except ModuleNotFoundError as error:
        return GpuExplanation(gpu=name, problem=f"requires {error.name}, which is not installed")
    except Exception as error:  # PyTorch's private interfaces may change; the report says what failed
        return GpuExplanation(gpu=name, problem=f"not supported with PyTorch {torch.__version__} here: {_said(error)}")
    finally:
        torch._dynamo.reset()
    bf16_costs, bf16_problem = _unconverted(call, blocks if is_counted else None)
    return GpuExplanation(
        gpu=name,
        costs=costs,
        casts=casts,
        gemms=_gemms(model, gpu),
        bf16_costs=bf16_costs,
        bf16_problem=bf16_problem,
        counted=str(blocks) if is_counted else "",
    )
