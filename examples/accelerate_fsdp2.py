"""accelerate with a loop of your own: convert before prepare, since accelerate has no hook between the two.

torchrun --nproc-per-node 2 -m examples.accelerate_fsdp2
python -m examples.accelerate_fsdp2 --recipe tensorwise
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin

import fp8compile as f8
from examples import accelerate_on_cpu
from examples.losses import SEQUENCE, batch, mean_over_ranks, options, show
from examples.train.layout import is_first, joined
from examples.train.model import ByteLlama, ModelShape
from fp8compile.integrations import accelerate as f8accelerate

SHAPE = ModelShape(dim=128, layers=2, heads=4, kv_heads=2, hidden=256, seq=SEQUENCE)


def accelerator() -> Accelerator:
    """Mixed precision, and FSDP2 of each block where there are ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)  # one training after another in one process
    GradientState._reset_state()
    plugin = None
    if dist.is_initialized():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["_Block"],
            state_dict_type="SHARDED_STATE_DICT",
        )
    return Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)


def train(recipe: f8.Recipe | None, steps: int, *, codes: bool = True) -> list[float]:
    """The ranks' mean loss in each step."""
    own, model, losses = accelerator(), ByteLlama(SHAPE, seed=0), []
    if recipe is not None:
        f8accelerate.convert(own, model, recipe, filter="!head", fsdp_float8_all_gather=codes)
    model, optimizer = own.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in range(steps):
        loss = model(*batch(step))
        own.backward(loss)
        own.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    if recipe is not None and codes and is_first():
        print(f8.conversion_report(own.unwrap_model(model)))
    return losses


def main() -> None:
    """Train in bf16 and in FP8; over ranks, in FP8 with weights gathered as values too."""
    given = options(__doc__)
    recipe = f8.recipes.by_name(given.recipe)
    with joined(), accelerate_on_cpu.told_to_shard():
        losses = {"bf16": train(None, given.steps), given.recipe: train(recipe, given.steps)}
        if dist.is_initialized():
            losses["values gathered"] = train(recipe, given.steps, codes=False)
        show(losses, same=list(losses)[1:])


if __name__ == "__main__":
    main()
