"""Which GEMMs of the linear layers ran in FP8: by the recipe, and as a profiled step shows.

The recipe says what should run, and the device how: on a kernel, or emulated in float64. The profiler
sees the products that the compiled step calls, with their dtypes, so a layer that fell back to bf16 on
the way can pass for neither. Of a model that is cut over ranks, both count what one rank does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn

    from fp8compile import Recipe

__all__ = ["GemmCount", "expected_gemms", "profiled_gemms"]

OTHER_CALLS = frozenset({"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"})
FP8, EMULATED, OTHER = "fp8", "emulated", "other"


@dataclass(frozen=True, kw_only=True)
class GemmCount:
    """GEMMs of the linear layers in one training step, on one rank.

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


def _expected_kinds(recipe: Recipe, device: torch.device) -> tuple[str, ...]:
    from fp8compile.ops.support import recipe_support

    kinds = {"high_precision": OTHER, "emulated": EMULATED}
    return tuple(kinds.get(gemm.kind, FP8) for gemm in recipe_support(recipe, device))


def expected_gemms(model: nn.Module, recipe: Recipe | None, *, tokens: int, device: torch.device) -> GemmCount:
    """Count the GEMMs that the recipe asks for, by what the device has for them.

    Args:
        model: After conversion.
        recipe: What it was converted by; None if it was not.
        tokens: Rows of a layer's input in one step.
        device: Where it runs.

    Returns:
        The count; each linear has three GEMMs.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor

    import fp8compile as f8
    from fp8compile.quantizers import GEMMS

    converted, kinds = set(), ()
    if recipe is not None:
        converted = {row.fqn for row in f8.conversion_report(model).rows if row.converted}
        kinds = _expected_kinds(recipe, device)
    gemms = []
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
            flops = 2 * tokens * weight.numel()
            gemms += [(kind, flops) for kind in (kinds if fqn in converted else [OTHER] * len(GEMMS))]
    return _count(gemms)


def _fp8_calls() -> frozenset[str]:
    from fp8compile.ops.gemms.table import multiplying_calls

    return frozenset(f"aten::{call}{version}" for call in multiplying_calls() for version in ("", "_v2"))


def _is_nested(event: object, calls: frozenset[str]) -> bool:
    """Whether this is a part of another product."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name != event.name and parent.name in calls:
            return True
        parent = parent.cpu_parent
    return False


def _is_of_whole(event: object) -> bool:
    """Whether this is a product of DTensors, in eager mode: it calls that of this rank's parts."""
    inside = list(event.cpu_children)
    while inside:
        child = inside.pop()
        if child.name == event.name:
            return True
        inside += child.cpu_children
    return False


def _flops(shapes: list[list[int]]) -> int:
    (m, k), (_, n) = [shape for shape in shapes if len(shape) == 2][:2]
    return 2 * m * k * n


def _seen_kind(name: str, dtypes: Sequence[str], fp8_calls: frozenset[str]) -> str:
    if name in fp8_calls:
        return FP8
    # nothing else in this model is float64
    return EMULATED if list(dtypes[:2]) == ["double", "double"] else OTHER


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
    calls = fp8_calls | OTHER_CALLS
    return _count(
        (_seen_kind(event.name, dtypes[event.id], fp8_calls), _flops(event.input_shapes))
        for event in profiler.events()
        if event.name in calls and not _is_nested(event, calls) and not _is_of_whole(event)
    )
