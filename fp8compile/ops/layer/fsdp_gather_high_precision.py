"""fp8compile::fsdp_gather: all-gather a parameter with sharded rows; reduce-scatter its gradient.

    forward    shard --cast to dtype--> all-gather --> the parameter
    backward   gradient --cast to reduce_dtype--> reduce-scatter, mean --> mean over replicas --> shard's dtype

These are the steps of `torch.distributed.fsdp.fully_shard` around a module, as nodes of the graph. For the
backward, compiled code keeps a gathered vector (a bias or a norm). Of other parameters it keeps only the shard, and
repeats the gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from fp8compile import _compat, inductor
from fp8compile._compat import OpOverload
from fp8compile.ops.collectives import all_gather, all_reduce, reduce_scatter
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.registry import register_op

__all__ = ["fsdp_gather", "fsdp_reduce", "gathered", "reduced"]


def gathered(shard: Tensor, rows: Rows, *, in_backward: bool = False) -> Tensor:
    """All-gather a parameter's rows, in the shard's dtype; ``rows`` describes the sharding.

    Compiled code gathers in the forward and again in the backward; with ``in_backward``, only in the backward. Outside
    of checkpointed regions it gathers a vector once, and keeps it.
    """
    if len(rows.sizes) == 1:
        return shard
    if shard.ndim == 1 and not inductor.is_repeated_in_backward():
        # Whether the backward reads a bias depends on which activations the partitioner keeps, and so on their sizes.
        # Ranks with other sizes would wait for a message that this rank does not send.
        whole = all_gather(shard, 0, rows.sizes, rows.group)
        inductor.never_recompute(whole)
        return whole
    with inductor.recomputed(in_backward=in_backward):
        return all_gather(shard, 0, rows.sizes, rows.group)


def _divisors(dtype: torch.dtype, ranks: int) -> tuple[float, float]:
    """Return FSDP2's divisors before and after a sum over ranks: each about sqrt(ranks), so that no sum overflows."""
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before


def reduced(grad: Tensor, dtype: torch.dtype, rows: Rows) -> Tensor:
    """Average a gradient over ranks and replicas as FSDP2 does; returns this rank's rows in ``dtype``."""
    replicas: Any = rows.replicas  # the name of a group
    copies = _resolve_process_group(replicas).size() if replicas else 1
    ranks = len(rows.sizes) * copies
    reduce_dtype = getattr(torch, rows.reduce_dtype)
    # float32 and bfloat16 can't overflow in a sum; as in FSDP2, NCCL's mean divides for them, and we for other dtypes
    has_room = reduce_dtype in (torch.float32, torch.bfloat16)
    reduction = "avg" if has_room else "sum"
    before, after = (1.0, 1.0) if has_room else _divisors(reduce_dtype, ranks)
    part = grad.to(reduce_dtype)
    if before != 1:
        part = part / before
    if len(rows.sizes) > 1:
        part = reduce_scatter(part, reduction, 0, rows.sizes, rows.rank, rows.group)
    if copies > 1:
        part = all_reduce(part.contiguous(), reduction, rows.replicas)
    if after != 1:
        part = part / after
    return part.to(dtype)


# ---------------------------------------------------------------------------------- the gradient


def _reduce_kernel(grad: Tensor, dtype: torch.dtype, rows: Rows) -> Tensor:
    part = reduced(grad, dtype, rows)
    return part.clone() if part is grad else part.contiguous()


def _reduce_fake(grad: Tensor, dtype: torch.dtype, rows: Rows) -> Tensor:
    return grad.new_empty((rows.sizes[rows.rank], *grad.shape[1:]), dtype=dtype)


fsdp_reduce: OpOverload = register_op(
    "fp8compile::fsdp_reduce",
    _reduce_kernel,
    fake=_reduce_fake,
    backward=None,
    decompose=_reduce_kernel,
    sharding=None,  # takes tensors of this rank alone, never DTensors
)

# ---------------------------------------------------------------------------------- the gather


def _kernel(shard: Tensor, dtype: torch.dtype, rows: Rows) -> Tensor:
    whole = gathered(shard.to(dtype), rows)
    return whole.clone() if whole is shard else whole.contiguous()


def _fake(shard: Tensor, dtype: torch.dtype, rows: Rows) -> Tensor:
    return shard.new_empty((sum(rows.sizes), *shard.shape[1:]), dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, used, ctx.rows = inputs
    ctx.dtype = shard.dtype
    _compat.declare_grad_dtype(ctx, getattr(torch, ctx.rows.reduce_dtype), used)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return fsdp_reduce(grad, ctx.dtype, ctx.rows), None, None


fsdp_gather: OpOverload = register_op(
    "fp8compile::fsdp_gather",
    _kernel,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    decompose=_kernel,
    sharding=None,
)
