"""GroupedGemm describes a grouped GEMM: its operands, where it runs, how it multiplies.

rows     y_RN  = a_RK @ b_e,NK^T       each row times the matrix of its group; 0 in rows after the last group
outer    d_eNK = a_NC @ b_KC^T         sums over the tokens of each group; 0 for a group without tokens

Subscripts are sizes: R rows in groups e, C tokens with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.interface import Gemm
from fp8compile.quantizers import GemmConfig

__all__ = ["REGISTERED_GROUPED", "GroupedGemm", "Multiply", "product_shape"]


def product_shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    """Return the shape of a grouped product from its operands' codes.

    ``offsets``, (E,), are the ends of the groups.
    """
    return (a.shape[0], b.shape[1]) if b.ndim == 3 else (offsets.shape[0], a.shape[0], b.shape[0])


Multiply = Callable[[Quantized, Quantized, Tensor, torch.dtype, GemmConfig], Tensor]


@dataclass(frozen=True, kw_only=True)
class GroupedGemm(Gemm):
    """One way to multiply quantized matrices group by group.

    Attributes:
        rows: ``(a, b, offsets, out_dtype, config) -> Tensor``. Multiplies each of R rows by its group's matrix, (R, K)
            by (E, N, K), to (R, N). Inductor traces it, so it calls only PyTorch and `fp8compile` ops.
        outer: Like ``rows``; multiplies (N, C) by (K, C), summed over the tokens of each group, to (E, N, K). C is the
            number of tokens with padding.
        is_opaque: Whether the GEMM reads group sizes on the host. Compiled code can't do that, so the op then stays
            one call.
    """

    rows: Multiply
    outer: Multiply
    is_opaque: bool = False


REGISTERED_GROUPED: dict[str, GroupedGemm] = {}  # GEMMs that other packages registered, by name
