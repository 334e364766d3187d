"""fp8compile::group_outer_amaxes: the amax of each group of tokens, for the outer scales of four-bit codes.

A transform of the quantizer is applied before the amax. On a GPU the op is one Triton kernel.
`group_quantize_two_levels` reads the tokens again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile._compat import OpOverload, guard_or_false
from fp8compile.ops.groups.export_masks import ON_GPU
from fp8compile.ops.groups.padding import spans
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.outer_amaxes import outer_amax_of_values
from fp8compile.quantizers import Quantizer, TwoLevelScaling
from fp8compile.quantizers.hadamard import GROUP

__all__ = ["check_directions", "group_outer_amaxes", "is_two_level_pair", "quantizers_of"]

DIRECTIONS = ("both", "rows", "tokens")


def rows_of_two_levels(quantizer: Quantizer | None) -> bool:
    """Whether the GPU kernel can quantize groups along rows by this quantizer."""
    if type(quantizer) is not TwoLevelScaling or not quantizer.has_kernels():
        return False
    return quantizer.block == (1, GROUP) and not quantizer.hadamard


def tokens_of_two_levels(quantizer: Quantizer | None) -> bool:
    """Whether the GPU kernel can quantize groups along tokens by this quantizer."""
    return type(quantizer) is TwoLevelScaling and quantizer.has_kernels() and quantizer.block == (GROUP, 1)


def is_two_level_pair(rows: Any, columns: Any) -> bool:
    """Whether one launch of the GPU kernel can quantize along rows by ``rows`` and along tokens by ``columns``."""
    return rows_of_two_levels(rows) and tokens_of_two_levels(columns) and rows.scale == columns.scale


def check_directions(op: str, rows: Quantizer, columns: Quantizer, directions: str) -> None:
    """Raise a ValueError if GPU kernels don't take these quantizers in ``directions`` ("both", "rows" or "tokens")."""
    allowed = {
        "both": is_two_level_pair(rows, columns),
        "rows": rows_of_two_levels(rows),
        "tokens": tokens_of_two_levels(columns),
    }
    if not allowed.get(directions):
        raise ValueError(
            f"fp8compile::{op}: quantizers are {rows!r} and {columns!r} for directions {directions!r}. Directions "
            "must be 'rows', 'tokens' or 'both'. The quantizer along rows must be a TwoLevelScaling with block (1, "
            "16) and no transform, the one along tokens must have block (16, 1), and for both they must have the "
            "same scale rule. Choose them as fp8compile.recipes.nvfp4() does."
        )


def _fake(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, directions: str) -> Tensor:
    check_directions("group_outer_amaxes", rows, columns, directions)
    return x.new_empty((2, offsets.shape[0]), dtype=torch.float32)


def _launch(
    results: tuple[Tensor, ...], x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, directions: str
) -> Any:
    if guard_or_false(x.numel() == 0) or not offsets.shape[0]:
        return None
    from fp8compile.kernels.group_quantize_two_levels import amaxes_of_groups

    return amaxes_of_groups(x, offsets, *quantizers_of(rows, columns, directions), *results)


def quantizers_of(rows: Quantizer, columns: Quantizer, directions: str) -> tuple[Any, Any]:
    """Return both quantizers, but None for one that ``directions`` (``"both"``, ``"rows"``, ``"tokens"``) excludes."""
    return rows if directions != "tokens" else None, columns if directions != "rows" else None


def _group_by_group(x: Tensor, offsets: Tensor, rows: Quantizer, columns: Quantizer, directions: str) -> Tensor:
    """Compute two amaxes of each of E groups, (2, E) float32: [0] for blocks along rows, [1] for blocks along tokens.

    ``directions`` is ``"rows"``, ``"tokens"`` or ``"both"``; amaxes that it leaves out are 0.
    """
    amaxes = torch.zeros_like(_fake(x, offsets, rows, columns, directions))
    for own, quantizer in zip(amaxes, quantizers_of(rows, columns, directions), strict=True):
        for group, (tokens_of_group, _) in enumerate(spans(offsets, 1) if quantizer else ()):
            own[group : group + 1] = outer_amax_of_values(x[tokens_of_group], quantizer.unpacked())
    return amaxes


group_outer_amaxes: OpOverload = register_group_op(
    "fp8compile::group_outer_amaxes",
    _group_by_group,
    fake=_fake,
    portable=ON_GPU,
    launch=_launch,
)
