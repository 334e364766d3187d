"""What blocks of full size keep for the backward, to the kB, and that making values again changes no bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile as f8
from benchmarks.kept import kept_mb
from benchmarks.memory import saved_bytes

KEPT = {  # MB; the table of docs/results/bytes.md
    ("mlp", "rowwise"): 469.885,  # gate and up, and statistics
    ("mlp", "rowwise_bf16_wgrad"): 469.885,  # 771.9 with the activation and the normed x, which grad_weight reads
    ("attention", "bf16"): 336.626,  # no layer of ours is in that graph
    ("attention", "rowwise"): 168.919,  # 269.6 with heads of k and v repeated
    ("attention", "rowwise_bf16_wgrad"): 168.919,
    ("experts", "rowwise"): 604.832,  # 730.8 with codes of weights, and of the activation along tokens
    ("experts", "rowwise_bf16_wgrad"): 469.942,
    ("experts", "tensorwise"): 655.512,
    ("experts", "blockwise"): 665.673,
    ("experts", "mxfp8"): 661.869,
}


@pytest.mark.parametrize(("kind", "recipe"), KEPT)
def test_mb_kept_by_a_block_of_full_size(kind, recipe):
    assert round(kept_mb(kind, recipe), 3) == KEPT[kind, recipe]


class SharedHeads(nn.Module):
    """Attention in which heads of k and v serve several heads of q; a feed-forward behind it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(64)
        self.q, self.k, self.v = (nn.Linear(64, width, bias=False) for width in (64, 32, 32))
        self.up, self.down = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (layer(normed).view(1, len(x), -1, 16).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (each[:, :, None].expand(1, 2, 2, len(x), 16).reshape(q.shape) for each in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(nn.functional.gelu(self.up(mixed.transpose(1, 2).reshape(x.shape))))


def step(recipe, way, *, dynamic=False):
    """Bytes kept, then gradients of x and parameters."""
    torch._dynamo.reset()
    model = f8.convert(SharedHeads().bfloat16(), recipe, filter="*")
    x = torch.linspace(-2, 2, 128 * 64).view(128, 64).bfloat16().requires_grad_()
    call = way(model)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    kept = saved_bytes(call, model, x)
    call(x).float().square().sum().backward()
    return kept, [x.grad, *(parameter.grad for parameter in model.parameters())]


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")


def as_region(model):
    return f8.compile(nn.Sequential(model), blocks=[model], backend="aot_eager_decomp_partition")


def checkpointed(model):
    return compiled(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))


RECIPES = {"rowwise": f8.recipes.rowwise(), "rowwise_bf16_wgrad": f8.recipes.rowwise_bf16_wgrad()}
WAYS = {"whole": compiled, "region": as_region, "checkpointed": checkpointed}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_made_again_changes_no_bit(recipe, way, monkeypatch):
    """The same graph without the marks and barriers keeps more, and has the same gradients."""
    kept, gradients = step(RECIPES[recipe], WAYS[way])
    monkeypatch.setattr(f8.inductor, "repeat_in_backward", lambda tensor: None)
    monkeypatch.setattr("fp8compile.ops.layer.operands.made_of_kept", lambda tensor: tensor)
    before, expected = step(RECIPES[recipe], WAYS[way])
    assert kept < before if way != "checkpointed" else kept == before
    assert all(map(torch.equal, gradients, expected))


def test_heads_are_repeated_again_for_any_number_of_tokens():
    assert step(RECIPES["rowwise"], compiled, dynamic=True)[0] == step(RECIPES["rowwise"], compiled)[0]


def test_a_sum_that_a_bf16_product_reads_is_kept_in_place_of_its_terms():
    """To make it again would keep two tensors for one."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x):
            return self.c(self.a(x) + self.b(x))

    recipe = f8.recipes.rowwise_bf16_wgrad()
    model = f8.convert(Sum().bfloat16(), recipe, filter="*")
    x = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(compiled(model), model, x) <= 2 * 128 * 64 + 3 * 4 * 128
