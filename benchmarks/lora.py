"""LoRA over codes beside LoRA over bf16: bytes of parameters, losses, graphs.

A random Llama of four layers, 256 wide, and its adapters (rank 8, on q, v and down), trained on the source of Python's
standard library from one seed. "bytes" are those of all parameters, adapters and the embedding in bf16 too, beside a
base in bf16; "difference" is the largest of a step's loss to LoRA over bf16, "last" the mean of the last five.

    python -m benchmarks.lora [--json] [--steps 40] [--recipes blockwise ...]
"""

from __future__ import annotations

import argparse
import os
import warnings
from statistics import fmean

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import fp8compile as f8
from benchmarks.table import Row, emit
from examples.lora import megabytes
from examples.losses import LAST, VOCABULARY, batch
from fp8compile.integrations import peft as f8peft

__all__ = ["lora"]

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8 32x32", "nvfp4")
CONFIG = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


def _recipe(name: str) -> f8.Recipe:
    return f8.recipes.mxfp8(weight_block=(32, 32)) if name == "mxfp8 32x32" else f8.recipes.by_name(name)


def lora(name: str, steps: int) -> tuple[float, list[float], int]:
    """Megabytes of parameters, the losses, and the number of compiled graphs; ``"bf16"`` converts nothing."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(CONFIG).bfloat16()
    if name != "bf16":
        f8.freeze_weights(f8.convert(base, _recipe(name), filter=["model.layers.*"]))
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, f8peft.register(config))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-3)
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=graphs)
    losses = []
    for number in range(steps):
        tokens, _ = batch(number)
        loss = step(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return megabytes(model), losses, graphs.frame_count


def main() -> None:
    """Print the table."""
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    given = parser.parse_args()
    whole, wanted, graphs = lora("bf16", given.steps)
    rows: list[Row] = []
    for name in ("bf16", *given.recipes):
        size, losses, graphs = (whole, wanted, graphs) if name == "bf16" else lora(name, given.steps)
        rows.append(
            {
                "base": name,
                "bytes": size / whole,
                "first": losses[0],
                "last": fmean(losses[-LAST:]),
                "difference": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
                "graphs": graphs,
                "recompiles": graphs - 1,
            }
        )
    emit(f"LoRA, {given.steps} steps", rows, as_json=given.json, digits=4)


if __name__ == "__main__":
    main()
