"""What a GEMM is to this package: a value that says which operands it takes, where it runs and how it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.ops.check_returned import is_own, shape_said
from fp8compile.quantizers import GemmConfig, Quantizer, transposed
from fp8compile.scale_layouts import untiled
from fp8compile.target import Target

__all__ = ["GemmKernel", "GemmProblem", "Operand"]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of a product: codes and scales of a matrix, and the quantizer that made them of it.

    Attributes:
        codes: uint8, 2-D, ``quantizer.codes_shape`` of the matrix.
        scale: Grid of the quantizer's blocks over ``codes``, 2-D; or the same in tiles (`scale_layouts.tiled`), 1-D,
            where what made them knew of a GEMM that reads tiles.
        quantizer: In the coordinates of ``codes``.
        outer_scale: Of the whole tensor, (1,) float32; None of a quantizer with one level of scales.
    """

    codes: Tensor
    scale: Tensor
    quantizer: Quantizer
    outer_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the matrix that the codes stand for; packed codes are fewer."""
        if is_own(type(self.quantizer)):
            return self.quantizer.values_shape(self.codes.shape)
        return shape_said(self.quantizer, "values_shape", self.codes.shape)

    def grid(self) -> Tensor:
        """The scales, 2-D."""
        if self.scale.ndim == 2:
            return self.scale
        rows, columns = self.shape
        if self.quantizer.block[0] == 1:
            return untiled(self.scale, rows, columns // self.quantizer.block[1])
        return untiled(self.scale, columns, rows // self.quantizer.block[0]).t()

    def t(self) -> Operand:
        """The transposed matrix; no data moves."""
        return Operand(
            codes=self.codes.t(),
            scale=self.scale.t(),
            quantizer=transposed(self.quantizer),
            outer_scale=self.outer_scale,
        )

    def scale_values(self) -> Tensor:
        """The scales as float32 numbers."""
        return self.quantizer.scale_values(self.scale)


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
class GemmKernel:
    """One way to multiply quantized matrices.

    Attributes:
        name: What `select_gemm` and reports call it.
        detail: How it runs, in the words of ``fp8compile doctor``.
        takes: ``(a, b) -> bool``, of the two quantizers: whether it reads their codes and scales, on whatever device.
        lacks: ``(problem) -> str | None``, asked where it takes the operands: None where it runs. Otherwise the
            reason, as the rest of a sentence about the operands, and what to do.
        multiply: ``(a, b, out_dtype, config) -> Tensor``: the product of two operands (m, k) and (k, n) without an
            empty side, in ``out_dtype``, contiguous. Plain PyTorch: eager mode runs it and Inductor traces it.
        calls: Names of the PyTorch operators that multiply, by which reports find it in generated code and profiles.
        rounds_in_call: Whether the operator itself gives ``out_dtype``. If it does not, compiled code stores the last
            rounding explicitly, for Inductor drops that of a value which it fuses with what follows.
    """

    name: str
    detail: str
    takes: Callable[[Quantizer, Quantizer], bool]
    lacks: Callable[[GemmProblem], str | None]
    multiply: Callable[[Operand, Operand, torch.dtype, GemmConfig], Tensor]
    calls: tuple[str, ...] = ()
    rounds_in_call: bool = False
