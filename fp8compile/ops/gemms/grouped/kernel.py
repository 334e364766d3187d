"""What a grouped GEMM is to this package: a value that says which operands it takes, where it runs and how.

rows     y_RN  = a_RK @ b_e,NK^T       each row by the matrix of its group; rows behind the last group are zeros
outer    d_eNK = a_NC @ b_KC^T         over the tokens of each group; a group without tokens has zeros
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms.kernel import Gemm
from fp8compile.quantizers import GemmConfig

__all__ = ["REGISTERED_GROUPED", "GroupedGemm", "Multiply", "product_shape"]


def product_shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    """The shape of a grouped product (``rows`` or ``outer``), from the codes of its operands."""
    return (a.shape[0], b.shape[1]) if b.ndim == 3 else (offsets.shape[0], a.shape[0], b.shape[0])


Multiply = Callable[[Quantized, Quantized, Tensor, torch.dtype, GemmConfig], Tensor]


@dataclass(frozen=True, kw_only=True)
class GroupedGemm(Gemm):
    """One way to multiply quantized matrices group by group.

    Attributes:
        rows: ``(a, b, offsets, out_dtype, config) -> Tensor``, the first product at the head of this file, (R, N).
        outer: The second product there, (E, N, K). Inductor traces both, so they are PyTorch or `fp8compile` ops.
        is_opaque: Whether it reads sizes of groups, which compiled code can't: the op then stays one call.
    """

    rows: Multiply
    outer: Multiply
    is_opaque: bool = False


REGISTERED_GROUPED: dict[str, GroupedGemm] = {}  # of other packages, by name
