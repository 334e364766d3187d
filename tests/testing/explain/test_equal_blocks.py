"""Code for a GPU of equal blocks is generated for a few of them and counted for all, and the numbers are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.testing.explain import equal_blocks, gpu_code
from fp8compile.testing.explain.capture import record
from fp8compile.testing.explain.module_stack import Names
from fp8compile.testing.gpu.gpus import GPUS

TRITON = pytest.importorskip("triton", reason="Inductor generates a GPU's kernels in Triton")
triton_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Overriding a previously registered")


class Block(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.norm, self.factor = nn.LayerNorm(256), factor
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x) * self.factor)))


class Model(nn.Module):
    """Blocks; or a forward that takes the model."""

    def __init__(self, factors, forward=None):
        super().__init__()
        self.layers = nn.ModuleList(Block(factor) for factor in factors)
        self.run = forward

    def forward(self, x):
        if self.run is not None:
            return self.run(self, x)
        for layer in self.layers:
            x = layer(x)
        return x


def model(factors, forward=None, recipe="rowwise"):
    return f8.convert(Model(factors, forward).bfloat16(), f8.recipes.by_name(recipe)), (
        torch.randn(64, 256, dtype=torch.bfloat16),
    )


def proven(given, args):
    return equal_blocks.equal_blocks(given, args, {}, record(given, args, {}))


def found_on_gpu(given, args, blocks):
    call = gpu_code._ModelCall(what="it", model=given, args=args, kwargs={}, names=Names.of(given), gpu=GPUS["h200"])
    return gpu_code._costs(call, blocks)


@triton_warns
def test_counted_blocks_have_the_numbers_of_generated_ones():
    given, args = model([1.0] * 5)
    whole, is_counted = found_on_gpu(given, args, None)
    assert not is_counted
    counted, is_counted = found_on_gpu(given, args, equal_blocks.EqualBlocks(name="layers", count=5))
    assert is_counted
    assert gpu_code._comparable(counted) == gpu_code._comparable(whole)
    assert whole[0][1].fp8_gemms == 2 * 10
    assert list(given.layers._modules) == ["0", "1", "2", "3", "4"]


def test_a_block_in_the_middle_counts_for_all_but_two():
    def found(kernels, layers):
        cast = gpu_code.Cast(layer=None, gemm="output", operand="a", kernel="k", fused_with=(), serves=1)
        cost = gpu_code.GraphCost(
            backward=False, kernels=kernels, gemms=kernels, fp8_gemms=1, opaque=0, bytes=10 * kernels
        )
        return (cost,), tuple(replace(cast, layer=layer) for layer in layers)

    two = found(5, ["layers.0.up", "layers.1.up", None])
    three = found(7, ["layers.0.up", "layers.1.up", "layers.2.up", None])
    (cost,), casts = gpu_code._counted(equal_blocks.EqualBlocks(name="layers", count=6), two, three)
    assert (cost.kernels, cost.gemms, cost.fp8_gemms, cost.opaque, cost.bytes) == (13, 13, 1, 0, 130)
    assert [cast.layer for cast in casts] == [*(f"layers.{number}.up" for number in range(6)), None]


def test_code_that_depends_on_the_number_of_blocks_is_generated_for_all(monkeypatch):
    def generated(call):
        kernels = {2: 3, 3: 4, 4: 6}.get(len(call.model.layers), 9)  # 4 blocks are one kernel more than the sum
        return (gpu_code.GraphCost(backward=False, kernels=kernels, gemms=1, fp8_gemms=1, opaque=0, bytes=8),), ()

    monkeypatch.setattr(gpu_code._ModelCall, "generated", generated)
    given, args = model([1.0] * 5)
    found, is_counted = found_on_gpu(given, args, equal_blocks.EqualBlocks(name="layers", count=5))
    assert (found[0][0].kernels, is_counted) == (9, False)


def test_the_graphs_prove_that_blocks_are_equal():
    assert proven(*model([1.0] * 10)) == equal_blocks.EqualBlocks(name="layers", count=10)
    assert proven(*model([1.0] * 9)) is None  # code for 2, 3 and 4 is as much


@pytest.mark.parametrize(
    ("factors", "forward", "why"),
    [
        ([1.0] * 9 + [0.5], None, "aten.mul.Tensor occurs 9 times"),
        ([1.0] * 10, lambda self, x: self.layers[9].up(x), "with 2 of 10 blocks: IndexError"),
    ],
)
def test_blocks_that_differ_are_all_generated(factors, forward, why, caplog):
    with caplog.at_level("INFO", logger="fp8compile"):
        assert proven(*model(factors, forward)) is None
    assert "generating code for each block of layers, because they differ: " in caplog.text
    assert why in caplog.text


def test_blocks_of_two_recipes_are_not_equal():
    given, args = model([1.0] * 10)
    f8.revert(given.layers[3])
    assert proven(given, args) is None


def test_names_of_layers_in_blocks():
    blocks = equal_blocks.EqualBlocks(name="model.layers", count=8)
    assert blocks.place("model.layers.3.mlp.up") == (3, "mlp.up")
    assert blocks.place("model.layers_of.3") is None
    assert blocks.place("head") is None
    assert blocks.layer(3, "mlp.up") == "model.layers.3.mlp.up"
    assert (str(blocks), blocks.in_all(5, 7)) == ("model.layers.{1..6}", 17)
