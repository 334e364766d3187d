"""saved_as_codes in eager mode beside what else changes how a model runs: the same bits, or an error in words."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.saved_tensors import partitioner
from fp8compile.testing.bits import difference

TOKENS, D, H, RANKS = 32, 64, 128, 2


def chosen(tensor):
    """What the default chooses, and small tensors too."""
    return tensor.kind in ("norm", "activation", "checkpoint")


SAVED = f8.SavedAsCodes(filter=chosen)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((D, H), (D, H), (H, D)))

    def forward(self, x):
        normed = self.norm(x * 1)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def block(recipe="rowwise"):
    torch.manual_seed(0)
    return f8.convert(Block().bfloat16(), f8.recipes.by_name(recipe), filter="*")


def tokens(rank=0):
    return torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(rank)).bfloat16()


def loss_of(y, _=None):
    return y.float().square().sum()


def gradients(model):
    return [getattr(each.grad, "full_tensor", lambda each=each: each.grad)() for each in model.parameters()]


def of_one_process(saved=SAVED):
    """The mean of the gradients for each rank's tokens."""
    model, found = block(), []
    for rank in range(RANKS):
        with f8.saved_as_codes(saved):
            y = model(tokens(rank))
        loss_of(y).backward()
        found.append(gradients(model))
        model.zero_grad()
    return [((one.float() + other.float()) / 2).bfloat16() for one, other in zip(*found, strict=True)]


def in_tensor_parallel(mesh, saved):
    """Gradients of one block in two parts."""
    model = block()
    column, row = f8.parallel.ColwiseParallel(), f8.parallel.RowwiseParallel()
    parallelize_module(model, mesh, {"gate": column, "up": column, "down": row})
    with f8.saved_as_codes(saved):
        y = model(tokens())
    loss_of(y).backward()
    return gradients(model)


def in_sequence_parallel(mesh, saved, *, compiled):
    """Gradients of one block in two parts, of whose tokens each rank has a half."""
    torch._dynamo.reset()
    model = block()
    column = f8.parallel.ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
    row = f8.parallel.RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(
        model, mesh, {"norm": SequenceParallel(sequence_dim=0), "gate": column, "up": column, "down": row}
    )
    x = distribute_tensor(tokens(), mesh, [Shard(0)], src_data_rank=None)
    if compiled:  # by the partitioner
        backend = graphs_of_partitioner if saved is SAVED else "aot_eager"
        y = torch.compile(model, fullgraph=True, backend=backend)(x)
    else:
        with f8.saved_as_codes(saved):
            y = model(x)
    loss_of(y.full_tensor()).backward()
    return gradients(model)


def on_ranks(way):
    """What differs from one process, in words."""
    group = GROUPS["pair"]
    mesh = DeviceMesh.from_group(group, "cpu")
    expected, exact = of_one_process(), of_one_process(f8.SavedAsCodes(filter=lambda tensor: False))
    if "parallel" in way:  # other partial sums: as far from its own exact gradients as one process
        run = (
            in_tensor_parallel
            if way == "tensor parallel"
            else partial(in_sequence_parallel, compiled="compiled" in way)
        )
        found, own = (run(mesh, each) for each in (SAVED, f8.SavedAsCodes(filter=lambda tensor: False)))
        norm = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found, own, strict=True)]
        return [f"moved by {each}" for each in norm[1:3] if not 0 < each < 0.06]  # gate and up: two factors of e4m3
    model = block()
    if way == "fsdp2":
        call = fully_shard(model, mesh=mesh)
    else:
        call = nn.parallel.DistributedDataParallel(model, process_group=group)
    with f8.saved_as_codes(SAVED):
        y = call(tokens(dist.get_rank(group)))
    loss_of(y).backward()
    found = gradients(model)
    same = [torch.equal(one, other) for one, other in zip(found, exact, strict=True)]
    return [text for pair in zip(found, expected, strict=True) if (text := difference(*pair))] + ["exact"] * all(same)


@pytest.mark.parametrize(
    "way", ["fsdp2", "ddp", "tensor parallel", "sequence parallel", "sequence parallel, compiled"]
)
def test_ranks_save_codes_of_their_own_tensors(way):
    assert shared_ranks().run(on_ranks, way, within="pair") == [[], []]


def graphs_of_partitioner(graph, inputs):
    """A backend that packs by the partitioner and runs graphs as they are."""
    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), partition_fn=partitioner(SAVED))(
        graph, inputs
    )


def experts_layer(rows, expert, up, down, group):
    """Two products of experts, each row by its own, on the rank that has it."""
    order = expert.sort(stable=True).indices
    counts = torch.zeros(2 * RANKS, dtype=torch.int64).index_add(0, expert, torch.ones_like(expert))
    routes = f8.parallel.expert_routes(counts, group=group)
    recipe = f8.recipes.rowwise()
    inner = nn.functional.silu(f8.grouped_linear(routes.dispatch(rows[order]), up, routes.offsets, recipe=recipe))
    found = f8.grouped_linear(inner, down, routes.offsets, recipe=recipe)
    return routes.combine(found, len(rows))[order.argsort()]


