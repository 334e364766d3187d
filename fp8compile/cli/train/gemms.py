"""Which GEMMs of linear layers and experts ran in FP8: by the recipe, and as a profiled step shows.

The recipe says what should run, and the device how: on a kernel, or emulated in float64. The profiler
sees the products that the compiled step calls, with their dtypes, so a layer that fell back to bf16 on
the way can pass for neither. Of a model that is cut over ranks, both count what one rank does.

A product with a stack of experts' weights counts as one, however many experts get rows: one call where it is native,
and a call that loops over the experts on a CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from fp8compile import Recipe

__all__ = ["GemmCount", "expected_gemms", "profiled_gemms"]

OTHER_CALLS = frozenset({"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"})
# Grouped products over tokens: which dims of the two operands are those of the result. The third is the tokens, with
# padding between groups, so how many there are is said by the products of rows by stacks.
RESULT_DIMS = {
    "fp8compile::scaled_grouped_mm": (0, 0),
    "fp8compile::grouped_blockwise_mm": (0, 0),
    "fp8compile::grouped_nvfp4_mm": (0, 0),
    "fp8compile::grouped_mm": (1, 1),
    "aten::_scaled_grouped_mm": (0, 1),
    "aten::_grouped_mm": (0, 1),
}
FP8, EMULATED, OTHER = "fp8", "emulated", "other"


@dataclass(frozen=True, kw_only=True)
class GemmCount:
    """GEMMs of linear layers and experts in one training step, on one rank.

    Attributes:
        fp8: How many multiply FP8 operands by a kernel for them.
        emulated: How many multiply the values of FP8 operands in float64.
        total: How many there are.
        fp8_flops: Floating-point operations of the first.
        emulated_flops: Those of the second.
        flops: Those of all.
    """

    fp8: int
    emulated: int
    total: int
    fp8_flops: int
    emulated_flops: int
    flops: int

    def shown(self, *kinds: str) -> str:
        """Count and share of ``"fp8"``, ``"emulated"`` or both together, as the table shows them."""
        count = sum(getattr(self, kind) for kind in kinds)
        flops = sum(getattr(self, f"{kind}_flops") for kind in kinds)
        return f"{count} of {self.total} ({flops / self.flops if self.flops else 0.0:.1%} of flops)"


def _count(gemms: Iterable[tuple[str, int]]) -> GemmCount:
    gemms = list(gemms)
    return GemmCount(
        fp8=sum(kind == FP8 for kind, _ in gemms),
        emulated=sum(kind == EMULATED for kind, _ in gemms),
        total=len(gemms),
        fp8_flops=sum(flops for kind, flops in gemms if kind == FP8),
        emulated_flops=sum(flops for kind, flops in gemms if kind == EMULATED),
        flops=sum(flops for _, flops in gemms),
    )


def _expected_kinds(recipe: Recipe, device: torch.device, *, grouped: bool) -> tuple[str, ...]:
    from fp8compile.ops.gemms.grouped.one_by_one import ONE_BY_ONE
    from fp8compile.ops.support import recipe_support

    found = recipe_support(recipe, device)
    if grouped:
        groups = recipe_support(recipe, device, grouped=True)
        # group by group, codes are multiplied as those of a linear are
        found = tuple(one if each.kind == ONE_BY_ONE.name else each for each, one in zip(groups, found, strict=True))
    kinds = {"high_precision": OTHER, "emulated": EMULATED}
    return tuple(kinds.get(gemm.kind, FP8) for gemm in found)


def _weights(model: nn.Module, tokens: int) -> Iterator[tuple[str, Tensor, int]]:
    """Each weight of a linear, and each stack of experts' weights: the name of its module, itself, rows multiplied."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    from fp8compile.cli.train.experts import MixtureOfExperts

    def local(weight: Tensor) -> Tensor:
        return weight.to_local() if isinstance(weight, DTensor) else weight

    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield fqn, local(module.weight), tokens
        if isinstance(module, MixtureOfExperts):
            for stack in module.experts.parameters():
                # rows that an expert's rank gets are data: as many as it sends, on average
                senders = 1 if module.same_tokens is None else module.same_tokens.size()
                yield f"{fqn}.experts", local(stack), tokens * module.top_k // senders


