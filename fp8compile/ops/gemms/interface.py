"""GemmKernel describes a GEMM: which operands it takes, where it runs and how it multiplies."""

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
    """Describes a GEMM of (m, k) and (k, n) without its tensors, to select the kernel.

    Attributes:
        a: Quantizer of the left operand, over (m, k).
        b: Quantizer of the right operand, over (k, n).
        target: The device on which the GEMM will run.
        out_dtype: Dtype of the result.
        config: Options of the GEMM, such as emulation.
    """

    a: Quantizer
    b: Quantizer
    target: Target
    out_dtype: torch.dtype
    config: GemmConfig


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM in a table of GEMMs.

    Attributes:
        name: Name of this GEMM in reports.
        detail: How the GEMM runs, in the words of ``fp8compile doctor``.
        takes: ``(a, b) -> bool``. Takes two quantizers, over (m, k) and (k, n), and returns whether this GEMM reads
            their codes and scales, whatever the device.
        lacks: ``(problem) -> str | None``. Called only if the GEMM takes the operands. Returns None if the device can
            run the GEMM. Otherwise it returns the reason, as the rest of a sentence about the operands, and what to
            do instead.
        calls: Names of the PyTorch operators that multiply; reports look for them in generated code and profiles.
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
        multiply: ``(a, b, out_dtype, config) -> Tensor``: multiplies nonempty operands (m, k) and (k, n) to a
            contiguous tensor of ``out_dtype``. Plain PyTorch: eager mode runs it and Inductor traces it.
        rounds_in_call: Whether the operator itself rounds to ``out_dtype``. If not, compiled code rounds explicitly,
            because Inductor omits the rounding of a value that it fuses into its consumer.
    """

    multiply: Callable[[Quantized, Quantized, torch.dtype, GemmConfig], Tensor]
    rounds_in_call: bool = False
