"""A mixture of experts on ranks: experts spread by expert parallel, the rest by FSDP2; clipping; resumed to the digit.

torchrun --nproc-per-node 2 -m examples.moe_ep_fsdp2
torchrun --nproc-per-node 2 -m examples.moe_ep_fsdp2 --recipe blockwise --steps 60

Rows travel to the ranks of their experts as codes, and so do the weights that FSDP2 gathers. The model is a tiny
random Qwen3-MoE of transformers; nothing is downloaded.
"""

from __future__ import annotations

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8compile as f8
from examples.accelerate_on_cpu import of_first_rank
from examples.losses import VOCABULARY, batch, device, mean_over_ranks, options, show
from examples.train.layout import is_first, joined

CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    use_cache=False,
)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


class Training:
    """A model over all ranks, its optimizer, and the losses so far."""

    def __init__(self, recipe: f8.Recipe | None, *, codes: bool) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
        self.model = transformers.Qwen3MoeForCausalLM(CONFIG).to(device())
        # without quantizers where it is to be bf16, for experts that ranks share are multiplied by fp8compile
        f8.convert(self.model, recipe or f8.Recipe(), filter="!lm_head")
        parallelize_module(self.model, mesh, {"model.layers.*.mlp.experts": f8.parallel.ExpertParallel()})
        ignored = f8.parallel.expert_parameters(self.model)  # each rank has its own already
        if recipe is not None and codes:
            f8.parallel.fsdp_float8_all_gather(self.model, ignored_params=ignored)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=POLICY, ignored_params=ignored)
        fully_shard(self.model, mesh=mesh, mp_policy=POLICY, ignored_params=ignored)
        rest = [each for each in self.model.parameters() if each not in ignored]
        groups = [{"params": list(f8.parallel.expert_parameters(self.model))}, {"params": rest}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3)
        self.losses: list[float] = []

    def run(self, steps: int) -> list[float]:
        """Train on, to so many steps in all; the ranks' mean loss in each."""
        for step in range(len(self.losses), steps):
            tokens, _ = batch(step)  # the model shifts labels itself
            with torch.autocast(device().type, dtype=torch.bfloat16):
                loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            # an expert's gradient is a sum over all ranks' rows, and each rank has the mean loss of its own
            f8.parallel.average_expert_gradients(self.model, dist.get_world_size())
            f8.parallel.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(mean_over_ranks(loss))
        return self.losses

    def save(self, folder: str) -> None:
        """Write a checkpoint that any number of ranks can load."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str, losses: list[float]) -> None:
        """Go on from a checkpoint, after the steps that had these losses."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.losses = list(losses)


def main() -> None:
    """Train in bf16 and in FP8; resume that from its middle; train with FSDP2 gathering values."""
    given = options(__doc__)
    recipe = f8.recipes.by_name(given.recipe)
    with joined(), tempfile.TemporaryDirectory() as own:
        folder, half = of_first_rank(own), given.steps // 2
        training, resumed = (Training(recipe, codes=True) for _ in range(2))
        training.run(half)
        training.save(folder)
        resumed.load(folder, training.losses)
        losses = {"bf16": Training(None, codes=False).run(given.steps), given.recipe: training.run(given.steps)}
        losses["resumed"] = resumed.run(given.steps)
        losses["values gathered"] = Training(recipe, codes=False).run(given.steps)
        if is_first():
            print(f8.conversion_report(training.model))
        show(losses, same=(given.recipe, "resumed", "values gathered"))


if __name__ == "__main__":
    main()
