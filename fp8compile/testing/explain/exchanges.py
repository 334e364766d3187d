"""Registers expert parallelism's exchanges with graph reports, which know only PyTorch's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fp8compile.ops.exchange.dispatch import combine, dispatch, traveling
from fp8compile.ops.exchange.exchange_rows import exchange_rows
from fp8compile.testing.graphs.messages import bytes_by_dtype, register_message, size_of, tensors_in

__all__: list[str] = []


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def _dispatched(node: fx.Node) -> Mapping[torch.dtype, int]:
    rows, _, _, sizes, length, role, recipe, _ = (_value(arg) for arg in node.args)
    dtype, elements = traveling(rows, None if sizes is not None else length, role, recipe)
    return {dtype: size_of(elements) * dtype.itemsize}


def _rows(node: fx.Node) -> Mapping[torch.dtype, int]:
    return bytes_by_dtype(tensors_in([arg.meta.get("val") for arg in node.all_input_nodes])[:1], node)


register_message(dispatch, _dispatched)
register_message(combine, _rows)
register_message(exchange_rows, _rows)
