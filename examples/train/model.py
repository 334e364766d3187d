"""The model: a Llama over bytes.

RMSNorm before each half of a block, rotary positions, grouped-query attention and SwiGLU, which may be a mixture of
experts.

    tokens_BT int64 --embed--> x_BTD bf16 --blocks--> norm --head--> logits_BTV --> mean loss, fp32
                                 |    ^
                                 +----+  x + attention(norm(x)), x + feed_forward(norm(x))

Parameters are float32, and the trainer runs the model under bf16 autocast. So every linear, FP8 or not, multiplies
bf16 inputs by the bf16 rounding of its weight, while AdamW updates float32 values.

Letters: B sequences, T bytes in one, D model width, H query heads, G key and value heads, E width of a head, V values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train.experts import MixtureOfExperts

NUM_BYTES = 256
ROPE_BASE = 10000.0  # Su et al. 2021, arXiv:2104.09864
NORM_EPS = 1e-5  # Touvron et al. 2023, arXiv:2302.13971


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a :class:`ByteLlama`.

    `examples.train.config.TrainConfig` describes each of them, and raises if they don't fit each other.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    seq: int
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 0


def _rotation(*, length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    frequency_E = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_TE = torch.outer(torch.arange(length, dtype=torch.float32), frequency_E)
    return angle_TE.cos(), angle_TE.sin()


def _rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    first, second = x_BHTE.float().chunk(2, dim=-1)
    turned = (first * cos_TE - second * sin_TE, second * cos_TE + first * sin_TE)
    return torch.cat(turned, dim=-1).to(x_BHTE.dtype)


class _Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (scaled * self.weight).to(x.dtype)


def _attend(query_BHTE: Tensor, key_BGTE: Tensor, value_BGTE: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query_BHTE, key_BGTE, value_BGTE, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal attention with rotary positions. ``attend`` can be set to another function of query, key and value."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        kv_width = shape.kv_heads * self.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, kv_width, bias=False)
        self.value = nn.Linear(shape.dim, kv_width, bias=False)
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)
        self.attend = _attend
        # Dehghani et al. 2023, arXiv:2302.05442
        self.query_norm = _Norm(self.head_dim) if shape.qk_norm else None
        self.key_norm = _Norm(self.head_dim) if shape.qk_norm else None

    def _heads(self, x_BTD: Tensor, norm: _Norm | None = None) -> Tensor:
        x_BHTE = x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return x_BHTE if norm is None else norm(x_BHTE)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Compute the attention of x, shape (B, T, D), to the same shape."""
        query_BHTE = _rotate(self._heads(self.query(x_BTD), self.query_norm), cos_TE, sin_TE)
        key_BGTE = _rotate(self._heads(self.key(x_BTD), self.key_norm), cos_TE, sin_TE)
        mixed_BHTE = self.attend(query_BHTE, key_BGTE, self._heads(self.value(x_BTD)))
        return self.output(mixed_BHTE.transpose(1, 2).flatten(-2))


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = _Norm(shape.dim)
        self.attention = Attention(shape)
        self.feed_forward_norm = _Norm(shape.dim)
        self.feed_forward = (
            MixtureOfExperts(dim=shape.dim, hidden=shape.hidden, experts=shape.experts, top_k=shape.top_k)
            if shape.experts
            else _FeedForward(shape)
        )

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class ByteLlama(nn.Module):
    """A Llama over bytes that returns its own loss, so that one graph holds the whole step.

    Args:
        shape: Sizes of the model.
        seed: Seed of all initial weights; they are the same on every device, whatever ran before.
    """

    def __init__(self, shape: ModelShape, *, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_BYTES, shape.dim)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = _Norm(shape.dim)
        self.head = nn.Linear(shape.dim, NUM_BYTES, bias=False)
        cos_TE, sin_TE = _rotation(length=shape.seq, head_dim=shape.dim // shape.heads)
        self.register_buffer("cos", cos_TE, persistent=False)
        self.register_buffer("sin", sin_TE, persistent=False)
        self._draw_weights(torch.Generator().manual_seed(seed), num_layers=shape.layers)

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator, *, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = parameter.shape[-1] ** -0.5
            # Each block adds twice to the residual stream, whose variance would grow with depth.
            if name.endswith(("attention.output.weight", "feed_forward.down.weight", "experts.down")):
                std *= (2 * num_layers) ** -0.5
            parameter.normal_(std=std, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per byte, shape (), float32.

        Args:
            tokens: Bytes, shape (B, T), int64, 0 to 255; T at most ``shape.seq``.
            targets: The byte after each token, with the same shape and dtype.
        """
        length = tokens.shape[1]
        cos_TE, sin_TE = self.cos[:length], self.sin[:length]
        x_BTD = self.embed(tokens)
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets.flatten())
