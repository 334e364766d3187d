"""Raises if a GPU's GEMM would refuse its operands; reads scales from tiled layouts."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT", "E8M0", "MX_BLOCK", "TILE_BLOCKS", "TILE_ROWS", "demand", "four_bit_values", "tiled_values",
]  # fmt: skip

ALIGNMENT = 16  # bytes; addresses of tensors and strides of their rows are multiples of it
MX_BLOCK = 32
TILE_ROWS, TILE_BLOCKS = 128, 4  # size of a tile of MX scales
E8M0 = torch.float8_e8m0fnu


def demand(satisfied: bool, product: str, what: str) -> None:
    """Raise a ValueError that says what a GPU's GEMM requires, unless ``satisfied``.

    ``product`` names the GEMM, and ``what`` is the requirement in words.
    """
    if not satisfied:
        raise ValueError(f"{product}: the GPU's GEMM requires {what}")


def tiled_values(scale: Tensor, rows: int, blocks: int, dtype: torch.dtype = E8M0) -> Tensor:
    """Read scales from a GPU's layout in tiles of 128 rows by 4 blocks.

    Args:
        scale: Scales in tiles, as bytes or in ``dtype``.
        rows: Number of rows of the codes.
        blocks: Number of blocks, and so of scales, in each row.
        dtype: The scales' float8 dtype.

    Returns:
        The scales, (rows, blocks), float64.
    """
    along = -(-blocks // TILE_BLOCKS)
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    tile = row // TILE_ROWS * along + block // TILE_BLOCKS
    at = tile * 512 + row % 32 * 16 + row % TILE_ROWS // 32 * 4 + block % TILE_BLOCKS
    return scale.reshape(-1).view(torch.uint8)[at].view(dtype).double()


def four_bit_values(codes: Tensor, scale: Tensor, product: str) -> Tensor:
    """Decode e2m1 codes with an e4m3 scale for each block of 16.

    Args:
        codes: (rows, columns / 2) uint8; a byte holds two codes of one row.
        scale: Scales in tiles, as bytes.
        product: Name of the product, for errors.

    Returns:
        The values, (rows, columns), float64.
    """
    rows, blocks = codes.shape[0], codes.shape[1] // 8
    needed = -(-rows // TILE_ROWS) * TILE_ROWS * (-(-blocks // TILE_BLOCKS) * TILE_BLOCKS)
    laid = scale.dtype == torch.uint8 and scale.is_contiguous() and scale.numel() == needed
    demand(laid, product, f"{needed} bytes of scales in tiles, one after the other.")
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    numbers = table[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    return numbers * tiled_values(scale, rows, blocks, torch.float8_e4m3fn).repeat_interleave(16, 1)
