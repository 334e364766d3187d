"""Lightning in FP8: a precision plugin, and one line in configure_model where FSDP2 shards the model.

torchrun --nproc-per-node 2 -m examples.lightning_fsdp2
python -m examples.lightning_fsdp2 --recipe tensorwise

(The file is not called lightning.py: a program in this folder would import it in Lightning's place.)
"""

from __future__ import annotations

import logging
import os
import warnings

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8compile as f8
from examples.losses import SEQUENCE, batch, mean_over_ranks, options, show
from examples.train.layout import is_first
from examples.train.model import ByteLlama, ModelShape
from fp8compile.integrations import lightning as f8lightning

SHAPE = ModelShape(dim=128, layers=2, heads=4, kv_heads=2, hidden=256, seq=SEQUENCE)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Model(L.LightningModule):
    """A Llama over bytes; sharded over the ranks, if there are several."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.net, self.losses, self.steps = ByteLlama(SHAPE, seed=0), [], steps

    def configure_model(self) -> None:
        """Convert, then shard: ``convert_module`` of the plugin that the Trainer has, whichever it is."""
        self.trainer.precision_plugin.convert_module(self)
        if RANKS > 1:
            mesh = self.device_mesh["data_parallel"]
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh, mp_policy=POLICY)
            fully_shard(self.net, mesh=mesh, mp_policy=POLICY)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        """Numbers of steps, of which `training_step` makes batches."""
        return torch.utils.data.DataLoader(range(self.steps * RANKS), batch_size=1)

    def training_step(self, _: Tensor, index: int) -> Tensor:
        """The loss of this rank's rows."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.net(*batch(self.global_step))
        self.losses.append(mean_over_ranks(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Made after the model was converted and sharded."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(recipe: f8.Recipe | None, steps: int, *, codes: bool = True) -> list[float]:
    """The ranks' mean loss in each step."""
    plugin = []
    if recipe is not None:
        options = {"filter": "!net.head"}
        plugin = [f8lightning.F8Precision(recipe, fsdp_float8_all_gather=codes, convert_options=options)]
    strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1) if RANKS > 1 else "auto"
    trainer = L.Trainer(
        max_steps=steps,
        plugins=plugin,
        strategy=strategy,
        devices=RANKS,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(steps)
    trainer.fit(model)
    if recipe is not None and codes and is_first():
        print(f8.conversion_report(model))
    return model.losses


def main() -> None:
    """Train in bf16 and in FP8; over ranks, in FP8 with values on the wire too."""
    given = options(__doc__)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    recipe = f8.recipes.by_name(given.recipe)
    losses = {"bf16": train(None, given.steps), given.recipe: train(recipe, given.steps)}
    if RANKS > 1:
        losses["values gathered"] = train(recipe, given.steps, codes=False)
    show(losses, same=list(losses)[1:])


if __name__ == "__main__":
    main()
