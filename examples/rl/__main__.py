"""Reinforcement learning in FP8 on two ranks; a third process generates, with the codes that trained.

torchrun --nproc-per-node 3 -m examples.rl
torchrun --nproc-per-node 3 -m examples.rl --steps 30 --recipe blockwise

Each step the ranks that train send their weights as `fp8compile.export.tensors` streams them: codes and scales. Beside
that the same weights go in bf16 to two others, as servers are often run: one quantizes them anew, with scales that are
powers of two, one multiplies in bf16. Printed is the mean KL divergence of what each would generate from what trains,
over the sequences that the first one generated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fp8compile as f8
from examples.rl.policy import LENGTH, VOCABULARY, Policy, generate, policy, rewards
from examples.rl.weights import FORMAT, load_codes, received, send

TRAINERS, GENERATOR, ROWS = [0, 1], 2, 64
ANEW = f8.recipes.blockwise(scale="pow2")  # what servers do with weights in bf16 on a B200
WAYS = ("the codes that trained", "quantized anew", "bf16")
BF16 = torch.bfloat16


def in_bf16(model: Policy) -> Iterator[tuple[str, Tensor]]:
    """The weights whole, in bfloat16."""
    for name, parameter in model.named_parameters():
        yield name, (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().to(BF16)


def generating(recipe: f8.Recipe, steps: int) -> None:
    """The third process: load weights, generate, and send sequences with the log-probabilities of each way."""
    own = f8.freeze_weights(policy(recipe, BF16))
    anew, plain = policy(ANEW, BF16), policy(None, BF16)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        load_codes(own, received())
        values = dict(received())
        for model in (anew, plain):
            model.load_state_dict(values)
        tokens = generate(own, ROWS, generator)
        with torch.no_grad():
            chances = torch.stack([model(tokens[:, :LENGTH]) for model in (own, anew, plain)])
        for rank in TRAINERS:
            dist.send(tokens, dst=rank)
            dist.send(chances, dst=rank)


def divergence(given: Tensor, trained: Tensor) -> Tensor:
    """The mean over tokens of KL(given || trained), from log-probabilities of all tokens."""
    return (given.exp() * (given - trained)).sum(-1).mean()


def training(recipe: f8.Recipe, steps: int, group: dist.ProcessGroup) -> None:
    """A rank that trains: send weights, get sequences, take a step of REINFORCE on this rank's half of them."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = policy(recipe)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    own = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
    found: list[Tensor] = []
    for step in range(steps):
        send(f8.export.tensors(model, FORMAT), GENERATOR)
        send(in_bf16(model), GENERATOR)
        tokens = torch.empty(ROWS, LENGTH + 1, dtype=torch.int64)
        chances = torch.empty(len(WAYS), ROWS, LENGTH, VOCABULARY)
        dist.recv(tokens, src=GENERATOR)
        dist.recv(chances, src=GENERATOR)
        won = rewards(tokens)
        trained = model(tokens[own, :LENGTH])
        drawn = trained.gather(-1, tokens[own, 1:, None])[..., 0]
        advantage = (won - won.mean()) / (won.std() + 1e-6)
        (-(advantage[own] * drawn).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        divergences = torch.stack([divergence(each[own], trained.detach()) for each in chances])
        dist.all_reduce(divergences, group=group)
        found.append(torch.cat([divergences / 2, won.mean()[None]]))
        if dist.get_rank() == 0 and step in (0, steps - 1):
            print(f"step {step + 1}: {won.mean():.1%} of the tokens are right")
    if dist.get_rank() == 0:
        show(torch.stack(found))


def show(found: Tensor) -> None:
    """Print the KL divergence of each way."""
    print(f"{'KL over ' + str(len(found)) + ' steps':24}  {'mean':>9}  {'largest':>9}")
    for way, own in zip(WAYS, found.t(), strict=False):
        print(f"{way:24}  {own.mean():9.2e}  {own.max():9.2e}")


def main() -> None:
    """Train on two ranks, generate on a third."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="blockwise", choices=("blockwise", "tensorwise"))
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    group, recipe = dist.new_group(TRAINERS), f8.recipes.by_name(given.recipe)
    if dist.get_rank() == GENERATOR:
        generating(recipe, given.steps)
    else:
        training(recipe, given.steps, group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
