"""conversion_report: every layer that multiplies, converted or why not."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fp8compile as f8


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(4, 64, 32))
        self.router = nn.Linear(32, 4)
        self.bias = nn.Parameter(torch.empty(4, 64))


class Conv1D(nn.Module):
    """GPT-2's layer: its weight is (in_features, out_features)."""

    def __init__(self, out_features, in_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))


def model():
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(100, 32),
            "attention": nn.MultiheadAttention(32, 2),
            "up": nn.Linear(32, 64),
            "down": nn.Linear(64, 32, dtype=torch.bfloat16),
            "gate": nn.Linear(32, 8),
            "exact": nn.Linear(32, 32, dtype=torch.float64),
            "scaled": Scaled(32, 32),
            "experts": Experts(),
            "c_attn": Conv1D(96, 32),
            "conv": nn.Conv1d(16, 16, 3),
            "lm_head": nn.Linear(32, 100, bias=False),
        }
    )


def row(report, fqn):
    return next(row for row in report.rows if row.fqn == fqn)


def test_printed_after_convert():
    converted = f8.convert(model(), f8.recipes.rowwise_bf16_wgrad())
    assert_expected_inline(
        str(f8.conversion_report(converted)),
        """\
layer                     module                    out x in  recipe              GEMMs in FP8
------------------------  ------------------------  --------  ------------------  ------------------
attention.in_proj_weight  MultiheadAttention        96 x 32   -                   [1]
attention.out_proj        NonDynamically            32 x 32   -                   [2]
                          QuantizableLinear
up                        Linear                    64 x 32   rowwise_bf16_wgrad  output, grad_input
down                      Linear                    32 x 64   rowwise_bf16_wgrad  output, grad_input
gate                      Linear                    8 x 32    -                   [3]
exact                     Linear                    32 x 32   -                   [4]
scaled                    Scaled                    32 x 32   -                   [5]
experts.w1                Experts                   64 x 32   -                   [6]
experts.router            Linear                    4 x 32    -                   [7]
c_attn.weight             Conv1D                    96 x 32   -                   [1]
lm_head                   Linear                    100 x 32  rowwise_bf16_wgrad  output, grad_input
[1] not a nn.Linear
[2] MultiheadAttention.forward reads its weight directly, without calling the layer's forward, which
    would not be FP8
[3] tiny: a dim of 8 is less than 16
[4] weights are torch.float64; FP8 layers support bfloat16, float16 and float32
[5] a subclass of nn.Linear (Scaled), whose own forward would be lost
[6] a 3-D parameter (experts?), not a nn.Linear
[7] tiny: a dim of 4 is less than 16
3 of 11 converted""",
    )


def test_printed_before_convert():
    assert_expected_inline(
        str(f8.conversion_report(nn.Sequential(nn.Linear(32, 48), nn.ReLU()))),
        """\
layer  module  out x in  recipe  GEMMs in FP8
-----  ------  --------  ------  ------------
0      Linear  48 x 32   -       [1]
[1] convert() has not visited it
0 of 1 converted""",
    )


def test_printed_of_a_root_linear_with_a_recipe_of_nothing():
    assert_expected_inline(
        str(f8.conversion_report(f8.convert(nn.Linear(32, 48), f8.Recipe()))),
        """\
layer        module  out x in  recipe  GEMMs in FP8
-----------  ------  --------  ------  ------------
(the model)  Linear  48 x 32   custom  none [1]
[1] the recipe has no quantizers
1 of 1 converted""",
    )


def test_printed_with_filters_and_two_recipes():
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    f8.convert(layers, f8.recipes.tensorwise(), filter=["0", "1", "!1"])
    f8.convert(layers, f8.recipes.rowwise(eps=1e-6), filter=lambda module, fqn: fqn == "2")
    assert_expected_inline(
        str(f8.conversion_report(layers)),
        """\
layer  module  out x in  recipe              GEMMs in FP8
-----  ------  --------  ------------------  ------------
0      Linear  32 x 32   tensorwise          all three
{1,3}  Linear  32 x 32   -                   [1]
2      Linear  32 x 32   rowwise(eps=1e-06)  all three
[1] excluded by the filter
2 of 4 converted""",
    )


def test_printed_of_a_model_that_multiplies_nothing():
    assert_expected_inline(
        str(f8.conversion_report(nn.ReLU())),
        """\
layer  module  out x in  recipe  GEMMs in FP8
-----  ------  --------  ------  ------------
0 of 0 converted""",
    )


def test_rows_say_what_the_table_says():
    recipe = f8.recipes.rowwise_bf16_wgrad()
    report = f8.conversion_report(f8.convert(model(), recipe))
    up, gate = row(report, "up"), row(report, "gate")
    assert (up.module, up.converted, up.reason, up.recipe) == ("Linear", True, "", recipe)
    assert (up.in_features, up.out_features) == (32, 64)
    assert up.float8_gemms() == ("output", "grad_input")
    assert (gate.converted, gate.reason, gate.recipe) == (False, "tiny: a dim of 8 is less than 16", None)
    assert gate.float8_gemms() == ()


@pytest.mark.parametrize(
    ("fqn", "size", "reason"),
    [
        ("attention.out_proj", (32, 32), "MultiheadAttention.forward reads its weight directly"),
        ("scaled", (32, 32), "a subclass of nn.Linear (Scaled)"),
        ("exact", (32, 32), "weights are torch.float64; FP8 layers support bfloat16, float16 and float32"),
        ("experts.w1", (32, 64), "a 3-D parameter (experts?), not a nn.Linear"),
        ("experts.router", (32, 4), "tiny: a dim of 4 is less than 16"),
        ("c_attn.weight", (32, 96), "not a nn.Linear"),
    ],
)
def test_what_can_not_be_converted_is_listed_with_its_reason(fqn, size, reason):
    found = row(f8.conversion_report(f8.convert(model(), f8.recipes.rowwise())), fqn)
    assert not found.converted
    assert (found.in_features, found.out_features) == size
    assert found.reason.startswith(reason)


