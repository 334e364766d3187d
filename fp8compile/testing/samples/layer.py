"""Sample arguments of a layer's ops, for one rank; more ranks need processes (tests/parallel)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8compile.ops.layer.fsdp_delayed_amaxes import AmaxGroups
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.operands import WEIGHT_ROLES
from fp8compile.testing.samples import inputs
from fp8compile.testing.samples.layer_ops import (
    delayed_samples,
    grad_input_samples,
    grad_weight_samples,
    linear_samples,
    weight_samples,
)

__all__ = ["SAMPLES"]


def _fsdp_amax() -> Iterator[tuple[Any, ...]]:
    for index, (weight, recipe) in enumerate(weight_samples()):
        own = weight.float()[: 0 if index % 5 == 4 else 40]
        own = own.t().contiguous().t() if index % 2 else own
        for role in ("weight", "weight_for_grad_input"):
            if (quantizer := getattr(recipe, role)) is not None:
                grid = list(quantizer.scale_shape((40 + own.shape[0], own.shape[1])))
                rows = Rows(sizes=(40, own.shape[0]), rank=1, group="", replicas="", reduce_dtype="float32")
                yield own, weight.dtype, rows, grid, role, recipe


def _fsdp_amax_carriers() -> Iterator[tuple[Any, ...]]:
    for x, *_, amax_history, multiplier, _, _, _, _, _, recipe in delayed_samples():
        if amax_history is not None:
            yield x, amax_history, multiplier, recipe


def _fsdp_amaxes_together() -> Iterator[tuple[Any, ...]]:
    yield torch.zeros(8), AmaxGroups(())
    yield torch.zeros(12)[::3], AmaxGroups(())
    yield torch.zeros(0), AmaxGroups(())


def _fsdp_reduce() -> Iterator[tuple[Any, ...]]:
    for shard, dtype, rows in _fsdp_gather():
        yield torch.ones_like(shard, dtype=dtype), shard.dtype, rows


def _fsdp_gather() -> Iterator[tuple[Any, ...]]:
    for shape in ((6,), (3, 4), (0, 4)):
        for dtype in (torch.float32, torch.bfloat16):
            yield torch.ones(shape), dtype, Rows.alone(shape[0])
    yield torch.ones(4, 3).t(), torch.float16, Rows.alone(3, "float16")


def _weight_codes() -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for recipe in inputs.recipes():
        for weight in (
            torch.randn(40, 24, generator=generator).bfloat16(),
            torch.randn(24, 40, generator=generator).t(),
            torch.randn(3, 20, 24, generator=generator).bfloat16(),
            torch.randn(0, 24, generator=generator),
        ):
            for role in WEIGHT_ROLES:
                if getattr(recipe, role) is not None:
                    yield weight, role, recipe


SAMPLES = {
    "fp8compile::linear": linear_samples,
    "fp8compile::grad_input": grad_input_samples,
    "fp8compile::grad_weight": grad_weight_samples,
    "fp8compile::delayed_linear": delayed_samples,
    "fp8compile::fsdp_amax": _fsdp_amax,
    "fp8compile::fsdp_amax_carriers": _fsdp_amax_carriers,
    "fp8compile::fsdp_amaxes_together": _fsdp_amaxes_together,
    "fp8compile::fsdp_reduce": _fsdp_reduce,
    "fp8compile::fsdp_gather": _fsdp_gather,
    "fp8compile::weight_codes": _weight_codes,
}
