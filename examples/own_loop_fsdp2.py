"""FSDP2 with a loop of your own: weights travel as FP8 codes, blocks are compiled, and the losses do not notice.

torchrun --nproc-per-node 2 -m examples.own_loop_fsdp2
torchrun --nproc-per-node 2 -m examples.own_loop_fsdp2 --recipe tensorwise --steps 100

The order is what matters: convert, fsdp_float8_all_gather, compile each block, fully_shard, and then the optimizer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8compile as f8
from examples.losses import SEQUENCE, batch, device, mean_over_ranks, options, show
from examples.train.layout import is_first, joined
from examples.train.model import ByteLlama, ModelShape

SHAPE = ModelShape(dim=128, layers=2, heads=4, kv_heads=2, hidden=256, seq=SEQUENCE)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def sharded(recipe: f8.Recipe | None, *, codes: bool) -> nn.Module:
    """A model over all ranks, with FP8 layers if a recipe is given; its weights travel as codes, or as values."""
    model = ByteLlama(SHAPE, seed=0).to(device())
    if recipe is not None:
        f8.convert(model, recipe, filter="!head")
    if codes:
        f8.parallel.fsdp_float8_all_gather(model)
    for index, block in enumerate(model.blocks):
        # "aot_eager" on a CPU: there Inductor's C++ takes longer than this training
        backend = "inductor" if device().type == "cuda" else "aot_eager"
        model.blocks[index] = torch.compile(block, fullgraph=True, backend=backend)
        fully_shard(model.blocks[index], mp_policy=POLICY)
    return fully_shard(model, mp_policy=POLICY)


def train(recipe: f8.Recipe | None, steps: int, *, codes: bool = False) -> list[float]:
    """The ranks' mean loss in each step."""
    model, losses = sharded(recipe, codes=codes), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        with torch.autocast(device().type, dtype=torch.bfloat16):
            loss = model(*batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    if recipe is not None and codes and is_first():
        print(f8.conversion_report(model))
    return losses


def main() -> None:
    """Train in bf16, in FP8 with values on the wire, and in FP8 with codes on the wire."""
    given = options(__doc__)
    recipe = f8.recipes.by_name(given.recipe)
    with joined():
        losses = {"bf16": train(None, given.steps)}
        losses[given.recipe] = train(recipe, given.steps, codes=True)
        losses["values gathered"] = train(recipe, given.steps)
        show(losses, same=(given.recipe, "values gathered"))


if __name__ == "__main__":
    main()
