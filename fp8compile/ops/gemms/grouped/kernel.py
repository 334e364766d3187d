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
from fp8compile.ops.gemms.kernel import GemmProblem
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["REGISTERED_GROUPED", "GroupedGemm", "product_shape"]


def product_shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    """The shape of a grouped product (``rows`` or ``outer``), from the codes of its operands."""
    return (a.shape[0], b.shape[1]) if b.ndim == 3 else (offsets.shape[0], a.shape[0], b.shape[0])


Multiply = Callable[[Quantized, Quantized, Tensor, torch.dtype, GemmConfig], Tensor]


@dataclass(frozen=True, kw_only=True)
class GroupedGemm:
    """One way to multiply quantized matrices group by group.

    Attributes:
        name: What `select_grouped_gemm` and reports call it.
        detail: How it runs, in the words of ``fp8compile doctor``.
        takes: ``(a, b) -> bool``, of two quantizers over (m, k) and (k, n): whether it reads their codes and scales.
        lacks: ``(problem) -> str | None``, as ``GemmKernel`` has it.
        rows: ``(a, b, offsets, out_dtype, config) -> Tensor``, the first product at the head of this file, (R, N).
        outer: The second product there, (E, N, K). Inductor traces both, so they are PyTorch or `fp8compile` ops.
        calls: Names of the operators that multiply, by which reports find it in generated code and profiles.
        is_opaque: Whether it reads sizes of groups, which compiled code can't: the op then stays one call.
    """

    name: str
    detail: str
    takes: Callable[[Quantizer, Quantizer], bool]
    lacks: Callable[[GemmProblem], str | None]
    rows: Multiply
    outer: Multiply
    calls: tuple[str, ...] = ()
    is_opaque: bool = False


REGISTERED_GROUPED: dict[str, GroupedGemm] = {}  # of other packages, by name
