"""A Llama of Hugging Face in FP8, as ``fp8compile explain`` takes it.

fp8compile explain examples/llama.py            # each layer from the graphs, and code for an H200
fp8compile explain examples/llama.py --gpu b200 --recipe mxfp8
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fp8compile as f8

__all__ = ["example"]


def example() -> tuple[nn.Module, tuple[Tensor]]:
    """The converted model, with random weights, and its arguments."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=2048,
    )  # fmt: skip
    model = f8.convert(LlamaForCausalLM(config).bfloat16(), f8.recipes.rowwise())
    return model, (torch.randint(2048, (2, 128)),)
