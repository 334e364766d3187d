"""`fp8compile explain`: what each GEMM runs in by the graphs, planted fall-backs, bad targets, the page."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.cli import main
from fp8compile.cli.explain import subcommand as explain_flags
from fp8compile.cli.explain.html import page
from fp8compile.cli.explain.sections import graph_sections
from fp8compile.testing import gpu_kernels
from fp8compile.testing.explain import PEAKS, explain
from fp8compile.testing.explain.graphs import GraphGemm
from fp8compile.testing.explain.module_stack import Names, layer_of_stack
from fp8compile.testing.explain.roofline import roofline
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.graphs.report import graph_report, place_text
from fp8compile.testing.graphs.without_values import values_needed

ROOT = Path(__file__).parents[2]
GEMMS = ("output", "grad_input", "grad_weight")
ROWWISE = "e4m3 x e4m3 rowwise"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
)


class Block(nn.Module):
    """A feed-forward block and a head that is left out."""

    def __init__(self, bias=False):
        super().__init__()
        self.norm = nn.RMSNorm(32, dtype=torch.bfloat16)
        self.up = nn.Linear(32, 64, bias=bias, dtype=torch.bfloat16)
        self.down = nn.Linear(64, 32, bias=bias, dtype=torch.bfloat16)
        self.head = nn.Linear(32, 16, bias=bias, dtype=torch.bfloat16)

    def forward(self, x):
        return self.head(x + self.down(nn.functional.silu(self.up(self.norm(x)))))


def block(recipe="rowwise", **options):
    return f8.convert(Block(**options), f8.recipes.by_name(recipe), filter="!head")


def tokens(m=16, *, requires_grad=False):
    return torch.randn(m, 32, dtype=torch.bfloat16, requires_grad=requires_grad)


def gemms_of(found, fqn):
    (layer,) = [layer for layer in found.layers if layer.fqn == fqn]
    return {gemm.gemm: gemm for gemm in layer.gemms}


def texts(found, fqn):
    return tuple(str(gemm) for gemm in gemms_of(found, fqn).values())


# ---------------------------------------------------------------------------------- what runs in what


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("rowwise", (ROWWISE,) * 3),
        ("tensorwise", ("e4m3 x e4m3 tensorwise", "e5m2 x e4m3 tensorwise", "e5m2 x e4m3 tensorwise")),
        ("delayed", ("e4m3 x e4m3 tensorwise", "e5m2 x e4m3 tensorwise", "e5m2 x e4m3 tensorwise")),
        ("blockwise", ("e4m3 x e4m3 blockwise",) * 3),
        ("mxfp8", ("e4m3 x e4m3 mxfp8",) * 3),
        ("nvfp4", ("e2m1 x e2m1 nvfp4",) * 3),
        ("rowwise_bf16_wgrad", (ROWWISE, ROWWISE, "bfloat16, as the recipe specifies")),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_each_gemm_of_each_layer_is_named(recipe, expected, bias):
    found = explain(block(recipe, bias=bias), (tokens(),), gpu=None)
    assert texts(found, "up") == texts(found, "down") == expected
    assert texts(found, "head") == ("bfloat16",) * 3
    assert not found.fell_back
    assert not found.unproven
    in_fp8 = 2 * sum(ROWWISE[:4] in text for text in expected) if recipe == "rowwise_bf16_wgrad" else 6
    assert found.verdict == (
        f"YES, as the recipes specify: {in_fp8} of 9 GEMMs of linear layers run in FP8, 2 of 3 layers are converted"
    )


def test_sizes_operators_and_reasons_are_those_of_the_graphs():
    found = explain(block(), (tokens(),), gpu=None)
    up, head = gemms_of(found, "up"), gemms_of(found, "head")
    assert [(g.m, g.k, g.n) for g in up.values()] == [(16, 32, 64), (16, 64, 32), (64, 16, 32)]
    assert [g.ops for g in up.values()] == [(f"fp8compile::{op}",) for op in ("linear", "grad_input", "grad_weight")]
    assert [(g.m, g.k, g.n) for g in head.values()] == [(16, 32, 16), (16, 16, 32), (16, 16, 32)]
    assert [g.ops for g in head.values()] == [("aten::mm",)] * 3
    assert {layer.fqn: layer.reason for layer in found.layers} == {
        "up": "", "down": "", "head": "excluded by the filter !head"
    }  # fmt: skip


def test_an_unconverted_model_is_said_to_be_one():
    found = explain(Block(), (tokens(),), gpu=None)
    assert found.verdict == "NO: none of the 3 linear layers is converted"
    assert {gemm.runs for layer in found.layers for gemm in layer.gemms} == {"bfloat16"}


def test_a_linear_that_is_the_model_itself():
    found = explain(f8.Linear(32, 48, recipe=f8.recipes.rowwise()), (torch.randn(16, 32),), gpu=None)
    assert texts(found, "") == (ROWWISE, "not in the graph: its input needs no gradient", ROWWISE)
    assert found.layers[0].name == "(the model)"


def test_a_layer_that_is_called_twice_and_one_that_never_is():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.square, self.unused = (nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(2))

        def forward(self, x):
            return self.square(self.square(x))

    found = explain(f8.convert(Twice(), f8.recipes.rowwise()), (tokens(requires_grad=True),), gpu=None)
    assert [len(gemm.ops) for gemm in gemms_of(found, "square").values()] == [2, 2, 2]
    assert texts(found, "unused") == ("not in the graph: the layer is not called",) * 3


def test_layers_that_share_a_weight_are_told_apart():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(2))
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).relu())

    model = f8.convert(Tied(), f8.recipes.rowwise(), filter="!second")
    found = explain(model, (tokens(requires_grad=True),), gpu=None)
    assert texts(found, "first") == (ROWWISE,) * 3
    assert texts(found, "second") == ("bfloat16",) * 3


def test_a_weight_that_is_computed_is_found_by_the_module_that_was_called():
    model = block()
    nn.utils.parametrize.register_parametrization(model.up, "weight", nn.Tanh())
    found = explain(model, (tokens(requires_grad=True),), gpu=None)
    assert texts(found, "up") == (ROWWISE,) * 3
    plain = Block()
    nn.utils.parametrize.register_parametrization(plain.up, "weight", nn.Tanh())
    found = explain(plain, (tokens(requires_grad=True),), gpu=None)
    assert texts(found, "up") == ("bfloat16",) * 3


def test_autocast_is_looked_through():
    class Autocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.fp8, self.plain = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.plain(self.fp8(x))

    model = f8.convert(Autocast(), f8.recipes.rowwise(), filter="!plain")
    found = explain(model, (torch.randn(16, 32, requires_grad=True),), gpu=None)
    assert texts(found, "fp8") == (ROWWISE,) * 3
    assert texts(found, "plain") == ("bfloat16",) * 3


# ---------------------------------------------------------------------------------- what is absent


def test_a_frozen_weight_and_an_input_without_gradient_have_no_gemm():
    model = block()
    model.down.weight.requires_grad_(requires_grad=False)
    model.norm.weight.requires_grad_(requires_grad=False)
    found = explain(model, (tokens(),), gpu=None)
    assert texts(found, "up") == (ROWWISE, "not in the graph: its input needs no gradient", ROWWISE)
    assert texts(found, "down") == (ROWWISE, ROWWISE, "not in the graph: its weight is frozen")
    assert found.verdict.startswith("YES")


def test_without_a_backward_there_is_the_output_alone():
    found = explain(block().requires_grad_(requires_grad=False), (tokens(),), gpu=None)
    none = "not in the graph: there is no backward"
    assert texts(found, "up") == (ROWWISE, none, none)


def test_a_layer_behind_a_graph_break_is_not_proven():
    model = block()
    model.up.forward = torch._dynamo.disable(model.up.forward)
    found = explain(model, (tokens(),))
    assert texts(found, "up") == ("no proof: graph break, the layer runs outside of the graphs",) * 3
    assert texts(found, "down") == (ROWWISE,) * 3  # in a graph of its own, by its weight
    unseen = "1 graph break: what runs outside of the graphs is unknown"
    assert found.verdict.startswith(f"NOT PROVEN: 1 converted layer without proof; {unseen}; 3 of 6 GEMMs")
    assert found.unproven == (f"up: {', '.join(GEMMS)}: graph break, the layer runs outside of the graphs", unseen)
    assert len(found.graphs.breaks) == 1
    assert found.gpu.problem == "it requires a single graph, but this model has 1 graph break"


# ---------------------------------------------------------------------------------- planted fall-backs


class Planted(f8.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def plant_subclass(model):
    model.up.__class__ = Planted


def plant_forward(model):
    model.up.forward = functools.partial(nn.Linear.forward, model.up)


def plant_parent(model):
    model.forward = lambda x: model.head(x + model.down(nn.functional.silu(model.norm(x) @ model.up.weight.t())))


def plant_parent_float32(model):
    def forward(x):
        up = (model.norm(x).float() @ model.up.weight.float().t()).bfloat16()
        return model.head(x + model.down(nn.functional.silu(up)))

    model.forward = forward


def plant_float32(model):
    def forward(x):
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), model.up.weight.float()).bfloat16()

    model.up.forward = forward


@pytest.mark.parametrize(
    ("plant", "runs"),
    [
        (plant_subclass, "bfloat16"),
        (plant_forward, "bfloat16"),
        (plant_parent, "bfloat16"),
        (plant_parent_float32, "float32"),
        (plant_float32, "float32"),
    ],
)
def test_a_planted_fall_back_is_called_out(plant, runs):
    model = block()
    plant(model)
    assert {row.fqn: row.converted for row in f8.conversion_report(model).rows}["up"], "it says of itself that it is"
    found = explain(model, (tokens(),), gpu=None)
    assert texts(found, "up") == (f"FELL BACK to {runs}, the recipe specifies {ROWWISE}",) * 3
    assert texts(found, "down") == (ROWWISE,) * 3
    assert found.verdict == "NO: 1 converted layer fell back; 3 of 9 GEMMs of linear layers run in FP8"
    each = [f"{gemm} runs in {runs}, the recipe specifies {ROWWISE}" for gemm in GEMMS]
    (line,) = found.fell_back
    assert line.startswith(f"up: {'; '.join(each)} (aten::mm at ")
    if plant is not plant_forward:  # it calls PyTorch's own code
        assert place_text(__file__, 0).removesuffix(":0") in line


def test_one_of_two_calls_that_falls_back_is_called_out():
    class Half(f8.Linear):
        calls = 0

        def forward(self, x):
            return super().forward(x) if x.shape[0] == 16 else nn.functional.linear(x, self.weight)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Half(32, 32, bias=False, recipe=f8.recipes.rowwise(), dtype=torch.bfloat16)

        def forward(self, x):
            return self.layer(x), self.layer(x[:8])

    found = explain(Model(), (tokens(),), gpu=None)
    assert str(gemms_of(found, "layer")["output"]) == (
        f"FELL BACK to {ROWWISE} and bfloat16, the recipe specifies {ROWWISE} in 1 of 2 calls"
    )


def test_another_recipe_than_the_layers_own_is_called_out():
    model = block()
    other = f8.recipes.tensorwise()
    model.up.forward = lambda x: f8.linear(x, model.up.weight, recipe=other)
    found = explain(model, (tokens(),), gpu=None)
    assert str(gemms_of(found, "up")["output"]) == (
        f"FELL BACK to e4m3 x e4m3 tensorwise, the recipe specifies {ROWWISE}"
    )


# ---------------------------------------------------------------------------------- padding and least times


@needs_triton
def test_padding_is_of_the_sum_and_the_columns():
    model = f8.convert(nn.Sequential(nn.Linear(32, 40, dtype=torch.bfloat16)), f8.recipes.rowwise())
    found = explain(model, (tokens(17, requires_grad=True),))
    gemms = gemms_of(found, "0")
    assert [(g.m, g.k, g.n) for g in gemms.values()] == [(17, 32, 40), (17, 40, 32), (40, 17, 32)]
    assert [(g.padded_k, g.padded_n) for g in gemms.values()] == [(32, 48), (48, 32), (32, 32)]
    assert [g.padding_flops for g in gemms.values()] == pytest.approx([48 / 40 - 1, 48 / 40 - 1, 32 / 17 - 1])
    forward, backward = found.gpu.costs  # padded codes are written once more
    assert (found.gpu.problem, forward.fp8_gemms, backward.fp8_gemms) == ("", 1, 2)


def test_layers_that_a_gpu_gains_nothing_from_are_named():
    sizes = ((64, 1024), (1024, 160), (160, 160))
    layers = [nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for k, n in sizes]
    found = explain(
        f8.convert(nn.Sequential(*layers), f8.recipes.rowwise()), (torch.randn(16, 64, dtype=torch.bfloat16),)
    )
    assert [(layer.size, layer.least_gaining, layer.is_small) for layer in found.layers] == [
        (60, 137, True),
        (138, 137, False),
        (80, 137, True),
    ]
    (small,) = (section for section in graph_sections(found) if section.title == "small layers")
    assert small.rows == (("0", "1024 x 64", "60", "137"), ("2", "160 x 160", "80", "137"))


def test_a_bf16_gemm_is_not_padded():
    found = explain(nn.Linear(33, 17, dtype=torch.bfloat16), (torch.randn(5, 33, dtype=torch.bfloat16),), gpu=None)
    output = gemms_of(found, "")["output"]
    assert (output.padded_k, output.padded_n, output.padding_flops) == (33, 17, 0.0)


def test_least_times_are_the_larger_of_operations_and_bytes():
    model = f8.Linear(64, 96, bias=False, recipe=f8.recipes.tensorwise(), dtype=torch.bfloat16)
    bound = explain(model, (torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True),)).roofline
    m, k, n, bandwidth = 32, 64, 96, 4.8e12  # far too small for the operations to take longer than the bytes
    fp8 = (m * k + k * n + m * n * 2) + (m * n + n * k + m * k * 2) + (n * m + m * k + n * k * 2)
    # the weight is read and written, input and gradient are written; the gradient once for both of its GEMMs
    casts = (n * k * 3 + m * k) + (n * k * 3 + m * n + m * k)
    bf16 = 3 * 2 * (m * k + k * n + m * n)
    assert bound.gemm_seconds == pytest.approx(fp8 / bandwidth)
    assert bound.cast_seconds == pytest.approx(casts / bandwidth)
    assert bound.seconds == pytest.approx((fp8 + casts) / bandwidth)
    assert bound.bf16_seconds == pytest.approx(bf16 / bandwidth)
    assert bound.ratio == pytest.approx(bf16 / (fp8 + casts))


def test_codes_of_four_bits_are_half_a_byte_and_have_a_peak_of_their_own():
    model = f8.Linear(64, 96, bias=False, recipe=f8.recipes.nvfp4(), dtype=torch.bfloat16)
    rows = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    bound = explain(model, (rows,), gpu="b200").roofline
    m, k, n, bandwidth = 32, 64, 96, 8e12
    products = (
        ((m * k + k * n) / 2 + m * n * 2) + ((m * n + n * k) / 2 + m * k * 2) + ((n * m + m * k) / 2 + n * k * 2)
    )
    # the weight, 16 x 16, is read and written in both graphs; input and gradient in both directions, of other codes
    casts = 2 * n * k * (2 + 0.5) + (m * k + m * n) / 2 * 2
    # float64 sums of quotients there, a quotient of sums here: they differ in the last bit, which approx allows
    assert bound.gemm_seconds == pytest.approx(products / bandwidth)
    assert bound.cast_seconds == pytest.approx(casts / bandwidth)
    large = GraphGemm(
        layer="a", gemm="output", op="fp8compile::linear", runs="", is_fp8=True, m=8192, k=8192, n=8192, in_bytes=2,
        out_bytes=2, code_bits=4,
    )  # fmt: skip
    assert roofline([large], PEAKS["b200"]).seconds == pytest.approx(2 * 8192**3 / 9e15)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_sums_are_padded_to_32_where_a_gpu_takes_no_less(name):
    layer = nn.Linear(48, 40, bias=False, dtype=torch.bfloat16)
    found = explain(
        f8.convert(nn.Sequential(layer), f8.recipes.by_name(name)),
        (torch.randn(16, 48, dtype=torch.bfloat16),),
        gpu=None,
    )
    output = gemms_of(found, "0")["output"]
    assert (output.k, output.n, output.padded_k, output.padded_n) == (48, 40, 64, 48)


def test_large_gemms_are_bound_by_the_published_peaks():
    size = 8192
    fp8 = GraphGemm(
        layer="a", gemm="output", op="fp8compile::linear", runs=ROWWISE, is_fp8=True, m=size, k=size, n=size,
        in_bytes=2, out_bytes=2,
    )  # fmt: skip
    nobodys = GraphGemm(**{**vars(fp8), "layer": None})
    bound = roofline([fp8, nobodys], PEAKS["h200"])
    assert bound.seconds == pytest.approx(2 * size**3 / 1979e12)
    assert bound.bf16_seconds == pytest.approx(2 * size**3 / 989e12)


# ---------------------------------------------------------------------------------- the GPU


@needs_triton
def test_kernels_gemms_bytes_and_casts_on_the_gpu():
    model, x = block(), tokens()
    found = explain(model, (x,))
    assert found.gpu.problem == found.gpu.bf16_problem == ""
    codes = gpu_kernels(model, x)
    for cost, code in zip(found.gpu.costs, codes, strict=True):
        assert cost.kernels == sum(launch.kind == "triton" for launch in code.launches)
        assert cost.gemms == len(code.gemms)
        assert cost.bytes == sum(launch.bytes_read + launch.bytes_written for launch in code.launches)
    assert [(c.backward, c.gemms, c.fp8_gemms, c.opaque) for c in found.gpu.costs] == [
        (False, 3, 2, 0), (True, 6, 4, 0)  # one launch reads a weight for its codes and the backward's amaxes
    ]  # fmt: skip
    assert [(c.gemms, c.fp8_gemms) for c in found.gpu.bf16_costs] == [(3, 0), (6, 0)]
    casts = {(cast.layer, cast.gemm, cast.operand): cast for cast in found.gpu.casts}
    assert set(casts) == {(layer, gemm, side) for layer in ("up", "down") for gemm in GEMMS for side in "ab"}
    assert "aten.rsqrt" in casts["up", "output", "a"].fused_with, "the norm's kernel writes the codes"
    assert casts["down", "output", "a"].fused_with == ("aten.silu",)
    for layer in ("up", "down"):  # a parameter is cast by a kernel that does nothing else
        assert casts[layer, "output", "b"].kernel.startswith("group_rows_kernel")  # ours, which Inductor launches
        assert casts[layer, "grad_input", "b"].kernel
        assert not any(casts[layer, gemm, "b"].is_fused for gemm in ("output", "grad_input"))


def casts_of(found):
    assert (found.gpu.problem, found.gpu.bf16_problem) == ("", "")
    return {(cast.layer, cast.gemm, cast.operand): cast for cast in found.gpu.casts}


@needs_triton
def test_a_model_with_random_numbers_has_code():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32, dtype=torch.bfloat16)

        def forward(self, x):
            return self.layer(nn.functional.dropout(x, 0.1)) * torch.rand(16, 32)

    casts = casts_of(explain(f8.convert(Noisy(), f8.recipes.rowwise()), (tokens(),)))
    assert casts["layer", "output", "a"].fused_with == ("aten.native_dropout",)


@needs_triton
def test_a_language_model_with_a_loss_has_code():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model = f8.convert(model, f8.recipes.rowwise(), filter="!lm_head")
    ids = torch.randint(256, (1, 32))
    casts = casts_of(explain(model, (), {"input_ids": ids, "labels": ids}))
    assert "aten.rsqrt" in casts["model.layers.0.mlp.up_proj", "output", "a"].fused_with
    # what attention's backward hands over: what is before it is another kernel's
    assert not {"aten.nll_loss_backward"} & set(casts["model.layers.0.self_attn.v_proj", "grad_input", "a"].fused_with)


@needs_triton
def test_a_layer_with_several_names_is_shown_by_its_first():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 32, dtype=torch.bfloat16)
            self.second = self.first

        def forward(self, x):
            return self.second(x)

    assert {layer for layer, _, _ in casts_of(explain(f8.convert(Twice(), f8.recipes.rowwise()), (tokens(),)))} == {
        "first"
    }  # fmt: skip


def test_a_model_on_the_meta_device_is_explained_like_one_in_memory():
    with torch.device("meta"):
        model = block()
    found = explain(model, (tokens().to("meta"),), gpu="b200")
    assert (found.gpu.problem, found.gpu.costs[0].fp8_gemms, found.gpu.bf16_costs[0].gemms) == ("", 2, 3)
    in_memory = explain(block(), (tokens(),), gpu=None).to_dict()
    assert explain(model, (tokens().to("meta"),), gpu=None).to_dict() == in_memory
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_forward_that_reads_values_is_called_with_them_or_refused(caplog):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 64)

        def forward(self, x):
            return self.up(x) if x.sum() > 0 else x

    with caplog.at_level("INFO", logger="fp8compile"):
        found = explain(f8.convert(Reads(), f8.recipes.rowwise()), (torch.ones(16, 32),), gpu=None)
    assert found.verdict.startswith("NOT PROVEN: 1 graph break: what runs outside of the graphs is unknown")
    assert (
        "calling it with real tensors, because it fails with fake ones (DataDependentOutputException: " in caplog.text
    )
    with pytest.raises(ValueError, match=r" on the meta device.*DataDependentOutputException"):
        explain(f8.convert(Reads().to("meta"), f8.recipes.rowwise()), (torch.ones(16, 32),), gpu=None)


@needs_triton
def test_no_tokens_at_all_are_no_launch():
    found = explain(block(), (tokens(0),))
    assert found.gpu.problem == ""
    assert (found.gpu.costs[0].kernels, found.gpu.costs[0].fp8_gemms) == (0, 0)


@needs_triton
def test_a_cast_that_stores_nothing_but_codes_is_looked_into():
    # tensorwise: the amax is another kernel's, and what this one computes can be told by the codes alone
    class Activation(nn.Module):
        def __init__(self):
            super().__init__()
            layer = f8.Linear(64, 64, bias=False, recipe=f8.recipes.tensorwise(), dtype=torch.bfloat16)
            self.layers = nn.ModuleList([layer])

        def forward(self, x):
            return self.layers[0](torch.tanh(x))

    x = torch.randn(1024, 64, dtype=torch.bfloat16)  # large enough for an amax in several parts
    found = explain(Activation().requires_grad_(requires_grad=False), (x,))
    a, b = found.gpu.casts
    assert (a.layer, a.operand, b.layer, b.operand) == ("layers.0", "a", "layers.0", "b")
    assert a.fused_with == ("aten.tanh",)
    assert b.fused_with == ()


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("L['self']._modules['layers']._modules['0'].gate", "layers.0.gate"),
        ("L['self'].layers.0.gate", "layers.0.gate"),
        ("L['self'].layers[0].gate", "layers.0.gate"),
        ("L['fn'].__closure__[0].cell_contents.layers[0].gate", "layers.0.gate"),
        ("L['self'].head", "head"),
        ("L['self'].up", "layers.0.up"),  # behind a graph break, from a frame of an inner module
        ("L['self'].gate", None),  # two layers are called so
        ("L['self'].norm", None),
        ("L['self'].alias", "head"),
        ("L['self'].block.scores", None),
    ],
)
def test_a_module_that_was_called_is_found_by_its_path(path, layer):
    layers = ["layers.0.gate", "layers.0.up", "layers.1.gate", "head"]
    modules = ["", "layers", "layers.0", "layers.1", "norm", "block.scores", *layers]
    names = Names(layers=layers, modules={**dict(zip(modules, modules, strict=True)), "alias": "head"})
    node = SimpleNamespace(meta={"nn_module_stack": {"0": ("L['self']", Block), "1": (path, nn.Linear)}})
    assert layer_of_stack(node, names) == layer


def test_what_keeps_the_gpu_code_from_being_made_is_said(monkeypatch):
    def fails(*_):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr("fp8compile.testing.explain.gpu_code.schedule", fails)
    found = explain(block(), (tokens(),))
    assert found.gpu.problem == "requires triton, which is not installed"
    assert found.verdict.startswith("YES")


# ---------------------------------------------------------------------------------- the value


def test_the_graphs_are_those_of_graph_report():
    model, x = block(), tokens()
    found = explain(model, (x,), gpu=None)
    assert found.graphs.graphs == graph_report(model, x).graphs
    assert [call.graphs for call in found.graphs.calls] == [1, 0]


def test_the_json_is_the_explanation():
    found = explain(block(), (tokens(),), gpu=None)
    again = json.loads(found.to_json())
    assert again == found.to_dict()
    assert again["layers"][0]["gemms"][0]["runs"] == ROWWISE
    assert again["verdict"] == found.verdict


def test_no_gradient_is_left_behind():
    model, x = block(), tokens(requires_grad=True)
    explain(model, (x,), gpu=None)
    assert [t.grad for t in (x, *model.parameters())] == [None] * 5


def test_explain_refuses_what_it_cannot_explain():
    with pytest.raises(TypeError, match=r"`model` is a function; it must be a torch\.nn\.Module"):
        explain(tokens)
    with pytest.raises(ValueError, match=r"`gpu` is 'h2000'; it must be one of h200, b200, .*, or None"):
        explain(block(), (tokens(),), gpu="h2000")


# ---------------------------------------------------------------------------------- the command


EXAMPLE = """
import torch
from torch import nn
import fp8compile as f8


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)

    def example_inputs(self):
        return torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)

    def forward(self, x, *, scale=1.0):
        return self.layer(x) * scale


