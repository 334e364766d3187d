"""Trainers of Hugging Face that shard by FSDP2 themselves: with weights gathered as codes they have the same bits.

On a CPU accelerate shards nothing, so its ranks are told that they are of a kind for which it does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate_ranks import sharding_ranks
from gloo_ranks import shared_ranks
from ways import behaviour

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.parallel import fsdp_float8_all_gather
from fp8compile.testing.bits import difference

STEPS, ROWS = 3, 2
LAYER = "LlamaDecoderLayer"


# ---------------------------------------------------------------------------------- in each rank


def llama(recipe, *, codes):
    from zoo import ZOO, bf16_model  # imports transformers, which takes seconds, in the process that has the model

    model = f8.convert(bf16_model(ZOO["Llama"], attn_implementation="eager").float(), f8.recipes.by_name(recipe))
    return fsdp_float8_all_gather(model) if codes else model


def rows(step, rank):
    from zoo import ZOO

    return {name: every[ROWS * rank : ROWS * (rank + 1)] for name, every in ZOO["Llama"].batch(step).items()}


def by_accelerate(recipe, folder, *, codes, **plugin):
    """Losses, and the model, of accelerate's FSDP2."""
    import accelerate
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[LAYER], **plugin
    )
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
    model = llama(recipe, codes=codes)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses = []
    for step in range(STEPS):
        loss = model(**rows(step, dist.get_rank())).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator.unwrap_model(model)


class Batches(torch.utils.data.Dataset):
    """The rows of the zoo's batches, one after another."""

    def __len__(self):
        return STEPS * ROWS * dist.get_world_size()

    def __getitem__(self, row):
        from zoo import ZOO

        return {name: every[row % 8] for name, every in ZOO["Llama"].batch(row // 8).items()}


def by_trainer(recipe, folder, *, codes, **config):
    """Losses, and the model, of Hugging Face's Trainer with ``fsdp``."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        bf16=True,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        train_sampling_strategy="sequential",
        optim="adamw_torch",
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        fsdp="full_shard auto_wrap",
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": [LAYER], **config},
    )
    trainer = transformers.Trainer(
        model=llama(recipe, codes=codes), args=arguments, train_dataset=Batches(), callbacks=[]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.accelerator.unwrap_model(trainer.model_wrapped)


WAYS = {"accelerate": by_accelerate, "Trainer": by_trainer}


def on_and_off(way, recipe, folder, config):
    """What differs between gathers of codes and of values, in words."""
    found = []
    for codes in (False, True):
        with sharding_ranks():
            losses, model = WAYS[way](recipe, folder, codes=codes, **config)
            report = f8.conversion_report(model).rows
            weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        found.append((losses, weights, {row.gathered for row in report if row.converted}))
    (losses, weights, _), (own, others, gathered) = found
    problems = [name for name, value in weights.items() if difference(others[name], value)]
    problems += [] if losses == own and len(losses) == STEPS else [f"losses {losses}, {own}"]
    return problems + [f"gathered {what!r}" for what in gathered if not what.startswith("codes")]


# ---------------------------------------------------------------------------------- rows of the table

CASES = [("rowwise", {}), ("tensorwise", {"cpu_ram_efficient_loading": True})]


def assert_same(way, trainer, tmp_path):
    if TORCH_VERSION < (2, 12):
        layer = f8.Linear(32, 32, recipe=f8.recipes.rowwise())
        with way.raises(RuntimeError, "a process group on a QuantizedTensor needs PyTorch 2.12 or later"):
            fsdp_float8_all_gather(layer)
        return
    for recipe, config in CASES:
        folder = str(tmp_path / recipe)
        assert shared_ranks().run(on_and_off, trainer, recipe, folder, config) == [[]] * 4, (recipe, config)


@behaviour("Trainers", "accelerate's FSDP2, `fsdp_float8_all_gather` before prepare", ways=("eager",))
def test_accelerate_shards(way, tmp_path):
    assert_same(way, "accelerate", tmp_path)


@behaviour("Trainers", "Hugging Face Trainer with FSDP2, after `fsdp_float8_all_gather`", ways=("eager",))
def test_trainer_shards(way, tmp_path):
    assert_same(way, "Trainer", tmp_path)
