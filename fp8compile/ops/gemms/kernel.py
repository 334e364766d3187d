"""What a GEMM is to this package: a value that says which operands it takes, where it runs and how it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.quantizers import GemmConfig, Quantizer
from fp8compile.target import Target

__all__ = ["Gemm", "GemmKernel", "GemmProblem"]


@dataclass(frozen=True, kw_only=True)
class GemmProblem:
    """A product (m, k) by (k, n) as far as it is known before there are tensors.

    Attributes:
        a: Quantizer of the left operand, over (m, k).
        b: Quantizer of the right operand, over (k, n).
        target: The device that code is made for.
        out_dtype: Dtype of the product.
        config: What the GEMM is allowed.
    """

    a: Quantizer
    b: Quantizer
    target: Target
    out_dtype: torch.dtype
    config: GemmConfig


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """What a table of GEMMs has of each.

    Attributes:
        name: What `select_gemm` and reports call it.
        detail: How it runs, in the words of ``fp8compile doctor``.
        takes: ``(a, b) -> bool`` of the quantizers over (m, k) and (k, n): whether it reads their codes and scales, on
            any device.
        lacks: ``(problem) -> str | None``, asked if it takes the operands. It returns None if the device can run it;
            otherwise the reason, as the rest of a sentence about the operands, and what to do.
        calls: Names of the PyTorch operators that multiply, by which reports find it in generated code and profiles.
    """

    name: str
    detail: str
    takes: Callable[[Quantizer, Quantizer], bool]
    lacks: Callable[[GemmProblem], str | None]
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GemmKernel(Gemm):
    """One way to multiply quantized matrices.

    Attributes:
        multiply: ``(a, b, out_dtype, config) -> Tensor``: the product of two operands (m, k) and (k, n) without an
            empty side, in ``out_dtype``, contiguous. Plain PyTorch: eager mode runs it and Inductor traces it.
        rounds_in_call: Whether the operator itself rounds to ``out_dtype``. If not, compiled code rounds explicitly,
            because Inductor drops the rounding of a value that it fuses with its reader.
    """

    multiply: Callable[[Quantized, Quantized, torch.dtype, GemmConfig], Tensor]
    rounds_in_call: bool = False
