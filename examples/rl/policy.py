"""The policy: a small transformer over a few tokens, and the task that it learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8compile as f8

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 16, 128, 4, 2


class Block(nn.Module):
    """Attention and a gated feed-forward, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, LENGTH, WIDTH) to the same shape."""
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Policy(nn.Module):
    """Tokens (rows, LENGTH) to the log-probabilities of each next token, (rows, LENGTH, VOCABULARY) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the log-probabilities."""
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float().log_softmax(-1)


def policy(recipe: f8.Recipe | None, dtype: torch.dtype = torch.float32) -> Policy:
    """The policy with its first weights, which are the same everywhere; its blocks in FP8, or in ``dtype``."""
    torch.manual_seed(0)
    made = Policy().to(dtype)
    return made if recipe is None else f8.convert(made, recipe, filter="blocks.*")


@torch.no_grad()
def generate(run: Policy, rows: int, generator: torch.Generator) -> Tensor:
    """Sequences of tokens that a policy draws, (rows, LENGTH + 1), from a first token that is drawn evenly."""
    tokens = torch.zeros(rows, LENGTH + 1, dtype=torch.int64)
    tokens[:, 0] = torch.randint(VOCABULARY, (rows,), generator=generator)
    for place in range(LENGTH):
        chances = run(tokens[:, :LENGTH])[:, place].exp()
        tokens[:, place + 1] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return tokens


def rewards(tokens: Tensor) -> Tensor:
    """For each token but the first, 1 if it is the one before plus one, else 0: (rows, LENGTH)."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float()