def on_expert_ranks():
    """What differs from tensors that are rounded by hooks, in words, eager and compiled."""
    group = GROUPS["pair"]
    generator = torch.Generator().manual_seed(group.rank())
    sizes = (TOKENS, D), (2, H, D), (2, D, H)
    rows, up, down = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    expert = torch.randint(2 * RANKS, (TOKENS,), generator=generator)

    def results(layer, context):
        given = [each.clone().requires_grad_() for each in (rows, up, down)]
        with context:
            y = layer(given[0], expert, *given[1:], group)
        return [y.detach(), *torch.autograd.grad(loss_of(y), given)]

    def rounded(x):
        is_silus = x.shape[-1] == H and x.ndim == 2 and x.grad_fn is not None and "Silu" not in x.grad_fn.name()
        return f8.quantize(x, f8.CurrentScaling(block=(1, H), scale="pow2")).dequantize(x.dtype) if is_silus else x

    expected = results(experts_layer, torch.autograd.graph.saved_tensors_hooks(rounded, lambda x: x))
    exact = results(experts_layer, contextlib.nullcontext())
    eager = results(experts_layer, f8.saved_as_codes(SAVED))
    compiled = torch.compile(experts_layer, fullgraph=True, backend=graphs_of_partitioner)
    found = [*eager, *results(compiled, contextlib.nullcontext())]
    texts = [text for pair in zip(found, expected * 2, strict=True) if (text := difference(*pair))]
    return texts + ["exact"] * all(map(torch.equal, eager, exact))


def test_experts_on_ranks_save_codes_of_the_rows_that_they_got():
    assert shared_ranks().run(on_expert_ranks, within="pair") == [[], []]


def test_each_microbatch_of_a_pipeline_saves_codes():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, x = block(), torch.cat([tokens(0), tokens(1)])
        stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"), input_args=(tokens(),))
        schedule = pipelining.Schedule1F1B(stage, RANKS, loss_fn=loss_of, scale_grads=False)
        with f8.saved_as_codes(SAVED):
            schedule.step(x, target=x)
    finally:
        dist.destroy_process_group()
    found = gradients(model)
    model = block()
    for rank in range(RANKS):
        with f8.saved_as_codes(SAVED):
            y = model(tokens(rank))
        loss_of(y).backward()
    assert [difference(*pair) for pair in zip(found, gradients(model), strict=True)] == [None] * len(found)


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_recipes_with_a_state_and_with_four_bits(recipe):
    found = {}
    for saved in (SAVED, f8.SavedAsCodes(filter=lambda tensor: False)):
        model = block(recipe)
        for _ in range(2):  # the second step has the scales of the first
            with f8.saved_as_codes(saved):
                y = model(tokens())
            loss_of(y).backward()
        found[saved] = y, gradients(model)
    (coded, moved), (plain, exact) = found.values()
    assert torch.equal(coded, plain) or recipe == "delayed"  # a delayed scale has seen the gradients of the first step
    distance = max((a.float() - b.float()).norm() / b.float().norm() for a, b in zip(moved, exact, strict=True))
    # two factors of e4m3; a value between two codes of four bits may fall to the other one, a fourth away
    assert 0 < distance < (0.06 if recipe == "delayed" else 0.25)


def test_second_derivatives_are_those_of_rounded_tensors():
    def derivative(saved):
        x = tokens().float().requires_grad_()
        with f8.saved_as_codes(saved):
            y = nn.functional.silu(x * 1) * (x * 2)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.square().sum().backward()
        return x.grad

    exact = derivative(f8.SavedAsCodes(filter=lambda tensor: False))
    assert 0 < (derivative(SAVED) - exact).norm() / exact.norm() < 0.06  # two factors of e4m3


def test_contexts_within_each_other_and_hooks_of_others():
    model, x = block(), tokens()
    with f8.saved_as_codes(filter=lambda tensor: False), f8.saved_as_codes(SAVED):
        loss_of(model(x)).backward()
    inner = gradients(model)
    model.zero_grad()
    with f8.saved_as_codes(SAVED):
        loss_of(model(x)).backward()
    assert all(map(torch.equal, inner, gradients(model)))

    def inside(x):
        with f8.saved_as_codes(SAVED):
            return model(x)

    with pytest.raises(RuntimeError, match="other hooks on saved tensors are active"):
        checkpoint(inside, x.requires_grad_(), use_reentrant=False)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="other hooks on saved tensors"):
        inside(x)
    with f8.saved_as_codes(SAVED), pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        torch.func.grad(lambda x: loss_of(model(x)))(x)