class Strange(Own):
    def example_inputs(self):
        return (torch.randn(16, 31, dtype=torch.bfloat16),)


def example():
    return f8.convert(Own(), f8.recipes.rowwise()), Own().example_inputs()


def with_kwargs():
    return Own(), (Own().example_inputs(),), {"scale": 2.0}


def planted():
    model, x = example()
    model.layer.forward = lambda x: nn.functional.linear(x, model.layer.weight)
    model.add_module("<b>&[bold]", nn.Linear(32, 32))
    return model, (x,)


def behind_a_break():
    model, x = example()
    model.layer.forward = torch._dynamo.disable(model.layer.forward)
    return model, (x,)


def prints():
    print("loaded")
    model, x = example()
    model.layer.register_forward_pre_hook(lambda *_: print("called") if not torch.compiler.is_compiling() else None)
    return model, x


class Reads(Own):
    def forward(self, x):
        return self.layer(x) if x.sum() > -1000 else x


def reads():
    return f8.convert(Reads(), f8.recipes.rowwise()), Own().example_inputs()


class Forces(Own):
    def forward(self, x):
        y = self.layer(x).float().square().sum()
        return torch.autograd.grad(y, x)[0]


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise ValueError("no such gradient")


class BadBackward(Own):
    def forward(self, x):
        return Bad.apply(self.layer(x))


