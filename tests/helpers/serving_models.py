"""Tiny models of transformers that the tests of f8.export share, and the values that their checkpoints must give."""

from __future__ import annotations

import torch

import fp8compile as f8
from fp8compile.nn.convertible.convertible_layers import is_converted, layers, weight_names
from fp8compile.nn.experts.known_modules import as_it_lies

__all__ = ["IDS", "MODELS", "RECIPES", "SMALL", "converted", "logits", "make", "wanted"]

RECIPES = {  # for each kind of codes of `fp8compile.export.scheme` with eight bits
    "block": f8.recipes.blockwise(),
    "block_ue8m0": f8.recipes.blockwise(scale="pow2"),
    "tensor": f8.recipes.tensorwise(),
    "channel": f8.recipes.rowwise(),
    "mx": f8.recipes.mxfp8(),
}
IDS = torch.arange(12).view(1, 12)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}


def _classes(kind):
    import transformers as t

    if kind == "llama":
        return t.LlamaForCausalLM, t.LlamaConfig(**SMALL)
    if kind == "tied":
        return t.LlamaForCausalLM, t.LlamaConfig(**SMALL, tie_word_embeddings=True)
    if kind == "qwen3":
        return t.Qwen3ForCausalLM, t.Qwen3Config(**SMALL, head_dim=64)
    if kind.startswith("qwen3_moe"):
        count = 4 if kind.endswith("_4") else 3
        return t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=64, num_experts=count)
    if kind == "gpt_oss":
        return t.GptOssForCausalLM, t.GptOssConfig(
            **SMALL, num_local_experts=3, num_experts_per_tok=2, head_dim=64, layer_types=["full_attention"]
        )
    if kind == "llama4":
        return t.Llama4ForCausalLM, t.Llama4TextConfig(
            **SMALL, num_local_experts=2, head_dim=64, intermediate_size_mlp=256, moe_layers=[0]
        )
    parts = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 128, "qk_nope_head_dim": 64}
    groups = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
    config = t.DeepseekV3Config(**SMALL, **EXPERTS, **parts, **groups, v_head_dim=64)
    return t.DeepseekV3ForCausalLM, config


MODELS = ("llama", "qwen3_moe", "deepseek_v3")


def make(kind, dtype=torch.bfloat16):
    torch.manual_seed(0)
    cls, config = _classes(kind)
    return cls._from_config(config, dtype=dtype)  # .to(dtype) would round the rotary frequencies too


def converted(model, recipe, **options):
    return f8.convert(model, recipe, filter=["*", "!lm_head"], **options)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def _dequantized(layer, weight, dtype):
    if weight.ndim == 2:
        q = weight if isinstance(weight, f8.QuantizedTensor) else f8.quantize(weight, layer.recipe.weight)
        return q.dequantize(dtype)
    quantizer = as_it_lies(layer, layer.recipe.weight)
    return torch.stack([f8.quantize(each, quantizer).dequantize(dtype) for each in weight])


def wanted(model, dtype=torch.float32):
    """The values of the codes of each converted weight by the parameter's name in the model."""
    return {
        f"{fqn}.{name}": _dequantized(layer, layer.get_parameter(name).detach(), dtype)
        for layer, (fqn, *_) in layers(model)
        if is_converted(layer)
        for name in weight_names(layer)
    }
