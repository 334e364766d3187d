"""Models with experts that the tests of FSDP share, run in each rank; batches and optimizer are `fsdp_models`'s."""

from __future__ import annotations

import fsdp_models as models
import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint

import fp8compile as f8

__all__ = ["DIM", "Mixture", "MixtureModel", "mixture_of"]

DIM, INNER, TOP_K = 32, 200, 2  # 400 rows of gate_up: halves of them are cut within blocks of 128


class Experts(nn.Module):
    """As torchtitan writes them, by a method that convert replaces; or with transposed weights and biases, as gpt-oss.

    Weights of such experts are multiplied by ``f8.grouped_mm`` or ``f8.grouped_linear`` once they are converted.
    """

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


def mixture_of(kind, count, recipe):
    """A model whose experts, and nothing else, are in FP8."""
    torch.manual_seed(0)
    return f8.convert(MixtureModel(kind, count), recipe, filter=lambda _, fqn: fqn.endswith("experts"))
