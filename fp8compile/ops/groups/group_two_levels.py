"""fp8compile::group_two_levels: quantize each group of tokens with two levels of scales, one code a byte.

    blocks along rows, or square    codes (R, K)     scales (R / block, ...)     each group begins a new block
    blocks along tokens             codes (K, C)     scales (C / block, K)       padded columns, see `group_quantize`

R is the number of tokens, C the number with padding, K the number of features. Each of E groups has one outer scale,
(E,). The op runs on a CPU; a GPU runs `group_quantize_two_levels` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile._compat import OpOverload
from fp8compile.ops.groups.export_masks import OF_BACKWARD, masks_of_groups
from fp8compile.ops.groups.group_quantize import empty_outputs
from fp8compile.ops.groups.padding import alignment, group_to_read, spans, zero_behind
from fp8compile.ops.groups.register_group_op import register_group_op
from fp8compile.ops.quantization_steps import PYTHON_OF_STEPS
from fp8compile.quantizers import Quantizer, TwoLevelScaling
from fp8compile.target import target_of

__all__ = ["NO_GROUPS_OF_TWO_LEVELS", "group_two_levels", "token_columns"]

NO_GROUPS_OF_TWO_LEVELS = (
    "has two levels of scales, for which grouped GEMMs on a GPU only support fp8compile.TwoLevelScaling. Use "
    "another recipe for experts, such as fp8compile.recipes.nvfp4(), or call fp8compile.linear for each group."
)


def token_columns(columns: slice, quantizer: Quantizer) -> slice:
    """Return ``columns``, a group's columns of transposed codes, extended to whole blocks if there is a transform."""
    missing = (columns.start - columns.stop) % quantizer.block[0] if quantizer.transform() else 0
    return slice(columns.start, columns.stop + missing)


def _fake(x: Tensor, offsets: Tensor, quantizer: Quantizer, along_tokens: bool) -> tuple[Tensor, Tensor, Tensor]:
    outer = x.new_empty(offsets.shape, dtype=torch.float32)
    if along_tokens:
        return *empty_outputs(x, offsets, quantizer), outer
    scale = x.new_empty(quantizer.scale_shape(x.shape), dtype=quantizer.scale_dtype())
    return x.new_empty(x.shape, dtype=torch.uint8), scale, outer


def _kernel(x: Tensor, offsets: Tensor, quantizer: Quantizer, along_tokens: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each group; returns codes, scales of blocks and an outer scale for each group.

    If ``along_tokens``, codes are transposed and each group's columns are padded. Otherwise each group has to end at a
    multiple of the block's rows.
    """
    if target_of(x.device).type != "cpu":
        raise RuntimeError(f"fp8compile::group_two_levels: {quantizer!r} {NO_GROUPS_OF_TWO_LEVELS}")
    codes, scales, outers = _fake(x, offsets, quantizer, along_tokens)
    codes.zero_()
    scales.zero_()
    block = quantizer.block[0]
    for group, (rows, columns) in enumerate(spans(offsets, alignment(quantizer))):
        own = x[rows]
        amax = PYTHON_OF_STEPS.amax(own, quantizer)
        multiplier, scale, outers[group] = PYTHON_OF_STEPS.two_scales(
            amax, PYTHON_OF_STEPS.outer_amax(amax, quantizer), quantizer
        )
        found = PYTHON_OF_STEPS.cast(own, multiplier, quantizer)
        if along_tokens:
            codes[:, token_columns(columns, quantizer)] = found.t()
        else:
            codes[rows] = found
        first = (columns if along_tokens else rows).start // block
        scales[first : first + scale.shape[0]] = scale
    return codes, scales, outers


def _portable(x: Tensor, offsets: Tensor, quantizer: Quantizer, along_tokens: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize all groups at once in exported programs, which can't read sizes of groups on the host."""
    if along_tokens or type(quantizer) is not TwoLevelScaling or quantizer.rounding != "nearest":
        why = OF_BACKWARD if along_tokens else f"{quantizer!r} is no TwoLevelScaling with rounding='nearest'. Use one"
        raise RuntimeError(f"decompositions: fp8compile::group_two_levels can't be decomposed: {why}.")
    block = quantizer.block[0]
    amax = PYTHON_OF_STEPS.amax(x, quantizer)
    ends, rows = offsets // block, amax.shape[0]
    masks = masks_of_groups(ends, rows)
    largest = torch.cat([PYTHON_OF_STEPS.outer_amax(torch.where(own, amax, 0), quantizer).view(1) for own in masks])
    own = largest[group_to_read(ends, rows)].unsqueeze(1)
    scale = quantizer.block_scale(amax, own)
    multiplier = quantizer.block_multiplier(scale, quantizer.outer_scale(own))
    codes = PYTHON_OF_STEPS.cast(x, multiplier, quantizer)
    return zero_behind(codes, offsets), zero_behind(scale, ends), quantizer.outer_scale(largest)


group_two_levels: OpOverload = register_group_op(
    "fp8compile::group_two_levels", _kernel, fake=_fake, portable=_portable
)
