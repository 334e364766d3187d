"""Computes matrix products of generated code, or raises if a GPU's library would refuse their operands.

A result is summed in float64 and rounded to its dtype, so it depends only on the operands' values; `grouped_products`
has one exception. cuBLASLt adds in its own order, and for float8 in its own precision.

Sources of the requirements: PyTorch's checks in `_scaled_mm` (aten/src/ATen/native/cuda/ScaledBlas.cpp) and in
`_int_mm` (Blas.cpp beside it); cuBLAS documentation, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.program.demands import (
    ALIGNMENT,
    E8M0,
    MX_BLOCK,
    TILE_BLOCKS,
    TILE_ROWS,
    demand,
    four_bit_values,
    tiled_values,
)
from fp8compile.testing.gpu.program.grouped_products import (
    grouped_blockwise_mm,
    grouped_mm,
    grouped_nvfp4_mm,
    scaled_grouped_mm,
)
from fp8compile.testing.gpu.program.libraries import gates_of

if TYPE_CHECKING:
    from fp8compile.testing.gpu.program.nan_origin import NanSearch

__all__ = ["BY_OUR_KERNEL", "PRODUCTS", "Product", "Products", "is_product"]

BLOCK = 128
BY_OUR_KERNEL = "grouped_blockwise_mm"
SCALED = ("left operand", "right operand", "left scale", "right scale")
BIASED = ("bias", "left operand", "right operand")


@dataclass(frozen=True, eq=False)
class Product:
    """The record of one call of a matrix product.

    Attributes:
        name: Name of the operator, such as "_scaled_mm".
        operands: Copies of the tensors among the positional arguments, in the order of ``operand_names``.
        result: A copy of the result.
    """

    name: str
    operands: tuple[Tensor, ...]
    result: Tensor

    @property
    def operand_names(self) -> tuple[str, ...]:
        """Description of each operand, such as "left scale"."""
        names = BIASED if "add" in self.name else SCALED
        return (*names, *(f"operand {at}" for at in range(len(names), len(self.operands))))[: len(self.operands)]

    def __str__(self) -> str:
        shapes = " x ".join(str(tuple(each.shape)) for each in self.operands)
        return f"{self.name}: {shapes} -> {tuple(self.result.shape)} {str(self.result.dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------------------------- scaled products


def _is_laid(scale: Tensor, strides: Sequence[int]) -> bool:
    return all(n == 1 or has == wants for n, has, wants in zip(scale.shape, scale.stride(), strides, strict=True))


def _spread(scale: Tensor, rows: int, k: int, side: str, gpu: Gpu) -> tuple[str, Tensor]:
    """Expand the scales of one operand of `_scaled_mm` to its elements; raise if a GPU would refuse the scales.

    Args:
        scale: The operand's scales, transposed for a right operand.
        rows: Number of the operand's rows; for a right operand, of its columns.
        k: Size of the contracted dim.
        side: "a" or "b", for errors.
        gpu: The GPU.

    Returns:
        Kind of scaling, such as "mx" or "tensorwise", and the scale of each element, (rows, k) float64.
    """
    name, blocks = f"_scaled_mm, scale {side} {tuple(scale.shape)}, strides {scale.stride()}", -(-k // BLOCK)
    if scale.dtype == E8M0:
        return "mx", _swizzled_values(scale, rows, k, name, gpu)
    demand(scale.dtype == torch.float32, name, f"scales in float32 or E8M0, not {scale.dtype}.")
    values = scale.double()
    if scale.numel() == 1 and scale.ndim == 0:
        return "tensorwise", values.expand(rows, k)
    if tuple(scale.shape) == (rows, 1) and blocks > 1:
        demand(scale.is_contiguous() or scale.stride(0) == 1, name, "contiguous scales of rows.")
        return "rowwise", values.expand(rows, k)
    if tuple(scale.shape) == (rows, blocks):
        strides = (1, rows)
        demand(_is_laid(scale, strides), name, f"scales of 1 x {BLOCK} with strides {strides}.")
        return "1x128" if blocks > 1 else "rowwise or 1x128", values.repeat_interleave(BLOCK, 1)[:, :k]
    demand(tuple(scale.shape) == (-(-rows // BLOCK), blocks), name, f"another shape for an operand ({rows}, {k}).")
    strides = (blocks, 1)
    laid = _is_laid(scale, strides)
    demand(laid, name, f"scales of {BLOCK} x {BLOCK} with strides {strides}, which PyTorch asks for.")
    demand(blocks % 4 == 0 or scale.shape[0] == 1, name, "rows of a multiple of 16 bytes, which cuBLAS asks for.")
    return "128x128", values.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :k]


def _swizzled_values(scale: Tensor, rows: int, k: int, name: str, gpu: Gpu) -> Tensor:
    demand(bool(gates_of("mx", gpu.target)), name, "MX scales on compute capability 10.0 to 12.1.")
    demand(k % MX_BLOCK == 0, name, f"a sum over a multiple of {MX_BLOCK}, not {k}.")
    blocks = k // MX_BLOCK
    needed = -(-rows // TILE_ROWS) * TILE_ROWS * (-(-blocks // TILE_BLOCKS) * TILE_BLOCKS)
    demand(scale.is_contiguous() and scale.numel() == needed, name, f"{needed} scales in tiles, one after the other.")
    return tiled_values(scale, rows, blocks).repeat_interleave(MX_BLOCK, 1)


def _turned(scale: Tensor) -> Tensor:
    return scale.t() if scale.ndim == 2 else scale


def _check_codes(a: Tensor, b: Tensor) -> None:
    name = f"_scaled_mm {tuple(a.shape)} x {tuple(b.shape)}, strides {a.stride()} and {b.stride()}"
    demand(a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0], name, "two matrices that fit.")
    demand(a.stride(1) == 1 and a.stride(0) >= a.shape[1], name, "a row-major left operand.")
    demand(b.stride(0) == 1 and b.stride(1) >= b.shape[0], name, "a column-major right operand.")
    demand(b.shape[0] % ALIGNMENT == 0 and b.shape[1] % ALIGNMENT == 0, name, f"k and n in multiples of {ALIGNMENT}.")
    aligned = all(each % ALIGNMENT == 0 for each in (a.stride(0), b.stride(1), a.data_ptr(), b.data_ptr()))
    demand(aligned, name, f"rows that begin at multiples of {ALIGNMENT} bytes.")
    float8 = {torch.float8_e4m3fn, torch.float8_e5m2}
    demand({a.dtype, b.dtype} <= float8, name, f"float8 operands, not {a.dtype} and {b.dtype}.")
    demand(not a.dtype == b.dtype == torch.float8_e5m2, name, "e5m2 on one side at most.")


def _check_kinds(kinds: tuple[str, str], out_dtype: torch.dtype, gpu: Gpu) -> None:
    a, b = kinds
    name = f"_scaled_mm, scales {a} by {b} to {out_dtype}"
    if "rowwise" in (a, b):
        gates = gates_of("rowwise", gpu.target)
        demand(bool(gates), name, "rows' scales on a GPU that has a kernel for them.")
        dtypes = {dtype for gate in gates for dtype in gate.out_dtypes}
        demand(out_dtype in dtypes, name, f"rows' scales to {', '.join(sorted(map(str, dtypes)))} only.")
    if "1x128" in (a, b) or "128x128" in (a, b):
        demand(bool(gates_of("blockwise", gpu.target)), name, "blocks' scales on compute capability 9.0 only.")
        demand(kinds != ("128x128", "128x128"), name, f"scales of {BLOCK} x {BLOCK} on one side at most.")
    small = {"1x128", "128x128", "rowwise or 1x128"}
    demand(
        a == b or ({a, b} <= small) or {a, b} == {"rowwise", "rowwise or 1x128"},
        name,
        "two scalings that go together.",
    )


def scaled_mm(
    gpu: Gpu, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `torch._scaled_mm` in float64, rounded once; raise a ValueError if a GPU would refuse the operands.

    The arguments after ``gpu`` are those of the operator.
    """
    demand(bias is None and scale_result is None, "_scaled_mm", "no bias and no scale of its result here.")
    (m, k), n = a.shape, b.shape[1]
    _check_codes(a, b)
    kind_a, values_a = _spread(scale_a, m, k, "a", gpu)
    kind_b, values_b = _spread(_turned(scale_b), n, k, "b", gpu)
    out_dtype = out_dtype or a.dtype
    _check_kinds((kind_a, kind_b), out_dtype, gpu)
    left, right = a.double() * values_a, b.t().contiguous().double() * values_b
    return (left @ right.t()).to(out_dtype)


