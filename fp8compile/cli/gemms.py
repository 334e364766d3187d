"""Which GEMMs of the linear layers ran in FP8: by the recipe, and as a profiled step shows.

The recipe says what should run. The profiler sees the kernels that the compiled step calls, so a
layer that fell back to bf16 on the way cannot pass for FP8.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from fp8compile import Recipe

__all__ = ["GemmCount", "expected_gemms", "profiled_gemms"]

# By the kernels' own names: an op of ours that emulates the product on a CPU is no FP8 GEMM.
FP8_CALLS = frozenset({"aten::_scaled_mm", "aten::_scaled_mm_v2"})
OTHER_CALLS = frozenset({"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"})


@dataclass(frozen=True, kw_only=True)
class GemmCount:
    """GEMMs of the linear layers in one training step.

    Attributes:
        fp8: How many multiply FP8 operands.
        total: How many there are.
        fp8_flops: Floating-point operations of the FP8 ones.
        flops: Those of all.
    """

    fp8: int
    total: int
    fp8_flops: int
    flops: int

    @property
    def share(self) -> float:
        """Share of the operations that FP8 GEMMs do, 0 to 1."""
        return self.fp8_flops / self.flops if self.flops else 0.0

    def __str__(self) -> str:
        """Count and share, as the table shows them."""
        return f"{self.fp8} of {self.total} ({self.share:.1%} of flops)"


def _count(gemms: Iterable[tuple[bool, int]]) -> GemmCount:
    gemms = list(gemms)
    return GemmCount(
        fp8=sum(is_fp8 for is_fp8, _ in gemms),
        total=len(gemms),
        fp8_flops=sum(flops for is_fp8, flops in gemms if is_fp8),
        flops=sum(flops for _, flops in gemms),
    )


def expected_gemms(model: nn.Module, recipe: Recipe | None, *, tokens: int) -> GemmCount:
    """Count the GEMMs that the recipe asks for.

    Args:
        model: After conversion.
        recipe: What it was converted by; None if it was not.
        tokens: Rows of a layer's input in one step.

    Returns:
        The count; each linear has three GEMMs.
    """
    from torch import nn

    import fp8compile as f8
    from fp8compile.quantizers import GEMMS

    converted = set()
    if recipe is not None:
        converted = {row.fqn for row in f8.conversion_report(model).rows if row.converted}
    gemms = []
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        flops = 2 * tokens * module.in_features * module.out_features
        for gemm in GEMMS:
            is_fp8 = fqn in converted and recipe.quantizers(gemm) is not None
            gemms.append((is_fp8, flops))
    return _count(gemms)


def _is_nested(event: object) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in FP8_CALLS or parent.name in OTHER_CALLS:
            return True
        parent = parent.cpu_parent
    return False


def _flops(shapes: list[list[int]]) -> int:
    (m, k), (_, n) = [shape for shape in shapes if len(shape) == 2][:2]
    return 2 * m * k * n


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

    activities = [ProfilerActivity.CPU]  # calls of operators are CPU events on every device
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        step()
    return _count(
        (event.name in FP8_CALLS, _flops(event.input_shapes))
        for event in profiler.events()
        if (event.name in FP8_CALLS or event.name in OTHER_CALLS) and not _is_nested(event)
    )
