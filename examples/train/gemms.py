"""Counts the GEMMs of linear layers and experts in FP8: those that recipes ask for, and those of a profiled step.

The profiler sees the products that the compiled step calls, with their dtypes, so a layer that fell back to bf16 can't
pass for one in FP8. A device without a kernel for a product emulates it in float64. Each rank counts its own products.

A product with a stack of experts' weights counts as one, however many experts get rows. It is one call, of a grouped
kernel or, on a CPU, of an op that loops over the experts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import fp8compile as f8

GEMMS_A_MATRIX = 3  # output, grad_input, grad_weight
FP8, EMULATED, OTHER = "fp8", "emulated", "other"
FP8_CALL = re.compile(
    r"aten::_scaled_(grouped_)?mm(_v2)?|fp8compile::(scaled_grouped|grouped_blockwise|grouped_nvfp4)_mm"
)
OTHER_CALLS = frozenset({"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"})
GROUPED_CALL = re.compile(r".*grouped_(blockwise_|nvfp4_)?mm(_v2)?")


@dataclass(frozen=True, kw_only=True)
class GemmCount:
    """GEMMs of linear layers and experts in one training step, on one rank, and their floating-point operations."""

    fp8: int
    emulated: int
    total: int
    fp8_flops: int
    emulated_flops: int
    flops: int

    def shown(self, kind: str) -> str:
        """The count and the share of flops of products that are ``"fp8"`` or ``"emulated"``, as text for the table."""
        flops = getattr(self, f"{kind}_flops")
        return f"{getattr(self, kind)} of {self.total} ({flops / self.flops if self.flops else 0.0:.1%} of flops)"


def asked_gemms(model: nn.Module, *, top_k: int) -> tuple[int, int, float]:
    """Number of a step's GEMMs that recipes put in FP8, number of all its GEMMs, and FP8's share of the flops."""
    asked, total, asked_flops, flops = 0, 0, 0, 0
    for row in f8.conversion_report(model).rows:
        fp8 = len(row.float8_gemms()) if row.converted else 0
        size = sum(n * k for n, k in row.matrices) * (top_k if row.experts else 1)
        asked, asked_flops = asked + fp8 * len(row.matrices), asked_flops + fp8 * size
        total, flops = total + GEMMS_A_MATRIX * len(row.matrices), flops + GEMMS_A_MATRIX * size
    return asked, total, asked_flops / flops


def _is_product(event: FunctionEvent) -> bool:
    name = event.name
    return name in OTHER_CALLS or bool(FP8_CALL.fullmatch(name) or GROUPED_CALL.fullmatch(name))


def _above(event: FunctionEvent) -> Iterator[FunctionEvent]:
    while (event := event.cpu_parent) is not None:
        yield event


def _inside(event: FunctionEvent) -> Iterator[FunctionEvent]:
    for child in event.cpu_children:
        yield child
        yield from _inside(child)


def _is_counted(event: FunctionEvent) -> bool:
    """Whether a product counts: it is no part of another one, and no call on DTensors, whose local product counts."""
    is_part = any(_is_product(above) and above.name != event.name for above in _above(event))
    return not is_part and not any(child.name == event.name for child in _inside(event))


def _matrices(event: FunctionEvent) -> list[list[int]]:
    return [shape for shape in event.input_shapes if len(shape) > 1][:2]


def _flops(event: FunctionEvent, rows_in_groups: int) -> int:
    """Operations of a product. A sum over grouped tokens has ``rows_in_groups`` terms; padding doesn't count."""
    first, second = _matrices(event)
    if not GROUPED_CALL.fullmatch(event.name):
        return 2 * first[0] * first[1] * second[1]
    if len(second) == 3:
        return 2 * first[0] * second[1] * second[2]
    # a sum over tokens: the operands' dims that are the result's
    of_first = 1 if event.name == "fp8compile::grouped_mm" else 0
    of_second = 1 if of_first or event.name.startswith("aten::") else 0
    return 2 * rows_in_groups * first[of_first] * second[of_second]


def profiled_gemms(step: Callable[[], None]) -> GemmCount:
    """Profile a compiled forward and backward, and count its GEMMs, without attention, which has its own kernels."""
    # Kineto prints a line at each start and stop; only this variable prevents that.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Calls of operators are CPU events on every device.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        step()
    # The profiler's own events have no dtypes before PyTorch 2.13.
    dtypes = {event.correlation_id(): event.dtypes() for event in profiler.profiler.kineto_results.events()}
    events = [event for event in profiler.events() if _is_product(event)]
    grouped = [_matrices(event) for event in events if GROUPED_CALL.fullmatch(event.name)]
    rows_in_groups = max((first[0] for first, second in grouped if len(second) == 3), default=0)

    def kind_of(event: FunctionEvent) -> str:
        called = [event, *(child for child in _inside(event) if child.name in OTHER_CALLS)]
        if any(list(dtypes[each.id][:2]) == ["double", "double"] for each in called):
            return EMULATED  # nothing else in this model is float64
        return FP8 if FP8_CALL.fullmatch(event.name) else OTHER

    gemms = [(kind_of(event), _flops(event, rows_in_groups)) for event in events if _is_counted(event)]
    numbers = {"total": len(gemms), "flops": sum(flops for _, flops in gemms)}
    for each in (FP8, EMULATED):
        found = [flops for kind, flops in gemms if kind == each]
        numbers |= {each: len(found), f"{each}_flops": sum(found)}
    return GemmCount(**numbers)
