"""Advice on recipes for three models, and whether a training by it ends nearer to bf16 than nvfp4 everywhere.

    python -m benchmarks.advice [--steps 200] [--seeds 3]

The models are a Llama and a Qwen3-MoE of transformers with random weights, and the byte-level Llama of
``examples/train``, trained without FP8 for some steps. For the last one there is advice within a budget of time that
lies halfway from nvfp4 everywhere to tensorwise everywhere. It is then trained by this advice from the first step on,
beside bf16 and nvfp4 everywhere, from the same weights and on the same batches for each seed. Runs are in eager mode
on one CPU thread, under autocast to bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile as f8
from benchmarks.table import Row, emit
from examples.train.data import Text, held_out_batches, load_text, training_batch
from examples.train.model import ByteLlama, ModelShape

BATCH, SEQ, HELD_OUT = 8, 64, 64
SHAPE = ModelShape(dim=64, layers=2, heads=2, kv_heads=1, hidden=192, seq=SEQ)
ROWS_FACTOR = 4096  # so that least times are those of layers with many rows, and not of the casts of weights
CANDIDATES = ("nvfp4", "tensorwise")
GPU = "b200"


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """A Llama of transformers with random weights, and a batch."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    tokens = torch.randint(256, (8, 64))
    return transformers.LlamaForCausalLM(config).bfloat16(), {"input_ids": tokens, "labels": tokens}


def qwen3_moe() -> tuple[nn.Module, dict[str, Tensor]]:
    """A mixture of experts of transformers with random weights, and a batch."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    tokens = torch.randint(256, (8, 64))
    return transformers.Qwen3MoeForCausalLM(config).bfloat16(), {"input_ids": tokens, "labels": tokens}


def in_bf16() -> torch.autocast:
    """The context in which the byte-level Llama runs."""
    return torch.autocast("cpu", torch.bfloat16)


def trained(text: Text, recipe: Any, *, seed: int, steps: int) -> tuple[nn.Module, float]:
    """The byte-level Llama after some steps, and its loss on held-out text in nats a byte.

    Args:
        text: The text.
        recipe: What `fp8compile.convert` takes; None for bf16.
        seed: Seed of weights and batches.
        steps: Number of updates.
    """
    model = ByteLlama(SHAPE, seed=seed)
    if recipe is not None:
        f8.convert(model, recipe, filter=lambda module, fqn: not fqn.endswith("head"))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min((step + 1) / 30, (30 / (step + 1)) ** 0.5)
        with in_bf16():
            loss = model(*training_batch(text, seed=seed, step=step, batch=BATCH, seq=SEQ))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), in_bf16():
        held_out = list(held_out_batches(text, batch=BATCH, seq=SEQ, sequences=HELD_OUT))
        return model, sum(model(*each).item() for each in held_out) / len(held_out)


def between(model: nn.Module, batch: Any, **options: Any) -> f8.testing.Advice:
    """Advice within a budget of time halfway from nvfp4 everywhere to tensorwise everywhere."""
    found = f8.advise(model, batch, **options)
    plain = found.total("unconverted").seconds
    shares = [found.total(name).seconds / plain for name in CANDIDATES]
    return f8.advise(model, batch, budget={"time": sum(shares) / 2}, **options)


def losses(text: Text, advice: f8.testing.Advice, *, seeds: int, steps: int) -> list[Row]:
    """For each seed, losses of bf16, of nvfp4 everywhere and of the advice, and their distances from bf16."""
    rows: list[Row] = []
    for seed in range(seeds):
        recipes: Mapping[str, Any] = {"bf16": None, "nvfp4": f8.recipes.nvfp4(), "advised": advice}
        found = {name: trained(text, recipe, seed=seed, steps=steps)[1] for name, recipe in recipes.items()}
        distances = {f"{name} - bf16": found[name] - found["bf16"] for name in ("nvfp4", "advised")}
        rows.append({"seed": seed, **found, **distances})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Advice on three models, and a training by it.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind; 0 for the tables alone")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = load_text(None, batch=BATCH, seq=SEQ)
    model, _ = trained(text, None, seed=0, steps=args.steps)
    tokens = training_batch(text, seed=0, step=args.steps, batch=BATCH, seq=SEQ)
    options: dict[str, Any] = {"gpu": GPU, "rows_factor": ROWS_FACTOR}
    with in_bf16():
        whole = f8.advise(model, tokens, **options)
        mixed = between(model, tokens, recipes=CANDIDATES, filter=lambda _, fqn: not fqn.endswith("head"), **options)
    if not args.json:
        for name, (each, batch) in {"Llama": llama(), "Qwen3-MoE": qwen3_moe()}.items():
            print(f"{name} of transformers, random weights\n{f8.advise(each, batch, **options)}\n")
        print(f"byte-level Llama of examples/train after {args.steps} steps\n{whole}\n")
        print(f"the same, within a budget halfway from nvfp4 to tensorwise\n{mixed}\n")
    if not args.seeds:
        return
    title = f"Held-out losses in nats a byte after {args.steps} steps of {BATCH * SEQ} bytes"
    emit(title, losses(text, mixed, seeds=args.seeds, steps=args.steps), as_json=args.json, digits=4)


if __name__ == "__main__":
    main()
