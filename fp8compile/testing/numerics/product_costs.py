"""Bytes and least time of a layer's GEMMs and casts in a recipe, by the published peaks of a GPU.

Costs are those of `fp8compile.testing.explain.roofline`: a GEMM takes the longer of the times for its operations and
its bytes, the cast of a weight reads it and writes codes, and any other cast only writes codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.grouped.cpu_loop import ONE_BY_ONE
from fp8compile.ops.gemms.selection import ALIGNMENT
from fp8compile.quantizers import GEMMS, TENSORS, Gemm, Recipe
from fp8compile.target import pretend_target
from fp8compile.testing.explain.graphs import code_sizes, multiplied
from fp8compile.testing.explain.recipe_support import recipe_support
from fp8compile.testing.explain.roofline import Peaks, least_seconds
from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.numerics.layer_calls import LayerCall

__all__ = ["Cost", "cost_of", "why_not_native"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
TENSOR_OF = {role: tensor for tensor, roles in TENSORS.items() for role in roles}


@dataclass(frozen=True)
class Cost:
    """Bytes and minimum time of a layer's GEMMs and casts in one training step.

    Attributes:
        bytes: Bytes of memory that are read and written.
        seconds: Lower bound of the time, from the GPU's peak rates; not a measurement.
    """

    bytes: float
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        """The sum of two costs."""
        return Cost(self.bytes + other.bytes, self.seconds + other.seconds)


@dataclass(frozen=True)
class _Sizes:
    m: int
    k: int
    n: int
    matrices: int
    element: int

    @classmethod
    def of(cls, call: LayerCall, rows_factor: float) -> _Sizes:
        """The sizes of a call, with ``rows_factor`` times the call's rows."""
        n, k = call.weight.shape[-2:]
        matrices = 1 if call.ends is None else call.weight.shape[0]
        return cls(round(call.rows * rows_factor), k, n, matrices, call.weight.element_size())

    def elements(self, tensor: str) -> int:
        """Number of elements of ``tensor``, which is ``"input"``, ``"weight"`` or ``"grad_output"``."""
        counts = {"input": self.m * self.k, "weight": self.matrices * self.n * self.k, "grad_output": self.m * self.n}
        return counts[tensor]


def _product(gemm: Gemm, recipe: Recipe | None, sizes: _Sizes, peaks: Peaks) -> Cost:
    others = [TENSOR_OF[role] for role in (gemm.a, gemm.b)]
    result = next(tensor for tensor in ("grad_output", "input", "weight") if tensor not in others)
    read = sum(sizes.elements(tensor) for tensor in others)
    summed, columns = {
        OUTPUT.name: (sizes.k, sizes.n), GRAD_INPUT.name: (sizes.n, sizes.k), GRAD_WEIGHT.name: (sizes.m, sizes.k),
    }[gemm.name]  # fmt: skip
    operations, written = 2 * sizes.m * sizes.n * sizes.k, sizes.elements(result) * sizes.element
    if recipe is None or recipe.quantizers(gemm) is None:
        peak = peaks.bf16 if sizes.element == 2 else peaks.fp32
        moved = read * sizes.element + written
        return Cost(moved, least_seconds(operations, moved, peak, peaks))
    codes = code_sizes(*multiplied(recipe, gemm), recipe.gemm_config(gemm))
    bits, to = codes["code_bits"], codes["sum_to"]
    padding: float = 1
    if summed and columns:
        padding = (summed + -summed % to) / summed * (columns + -columns % ALIGNMENT) / columns
    moved_codes = read * bits / 8 + written
    peak = peaks.of_codes(bits, is_mx=codes["by_mx"])
    return Cost(moved_codes, least_seconds(operations * padding, moved_codes, peak, peaks))


def _casts(gemms: Iterable[Gemm], recipe: Recipe, sizes: _Sizes) -> float:
    moved: dict[object, float] = {}
    for gemm in gemms:
        for role, quantizer in zip((gemm.a, gemm.b), recipe.quantizers(gemm) or (), strict=False):
            tensor = TENSOR_OF[role]
            read = sizes.element if tensor == "weight" else 0
            moved[gemm is OUTPUT, tensor, quantizer] = sizes.elements(tensor) * (quantizer.code_bits() / 8 + read)
    return sum(moved.values())


def cost_of(call: LayerCall, recipe: Recipe | None, peaks: Peaks, *, rows_factor: float = 1) -> Cost:
    """The cost of the GEMMs and casts of a layer's call, forward and backward.

    Args:
        call: The call; all rows that the layer multiplied count, not only the sampled ones.
        recipe: The recipe; None for the operands' own dtype.
        peaks: Peaks of the GPU.
        rows_factor: Number by which the rows are multiplied, if training batches are larger.
    """
    sizes, has_gradient = _Sizes.of(call, rows_factor), call.grad_output is not None
    needed = {
        OUTPUT: True, GRAD_INPUT: has_gradient and call.needs_x, GRAD_WEIGHT: has_gradient and call.needs_weight,
    }  # fmt: skip
    gemms = [gemm for gemm in GEMMS if needed[gemm]]
    total = sum((_product(gemm, recipe, sizes, peaks) for gemm in gemms), Cost(0, 0))
    casts = 0 if recipe is None else _casts(gemms, recipe, sizes)
    return total + Cost(casts, casts / peaks.bandwidth)


def why_not_native(recipe: Recipe, gpu: Gpu, dtype: torch.dtype, *, grouped: bool) -> str | None:
    """Reason why a GPU can't run one of a recipe's three GEMMs natively; None if it can run all three.

    ``dtype`` is the weight's dtype; ``grouped`` is whether the layer has experts.
    """
    with pretend_target(gpu.target):
        found = recipe_support(recipe, torch.device("cuda"), dtype, grouped=grouped)
        one_by_one = any(each.kind == ONE_BY_ONE.name for each in found)
    for each in found:
        if each.kind == "none":
            return each.detail
        if each.kind == EMULATED.name:
            return f"{each.gemm} is emulated on an {gpu.name}"
    return why_not_native(recipe, gpu, dtype, grouped=False) if one_by_one else None
