"""What blocks of full size keep for the backward, to the kB, and that making values again changes no bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile as f8
from benchmarks.kept import SAVED, kept_mb
from benchmarks.memory import saved_bytes
from benchmarks.saved_codes import moved_row

KEPT = {  # MB: exact, default codes, all codes; the tables of docs/results/saved-codes.md
    ("mlp", "bf16"): (771.785, 540.574, 391.938),
    ("mlp", "tensorwise"): (469.795, 234.947, 234.947),
    ("mlp", "rowwise"): (469.885, 235.037, 235.037),
    ("mlp", "rowwise_bf16_wgrad"): (469.885, 235.037, 235.037),
    ("mlp", "blockwise"): (469.838, 238.627, 238.627),
    ("mlp", "mxfp8"): (469.795, 249.594, 249.594),
    ("mlp", "delayed"): (645.956, 411.107, 411.107),
    ("mlp", "nvfp4"): (643.498, 437.977, 437.977),
    ("attention", "bf16"): (336.626, 336.626, 171.475),
    ("attention", "tensorwise"): (168.854, 168.854, 86.278),
    ("attention", "rowwise"): (168.919, 168.919, 86.344),
    ("attention", "rowwise_bf16_wgrad"): (168.919, 168.919, 86.344),
    ("attention", "blockwise"): (168.864, 168.864, 86.288),
    ("attention", "mxfp8"): (168.854, 168.854, 87.851),
    ("attention", "delayed"): (210.797, 210.797, 128.221),
    ("attention", "nvfp4"): (227.738, 227.738, 148.832),
    ("layer", "bf16"): (1242.628, 945.357, 631.570),
    ("layer", "tensorwise"): (772.866, 470.942, 388.366),
    ("layer", "rowwise"): (773.022, 471.097, 388.522),
    ("layer", "rowwise_bf16_wgrad"): (773.022, 471.097, 388.522),
    ("layer", "blockwise"): (772.919, 475.648, 393.073),
    ("layer", "mxfp8"): (772.866, 489.751, 408.748),
    ("layer", "delayed"): (990.970, 689.046, 606.470),
    ("layer", "nvfp4"): (1005.453, 741.212, 662.307),
    ("experts", "bf16"): (570.491, 339.280, 289.735),
    ("experts", "tensorwise"): (655.512, 422.859, 422.859),
    ("experts", "rowwise"): (604.832, 372.179, 372.179),
    ("experts", "rowwise_bf16_wgrad"): (469.942, 237.289, 237.289),
    ("experts", "blockwise"): (665.673, 434.462, 434.462),
    ("experts", "mxfp8"): (661.869, 435.377, 435.377),
    ("experts", "nvfp4"): (614.859, 394.658, 394.658),
}


QUICK = [  # each block, and each way to keep less
    ("mlp", "rowwise", "exact"),
    ("mlp", "rowwise", "default"),
    ("mlp", "bf16", "all"),
    ("mlp", "rowwise_bf16_wgrad", "exact"),
    ("attention", "bf16", "exact"),
    ("attention", "rowwise", "all"),
    ("layer", "rowwise", "default"),
    ("experts", "rowwise", "exact"),
    ("experts", "blockwise", "default"),
]


@pytest.mark.parametrize(("kind", "recipe", "saved"), QUICK)
def test_mb_kept_by_a_block_of_full_size(kind, recipe, saved):
    assert round(kept_mb(kind, recipe, SAVED[saved]), 3) == KEPT[kind, recipe][list(SAVED).index(saved)]


@pytest.mark.parametrize(("kind", "recipe"), KEPT)
def test_mb_kept_by_every_block_with_every_recipe(kind, recipe):
    assert tuple(round(kept_mb(kind, recipe, saved), 3) for saved in SAVED.values()) == KEPT[kind, recipe]


def test_the_results_page_has_these_numbers():
    page = (Path(__file__).parents[1] / "docs" / "results" / "saved-codes.md").read_text()
    for (_, recipe), row in KEPT.items():
        assert f"| {recipe} | {' | '.join(f'{each:.1f}' for each in row)} |" in page


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it")
@pytest.mark.parametrize(
    ("recipe", "most"),
    [("bf16", 1.01), ("tensorwise", 1.02), ("rowwise", 1.035), ("blockwise", 1.07), ("mxfp8", 1.07), ("nvfp4", 1.07)],
)
def test_packing_and_unpacking_ride_in_kernels_that_are_there(recipe, most):
    assert moved_row("mlp", recipe)["ratio"] <= most


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
    monkeypatch.setattr("fp8compile.ops.layer.operands.optimization_barrier", lambda tensor: tensor)
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