def test_reasons_are_those_of_the_last_convert_and_go_with_revert():
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    f8.convert(layers, f8.recipes.rowwise(), filter="0")
    assert row(f8.conversion_report(layers), "1").reason == "excluded by the filter 0"
    f8.convert(layers, f8.recipes.rowwise(), filter=lambda module, fqn: fqn == "0")
    assert row(f8.conversion_report(layers), "1").reason == "excluded by the filter"
    f8.revert(layers)
    assert [r.reason for r in f8.conversion_report(layers).rows] == ["convert() has not visited it"] * 2


def test_a_layer_converted_later_says_nothing_of_having_been_left_out():
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    f8.convert(layers, f8.recipes.rowwise(), filter="0")
    f8.convert(layers, f8.recipes.rowwise())
    assert [(r.converted, r.reason) for r in f8.conversion_report(layers).rows] == [(True, "")] * 2
    f8.revert(layers)
    assert row(f8.conversion_report(layers), "1").reason == "convert() has not visited it"


def test_a_linear_in_two_places_has_one_row():
    shared = nn.Linear(32, 32)
    report = f8.conversion_report(f8.convert(nn.ModuleDict({"a": shared, "b": shared}), f8.recipes.rowwise()))
    assert [r.fqn for r in report.rows] == ["a"]


def test_weights_of_attention_and_recurrent_layers_are_listed_and_embeddings_and_positions_are_not():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(32, 4),
            "lstm": nn.LSTM(32, 48),
            "embedding": nn.Embedding(100, 32),
            "norm": nn.LayerNorm(32),
            "conv": nn.Conv1d(32, 32, 3),
        }
    )
    model.position = nn.Parameter(torch.zeros(1, 100, 32))
    rows = {row.fqn: row.reason for row in f8.conversion_report(model).rows}
    assert rows.pop("attention.out_proj").startswith("convert() has not visited it")
    assert rows == dict.fromkeys(
        ["attention.in_proj_weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0"], "not a nn.Linear"
    )


class Multiplying(nn.Module):
    """Matrices of every kind, in products and not."""

    def __init__(self):
        super().__init__()
        self.embed, self.table, self.body = nn.Embedding(64, 32), nn.Embedding(64, 32), nn.Linear(32, 32)
        self.proj, self.kernel = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(32, 32))
        self.logit_scale, self.bank = nn.Parameter(torch.ones(4, 1, 1)), nn.Parameter(torch.randn(4, 32, 32))
        self.position, self.norm = nn.Parameter(torch.randn(8, 32)), nn.LayerNorm((8, 32))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 32, 3))

    def forward(self, tokens):
        x = self.norm(self.body(self.embed(tokens)) + self.position) + self.table(tokens)
        x = self.normed(x) + self.conv(x.mT).mean()
        x = torch.einsum("btk,ekn->etn", x @ self.kernel, self.bank) * self.logit_scale
        return nn.functional.linear(x, self.embed.weight), x @ self.proj


@pytest.mark.parametrize("way", ["given to the report", "the first one", "compiled"])
def test_matrices_multiplied_without_a_linear_are_listed_by_what_a_forward_does_with_them(way):
    model, tokens = f8.convert(Multiplying(), f8.recipes.rowwise()), torch.zeros(2, 8, dtype=torch.int64)
    if way != "given to the report":
        (torch.compile(model, backend="aot_eager") if way == "compiled" else model)(tokens)
    forward = (lambda: model(tokens)) if way == "given to the report" else None
    rows = {row.fqn: row.reason for row in f8.conversion_report(model, forward=forward).rows}
    assert rows == {
        "body": "",
        "normed": "its weight or bias is parametrized; convert the model first, then parametrize the converted layer",
        "bank": "a 3-D parameter (experts?), not a nn.Linear",
        **dict.fromkeys(["embed.weight", "proj", "kernel"], "not a nn.Linear"),
    }


class LowRank(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.lora_A = nn.Parameter(torch.randn(4, 32))

    def forward(self, x):
        return nn.functional.linear(x, self.weight) + (x @ self.lora_A.T).sum()


def test_matrices_of_a_linear_beside_its_weight_are_listed():
    model = LowRank(32, 32)
    report = f8.conversion_report(model, forward=lambda: model(torch.randn(4, 32)))
    assert [(r.fqn, r.out_features, r.in_features) for r in report.rows] == [("", 32, 32), ("lora_A", 4, 32)]


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (f8.recipes.rowwise(), "rowwise"),
        (f8.recipes.rowwise(scale="pow2", grad_format="e5m2"), "rowwise(grad_format='e5m2', scale='pow2')"),
        (f8.recipes.delayed(history=16, weight_lifetime="call"), "delayed(history=16, weight_lifetime='call')"),
        (f8.recipes.mxfp8(emulate=True), "mxfp8(emulate=True)"),
    ],
    ids=["ready", "two arguments", "delayed", "mxfp8"],
)
def test_print_names_a_recipe_and_the_report_does(recipe, name):
    layer = f8.convert(nn.Linear(32, 48), recipe)
    assert repr(layer) == f"Linear(in_features=32, out_features=48, bias=True, recipe={name})"
    assert name in str(f8.conversion_report(layer)).splitlines()[2]
