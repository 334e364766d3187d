"""What a compiled block saves for its backward: no more than torchao's; the table at full size."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from eight_bits import EIGHT_BITS

from benchmarks.memory import saved_bytes, saved_row
from benchmarks.mlp import mlp

SIZES = (8192, 4096, 14336)
M, D, H = SIZES
# amaxes of bfloat16 tensors are bfloat16 in torchao and float32 here: two bytes more for each that is saved
SCALARS_MB = 100e-6
PEERS = {
    "tensorwise": "tensorwise",
    "rowwise": "rowwise",
    "rowwise_bf16_wgrad": "rowwise_with_gw_hp",
}


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_a_block_saves_two_bytes_for_each_of_two_hidden_activations(recipe):
    """The outputs of gate and up; the norm's statistics. What a bf16 grad_weight reads is made of them again."""
    hidden = 2 * 2 * M * H
    statistics = 4 * M
    # histories are inputs of the backward, no copies of them
    state = 3 * 3 * 1024 * 4 if recipe == "delayed" else 0
    # of blocks along tokens, the codes of what the activation made, whose kernel has it at hand; scales of weights
    blocks = M * H + 4 * M * H // 128 + 3 * 4 * D * H // 128**2 if recipe in ("blockwise", "mxfp8") else 0
    saved = saved_row(recipe, *SIZES)["saved MB"] * 1e6
    assert saved <= hidden + state + blocks + statistics + 1024, f"{saved / 1e6} MB"


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="compares with torchao, which is not installed")
@pytest.mark.parametrize("recipe", PEERS)
def test_a_block_saves_no_more_than_torchao(recipe):
    own, other = saved_row(recipe, *SIZES), saved_row(f"torchao {PEERS[recipe]}", *SIZES)
    assert own["saved MB"] <= other["saved MB"] + SCALARS_MB, f"{own} {other}"


def test_the_method_counts_what_inductor_saves():
    model, x = mlp("rowwise", 64, 32, 48)
    by_inductor = saved_bytes(torch.compile(model, fullgraph=True), model, x)
    assert by_inductor == saved_row("rowwise", 64, 32, 48)["saved MB"] * 1e6


def test_a_storage_is_counted_once_and_parameters_are_not():
    model = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)

    def fn(x):
        y = model(x)
        return y.exp() * y.exp().view(4, 2).view(2, 4)

    assert saved_bytes(fn, model, x) == 2 * 2 * 4 * 4  # the two exponentials, each saved by itself and by the product
