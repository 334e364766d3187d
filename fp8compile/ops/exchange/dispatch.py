"""fp8compile::dispatch sends rows to the ranks of their experts, fp8compile::combine sends them back.

    dispatch   rows_NK  --codes--> ranks --sorted by expert--> grouped_MK     its gradient is sent in its own dtype
    combine    grouped_MK --> ranks --in the order of rows--> rows_NK         its gradient is sent as codes

Each op is the gradient of the other. Arguments of both ops after the rows:

    sent        (R, E), int64: number of rows that this rank has for each of the E experts of each of the R ranks
    received    (R, E), int64: number of rows that each rank has for each expert of this rank
    sizes       (2, R), int64, on the host: the sums of `sent` and of `received` over experts, the lengths of messages;
                None: all messages have the same length, and unused places hold zeros
    length      number of rows of the result; None: as many as arrive
    role        (dispatch) the recipe's field for the rows, "input" or "grad_output"
    recipe      decides whether rows, or the gradient of combine, are sent as codes: see `sent_as`
    group       name of the group; ignored if R is 1

A group of one rank sends nothing. Values that other groups would send as codes are still rounded to codes, so that one
rank computes the same values as many.

Letters: N rows of this rank, M rows of its experts, K features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8compile import _compat
from fp8compile._compat import OpOverload
from fp8compile.ops.collectives import all_to_all
from fp8compile.ops.exchange.exchange_rows import BACK, THERE, exchange_rows
from fp8compile.ops.exchange.message_format import packed, sent_as, unpacked, wire_width
from fp8compile.ops.exchange.row_order import Moves, take
from fp8compile.ops.layer.operands import Phase
from fp8compile.ops.registry import register_op
from fp8compile.quantizers import GEMMS, Recipe

__all__ = ["combine", "dispatch", "traveling"]

OUTPUT, GRAD_INPUT = GEMMS[:2]


def _sent(rows: Tensor, sizes: Tensor | None, back: bool, length: int | None, ranks: int, group: str) -> Tensor:
    """Exchange rows between ranks; returns the rows that arrived, in the order of ranks.

    ``back``: whether rows return from experts to the ranks of their tokens. If ``sizes`` is None, messages have one
    length.
    """
    if sizes is not None:
        return exchange_rows(rows, sizes, back, length, group)
    return all_to_all(rows, None, None, group) if ranks > 1 else rows


def _dispatch(
    rows: Tensor,
    sent: Tensor,
    received: Tensor,
    sizes: Tensor | None,
    length: int | None,
    role: str,
    recipe: Recipe,
    group: str,
) -> Tensor:
    ranks, quantizer = sent.shape[0], sent_as(recipe, role)
    phase = Phase.FORWARD if _compat.is_traced(rows) else Phase.EAGER
    wire = rows if quantizer is None else packed(rows, sent, quantizer, group, phase)
    slots: Any = length  # of all ranks, where sizes are not sent
    moves = Moves(sent, received, None if sizes is not None else slots // ranks)
    if sizes is None:
        wire = take(wire, moves.rows_of_slots(slots))
    buffer = _sent(wire, sizes, THERE, length, ranks, group)
    grouped = take(buffer, moves.buffer_of_grouped(buffer.shape[0]))
    return grouped if quantizer is None else unpacked(grouped, rows.shape[1], quantizer, rows.dtype)


def _combine(
    grouped: Tensor,
    sent: Tensor,
    received: Tensor,
    sizes: Tensor | None,
    length: int,
    recipe: Recipe,
    group: str,
) -> Tensor:
    ranks, places = sent.shape[0], grouped.shape[0]
    moves = Moves(sent, received, None if sizes is not None else places // ranks)
    buffer = take(grouped, moves.grouped_of_buffer(places))
    rows = _sent(buffer, sizes, BACK, length, ranks, group)
    return rows if sizes is not None else take(rows, moves.slots_of_rows(length))


def _dispatch_fake(*args: Any) -> Tensor:
    rows, _, _, _, length, *_ = args
    if length is None:
        length = _compat.new_dynamic_size()
    return rows.new_empty((length, rows.shape[1]))


def _combine_fake(*args: Any) -> Tensor:
    grouped, _, _, _, length, *_ = args
    return grouped.new_empty((length, grouped.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, sent, received, sizes, *others = inputs
    ctx.rows, (ctx.recipe, ctx.group) = rows.shape[0], others[-2:]
    ctx.save_for_backward(sent, received, sizes)


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return combine(grad, *ctx.saved_tensors, ctx.rows, ctx.recipe, ctx.group), *[None] * 7


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return dispatch(grad, *ctx.saved_tensors, ctx.rows, GRAD_INPUT.a, ctx.recipe, ctx.group), *[None] * 6


dispatch: OpOverload = register_op(
    "fp8compile::dispatch",
    _dispatch,
    fake=_dispatch_fake,
    setup_context=_setup_context,
    backward=_dispatch_backward,
    decompose=_dispatch,
    sharding=None,  # takes rows of this rank alone, never DTensors
)

combine: OpOverload = register_op(
    "fp8compile::combine",
    _combine,
    fake=_combine_fake,
    setup_context=_setup_context,
    backward=_combine_backward,
    decompose=_combine,
    sharding=None,
)


def traveling(rows: Tensor, length: int | None, role: str, recipe: Recipe) -> tuple[torch.dtype, int]:
    """Return the dtype and number of elements of all messages that `dispatch` sends for ``rows``.

    ``length`` is the number of rows for which all messages together have room; None without a capacity.
    """
    quantizer, features = sent_as(recipe, role), rows.shape[1]
    count = rows.shape[0] if length is None else length
    if quantizer is None:
        return rows.dtype, count * features
    return torch.uint8, count * wire_width(features, quantizer)
