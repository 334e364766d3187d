"""Models with experts that the tests of FSDP share, run in each rank; batches and optimizer are `fsdp_models`'s."""

from __future__ import annotations

import fsdp_models as models
import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

import fp8compile as f8

__all__ = ["mixture_of"]

DIM, INNER, TOP_K = 32, 200, 2  # 400 rows of gate_up: halves of them are cut within blocks of 128


class Experts(nn.Module):
    """As torchtitan writes them, by a method that convert replaces."""

    def __init__(self, count):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 2 * INNER, DIM) / 6)
        self.down = nn.Parameter(torch.randn(count, DIM, INNER) / 14)

    def _grouped_mm(self, *, A, B_t, offs):
        raise AssertionError("experts were not converted")

    def forward(self, rows, offsets):
        gate, up = self._grouped_mm(A=rows, B_t=self.gate_up.transpose(-2, -1), offs=offsets).chunk(2, dim=-1)
        return self._grouped_mm(A=silu(gate) * up, B_t=self.down.transpose(-2, -1), offs=offsets)


class Mixture(nn.Module):
    """A norm, a router and its experts, and the input added."""

    def __init__(self, count):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, count, bias=False)
        self.experts = Experts(count)

    def forward(self, x):
        rows = self.norm(x).flatten(0, -2)
        shares, chosen = self.router(rows).float().softmax(-1).topk(min(TOP_K, self.router.out_features))
        experts, places = chosen.flatten().sort(stable=True)
        every = torch.arange(self.router.out_features, device=x.device)
        offsets = torch.searchsorted(experts, every, right=True, out_int32=True)
        y = self.experts(rows[places // chosen.shape[1]], offsets)
        y = y[places.argsort()].unflatten(0, chosen.shape) * shares.unsqueeze(-1)
        return x + y.sum(1).to(x.dtype).view_as(x)


class GptOss(nn.Module):
    """A norm, a router and experts of gpt-oss: transposed weights, and biases."""

    def __init__(self, count):
        super().__init__()
        from transformers.models.gpt_oss import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, count, bias=False)
        self.experts = GptOssExperts(
            GptOssConfig(num_local_experts=count, intermediate_size=INNER, hidden_size=DIM, num_hidden_layers=1)
        )
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x):
        rows = self.norm(x).flatten(0, -2)
        shares, chosen = self.router(rows).float().softmax(-1).topk(min(TOP_K, self.router.out_features))
        return x + self.experts(rows, chosen, shares.to(x.dtype)).view_as(x)


KINDS = {"torchtitan": Mixture, "gpt-oss": GptOss}


class MixtureModel(nn.Module):
    """Symbols to the loss of the next ones, through blocks of experts."""

    def __init__(self, kind, count):
        super().__init__()
        self.is_checkpointed = False
        self.embed = nn.Embedding(models.NUM_SYMBOLS, DIM)
        self.blocks = nn.ModuleList([KINDS[kind](count) for _ in range(2)])
        self.head = nn.Linear(DIM, models.NUM_SYMBOLS, bias=False)

    def forward(self, symbols):
        x = self.embed(symbols[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return cross_entropy(self.head(x).flatten(0, 1).float(), symbols[:, 1:].flatten())


class Qwen3Moe(nn.Module):
    """Two layers of transformers' Qwen3-MoE, with the loss of the next symbols."""

    def __init__(self, count):
        super().__init__()
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            vocab_size=models.NUM_SYMBOLS,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=count,
            num_experts_per_tok=TOP_K,
            max_position_embeddings=64,
            use_cache=False,
        )
        self.model = Qwen3MoeForCausalLM(config)

    @property
    def blocks(self):
        """The layers."""
        return self.model.model.layers

    def forward(self, symbols):
        return self.model(input_ids=symbols, labels=symbols).loss


def mixture_of(kind, count, recipe, *, seed=0, dtype=None, **options):
    """A model whose experts are in FP8; of the small ones nothing else is."""
    torch.manual_seed(seed)
    if kind == "Qwen3-MoE":
        return f8.convert(Qwen3Moe(count).to(dtype), recipe, filter=lambda *_: True, **options)
    model = MixtureModel(kind, count).to(dtype)
    return f8.convert(model, recipe, filter=lambda _, fqn: fqn.endswith("experts"), **options)