def other_name():
    model, x = example()
    model.alias = model.layer
    model.forward = lambda x: model.alias(x)
    return model, x


def fails():
    raise KeyError("no such size")


def needs(size):
    return size


own = Own()
number = 3
bare = lambda: nn.Linear(4, 4)
half = lambda: (Own(),)
wrong = lambda: ("model", ())
odd = lambda: (Own(), {"x": 1})
compiled = lambda: (torch.compile(Own()), Own().example_inputs())


def in_place():
    model, x = example()
    model.compile()
    return model, x


def mixture():
    block = nn.ModuleDict({"experts": nn.Linear(64, 64), "up": nn.Linear(64, 64)})
    block.forward = lambda x: block["up"](block["experts"](x))
    return nn.Sequential(block).bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16)
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Nothing is wrapped; how lines are is in tests/cli/test_terminal.py."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example as a file and as a module of the same name, found from where the command runs."""
    path = tmp_path / "explained_example.py"
    path.write_text(textwrap.dedent(EXAMPLE))
    (tmp_path / "broken_example.py").write_text("import not_there_at_all\n")
    (tmp_path / "empty_example.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    for name in ("explained_example", "broken_example", "empty_example"):
        sys.modules.pop(name, None)


def run(capsys, *words):
    """Exit code, standard output, and standard error without the lines that say what is being done."""
    code = main(["explain", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, "".join(line for line in err.splitlines(keepends=True) if not line.endswith(" ...\n"))


@pytest.mark.parametrize(
    "target",
    [
        "explained_example.py",
        "explained_example.py:example",
        "explained_example:example",
        "explained_example:Own",
        "explained_example:own",
        "explained_example:with_kwargs",
    ],
)
def test_every_form_of_target_is_found(example, capsys, target):
    recipe = () if target.endswith(("example", ".py")) else ("--recipe", "rowwise")
    code, out, err = run(capsys, target, "--no-gpu", *recipe)
    assert (code, err) == (0, "")
    assert "YES, as the recipes specify: 3 of 3 GEMMs of linear layers run in FP8, 1 of 1 layers are converted" in out
    assert out.count(f"all three  {ROWWISE}") == 1
    assert "1 graph, 0 breaks, 0 recompiles" in out


def test_without_a_recipe_the_model_is_explained_as_it_is(example, capsys):
    code, out, err = run(capsys, "explained_example:Own", "--no-gpu")
    assert (code, err) == (1, "fp8compile explain: NO: none of the 1 linear layers is converted\n")
    assert "NO: none of the 1 linear layers is converted" in out
    assert "[1] convert() has not visited it" in out


def test_a_recipe_takes_the_place_of_the_models_own(example, capsys):
    code, out, err = run(capsys, example, "--no-gpu", "--recipe", "tensorwise(scale='pow2')")
    assert (code, err) == (0, "")
    assert "  tensorwise(scale='pow2')  output                   e4m3 x e4m3 tensorwise\n" in out


def test_experts_get_a_recipe_of_their_own(example, capsys):
    code, out, err = run(capsys, f"{example}:mixture", "--no-gpu", "--recipe", "rowwise", "--experts", "tensorwise")
    assert (code, err) == (0, "")
    found = {line.split()[0]: line.split()[4] for line in out.splitlines() if line.startswith("0.")}
    assert found == {"0.experts": "tensorwise", "0.up": "rowwise"}


@pytest.mark.parametrize("given", [(), ("--recipe", "rowwise", "--mesh", "fsdp=2")], ids=["alone", "mesh"])
def test_experts_go_with_a_recipe_and_without_a_mesh(example, capsys, given):
    code, out, err = run(capsys, example, "--experts", "tensorwise", *given)
    assert (code, out) == (2, "")
    assert "--experts requires --recipe, and is not supported with --mesh" in err


def test_what_is_being_done_is_said_on_standard_error(example, capsys):
    assert main(["explain", str(example), "--no-gpu", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert err.splitlines() == [
        f"loading {example} ...",
        "calling it once, with fake tensors ...",
        "compiling the model and calling it twice ...",
        "reading its graphs ...",
    ]
    explain(block(), (tokens(),), gpu=None)
    assert capsys.readouterr().err == "", "whoever calls the library sees nothing"


def test_a_model_is_called_once_before_it_is_compiled(example, capsys, monkeypatch):
    from fp8compile.cli import target
    from fp8compile.testing.explain import explanation

    calls = []

    def counted(*args):
        calls.append(args)
        return values_needed(*args)

    for module in (target, explanation):
        monkeypatch.setattr(module, "values_needed", counted)
    assert run(capsys, example, "--no-gpu", "--json")[0] == 0
    assert len(calls) == 1
    assert run(capsys, f"{example}:reads", "--no-gpu", "--json")[0] == 1, "a graph break proves nothing"
    assert len(calls) == 2


def test_json_alone_is_printed(example, capsys):
    code, out, err = run(capsys, example, "--json", "--no-gpu")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [gemm["runs"] for gemm in found["layers"][0]["gemms"]] == [ROWWISE] * 3
    assert found["gpu"] is None
    assert found["roofline"] is None


def test_what_the_model_prints_is_not_taken_for_the_answer(example, capsys):
    code, out, err = run(capsys, f"{example}:prints", "--json", "--no-gpu")
    assert code == 0
    assert json.loads(out)["verdict"].startswith("YES")
    assert err.startswith("loaded\ncalled\n")


def test_a_model_that_takes_gradients_in_its_forward_is_explained(example, capsys):
    code, out, err = run(capsys, f"{example}:Forces", "--no-gpu", "--recipe", "rowwise")
    assert (code, out.count(f"all three  {ROWWISE}")) == (1, 1)
    assert err.startswith("fp8compile explain: not proven: 1 graph break: what runs outside of the graphs is unknown")


def test_an_unwritable_page_is_refused_before_anything_runs(example, capsys):
    code, out, err = run(capsys, f"{example}:prints", "--html", example.parent, "--no-gpu")
    assert (code, out) == (2, "")
    assert "Is a directory" in err
    assert "loaded" not in err
    assert run(capsys, f"{example}:fails", "--html", example.parent / "new.html")[0] == 2
    assert not (example.parent / "new.html").exists()


def test_a_fall_back_is_exit_code_1_and_one_line(example, capsys):
    code, out, err = run(capsys, f"{example}:planted", "--no-gpu")
    assert code == 1
    assert "NO: 1 converted layer fell back" in out
    assert f"FELL BACK: layer: output runs in bfloat16, the recipe specifies {ROWWISE}" in out
    assert "<b>&[bold]" in out, "a name is no markup"
    assert err.startswith("fp8compile explain: fell back: layer: output runs in bfloat16")
    assert err.count("\n") == 1
    code, out, _ = run(capsys, f"{example}:planted", "--no-gpu", "--json")
    assert code == 1
    assert json.loads(out)["fell_back"][0].startswith("layer: ")


def test_what_nothing_proves_is_exit_code_1_as_well(example, capsys):
    code, out, err = run(capsys, f"{example}:behind_a_break", "--no-gpu")
    assert code == 1
    assert "NOT PROVEN: 1 converted layer without proof" in out
    assert err.startswith("fp8compile explain: not proven: layer: output, grad_input, grad_weight: graph break")


def test_the_terminal_shows_casts_launches_and_least_times(example, capsys):
    code, out, err = run(capsys, example)
    assert (code, err) == (0, "")
    for text in (
        "padding",
        "small layers",
        "roofline of NVIDIA H200 SXM",
        "Lower bounds from published peak rates, not measurements",
    ):
        assert text in out
    if importlib.util.find_spec("triton"):
        assert "casts on NVIDIA H200 SXM" in out
        assert "on its own" in out
        assert "unconverted" in out
    else:
        assert "no generated code: needs triton, which is not installed" in out


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("not_a_module:x", "there is no module 'not_a_module'"),
        ("torch.not_there:x", "there is no module 'torch.not_there'"),
        (
            "broken_example:x",
            "importing broken_example failed: ModuleNotFoundError: No module named 'not_there_at_all'",
        ),
        ("broken_example.py", "broken_example.py: running it failed: ModuleNotFoundError"),
        ("no_file.py", "no_file.py: no such file"),
        ("no_file.py:x", "no_file.py: no such file"),
        ("empty_example.py", "empty_example.py has neither model_and_inputs nor example"),
        ("explained_example", "must be package.module:name, FILE.py:name or FILE.py"),
        ("a b:c", "'a b' is neither a FILE.py nor the name of a module"),
        ("explained_example:nothing", "explained_example has no 'nothing'"),
        ("explained_example:own.nothing", "explained_example has no 'own.nothing'"),
        (
            "explained_example:number",
            "explained_example:number is a int; it must be a function that returns (model,",
        ),
        (
            "explained_example:bare",
            "Linear has no method example_inputs(). Pass a function that returns (model, args)",
        ),
        ("explained_example:half", "returned a tuple; it must return (model, args) or (model, args, kwargs)"),
        ("explained_example:wrong", "returned a tuple; it must return (model, args) or (model, args, kwargs)"),
        (
            "explained_example:odd",
            "they must be a tuple and a dict; for keyword arguments return (model, (), {...})",
        ),
        ("explained_example:fails", "calling it without arguments failed: KeyError: 'no such size'"),
        ("explained_example:needs", "calling it without arguments failed: TypeError"),
        ("explained_example:Strange", "calling the model with its inputs failed: RuntimeError"),
        (
            "explained_example:compiled",
            "returned a model that is already compiled. Return the model before torch.compile.",
        ),
        (
            "explained_example:in_place",
            "returned a model that is already compiled. Return the model before torch.compile.",
        ),
        ("explained_example:BadBackward", "compiling the model and running it failed: "),
    ],
)
def test_a_bad_target_is_one_line_and_exit_code_2(example, capsys, target, complaint):
    code, out, err = run(capsys, target, "--no-gpu")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert err.startswith("fp8compile explain: ")
    assert complaint in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--recipe", "rowise"), "--recipe rowise: there is no recipe named 'rowise'"),
        (
            ("--html", "no/such/folder/page.html", "--no-gpu"),
            "--html no/such/folder/page.html: No such file or directory",
        ),
        (("--tp", "1"), "--tp 1: tensor parallelism requires at least 2 ranks, for example --tp 2."),
        (("--tp", "2"), "is a DTensor. Apply the plan in that function, as for 2 ranks: parallelize_module(model, "),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(example, capsys, words, complaint):
    code, _, err = run(capsys, example, *words)
    assert code == 2
    assert complaint in err
    assert err.count("\n") == 1


LLAMA = """
import torch
from torch.distributed.device_mesh import init_device_mesh
import fp8compile as f8
from examples.train.model import ByteLlama, ModelShape
from examples.train.tensor_parallel import parallelize

def example(sp=False):
    model = ByteLlama(ModelShape(dim=64, layers=1, heads=4, kv_heads=2, hidden=128, seq=64), seed=0).bfloat16()
    f8.convert(model, f8.recipes.mxfp8())
    parallelize(model, init_device_mesh("cpu", (2,)), sp=sp)
    return model, (torch.randint(256, (2, 64)), torch.randint(256, (2, 64)))

def with_sequence_parallel():
    return example(sp=True)
"""


def in_a_process(folder, *words):
    """Ranks are pretended in one of its own: PyTorch keeps meshes beyond their group."""
    command = [sys.executable, "-m", "fp8compile", "explain", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("sp", [False, True])
def test_a_model_that_applies_its_plan_says_what_its_layers_send(tmp_path, sp):
    (tmp_path / "llama.py").write_text(LLAMA)
    target = "llama.py:with_sequence_parallel" if sp else "llama.py"
    found = json.loads(in_a_process(tmp_path, target, "--gpu", "b200", "--tp", "2", "--json"))
    assert found["verdict"].startswith("YES, as the recipes specify: 24 of 24 GEMMs")
    assert found["gpu"]["problem"] == "it runs in one process, but layers of this model are sharded over ranks"
    assert found["roofline"] is None
    down = [row for row in found["sends"]["rows"] if row["layer"].endswith("down")]
    told = [(row["gemm"], row["what"], row["op"], row["bytes_per_element"], row["bytes"]) for row in down]
    size = 2 * 64 * 64
    if not sp:
        # what the head gives back is a sum still; each product of the layer asks for it
        summed = [(gemm, "grad_output", "all_reduce sum", 2, 2 * size) for gemm in ("grad_input", "grad_weight")]
        assert told == [("plan", "output", "all_reduce sum", 2, 2 * size), *summed]
        return
    codes = ("quantized data of grad_output", "all_gather", 1, size)
    scales = ("scales of grad_output", "all_gather", 1)
    assert told == [
        ("plan", "output", "reduce_scatter sum", 2, 2 * size),
        ("grad_input", *codes),
        ("grad_input", *scales, size // 32),
        ("grad_weight", *codes),
        ("grad_weight", *scales, size // 32),
    ]


def test_a_plan_of_ones_own_is_shown_as_a_table(tmp_path):
    (tmp_path / "own.py").write_text(
        """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
import fp8compile as f8

def example():
    model = f8.convert(nn.Sequential(nn.Linear(32, 64, bias=False)).bfloat16(), f8.recipes.mxfp8())
    plan = {"0": f8.parallel.ColwiseParallel(input_layouts=Shard(1))}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return model, torch.randn(2, 16, 32, dtype=torch.bfloat16)
"""
    )
    lines = in_a_process(tmp_path, "own.py", "--tp", "2", "--no-gpu").splitlines()
    (row,) = [line for line in lines if line.startswith("0 ") and "output" in line and "quantized data" in line]
    assert [cell.strip() for cell in row.split("  ") if cell] == [
        "0", "output", "quantized data of input", "all_gather", "uint8", "2,048", "1"
    ]  # fmt: skip


def test_an_unknown_gpu_is_refused(example, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["explain", str(example), "--gpu", "h2000"])
    assert stop.value.code == 2
    assert "invalid choice: 'h2000' (choose from" in capsys.readouterr().err
    assert tuple(PEAKS) == explain_flags.GPUS == tuple(GPUS)


@needs_triton
def test_the_code_and_the_peaks_of_a_b200(example, capsys):
    code, out, _ = run(capsys, f"{example}:Own", "--gpu", "b200", "--recipe", "mxfp8")
    assert code == 0
    for text in ("launches on NVIDIA B200 SXM", "this model   forward ", "roofline of NVIDIA B200 SXM"):
        assert text in out


@pytest.mark.parametrize(
    ("recipe", "gpu", "name", "needs"),
    [
        ("mxfp8", "h200", "NVIDIA H200 SXM", r"is MX, which needs compute capability 10\.0 \(B200\)"),
        ("blockwise", "b200", "NVIDIA B200 SXM", "needs power-of-two scales"),
    ],
)
def test_a_recipe_that_the_gpu_has_no_gemm_for_is_no_yes(example, capsys, recipe, gpu, name, needs):
    code, out, _ = run(capsys, f"{example}:Own", "--gpu", gpu, "--recipe", recipe, "--json")
    found = json.loads(out)
    assert code == 1
    assert re.match(rf"NO: {name} does not support the recipe of [\w.]+, output: .* {needs}", found["verdict"])
    assert found["gpu"]["no_gemm"] == found["gpu"]["problem"]


def test_it_needs_no_other_package(example, capsys, monkeypatch):
    for name in ("rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run(capsys, example, "--no-gpu")[0] == 0


# ---------------------------------------------------------------------------------- the page


def written_page(example, capsys):
    path = example.parent / "page.html"
    assert run(capsys, f"{example}:planted", "--no-gpu", "--html", path)[0] == 1
    return path


def test_the_page_is_well_formed_and_needs_nothing_else(example, capsys):
    text = written_page(example, capsys).read_text()
    root = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    cells = [cell.text for cell in root.iter("td")]
    assert "<b>&[bold]" in cells, "a layer's name comes out as it is"
    loud = [row for row in root.iter("tr") if row.get("class") == "loud"]
    assert [row[0].text for row in loud] == ["layer"]
    assert not [element.tag for element in root.iter() if {"src", "href"} & set(element.attrib)]
    assert not {element.tag for element in root.iter()} & {"script", "link", "img", "iframe"}
    assert "url(" not in text
    assert "@import" not in text


def test_what_was_typed_is_text_in_the_page():
    found = explain(block(), (tokens(),), gpu=None)
    text = page(found, "<script>alert(1)</script>$body")
    assert "<script>" not in text
    assert "fp8compile explain &lt;script&gt;alert(1)&lt;/script&gt;$body" in text


def test_a_browser_shows_the_page(example, capsys, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}, in PATH")
    path = written_page(example, capsys)
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "<title>fp8compile explain" in shown
    assert "NO: 1 converted layer fell back" in shown
    assert '<tr class="loud"><td>layer</td>' in shown
    assert "&lt;b&gt;&amp;[bold]" in shown
    assert shown.count("<section") == written_page(example, capsys).read_text().count("<section") == 4


# ---------------------------------------------------------------------------------- memory


def memory_report_of(kept_mb):
    from fp8compile.testing import KeptTensor, MemoryReport, Moment

    gate = KeptTensor(
        module="layers.0.gate", made_by="fp8compile.linear", read_in=("layers.0",), read_by=("aten.silu",),
        shape=(2048, 4096), dtype=torch.bfloat16, bytes=kept_mb * 10**6, saved=None, block=(1, -1),
        code_bytes=kept_mb * 10**6 // 2, moved=-400_000,
    )  # fmt: skip
    moment = Moment(parameters=25_200_000, kept=gate.bytes, temporaries=1_000_000)
    return MemoryReport(
        device="NVIDIA H200", parameters=25_200_000, gradients=25_200_000, optimizer=50_300_000, kept=(gate,),
        forward=moment, backward=moment,
    )  # fmt: skip


MEMORY = """\
memory of a training step, NVIDIA H200
Memory that the program allocates, in MB (10**6 bytes), computed from the code
  that Inductor generates; nothing was run. The optimizer is AdamW with states
  in the parameters' dtype. Workspaces of libraries and gaps between tensors are
  not included.
                              this model  without FP8
----------------------------  ----------  -----------
parameters, buffers                 25.2         25.2
their gradients                     25.2         25.2
optimizer                           50.3         50.3
saved for the backward              17.0         34.0
largest moment, forward             43.2         60.2
  parameters, buffers               25.2         25.2
  saved for the backward            17.0         34.0
  temporaries                        1.0          1.0
largest moment, backward            43.2         60.2
  parameters, buffers               25.2         25.2
  saved for the backward            17.0         34.0
  temporaries                        1.0          1.0
the step, with the optimizer       100.7        110.5

saved for the backward
Tensors that the forward of this model computes and saves. In FP8: e4m3 with
  scales, in the blocks of the recipe that is used next to the tensor. Moved:
  additional MB that a step reads and writes at least, if the tensor is saved in
  FP8.
created in     read by  shape                   MB  in FP8  moved
-------------  -------  --------------------  ----  ------  -----
layers.0.gate  silu     2048 x 4096 bfloat16  17.0     8.5   -0.4
"""


def test_memory_is_two_tables_of_80_columns(monkeypatch, capsys):
    from fp8compile.cli.explain.memory import memory_sections
    from fp8compile.cli.terminal import print_sections

    monkeypatch.setenv("COLUMNS", "80")
    print_sections(memory_sections({"this model": memory_report_of(17), "without FP8": memory_report_of(34)}))
    assert capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ").strip() == MEMORY.strip()


MEMORY_TARGET = """
import torch, fp8compile as f8

def example():
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 64)).bfloat16()
    return f8.convert(model, f8.recipes.rowwise(), filter="*"), torch.randn(32, 64, dtype=torch.bfloat16)
"""


@needs_triton
def test_explain_prints_memory_beside_the_model_without_fp8(tmp_path, monkeypatch, capsys):
    (tmp_path / "it.py").write_text(MEMORY_TARGET)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "--memory", str(tmp_path / "it.py")]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown[shown.index("memory of a training step") :].splitlines())) <= 80
    head = next(line for line in shown.splitlines() if line.split() == ["this", "model", "without", "FP8"])
    assert shown.index("launches on") < shown.index("memory of a training step") < shown.index(head)


@pytest.mark.parametrize("flag", ["--no-gpu", "--html page.html", "--tp 2"])
def test_memory_with_flags_that_leave_nothing_to_generate_is_refused(flag, tmp_path, capsys):
    (tmp_path / "it.py").write_text(MEMORY_TARGET)
    assert main(["explain", "--memory", str(tmp_path / "it.py"), *flag.split()]) == 2
    assert f"--memory can't be combined with {flag.split()[0]}" in capsys.readouterr().err


def test_memory_of_a_call_without_backward_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explain_flags, "_steps", lambda parsed, target: (explained(each) for each in [target]))
    (tmp_path / "it.py").write_text(MEMORY_TARGET.replace('filter="*")', 'filter="*").requires_grad_(False)'))
    assert main(["explain", "--memory", str(tmp_path / "it.py")]) == 2
    assert "--memory: memory_report: this call has no backward" in capsys.readouterr().err


def explained(target):
    return explain(target.model, target.args, gpu=None)
