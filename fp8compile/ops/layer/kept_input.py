"""Four-bit codes of a layer's input, which eager mode keeps for the backward in place of the input.

    x_MK --cast along tokens, in the forward--> codes, scale, outer scale --kept--> grad_weight_of_codes

Results are equal bit for bit, because the backward would make the same codes. Kept codes take 0.56 bytes an element
instead of two. In compiled code, PyTorch's partitioner chooses the smaller of input and codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile.formats import pack, unpack
from fp8compile.layout.cuts import split_axes
from fp8compile.layout.four_bit_packing import DIMS, packed_dim
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.ops.layer.quantize_groups import as_values_of_rows, by_row, is_four_bits_on_gpu, quantize_groups
from fp8compile.ops.layer.quantize_over_ranks import Steps, quantize_part
from fp8compile.quantizers import GEMMS, Quantizer, Recipe
from fp8compile.quantizers.blocks import as_matrix

__all__ = [
    "Kept", "features_of", "fits", "keep_input", "keeps_codes", "kept_input_as_quantized", "packed_while_kept",
]  # fmt: skip

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS
BITS = 4
Kept = tuple[Tensor, Tensor, Tensor]


def keeps_codes(x: Tensor, recipe: Recipe) -> bool:
    """Whether a layer keeps four-bit codes for grad_weight in place of ``x``; only in eager mode."""
    if _compat.is_stand_in(recipe):
        return False
    quantizer = recipe.quantizer_read(GRAD_WEIGHT.b)
    if quantizer is None or quantizer.code_bits() > BITS or not quantizer.has_outer_scale():
        return False
    is_own = type(own := _compat.local_itself(x)) in (Tensor, torch.nn.Parameter) and not own.is_meta
    return is_own and not _compat.is_traced(own) and not _compat.is_transformed(x)


def _is_along_rows(quantizer: Quantizer) -> bool:
    """Whether blocks of kept codes lie along rows: then grad_weight reads dequantized codes of the forward."""
    return quantizer.block[1] != 1


def packed_while_kept(layout: TensorLayout, quantizer: Quantizer) -> int:
    """Return the dim along which two neighbouring codes of a kept input share a byte."""
    if layout.ends is not None:
        return -1  # tokens if codes are cast along tokens, features if along rows
    return packed_dim(quantizer) or DIMS["columns" if quantizer.block[1] == 1 else "rows"]


def fits(x: Tensor, layout: TensorLayout, quantizer: Quantizer) -> bool:
    """Whether two codes can share a byte: the dim of `packed_while_kept` then has an even size on every rank.

    An odd number of tokens is padded, if no ranks shard the input. All ranks give the same answer.
    """
    if _compat.is_dtensor(x):  # a multiple of 2 * ranks has even parts, however a mesh cuts it
        return x.ndim > 1 and x.shape[packed_while_kept(layout, quantizer)] % (2 * x.device_mesh.size()) == 0
    if _is_along_rows(quantizer):
        return _is_even(x, layout, -1)
    if layout.ends is not None or not layout.cuts:
        return True
    return x.ndim > 1 and _is_even(x, layout, packed_while_kept(layout, quantizer))


def _is_even(x: Tensor, layout: TensorLayout, dim: int) -> bool:
    """Whether ``x`` has an even size along ``dim`` on every rank.

    All ranks must give the same answer, because a rank that keeps codes exchanges amaxes in its forward.
    """
    dim %= x.ndim
    sizes = [cut.sizes for cut in layout.cuts if cut is not None and cut.dim == dim]
    return all(size % 2 == 0 for size in (*(size for each in sizes for size in each), x.shape[dim]))


def keep_input(part: Plain, quantizer: Quantizer, steps: Steps) -> Kept:
    """Quantize an input for grad_weight; returns codes, scales of blocks, and outer scales: one, or one per group."""
    along_rows = _is_along_rows(quantizer)
    if part.layout.ends is not None:
        rows, tokens = (quantizer, None) if along_rows else (None, quantizer)
        found = quantize_groups(part, rows, tokens, steps, along_tokens=not along_rows, reads_once=False)
        found = as_values_of_rows(found, part.local.shape[-1]) if along_rows else found
    else:
        part = part if part.cuts else Plain(as_matrix(part.local))
        found = quantize_part(part, quantizer, steps)
    codes = found.codes
    if packed_dim(found.quantizer) is None and (part.cuts or part.layout.ends is not None):
        codes = pack(codes, packed_while_kept(part.layout, quantizer))
    outer_scale: Any = found.outer_scale  # four-bit codes have two levels of scales
    return codes, found.scale, outer_scale


def kept_input_as_quantized(kept: Kept, quantizer: Any, layout: TensorLayout, rows: int) -> Quantized:
    """Turn the result of `keep_input` into an operand of grad_weight; ``rows`` is this rank's number of tokens."""
    codes, scale, outer_scale = kept
    if layout.ends is not None:
        along_rows = _is_along_rows(quantizer)
        if not along_rows and is_four_bits_on_gpu(codes, quantizer):
            quantizer = replace(quantizer, packed="columns")
        else:
            codes, quantizer = unpack(codes, -1), quantizer.unpacked()
            quantizer = by_row(quantizer) if along_rows else quantizer
    elif layout.cuts:
        codes, quantizer = unpack(codes, packed_while_kept(layout, quantizer)), quantizer.unpacked()
    else:
        quantizer = quantizer.for_shape((rows, features_of(codes.shape, quantizer, layout)))
    split = split_axes(codes.shape, layout.cuts, quantizer.block)
    return Quantized(
        codes=codes,
        scale=scale,
        quantizer=quantizer,
        outer_scale=outer_scale,
        layout=layout,
        has_scales_of_whole=split,
    )


def features_of(codes: Sequence[int], quantizer: Quantizer, layout: TensorLayout) -> int:
    """Return the number of the input's features, from ``codes``, the shape of the kept codes."""
    if not _is_along_rows(quantizer):
        return codes[-1 if layout.ends is None else 0]
    is_packed = packed_dim(quantizer) is not None or layout.cuts or layout.ends is not None
    return codes[-1] * 2 if is_packed else codes[-1]