def nvfp4_mm(
    gpu: Gpu, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_outer: Tensor, b_outer: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `fp8compile::nvfp4_mm` (four-bit codes), or raise a ValueError if a GPU would refuse the operands.

    The arguments after ``gpu`` are those of the operator.
    """
    name, half, n = f"nvfp4_mm {tuple(a.shape)} x {tuple(b.shape)}", a.shape[1], b.shape[0]
    demand(bool(gates_of("nvfp4", gpu.target)), name, "FP4 operands on compute capability 10.0 to 12.1.")
    demand(a.shape[1] == b.shape[1] and a.is_contiguous() and b.is_contiguous(), name, "rows of one length.")
    demand(half % ALIGNMENT == 0 and n % ALIGNMENT == 0, name, f"rows of {ALIGNMENT} bytes, columns in as many.")
    for outer in (a_outer, b_outer):
        demand(outer.dtype == torch.float32 and outer.numel() == 1, name, "one float32 scale of each tensor.")
    sides = [four_bit_values(codes, scale, name) for codes, scale in ((a, a_scale), (b, b_scale))]
    return ((sides[0] @ sides[1].t()) * (a_outer.double() * b_outer.double())).to(out_dtype)


# ---------------------------------------------------------------------------------- plain products


def _wide(tensor: Tensor) -> Tensor:
    return tensor.contiguous().double() if tensor.is_floating_point() else tensor.contiguous()


def mm(gpu: Gpu, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``a @ b`` of matrices or batches of matrices, in float64 rounded once; ``gpu`` is ignored."""
    return (_wide(a) @ _wide(b)).to(out_dtype or a.dtype)


def addmm(gpu: Gpu, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute ``beta * bias + alpha * a @ b``, in float64 rounded once; ``gpu`` is ignored."""
    return (beta * _wide(bias) + alpha * (_wide(a) @ _wide(b))).to(a.dtype)


def convolution(
    gpu: Gpu, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), transposed: bool = False,
    output_padding: Sequence[int] = (0,), groups: int = 1,
) -> Tensor:  # fmt: skip
    """Compute `torch.convolution` with its arguments in float64, rounded once to the dtype of ``x``."""
    wide = None if bias is None else _wide(bias)
    sizes = (stride, padding, dilation, transposed, output_padding, groups)
    return torch.convolution(_wide(x), _wide(weight), wide, *sizes).to(x.dtype)


def int_mm(gpu: Gpu | None, a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch._int_mm` (int8 codes, exact sums); raise a ValueError if a GPU would refuse the operands."""
    name = f"_int_mm {tuple(a.shape)} x {tuple(b.shape)}"
    demand(a.dtype == b.dtype == torch.int8, name, f"int8 operands, not {a.dtype} and {b.dtype}.")
    if gpu is not None:
        demand(a.shape[0] > 16, name, "more than 16 rows.")
        demand(all(size % 8 == 0 for size in b.shape), name, "k and n in multiples of 8.")
    return (a.contiguous().double() @ b.contiguous().double()).to(torch.int32)


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "_scaled_mm": scaled_mm, "_int_mm": int_mm, "mm": mm, "bmm": mm, "addmm": addmm, "bias_addmm": addmm,
    "baddbmm": addmm, "_grouped_mm": grouped_mm, "_scaled_grouped_mm": scaled_grouped_mm,
    "grouped_blockwise_mm": grouped_blockwise_mm, "nvfp4_mm": nvfp4_mm,
    "grouped_nvfp4_mm": grouped_nvfp4_mm, "convolution": convolution,
}  # fmt: skip


def is_product(op: torch._ops.OpOverload) -> bool:
    """Whether an operator is one of ``PRODUCTS``, by its name and its namespace (aten or fp8compile)."""
    namespace, _, name = op._schema.name.partition("::")
    return namespace in ("aten", "fp8compile") and name in PRODUCTS


class Products:
    """Computes matrix products, and records each call.

    Args:
        gpu: The GPU whose requirements are checked; None for a CPU, which only some products allow.
        nans: The search for the origin of NaN, which gets each product's operands and result; None to skip it.
        interprets: Whether this package's Triton kernel runs in the active interpreter for `grouped_blockwise_mm`.

    Attributes:
        gpu: The GPU, or None.
        called: The records in the order of the calls.
    """

    def __init__(self, gpu: Gpu | None, nans: NanSearch | None = None, *, interprets: bool = False) -> None:
        self.gpu, self._nans, self._interprets = gpu, nans, interprets
        self.called: list[Product] = []

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        """The function of a matrix product, looked up by generated code as in Inductor's ``extern_kernels``."""
        if name not in PRODUCTS:
            raise NotImplementedError(
                f"run_gpu_program: generated code calls extern_kernels.{name}, which is not supported; "
                f"supported are {', '.join(PRODUCTS)}."
            )
        return lambda *args, **kwargs: self.multiply(name, *args, **kwargs)

    def multiply(self, name: str, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Compute the matrix product ``name``, record the call, and write the result to ``out`` if given."""
        if self._interprets and name == BY_OUR_KERNEL:
            kwargs["interpret"] = True
        with _disable_current_modes():  # operators that compute the product are no part of the program
            result = PRODUCTS[name](self.gpu, *args, **kwargs)
            self._record(name, [arg for arg in args if isinstance(arg, Tensor)], result)
            return result if out is None else _written(name, result, out)

    def launched(self, op: str, arguments: Mapping[str, Any]) -> None:
        """Record a matrix product that a Triton kernel has computed.

        Args:
            op: Name of the operator that the kernel stands for, such as "fp8compile.grouped_blockwise_mm.default".
            arguments: The kernel's arguments: the operator's tensors in order, and then its result.
        """
        with _disable_current_modes():
            *operands, result = (each for each in arguments.values() if isinstance(each, Tensor))
            self._record(op.split(".")[1], operands, result)

    def _record(self, name: str, given: Sequence[Tensor], result: Tensor) -> None:
        operands = tuple(arg.detach().clone() for arg in given)
        self.called.append(product := Product(name, operands, result.clone()))
        if self._nans is not None:
            named = dict(zip(product.operand_names, given, strict=True))
            self._nans.computed(f"product {len(self.called) - 1}, {product},", named, (result,))


def _written(name: str, result: Tensor, out: Tensor) -> Tensor:
    if (out.shape, out.dtype) != (result.shape, result.dtype):
        raise ValueError(
            f"{name}: `out` has shape {tuple(out.shape)} and dtype {out.dtype}; it must have the shape and dtype of "
            f"the result, {tuple(result.shape)} and {result.dtype}."
        )
    return out.copy_(result)
