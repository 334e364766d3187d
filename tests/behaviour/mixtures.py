"""Mixtures of experts of Hugging Face transformers, tiny and random: each writes its experts in another way."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from zoo import DECODER, ZOO, Zoo

__all__ = ["EXPERTS", "HELD_OTHERWISE", "MIXTURES"]

EXPERTS = 8  # of each model here that ZOO has not


def deepseek_v3(**options: Any) -> nn.Module:
    """Groups of experts, one expert that all tokens go to, a dense first layer, and low-rank attention."""
    config = transformers.DeepseekV3Config(
        **{**DECODER, "num_key_value_heads": 4},
        moe_intermediate_size=64,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        **options,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def llama4(**options: Any) -> nn.Module:
    """Transposed weights; each expert is given all tokens."""
    config = transformers.Llama4TextConfig(
        **DECODER,
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        **options,
    )
    return transformers.Llama4ForCausalLM(config)


def gpt_oss(**options: Any) -> nn.Module:
    """Transposed weights, biases, and a gate of its own."""
    config = transformers.GptOssConfig(
        **DECODER,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=16,
        **options,
    )
    return transformers.GptOssForCausalLM(config)


def granite_moe(**options: Any) -> nn.Module:
    config = transformers.GraniteMoeConfig(**DECODER, num_local_experts=EXPERTS, num_experts_per_tok=2, **options)
    return transformers.GraniteMoeForCausalLM(config)


def qwen3_next(**options: Any) -> nn.Module:
    """A gated expert that all tokens go to.

    Without the layers of linear attention: PyTorch's backend aot_eager fails in the backward of transformers'
    reference code for it, converted or not, by a view of other strides than were traced. Inductor does not, and takes
    minutes.
    """
    config = transformers.Qwen3NextConfig(
        **DECODER,
        head_dim=16,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        layer_types=["full_attention", "full_attention"],
        **options,
    )
    return transformers.Qwen3NextForCausalLM(config)


def dbrx(**options: Any) -> nn.Module:
    """Matrices of all experts below one another, in 2-D parameters of a child of the module of experts."""
    ffn = {"ffn_hidden_size": 64, "hidden_size": 64, "moe_num_experts": EXPERTS, "moe_top_k": 2}
    attention = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}
    special = {name: DECODER[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")}
    config = transformers.DbrxConfig(
        vocab_size=DECODER["vocab_size"],
        d_model=64,
        n_layers=2,
        n_heads=4,
        max_seq_len=64,
        ffn_config=ffn,
        attn_config=attention,
        **special,
        **options,
    )
    return transformers.DbrxForCausalLM(config)


def jetmoe(**options: Any) -> nn.Module:
    """Experts in the attention too; each module is one product, of rows that others sort."""
    config = transformers.JetMoeConfig(
        **DECODER, kv_channels=16, num_local_experts=EXPERTS, num_experts_per_tok=2, **options
    )
    return transformers.JetMoeForCausalLM(config)


MIXTURES = {
    zoo.name: zoo
    for zoo in (
        ZOO["Mixtral"],
        ZOO["Qwen3-MoE"],
        Zoo(name="DeepSeek-V3", build=deepseek_v3),
        Zoo(name="Llama 4", build=llama4),
        Zoo(name="gpt-oss", build=gpt_oss),
        Zoo(name="Granite-MoE", build=granite_moe),
        Zoo(name="Qwen3-Next", build=qwen3_next),
    )
}
# their experts are neither 3-D parameters of one module nor called with the routing
HELD_OTHERWISE = {zoo.name: zoo for zoo in (Zoo(name="DBRX", build=dbrx), Zoo(name="JetMoE", build=jetmoe))}
