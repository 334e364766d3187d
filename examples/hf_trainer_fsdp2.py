"""Hugging Face's Trainer in FP8: one callback, here with FSDP2 over the ranks that torchrun starts.

torchrun --nproc-per-node 2 -m examples.hf_trainer_fsdp2
python -m examples.hf_trainer_fsdp2 --recipe tensorwise

With several ranks, weights travel as codes, the losses are those of values on the wire, and a run that is resumed from
the Trainer's checkpoint has the same ones. The model is tiny and random; nothing is downloaded.
"""

from __future__ import annotations

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import transformers

import fp8compile as f8
from examples import accelerate_on_cpu
from examples.losses import ROWS, VOCABULARY, batch, options, show
from examples.train.layout import joined
from fp8compile.integrations import transformers as f8transformers

CONFIG = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


class Rows(torch.utils.data.Dataset):
    """Rows of text; a step of all ranks takes ROWS of each."""

    def __init__(self, steps: int) -> None:
        self.steps, self.ranks = steps, dist.get_world_size() if dist.is_initialized() else 1

    def __len__(self) -> int:
        return self.steps * self.ranks * ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = batch(row // ROWS, rank=0)[0][row % ROWS]
        return {"input_ids": ids.cpu(), "labels": ids.cpu()}  # the model shifts labels itself


def train(
    recipe: f8.Recipe | None, steps: int, folder: str, *, codes: bool = True, resume: str | None = None
) -> list[float]:
    """The losses that the Trainer logs: the mean over ranks."""
    torch.manual_seed(0)
    sharding = {}
    if dist.is_initialized():
        sharding = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    arguments = transformers.TrainingArguments(
        folder,
        bf16=True,
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_steps=max(steps // 2, 1),
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        **sharding,
    )
    callbacks = []
    if recipe is not None:
        callbacks = [
            f8transformers.F8Callback(recipe, fsdp_float8_all_gather=codes, print_report=codes and not resume)
        ]
    model = transformers.LlamaForCausalLM(CONFIG)
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(steps), callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Train in bf16 and in FP8; in FP8 with values on the wire too, and resumed from the middle."""
    given = options(__doc__)
    recipe = f8.recipes.by_name(given.recipe)
    with joined(), accelerate_on_cpu.told_to_shard(), tempfile.TemporaryDirectory() as own:
        folder = accelerate_on_cpu.of_first_rank(own)
        losses = {"bf16": train(None, given.steps, f"{folder}/bf16")}
        losses[given.recipe] = train(recipe, given.steps, f"{folder}/fp8")
        middle = f"{folder}/fp8/checkpoint-{max(given.steps // 2, 1)}"
        losses["resumed"] = train(recipe, given.steps, f"{folder}/fp8", resume=middle)
        same = [given.recipe, "resumed"]
        if dist.is_initialized():
            losses["values gathered"] = train(recipe, given.steps, f"{folder}/values", codes=False)
            same.append("values gathered")
        show(losses, same=same)


if __name__ == "__main__":
    main()
