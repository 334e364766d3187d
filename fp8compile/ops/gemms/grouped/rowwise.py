"""The rowwise grouped GEMM: `torch._scaled_grouped_mm` with a scale a row and a column.

It takes tensorwise operands too, whose one scale a group is spread over its rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8compile import _compat
from fp8compile.formats import E4M3
from fp8compile.ops.gemms.float8 import ALIGNMENT, float8_kind, lacks_tensor_cores
from fp8compile.ops.gemms.grouped.kernel import GroupedGemm, GroupedOperand
from fp8compile.ops.gemms.kernel import GemmProblem
from fp8compile.ops.groups.layout import alignment, padded_offsets, zero_behind
from fp8compile.quantizers import GemmConfig, Quantizer

__all__ = ["ROWWISE", "lacks_grouped", "padded_features"]


def _takes(a: Quantizer, b: Quantizer) -> bool:
    return float8_kind(a, b) in ("tensorwise", "rowwise")


def lacks_grouped(problem: GemmProblem) -> str | None:
    """Why a device has no `torch._scaled_grouped_mm` for a product; None if it has."""
    if (lacking := lacks_tensor_cores(problem)) is not None:
        return lacking
    if problem.target.capability[0] not in (9, 10):
        return "needs a grouped GEMM, which GPUs of compute capability 9.0 and 10.0 have (H100, H200, B200)."
    if problem.out_dtype != torch.bfloat16:
        return f"gives bfloat16 only in a grouped GEMM, and {problem.out_dtype} is asked for. Cast x and weight."
    if {problem.a.gemm_format(), problem.b.gemm_format()} != {E4M3}:
        return "has no grouped GEMM: it multiplies e4m3 by e4m3. Give gradients e4m3 too (grad_format='e4m3')."
    return None


def padded_features(codes: Tensor, multiples: tuple[int, ...], *, value: float = 0) -> Tensor:
    """A tensor whose last dims are multiples of these, by zeros behind."""
    missing = [-size % multiple for size, multiple in zip(codes.shape[-len(multiples) :], multiples, strict=True)]
    if all(_compat.statically_true(each == 0) for each in missing):
        return codes
    return pad(codes, [edge for each in reversed(missing) for edge in (0, each)], value=value)


def float8(codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Codes as the dtype of their format."""
    return codes.contiguous().view(quantizer.gemm_format().dtype)


def _rows(a: GroupedOperand, b: GroupedOperand, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig) -> Tensor:
    experts, n, _ = b.codes.shape
    left = padded_features(a.codes, (ALIGNMENT,))
    right = padded_features(b.codes, (ALIGNMENT, ALIGNMENT))
    columns = b.quantizer.scale_values(b.scale).squeeze(-1).expand(experts, n)
    product = torch.ops.aten._scaled_grouped_mm(
        float8(left, a.quantizer),
        float8(right, b.quantizer).transpose(-2, -1),
        a.quantizer.scale_values(a.scale).squeeze(-1).contiguous(),
        padded_features(columns, (ALIGNMENT,), value=1).contiguous(),
        offsets,
        out_dtype=out_dtype,
        use_fast_accum=config.fast_accumulation,
    )
    return zero_behind(product[:, :n], offsets)


def _group_scales(operand: GroupedOperand, groups: int) -> Tensor:
    """A scale for each group's features, one group after the other."""
    features = operand.codes.shape[0]
    scales = operand.quantizer.scale_values(operand.scale).expand(groups, features)
    return padded_features(scales, (ALIGNMENT,), value=1).reshape(-1)


def _outer(
    a: GroupedOperand, b: GroupedOperand, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig
) -> Tensor:
    n, k, groups = a.codes.shape[0], b.codes.shape[0], offsets.shape[0]
    left, right = (padded_features(each.codes, (ALIGNMENT, 1)) for each in (a, b))
    product = torch.ops.aten._scaled_grouped_mm(
        float8(left, a.quantizer),
        float8(right, b.quantizer).t(),
        _group_scales(a, groups),
        _group_scales(b, groups),
        padded_offsets(offsets, alignment(a.quantizer)),
        out_dtype=out_dtype,
        use_fast_accum=config.fast_accumulation,
    )
    return product[:, :n, :k]  # of a group without tokens, PyTorch's products over tokens write zeros


ROWWISE = GroupedGemm(
    name="rowwise",
    detail="native, rowwise grouped GEMM",
    takes=_takes,
    lacks=lacks_grouped,
    rows=_rows,
    outer=_outer,
    calls=("_scaled_grouped_mm",),
)
