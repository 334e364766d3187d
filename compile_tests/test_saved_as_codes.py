"""Saved tensors as codes in compiled models: by the context and by the partitioner, the same bits, bytes and graphs.

Graphs are those that Inductor gets, and run as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from processes import fake_rank
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from benchmarks.memory import saved_bytes
from fp8compile.saved_tensors import partitioner
from fp8compile.testing import assert_fullgraph

TOKENS, D, H = 256, 256, 512
BF16 = 2
SAVED = f8.SavedAsCodes()


class Block(nn.Module):
    """RMSNorm, SwiGLU, residual."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.norm, self.checkpointed = nn.RMSNorm(D), checkpointed
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((D, H), (D, H), (H, D)))

    def own(self, x):
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def forward(self, x):
        return checkpoint(self.own, x, use_reentrant=False) if self.checkpointed else self.own(x)


def graphs_only(graph, inputs):
    """A backend with Inductor's decompositions and its choice of a partitioner, without its code."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import compile_fx

    return aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph),
        decompositions=compile_fx.select_decomp_table(),
        partition_fn=compile_fx.partition_fn,
    )(graph, inputs)


def model_of(recipe, case="whole"):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(case == "checkpointed") for _ in range(2))).bfloat16()
    return f8.convert(model, f8.recipes.by_name(recipe), filter="*") if recipe else model


def tokens(case="whole"):
    torch.manual_seed(1)
    x = torch.randn(TOKENS, D).bfloat16().requires_grad_()
    if case == "dynamic":
        torch._dynamo.mark_dynamic(x, 0)
    return x


def opened(door, saved):
    """The context in which a door packs tensors; a partitioner by Inductor's option, which `f8.compile` sets."""
    if door is None:
        return contextlib.nullcontext()
    if door == "context":
        return f8.saved_as_codes(saved)
    return torch._inductor.config.patch(custom_partitioner_fn=partitioner(saved))


def step(door, recipe, case="whole", saved=SAVED, backend=graphs_only):
    """Bytes kept beside arguments, then the result and gradients."""
    torch._dynamo.reset()
    model, x = model_of(recipe, case), tokens(case)
    call = (f8.compile if case == "region" else torch.compile)(model, fullgraph=True, backend=backend)
    with opened(door, saved):
        y = call(x)
    given = {t.untyped_storage()._cdata for t in (x, y, *model.parameters())}
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in y.grad_fn.saved_tensors}
    kept = sum(size for key, size in held.items() if key not in given)
    y.float().square().sum().backward()
    return kept, y, [x.grad, *(each.grad for each in model.parameters())]


def distance(found, expected):
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", ["whole", "dynamic", "region", "checkpointed"])
def test_both_doors_give_the_same_bits_and_keep_a_byte_an_element(case):
    exact, y, gradients = step(None, "rowwise", case)
    by_context, by_partitioner = step("context", "rowwise", case), step("partitioner", "rowwise", case)
    assert by_context[0] == by_partitioner[0]
    between = TOKENS * D  # the input of the second block
    packed = between if case == "checkpointed" else between + 4 * TOKENS * H  # and gate and up of both
    rows = TOKENS * (1 if case == "checkpointed" else 5)
    assert exact - by_context[0] == packed * BF16 - (packed + rows * BF16)
    for _, result, found in (by_context, by_partitioner):
        assert torch.equal(result, y)
        assert 0 < distance(found, gradients) < 0.05  # the spread of e4m3 in the factors, see docs/results/bytes.md
    assert all(map(torch.equal, by_context[2], by_partitioner[2]))


@pytest.mark.parametrize(
    ("recipe", "columns"), [(None, 128), ("tensorwise", None), ("blockwise", 128), ("mxfp8", 32), ("nvfp4", 16)]
)
def test_codes_are_in_the_blocks_of_the_recipe(recipe, columns):
    exact, y, gradients = step(None, recipe)
    kept, result, found = step("partitioner", recipe)
    elements = TOKENS * D + 4 * TOKENS * H
    scales = 5 * TOKENS if columns is None else elements // columns
    assert exact - kept == elements * BF16 - (elements + scales * BF16)
    assert torch.equal(result, y)
    assert 0 < distance(found, gradients) < 0.05


def test_four_bits_by_choice_take_a_quarter():
    four = f8.SavedAsCodes(f8.TwoLevelScaling())
    exact, (by_context, _, found) = step(None, "rowwise")[0], step("context", "rowwise", saved=four)
    by_partitioner, _, others = step("partitioner", "rowwise", saved=four)
    elements = TOKENS * D + 4 * TOKENS * H
    assert by_context == by_partitioner == exact - elements * BF16 + elements * 9 // 16 + 5 * 4
    assert all(map(torch.equal, found, others))