def expected_gemms(model: nn.Module, recipe: Recipe | None, *, tokens: int, device: torch.device) -> GemmCount:
    """Count the GEMMs that the recipe asks for, by what the device has for them.

    Args:
        model: After conversion.
        recipe: What it was converted by; None if it was not.
        tokens: Rows of a layer's input in one step.
        device: Where it runs.

    Returns:
        The count; each linear has three GEMMs, and so has each stack of experts' weights.
    """
    import fp8compile as f8
    from fp8compile.quantizers import GEMMS

    converted = set()
    if recipe is not None:
        converted = {row.fqn for row in f8.conversion_report(model).rows if row.converted}
    gemms = []
    for fqn, weight, rows in _weights(model, tokens):
        kinds: Sequence[str] = [OTHER] * len(GEMMS)
        if recipe is not None and fqn in converted:
            kinds = _expected_kinds(recipe, device, grouped=weight.ndim == 3)
        gemms += [(kind, 2 * rows * weight.shape[-2] * weight.shape[-1]) for kind in kinds]
    return _count(gemms)


def _fp8_calls() -> frozenset[str]:
    from fp8compile.ops.gemms.grouped.table import grouped_calls
    from fp8compile.ops.gemms.table import multiplying_calls

    calls = {f"aten::{call}{version}" for call in multiplying_calls() for version in ("", "_v2")}
    own = {f"fp8compile::{call}" for call in ("scaled_grouped_mm", *grouped_calls())}
    return frozenset(calls | own | {f"aten::{call}" for call in grouped_calls()})


def _is_nested(event: object, calls: frozenset[str]) -> bool:
    """Whether this is a part of another product."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name != event.name and parent.name in calls:
            return True
        parent = parent.cpu_parent
    return False


def _inside(event: object) -> Iterator[object]:
    """All that an event calls."""
    for child in event.cpu_children:
        yield child
        yield from _inside(child)


def _is_of_whole(event: object) -> bool:
    """Whether this is a product of DTensors, in eager mode: it calls that of this rank's parts."""
    return any(child.name == event.name for child in _inside(event))


def _rows_in_groups(events: Iterable[object]) -> int:
    """Rows of every grouped product of a step, 0 if there is none."""
    sizes = [[shape for shape in event.input_shapes if shape][:2] for event in events if event.name in RESULT_DIMS]
    return max((rows[0] for rows, stack in sizes if len(stack) == 3), default=0)


def _flops(event: object, rows_in_groups: int) -> int:
    first, second = [shape for shape in event.input_shapes if len(shape) > 1][:2]
    if event.name not in RESULT_DIMS:
        return 2 * first[0] * first[1] * second[1]
    if len(second) == 3:
        return 2 * first[0] * second[1] * second[2]
    of_first, of_second = RESULT_DIMS[event.name]
    return 2 * rows_in_groups * first[of_first] * second[of_second]


def _is_float64(event: object, dtypes: Mapping[int, Sequence[str]]) -> bool:
    """Whether this multiplies in float64, or what it calls does; nothing else in this model is float64."""
    products = [event, *(child for child in _inside(event) if child.name in OTHER_CALLS)]
    return any(list(dtypes[product.id][:2]) == ["double", "double"] for product in products)


def profiled_gemms(step: Callable[[], None]) -> GemmCount:
    """Run a training step under the profiler and count the GEMMs it calls.

    Attention's products are inside its own kernels and not among them.

    Args:
        step: Forward and backward, compiled before, so that no compiler runs in here.

    Returns:
        What really ran.
    """
    # Kineto prints a line at each start and stop unless told not to, by this variable alone.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    from fp8compile._compat import dtypes_of_calls

    activities = [ProfilerActivity.CPU]  # calls of operators are CPU events on every device
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        step()
    dtypes, fp8_calls = dtypes_of_calls(profiler), _fp8_calls()
    calls = fp8_calls | OTHER_CALLS | RESULT_DIMS.keys()
    events = [event for event in profiler.events() if event.name in calls]
    rows = _rows_in_groups(events)

    def kind(event: object) -> str:
        if _is_float64(event, dtypes):
            return EMULATED
        return FP8 if event.name in fp8_calls else OTHER

    return _count(
        (kind(event), _flops(event, rows))
        for event in events
        if not _is_nested(event, calls) and not _is_of_whole(event)
    )
