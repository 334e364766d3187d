"""Models of Hugging Face transformers, tiny and random, and data that they can learn in 50 steps.

Text follows a rule: a token is 5 times the one before it plus 3, modulo 61. All tokens are equally frequent, so who
does not read the one before can't get below ln 61 = 4.11 nats. Images are one of 16 patterns under noise: who does not
look gets ln 16 = 2.77 nats.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# the configs are all here; nothing may look for one on the network
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import transformers
from torch import nn

__all__ = ["STEPS", "ZOO", "Zoo", "bf16_model", "tail", "train"]

STEPS = 50
BATCH, SEQUENCE, SOURCE = 8, 32, 24  # SOURCE: what an encoder reads
MODULUS, VOCABULARY = 61, 64
PATCHES, CLASSES = 16, 16

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 61,
    "eos_token_id": 62,
    "pad_token_id": 63,
    "use_cache": False,  # a cache is for generation
}


def sequences(step: int, length: int) -> torch.Tensor:
    """Token ids by the rule, (BATCH, length), each row from another start."""
    ids = torch.randint(MODULUS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    for _ in range(length - 1):
        ids = torch.cat([ids, (ids[:, -1:] * 5 + 3) % MODULUS], dim=1)
    return ids


def text(step: int) -> dict[str, torch.Tensor]:
    ids = sequences(step, SEQUENCE)
    return {"input_ids": ids, "labels": ids}


def source_and_target(step: int) -> dict[str, torch.Tensor]:
    ids = sequences(step, SOURCE + SEQUENCE)
    return {"input_ids": ids[:, :SOURCE], "labels": ids[:, SOURCE:].contiguous()}


def images(step: int) -> dict[str, torch.Tensor]:
    """Pictures (BATCH, 3, 16, 16), each one of CLASSES patterns under noise, and which."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    pixels = patterns[labels] + 0.5 * torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels.bfloat16(), "labels": labels}


def tokens_of_text(fqn: str) -> int:
    return BATCH * SEQUENCE


def tokens_of_two_experts(fqn: str) -> int:
    """Each token goes to two of the experts."""
    return BATCH * SEQUENCE * (2 if fqn.endswith("experts") else 1)


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """One model.

    Attributes:
        name: What people call it.
        build: Makes it, from random numbers; takes options of its config.
        batch: What a training step is called with, by the number of the step.
        tokens: Rows of a layer's input in a step, by the layer's name.
        level: A loss that nobody reaches who learned nothing: ln 2 for text, as if each of 61 tokens were down to two
            that may be next; ln 4 for 16 patterns, of which it sees 25 pictures each.
    """

    name: str
    build: Callable[..., nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]] = text
    tokens: Callable[[str], int] = tokens_of_text
    level: float = math.log(2)


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **options))


def qwen2(**options: Any) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER, **options))


def qwen3(**options: Any) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=16, **options))


def mixtral(**options: Any) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, **experts, **options))


def qwen3_moe(**options: Any) -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**DECODER, **experts, **options))


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=61,
        eos_token_id=62,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **options,
    )
    model = transformers.GPT2LMHeadModel(config)
    # transformers reads the loss off the name of the class, doesn't find it in this one, and warns: a logger's warning
    # breaks the graph, converted or not
    model.loss_type = "ForCausalLM"
    return model


def vit(**options: Any) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=CLASSES,
        # else the first step finds it out and writes it into the config, and the second one compiles anew
        problem_type="single_label_classification",
        **options,
    )
    return transformers.ViTForImageClassification(config)


def t5(**options: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        eos_token_id=62,
        pad_token_id=63,
        decoder_start_token_id=63,
        use_cache=False,
        **options,
    )
    return transformers.T5ForConditionalGeneration(config)


def tokens_of_t5(fqn: str) -> int:
    """The decoder projects the encoder's tokens to keys and values of its cross-attention."""
    reads_source = fqn.startswith("encoder.") or fqn.endswith(("EncDecAttention.k", "EncDecAttention.v"))
    return BATCH * (SOURCE if reads_source else SEQUENCE)


def tokens_of_vit(fqn: str) -> int:
    """The classifier reads one token of an image, the one that stands before the patches."""
    return BATCH * (1 if fqn == "classifier" else PATCHES + 1)


ZOO = {
    zoo.name: zoo
    for zoo in (
        Zoo(name="Llama", build=llama),
        Zoo(name="Qwen2", build=qwen2),
        Zoo(name="Qwen3", build=qwen3),
        Zoo(name="GPT-2", build=gpt2),
        Zoo(name="ViT", build=vit, batch=images, tokens=tokens_of_vit, level=math.log(4)),
        Zoo(name="T5", build=t5, batch=source_and_target, tokens=tokens_of_t5),
        Zoo(name="Mixtral", build=mixtral, tokens=tokens_of_two_experts),
        Zoo(name="Qwen3-MoE", build=qwen3_moe, tokens=tokens_of_two_experts),
    )
}


def bf16_model(zoo: Zoo, *, seed: int = 0, **options: Any) -> nn.Module:
    """The model in bfloat16, of this seed's random numbers."""
    torch.manual_seed(seed)
    return zoo.build(**options).bfloat16()


def train(zoo: Zoo, model: nn.Module, call: Callable[..., Any], *, steps: int = STEPS, seed: int = 0) -> list[float]:
    """Train by AdamW.

    Args:
        zoo: Where the data comes from.
        model: Its parameters are trained.
        call: The model, or what was compiled of it.
        steps: How many.
        seed: Of the data.

    Returns:
        The loss of each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = call(**zoo.batch(1000 * seed + step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tail(losses: list[float]) -> float:
    """The loss that a training got to: mean of the last 10 steps."""
    return sum(losses[-10:]) / 10
