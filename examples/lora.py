"""LoRA by peft over a base whose weights are FP8 codes: half the bytes, and FP8 products beside the adapters.

python -m examples.lora
python -m examples.lora --recipe tensorwise --steps 100

The base is a tiny random Llama; nothing is downloaded. Adapters are small and stay in high precision. At the end they
are merged into codes, and the old codes are put back.
"""

from __future__ import annotations

import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
import transformers

import fp8compile as f8
from examples.losses import VOCABULARY, batch, device, options, show
from fp8compile.integrations import peft as f8peft

CONFIG = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
LORA = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def megabytes(model: torch.nn.Module) -> float:
    """The memory of a model's parameters; a weight that is codes has those and its scales."""
    held = [each for p in model.parameters() for each in (p.parts() if isinstance(p, f8.QuantizedTensor) else (p,))]
    return sum(each.nbytes for each in held) / 1e6


def train(recipe: f8.Recipe | None, steps: int) -> list[float]:
    """Losses of the adapters' training."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(CONFIG).to(device(), torch.bfloat16)
    before = megabytes(base)
    if recipe is not None:
        f8.freeze_weights(f8.convert(base, recipe))
        print(f"the base: {megabytes(base):.2f} MB, in bf16 {before:.2f} MB")
    model = peft.get_peft_model(base, f8peft.register(LORA))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    # "aot_eager" on a CPU: there Inductor's C++ takes longer than this training
    step = torch.compile(model, fullgraph=True, backend="inductor" if device().type == "cuda" else "aot_eager")
    losses = []
    for number in range(steps):
        tokens, _ = batch(number)  # the model shifts labels itself
        loss = step(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if recipe is not None:
        print(f8.conversion_report(model))
        print(f"{sum(each.numel() for each in trained):,} parameters are trained")
        model.merge_adapter()
        model.unmerge_adapter()  # the codes of before, to the bit
    return losses


def main() -> None:
    """Train adapters over a base in bf16, and over the same in FP8."""
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")  # peft asks transformers by an older name
    given = options(__doc__)
    show({"bf16": train(None, given.steps), given.recipe: train(f8.recipes.by_name(given.recipe), given.steps)})


if __name__ == "__main__":
    main()