def test_a_backend_without_decompositions_packs_too():
    exact, y, _ = step(None, None, backend="aot_eager")
    kept, result, _ = step("context", None, backend="aot_eager")
    assert torch.equal(result, y)
    assert kept <= exact - (TOKENS * D + 4 * TOKENS * H) * (BF16 - 1 - BF16 / 128)


def test_a_filter_is_told_what_each_tensor_is():
    told = []

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.o = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

        def forward(self, x):
            q, k, v = (each.view(1, -1, 4, D // 4).transpose(1, 2) for each in self.q(self.norm(x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            h = x + self.o(mixed)
            return h + F.gelu(self.o(self.norm(h)))

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Attention().bfloat16(), tokens()
    with opened("partitioner", f8.SavedAsCodes(filter=lambda tensor: told.append(tensor) or False)):
        torch.compile(model, fullgraph=True, backend=graphs_only)(x)
    found = {(each.kind, each.module) for each in told}
    assert ("activation", "o") in found
    assert "norm" in {kind for kind, _ in found}
    assert {each.kind for each in told if each.shape[-1] == D // 4} == {"attention"}
    assert not [each for each in told if each.shape[-1] == 1 or each.dtype is torch.float32]  # no statistics


def test_one_graph_and_one_for_calls_outside():
    torch._dynamo.reset()
    model, x = model_of("rowwise"), tokens()
    with f8.saved_as_codes():
        assert_fullgraph(model, x)
    compiled = torch.compile(model, fullgraph=True, backend=graphs_only)
    torch._dynamo.utils.counters.clear()
    made = torch._dynamo.utils.counters["stats"]
    for _ in range(2):
        with f8.saved_as_codes(filter=("norm",)):
            compiled(x).sum().backward()
        compiled(x).sum().backward()
        with f8.saved_as_codes(f8.SavedAsCodes(filter=("norm",))):
            compiled(x).sum().backward()
    assert made["unique_graphs"] == 2


def test_what_compile_can_not_do_is_refused():
    model = model_of(None)
    with pytest.raises(TypeError, match="saved is 'all'; it is a fp8compile.SavedAsCodes"):
        f8.compile(model, saved="all")
    with pytest.raises(ValueError, match="a choice of Inductor's partitioner, and the backend is 'aot_eager'"):
        f8.compile(model, saved=SAVED, backend="aot_eager")
    with pytest.raises(ValueError, match="Inductor takes one partitioner"):
        f8.compile(model, saved=SAVED, options={"custom_partitioner_fn": partitioner(SAVED)})

    def inside(x):
        with f8.saved_as_codes():
            return model(x)

    with pytest.raises(Exception, match="Dynamo is tracing this context"):
        torch.compile(inside, fullgraph=True, backend="eager")(tokens())


# ---------------------------------------------------------------------------------- ranks


def kept_on_a_rank(placement):
    """Bytes that one of two ranks keeps, exact and by each door, with Inductor's decompositions."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, found = DeviceMesh("cpu", torch.arange(2)), []
    for door in (None, "context", "partitioner"):
        torch._dynamo.reset()
        model, x = model_of("rowwise"), tokens()
        if placement == "graph_fsdp":
            model = f8.parallel.graph_fsdp(model, mesh)
        else:
            column, row = f8.parallel.ColwiseParallel(), f8.parallel.RowwiseParallel()
            for block in model:
                parallelize_module(block, mesh, {"gate": column, "up": column, "down": row})
        call = torch.compile(model, fullgraph=True, backend=graphs_only)
        with opened(door, f8.SavedAsCodes(filter=lambda tensor: tensor.kind in ("norm", "activation"))):
            y = call(x)
        given = {t.untyped_storage()._cdata for t in (x, y)}
        held = {t.untyped_storage()._cdata: t for t in y.grad_fn.saved_tensors if t.dtype is not torch.float32}
        found.append(sum(t.untyped_storage().nbytes() for key, t in held.items() if key not in given))
        y.float().sum().backward()
    return found


@pytest.mark.parametrize("placement", ["tensor_parallel", "graph_fsdp"])
def test_a_rank_keeps_codes_of_its_own_part(placement):
    with fake_rank(0, 2) as elsewhere:
        exact, by_context, by_partitioner = elsewhere.submit(kept_on_a_rank, placement).result()
    hidden = H // 2 if placement == "tensor_parallel" else H
    packed, rows = TOKENS * D + 4 * TOKENS * hidden, 5 * TOKENS
    assert exact - by_context == packed * BF16 - (packed + rows * BF16)
    assert by_context == by_partitioner
