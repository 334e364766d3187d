"""fp8compile::grouped_mm: GEMMs in high precision, group by group, and fp8compile::group_sum.

    b is (E, N, K)    y_RN  = a_RK @ b_e,NK^T    each row of a times the matrix of its group
    b is (R, K)       d_eNK = a_RN^T @ b_RK      sums over the rows of each group
    group_sum         s_eN                       sums the rows of each group

Subscripts are sizes: R rows in E groups e. Unlike `torch._grouped_mm`, these ops write zeros to rows after the last
group, never read them, and take every dtype on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8compile import inductor
from fp8compile._compat import OpOverload
from fp8compile.ops.gemms.grouped.torch_scaled_grouped_mm import padded_features
from fp8compile.ops.groups.export_masks import OF_BACKWARD, masks_of_groups
from fp8compile.ops.groups.padding import spans, zero_behind, zero_where_empty
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import GemmConfig
from fp8compile.target import target_of

__all__ = ["group_sum", "grouped_mm"]

ALIGNMENT = 8  # `torch._grouped_mm` wants rows that are multiples of 16 bytes: 8 values of bfloat16


def _one_by_one(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    if b.ndim == 3:
        product = a.new_zeros((a.shape[0], b.shape[1]))
        for group, (rows, _) in enumerate(spans(offsets, 1)):
            product[rows] = a[rows] @ b[group].t()
        return product
    product = a.new_empty((offsets.shape[0], a.shape[1], b.shape[1]))
    for group, (rows, _) in enumerate(spans(offsets, 1)):
        product[group] = a[rows].t() @ b[rows]
    return product


def _by_torch(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    if a.dtype != torch.bfloat16:
        raise RuntimeError(
            f"grouped_mm: a GEMM in high precision has dtype {a.dtype}, but grouped GEMMs on a GPU only support "
            "bfloat16. Cast x and weight to bfloat16, or use a recipe with all three GEMMs in FP8."
        )
    if b.ndim == 3:
        left, right = padded_features(a, (ALIGNMENT,)), padded_features(b, (ALIGNMENT, ALIGNMENT))
        product = torch.ops.aten._grouped_mm(left, right.transpose(-2, -1), offsets)
        return zero_behind(product[:, : b.shape[1]], offsets)
    left, right = padded_features(a, (ALIGNMENT,)), padded_features(b, (ALIGNMENT,))
    product = torch.ops.aten._grouped_mm(left.t(), right, offsets)
    return zero_where_empty(product[:, : a.shape[1], : b.shape[1]], offsets)


def _kernel(a: Tensor, b: Tensor, offsets: Tensor, config: GemmConfig) -> Tensor:
    run = _one_by_one if target_of(a.device).type == "cpu" else _by_torch
    return run(a, b, offsets).contiguous()


def _fake(a: Tensor, b: Tensor, offsets: Tensor, config: GemmConfig) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]) if b.ndim == 3 else (offsets.shape[0], a.shape[1], b.shape[1]))


def _apart_on_gpu(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a decomposition that calls ``kernel`` on a GPU; on a CPU the op stays one call (NotImplemented)."""
    return lambda a, *others: NotImplemented if target_of(a.device).type == "cpu" else kernel(a, *others)


def _portable(a: Tensor, b: Tensor, offsets: Tensor, config: GemmConfig) -> Tensor:
    if target_of(a.device).type != "cpu":
        return _kernel(a, b, offsets, config)
    if b.ndim == 2:
        raise RuntimeError(f"decompositions: fp8compile::grouped_mm can't be decomposed: {OF_BACKWARD}.")
    product = a.new_zeros((a.shape[0], b.shape[1]))
    for group, own in enumerate(masks_of_groups(offsets, a.shape[0])):
        product = torch.where(own, a @ b[group].t(), product)
    return product


grouped_mm: OpOverload = register_op(
    "fp8compile::grouped_mm",
    _kernel,
    fake=_fake,
    backward=None,
    decompose=_apart_on_gpu(_kernel),
    portable=_portable,
    sharding=None,
)
inductor.register_fallback(grouped_mm)

# ---------------------------------------------------------------------------------- sums


def _sum_kernel(a: Tensor, offsets: Tensor, config: GemmConfig) -> Tensor:
    if target_of(a.device).type == "cpu":
        return torch.stack([a[rows].sum(0) for rows, _ in spans(offsets, 1)])
    # a product with ones sums in the same order each time, which atomics do not
    return _by_torch(a, a.new_ones((a.shape[0], ALIGNMENT)), offsets)[:, :, 0].contiguous()


group_sum: OpOverload = register_op(
    "fp8compile::group_sum",
    _sum_kernel,
    fake=lambda a, offsets, config: a.new_empty((offsets.shape[0], a.shape[1])),
    backward=None,
    decompose=_apart_on_gpu(_sum_kernel),
    portable=OF_BACKWARD,
    sharding=None,
)
inductor.register_fallback(group_sum)
