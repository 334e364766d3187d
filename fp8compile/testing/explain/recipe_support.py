"""How the GEMMs of a recipe would run on a device, for `fp8compile doctor` and reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8compile.ops.gemms.grouped.table import selected_grouped_gemm
from fp8compile.ops.gemms.selection import selected_gemm
from fp8compile.ops.layer.check_recipe_of_groups import check_recipe_of_groups
from fp8compile.quantizers import GEMMS, Recipe

__all__ = ["GemmSupport", "recipe_support"]


@dataclass(frozen=True, kw_only=True)
class GemmSupport:
    """How one GEMM of a recipe would run on one device.

    Attributes:
        gemm: ``"output"``, ``"grad_input"`` or ``"grad_weight"``.
        kind: Name of the selected GEMM, such as ``"rowwise"``; ``"high_precision"`` if the recipe multiplies without
            codes, ``"none"`` if the product can't run.
        detail: How the GEMM runs, in words; its dtype in high precision; the reason if it can't run.
    """

    gemm: str
    kind: str
    detail: str


def recipe_support(
    recipe: Recipe, device: torch.device, out_dtype: torch.dtype = torch.bfloat16, *, grouped: bool = False
) -> tuple[GemmSupport, ...]:
    """Return how each GEMM of a recipe would run on a device, in the order output, grad_input, grad_weight.

    ``out_dtype`` is the layer's dtype. ``grouped`` selects the GEMMs of a grouped layer, such as experts.
    """
    if grouped:
        try:
            check_recipe_of_groups(recipe)
        except ValueError as error:
            return tuple(GemmSupport(gemm=gemm.name, kind="none", detail=str(error)) for gemm in GEMMS)
    select, found = selected_grouped_gemm if grouped else selected_gemm, []
    for gemm in GEMMS:
        quantizers = recipe.quantizers(gemm)
        if quantizers is None:
            kind, detail = "high_precision", f"{out_dtype}".removeprefix("torch.")
        else:
            a, b = quantizers
            a = a.transposed() if gemm.a_transposed else a
            b = b.transposed() if gemm.b_transposed else b
            try:
                found_gemm = select(a, b, device, out_dtype, recipe.gemm_config(gemm))
                kind, detail = found_gemm.name, found_gemm.detail
            except (ValueError, RuntimeError) as error:
                kind, detail = "none", str(error)
        found.append(GemmSupport(gemm=gemm.name, kind=kind, detail=detail))
    return tuple(found)
