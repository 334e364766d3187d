"""Stages of a pipeline, of linears and of experts: losses and gradients of one process over the same microbatches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gloo_ranks import GROUPS
from pairs_of_fsdp import with_experts
from recipes_of_pairs import recipe_of
from torch import nn
from torch.distributed import pipelining

import fp8compile as f8
from fp8compile.testing.bits import difference

__all__ = ["ROWS", "alike"]

ROWS = {
    "GPipe": ("linears", "ScheduleGPipe", False),
    "1F1B": ("linears", "Schedule1F1B", False),
    "1F1B, compiled": ("linears", "Schedule1F1B", True),
    "1F1B, experts": ("experts", "Schedule1F1B", False),
    "GPipe, experts, compiled": ("experts", "ScheduleGPipe", True),
}
MICROBATCHES = 4


def stage_of(kind, seed, recipe):
    if kind == "experts":
        return with_experts("torchtitan", recipe, "even", seed).bfloat16().blocks
    torch.manual_seed(seed)
    layers = nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32)
    return f8.convert(nn.Sequential(*layers).bfloat16(), recipe, filter=lambda *_: True)


class InOrder(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(y, target):
    return (y.float() - target.float()).square().mean()


def alike(recipe, row):
    """What differs from one process, in words."""
    kind, schedule, compiled = ROWS[row]
    group = GROUPS["pair"]
    rank = dist.get_rank(group)
    stages = [InOrder(stage_of(kind, seed, recipe_of(recipe))) for seed in (0, 1)]
    generator = torch.Generator().manual_seed(7)
    x, target = (torch.randn(MICROBATCHES, 4, 6, 32, generator=generator).bfloat16() for _ in range(2))
    expected = []
    for part, wanted in zip(x, target, strict=True):
        loss = loss_of(stages[1](stages[0](part)), wanted)
        (loss / MICROBATCHES).backward()
        expected.append(loss.item())
    right = {name: p.grad for name, p in stages[rank].named_parameters()}
    own = InOrder(stage_of(kind, rank, recipe_of(recipe)))
    module = torch.compile(own, fullgraph=True, backend="aot_eager") if compiled else own
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    runner = getattr(pipelining, schedule)(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of, scale_grads=True)
    losses = []
    if rank == 0:
        runner.step(x.flatten(0, 1))
    else:
        runner.step(target=target.flatten(0, 1), losses=losses)
    found = {name: p.grad for name, p in own.named_parameters()}
    problems = [f"{name}: {text}" for name in right if (text := difference(found[name], right[name]))]
    if rank == 1 and [loss.item() for loss in losses] != expected:
        problems.append("losses")
    return problems
