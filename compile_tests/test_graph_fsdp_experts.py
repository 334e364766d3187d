"""Experts in the graph of a sharded model: what a pass sends of their weights, and that nothing gathered is kept."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from processes import fake_rank
from test_graph_fsdp_graphs import DIM, compiled_model, elsewhere  # noqa: F401
from torch import nn

import fp8compile as f8

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "blockwise_bf16_wgrad", "mxfp8")
EXPERTS, INNER, RANKS = 8, 512, 4


class Experts(nn.Module):
    """All of them are given as many rows."""

    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, INNER, DIM))
        self.down = nn.Parameter(torch.randn(count, INNER, DIM))  # transposed

    def _grouped_mm(self, *, A, B_t, offs):
        raise AssertionError("experts were not converted")

    def forward(self, rows):
        count = self.up.shape[0]
        offsets = torch.arange(1, count + 1, dtype=torch.int32) * (rows.shape[0] // count)
        inner = self._grouped_mm(A=rows, B_t=self.up.transpose(-2, -1), offs=offsets)
        return self._grouped_mm(A=nn.functional.silu(inner), B_t=self.down, offs=offsets)


@cache
def compiled(recipe, ranks, count=EXPERTS):
    """Messages of forward and backward, and what is kept between them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = nn.Sequential(Experts(count), Experts(count))
    model = f8.convert(model, f8.recipes.by_name(recipe) if recipe else f8.Recipe())
    if ranks == 1:
        return compiled_model(model.bfloat16())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return compiled_model(f8.parallel.graph_fsdp(model, DeviceMesh("cpu", range(ranks)), mp_policy=policy))


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_pass_gathers_codes_once_at_half_of_bfloat16s_bytes(elsewhere, recipe):  # noqa: F811
    forward, backward, _ = elsewhere(compiled, recipe, RANKS)
    own = EXPERTS // RANKS * INNER * DIM
    for messages in (forward, backward):
        gathers = [each for each in messages if "all_gather" in each.op]
        codes = [each for each in gathers if each.bytes == own]
        assert [each.dtype for each in codes] == ["uint8"] * 4, gathers
        assert sum(each.bytes for each in gathers) <= 4 * own * 1.04  # scales: of mxfp8 a byte for 32
        # scales by themselves; if both passes multiply the same codes, the backward has those of the forward
        is_known = messages is backward and f8.recipes.by_name(recipe).shares_weight_codes()
        assert len(gathers) == (4 if is_known else 8), gathers
    assert {each.op for each in forward} == {"all_gather_into_tensor"}, "no amax is exchanged"
    reduced = [each for each in backward if "reduce_scatter" in each.op]
    assert [each.bytes for each in reduced] == [4 * RANKS * own] * 4
    assert {each.op for each in backward} == {"all_gather_into_tensor", "reduce_scatter_tensor"}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", None])
def test_no_gathered_weight_is_kept_for_the_backward(elsewhere, recipe):  # noqa: F811
    """Beside what the unsharded model keeps: codes of this rank's experts, for each pass, and their scales."""
    alone, sharded = (elsewhere(compiled, recipe, ranks)[2] for ranks in (1, RANKS))
    assert EXPERTS * INNER * DIM not in [elements for elements, _ in sharded], sharded
    own = EXPERTS // RANKS * (INNER * DIM + 4 * (INNER + DIM))
    assert sum(size for _, size in sharded) - sum(size for _, size in alone) <= 2 * 4 * own, sharded


@pytest.fixture(scope="module")
def on_the_last_rank():
    """Runs a function in a process that is another rank."""
    with fake_rank(RANKS - 1, RANKS) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


class Narrow(nn.Module):
    """Two layers of as many rows, of which the last of four ranks has none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(DIM, RANKS - 1, bias=False)
        self.second = nn.Linear(DIM, RANKS - 1, bias=False)

    def forward(self, x):
        return self.first(x) + self.second(2 * x)


@cache
def compiled_narrow(recipe):
    from torch.distributed.device_mesh import DeviceMesh

    model = f8.convert(Narrow().bfloat16(), f8.recipes.by_name(recipe), filter=lambda *_: True)
    return compiled_model(f8.parallel.graph_fsdp(model, DeviceMesh("cpu", range(RANKS))))


def test_a_rank_without_rows_sends_what_others_send(elsewhere, on_the_last_rank):  # noqa: F811
    first, last = (where(compiled_narrow, "rowwise")[:2] for where in (elsewhere, on_the_last_rank))
    assert first == last


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_rank_without_experts_sends_what_others_send(elsewhere, on_the_last_rank, recipe):  # noqa: F811
    """What is sent of nothing is the same of all layers, and compilers merge equal calls."""
    first, last = (where(compiled, recipe, RANKS, RANKS - 1)[:2] for where in (elsewhere, on_the_last_rank))
    assert first == last
