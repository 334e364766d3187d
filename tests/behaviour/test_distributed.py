"""DistributedDataParallel and pipeline stages, two gloo processes each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from eight_bits import EIGHT_BITS
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ways import behaviour

import fp8compile as f8

RECIPE = f8.recipes.rowwise()


def mlp(seed=0, recipe=RECIPE):
    torch.manual_seed(seed)
    return f8.convert(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), recipe)


def batch(seed):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


def loss_of(y):
    return y.square().mean()


def as_way(model, compiled):
    return torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model


def gradients(model, x):
    model.zero_grad()
    loss_of(model(x)).backward()
    return [p.grad.clone() for p in model.parameters()]


def parallel_gradients(compiled):
    """Whether DDP's gradients are the mean of what both ranks compute alone."""
    group = GROUPS["pair"]
    rank = dist.get_rank(group)
    alone = [gradients(mlp(), batch(seed)) for seed in range(2)]
    model = mlp(seed=rank)  # DDP hands rank 0's parameters to all
    parallel = DistributedDataParallel(as_way(model, compiled), process_group=group)
    loss_of(parallel(batch(rank))).backward()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    means = [a / 2 + b / 2 for a, b in zip(*alone, strict=True)]
    return breaks == 0 and all(torch.equal(p.grad, m) for p, m in zip(model.parameters(), means, strict=True))


@behaviour("Parallel", "DDP: `DDP(torch.compile(model, fullgraph=True))`")
def test_ddp(way):
    assert all(shared_ranks().run(parallel_gradients, way.compiled))


def whole_ddp_compiled():
    """What comes of it for a converted model and for an unconverted one."""
    outcomes = []
    for model in (mlp(), f8.revert(mlp())):
        try:
            parallel = DistributedDataParallel(model, process_group=GROUPS["pair"])
            torch.compile(parallel, fullgraph=True, backend="aot_eager")(batch(0))
            outcomes.append("works")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return outcomes


@behaviour("Parallel", "DDP: `torch.compile(DDP(model), fullgraph=True)`; the way is above", ways=("compiled",))
def test_compiled_ddp(way):
    for converted, unconverted in shared_ranks().run(whole_ddp_compiled):
        assert converted == unconverted
        way.outcome = converted if converted == "works" else f"{converted} (the unconverted model too)"


def uneven_batches(compiled):
    """Steps of DDP's join over 2 or 4 batches; sums of the trained parameters, on which both ranks must agree."""
    group = GROUPS["pair"]
    parallel = DistributedDataParallel(as_way(mlp(), compiled), process_group=group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    seeds = range(2) if dist.get_rank(group) == 0 else range(10, 14)
    steps = 0
    with parallel.join():
        for seed in seeds:
            optimizer.zero_grad()
            loss_of(parallel(batch(seed))).backward()
            optimizer.step()
            steps += 1
    untrained = [p.double().sum().item() for p in mlp().parameters()]
    trained = [p.double().sum().item() for p in parallel.parameters()]
    assert all(a != b for a, b in zip(trained, untrained, strict=True))
    return steps, trained


@behaviour("Parallel", "DDP's `join` with uneven numbers of batches")
def test_join(way):
    (first, trained), (second, other), *_ = shared_ranks().run(uneven_batches, way.compiled)
    assert (first, second) == (2, 4)
    assert trained == other


def accumulate(compiled):
    """Whether gradients over two microbatches with `no_sync` equal those of each rank alone, averaged."""
    group = GROUPS["pair"]
    rank = dist.get_rank(group)
    alone = []
    for other in range(2):
        model = mlp()
        for seed in (other, other + 2):
            loss_of(model(batch(seed))).backward()
        alone.append([p.grad for p in model.parameters()])
    model = mlp()
    parallel = DistributedDataParallel(as_way(model, compiled), process_group=group)
    with parallel.no_sync():
        loss_of(parallel(batch(rank))).backward()
    loss_of(parallel(batch(rank + 2))).backward()
    means = [a / 2 + b / 2 for a, b in zip(*alone, strict=True)]
    return all(torch.equal(p.grad, m) for p, m in zip(model.parameters(), means, strict=True))


@behaviour("Parallel", "DDP's `no_sync` for accumulation")
def test_no_sync(way):
    assert all(shared_ranks().run(accumulate, way.compiled))


def pipeline(compiled, schedule_name, recipe):
    """Whether losses and gradients of a stage a rank equal those of one process over the same microbatches."""
    from torch.distributed import pipelining

    group = GROUPS["pair"]
    rank = dist.get_rank(group)
    stages = [mlp(seed, f8.recipes.by_name(recipe)) for seed in (0, 1)]
    x, target = batch(7).view(4, 4, 64), batch(8).view(4, 4, 64)

    whole = nn.Sequential(*stages)
    expected_losses = []
    for part, wanted in zip(x, target, strict=True):
        loss = nn.functional.mse_loss(whole(part), wanted)
        loss.backward()
        expected_losses.append(loss.item())
    expected = [p.grad / 4 for p in stages[rank].parameters()]  # the schedule divides by the microbatches
    whole.zero_grad()

    module = as_way(stages[rank], compiled)
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = getattr(pipelining, schedule_name)(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    losses = []
    if rank == 0:
        schedule.step(x.view(16, 64))
    else:
        schedule.step(target=target.view(16, 64), losses=losses)
        assert [loss.item() for loss in losses] == expected_losses
    return all(torch.equal(p.grad, e) for p, e in zip(stages[rank].parameters(), expected, strict=True))


@behaviour("Parallel", "pipeline stages, each compiled: GPipe and 1F1B")
def test_pipelining(way):
    current_scaling = [name for name in EIGHT_BITS if name != "delayed"]
    for schedule, recipe in [("ScheduleGPipe", "rowwise"), *(("Schedule1F1B", name) for name in current_scaling)]:
        assert all(shared_ranks().run(pipeline, way.compiled, schedule, recipe)), (schedule, recipe)
