"""Recipes for layers: by name, by a function, and the ends of a model in high precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile as f8

ROW, TENSOR, DELAYED = f8.recipes.rowwise(), f8.recipes.tensorwise(), f8.recipes.delayed(history=4)


many_ends = pytest.mark.filterwarnings("ignore:convert. keep_ends=")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """An embedding's linear, a stack of blocks, a head."""

    def __init__(self, blocks=4):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(32, 48)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def recipes_of(model):
    return {row.fqn: row.recipe for row in f8.conversion_report(model).rows}


def converted(model):
    return {fqn for fqn, recipe in recipes_of(model).items() if recipe is not None}


def test_the_first_pattern_that_matches_decides():
    model = f8.convert(Model(), {"layers.0.*": None, "*.down": TENSOR, "layers.*": ROW})
    assert recipes_of(model) == {
        "embed": None, "head": None, "layers.0.up": None, "layers.0.down": None,
        **{f"layers.{i}.up": ROW for i in (1, 2, 3)}, **{f"layers.{i}.down": TENSOR for i in (1, 2, 3)},
    }  # fmt: skip
    reasons = {row.fqn: row.reason for row in f8.conversion_report(model).rows}
    assert reasons["embed"] == reasons["layers.0.up"] == "no recipe is given for it"


def test_a_function_is_called_once_a_layer_and_never_in_a_forward():
    called = []

    def recipe(module, fqn):
        called.append(fqn)
        return ROW if module.in_features == 32 else None

    model = f8.convert(Model(blocks=2), recipe)
    assert called == ["embed", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]
    assert converted(model) == {"layers.0.up", "layers.1.up", "head"}
    model(torch.randn(3, 16))
    assert len(called) == 6


def test_a_shared_layer_is_one_layer():
    model = Model(blocks=2)
    model.layers[1] = model.layers[0]
    f8.convert(model, {"layers.1.*": ROW})
    assert converted(model) == {"layers.0.up", "layers.0.down"}


@pytest.mark.parametrize(
    ("count", "left"),
    [
        (0, set()),
        (1, {"embed", "layers.0.up", "layers.0.down", "layers.3.up", "layers.3.down", "head"}),
        (2, set(recipes_of(Model()))),
        (9, set(recipes_of(Model()))),
    ],
)
@many_ends
@pytest.mark.filterwarnings("ignore:convert. no linear layer was converted")
def test_the_ends_stay_as_they_are(count, left):
    model = f8.convert(Model(), ROW, keep_ends=count)
    assert set(recipes_of(model)) - converted(model) == left
    reasons = {row.reason for row in f8.conversion_report(model).rows if row.fqn in left}
    assert reasons == ({f"at one end of the model (keep_ends={count})"} if left else set())


@many_ends
def test_without_a_stack_each_linear_is_a_block():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    assert converted(f8.convert(Plain(), ROW, keep_ends=1)) == {"b"}
    assert converted(f8.convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), ROW, keep_ends=1)) == {"1", "2"}


class EncoderDecoder(nn.Module):
    """Blocks with lists of their own, a projector between encoder and decoder, and two heads."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = nn.ModuleList(nn.ModuleDict({"of": nn.ModuleList((Block(), Block()))}) for _ in range(encoder))
        self.project = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.decoder = nn.Sequential(*(Block() for _ in range(decoder)))
        self.heads = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))


def blocks_in_fp8(model):
    return {".".join(fqn.split(".")[:2]) for fqn in converted(model)}


@many_ends
def test_the_ends_of_each_list_of_blocks_stay_and_what_is_outside_of_lists():
    model = f8.convert(EncoderDecoder(4, 3), ROW, keep_ends=1)
    assert blocks_in_fp8(model) == {"encoder.1", "encoder.2", "decoder.1"}


def test_a_tail_counts_the_blocks_of_all_lists():
    """A large encoder took the whole decoder into the tail: it was the only list that was counted."""
    assert blocks_in_fp8(f8.convert(EncoderDecoder(6, 4), ROW, tail=0.2)) == {
        *(f"encoder.{block}" for block in range(6)), "project.0", "project.2", "decoder.0", "decoder.1",
    }  # fmt: skip
    in_tail = {"decoder.0", "decoder.1", "project.0", "project.2"}
    assert blocks_in_fp8(f8.convert(EncoderDecoder(6, 2), ROW, tail=0.3)).isdisjoint(in_tail)


def test_keep_ends_warns_if_more_than_a_third_of_the_layers_stays():
    f8.convert(Model(blocks=8), ROW, keep_ends=1)  # 6 of 18
    with pytest.warns(UserWarning, match=r"keep_ends=1 leaves 6 of 16 layers in high precision: the ends"):
        f8.convert(Model(blocks=7), ROW, keep_ends=1)


def test_layers_with_and_without_state_go_together():
    model = f8.convert(Model(), {"*.down": DELAYED, "*": ROW}).bfloat16()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(4, 16, dtype=torch.bfloat16)).float().sum().backward()
    assert {name.rpartition(".")[0] for name, _ in model.named_buffers()} == {f"layers.{i}.down" for i in range(4)}
    assert all(float(layer.down.multiplier.min()) != 1.0 for layer in model.layers)


def test_the_same_again_changes_nothing():
    wanted = {"*.down": TENSOR, "*": ROW}
    model = f8.convert(Model(), wanted)
    before = recipes_of(model)
    assert recipes_of(f8.convert(model, wanted)) == before
    with pytest.raises(ValueError, match=r"layers\.0\.down is already converted, with another recipe"):
        f8.convert(model, ROW)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (
            {"recipe": {"layer.*": ROW}},
            ValueError,
            r"the pattern 'layer.\*' matches no linear layer: embed",
        ),
        ({"recipe": {0: ROW}}, TypeError, "a key of `recipe` is 0; it must be a string pattern, such as 'layers.*'"),
        (
            {"recipe": {"*": "rowwise"}},
            TypeError,
            r"convert: '\*': `recipe` is 'rowwise'; it must be a "
            r"fp8compile.Recipe",
        ),
        ({"recipe": lambda module, fqn: "rowwise"}, TypeError, "convert: for 'embed': `recipe` is 'rowwise'"),
        ({"recipe": "rowwise"}, TypeError, "convert: `recipe` is 'rowwise'; it must be a fp8compile.Recipe"),
        ({"recipe": f8.Recipe}, TypeError, "convert: `recipe` is <class"),
        (
            {"recipe": ROW, "keep_ends": -1},
            ValueError,
            "`keep_ends` is -1; it must be an int of at least 0, the number of blocks",
        ),
        (
            {"recipe": ROW, "keep_ends": True},
            ValueError,
            "`keep_ends` is True; it must be an int of at least 0, the number of blocks",
        ),
    ],
    ids=["pattern", "key", "value", "function", "text", "class", "negative", "bool"],
)
def test_wrong_arguments_say_what_is_allowed_and_change_nothing(arguments, error, says):
    model = Model()
    with pytest.raises(error, match=says):
        f8.convert(model, **arguments)
    assert not converted(model)
