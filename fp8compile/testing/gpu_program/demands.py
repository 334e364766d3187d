"""What products of a GPU demand of their operands: the check, and sizes that all of them know."""

from __future__ import annotations

import torch

__all__ = ["ALIGNMENT", "E8M0", "MX_BLOCK", "demand"]

ALIGNMENT = 16  # bytes, of rows of codes and of their first element
MX_BLOCK = 32
E8M0 = torch.float8_e8m0fnu


def demand(satisfied: bool, product: str, what: str) -> None:
    """Raise a ValueError in the name of a product unless a demand is satisfied."""
    if not satisfied:
        raise ValueError(f"{product}: the GPU's product takes {what}")
