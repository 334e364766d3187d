"""A stack of matrices in four bits on a GPU: every matrix's own outer scale, in steps over all of them at once."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile.formats import repack
from fp8compile.ops.gemms.grouped.kernel import GroupedOperand
from fp8compile.ops.inductor_hints import realize, store
from fp8compile.ops.quantization_steps import Steps
from fp8compile.quantizers import TwoLevelScaling

__all__ = ["quantize_stack_in_two_levels", "turned_stack"]


# forward and backward both ask for it, and have one of it
@inductor.once_a_graph
def quantize_stack_in_two_levels(stack: Tensor, quantizer: TwoLevelScaling, steps: Steps) -> GroupedOperand:
    """Codes and scales of each matrix, as if it were alone.

    Args:
        stack: (E, N, K), each matrix in whole blocks of rows.
        quantizer: Of each; a block with several rows packs codes as it says, if their number is even.
        steps: How amaxes are taken, and values become codes.

    Returns:
        Codes, (E, N, K / 2) or (E, N / 2, K), or one a byte; scales (E, blocks, blocks), outer scales (E,).
    """
    groups, rows, columns = stack.shape
    matrix = stack.flatten(0, 1)
    quantizer = quantizer.for_shape(matrix.shape)
    grid = quantizer.scale_shape((rows, columns))
    amax = steps.amax(matrix, quantizer).view(groups, -1)
    largest = amax.amax(1, keepdim=True) if amax.numel() else amax.new_zeros((groups, 1))
    # rules of two levels are elementwise: each matrix takes its own outer amax
    outer = realize(quantizer.outer_scale(largest))
    scale = quantizer.block_scale(amax, largest)
    multiplier = realize(quantizer.block_multiplier(scale, outer)).view(-1, grid[1])
    where = ()
    if quantizer.rounding != "nearest":  # noise is that of a place in its own matrix
        place = torch.arange(groups * rows, device=stack.device) % rows * columns
        where = place, torch.arange(columns, device=stack.device)
    codes = steps.cast(matrix, multiplier, quantizer, *where)
    return GroupedOperand(
        codes=codes.view(groups, codes.shape[0] // groups, codes.shape[1]),
        scale=scale.view(groups, *grid),
        quantizer=quantizer,
        outer_scale=outer.view(groups),
    )


@inductor.once_a_graph
def turned_stack(codes: Tensor) -> Tensor:
    """Codes (E, N, K / 2) of a stack as the product reads them that sums over its rows, (E, K, N / 2)."""
    groups, rows, pairs = codes.shape
    turned = repack(codes.flatten(0, 1)).view(groups, rows // 2, pairs * 2)
    return store(turned.transpose(1, 2).contiguous())
