"""Layers of a subclass of nn.Linear that inherits its forward: converted, and of their class all the same."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from io import BytesIO

import pytest
import torch
from torch import nn

import fp8compile as f8

RECIPE, DELAYED = f8.recipes.rowwise(), f8.recipes.delayed(history=4)


class Registered:
    """A mixin that hears of each class that derives from it, such as a library of components has."""

    known: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Registered.known.append(cls)


class Plain(nn.Linear, Registered):
    """What torchtitan's Linear was: a class of its own, for configurations and initialization."""

    kind = "plain"

    def __init__(self, *args, std=0.02, **kwargs):
        self.std = std
        super().__init__(*args, **kwargs)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)

    def extra_repr(self):
        return f"{super().extra_repr()}, std={self.std}"

    def doubled(self, x):
        return 2 * self(x)


class Deeper(Plain):
    pass


def model(cls=Plain):
    torch.manual_seed(0)
    return nn.Sequential(cls(32, 48), nn.SiLU(), cls(48, 32))


@pytest.mark.parametrize("cls", [Plain, Deeper])
def test_a_converted_layer_is_of_both_classes_and_has_the_bits_of_fp8(cls, assert_bits_equal):
    layers, x = model(cls), torch.randn(4, 32)
    known = list(Registered.known)
    assert f8.convert(layers, RECIPE) is layers
    first = layers[0]
    assert isinstance(first, cls)
    assert isinstance(first, f8.Linear)
    assert type(first) is type(layers[2])
    assert (first.kind, first.std, type(first).__name__) == ("plain", 0.02, cls.__name__)
    expected = f8.linear(x, first.weight, first.bias, recipe=RECIPE)
    assert_bits_equal(first(x), expected)
    assert_bits_equal(first.doubled(x), 2 * expected)
    assert Registered.known == known, "it was told of a class that nobody wrote"
    first.reset_parameters()
    assert not first.bias.any()


def test_it_prints_what_the_class_prints_and_the_recipe():
    assert repr(f8.convert(Plain(32, 48), RECIPE)).startswith(
        "Plain(in_features=32, out_features=48, bias=True, std=0"
    )
    assert "recipe=" in repr(f8.convert(Plain(32, 48), RECIPE))
    row = f8.conversion_report(f8.convert(Plain(32, 48), RECIPE)).rows[0]
    assert (row.module, row.converted) == ("Plain", True)


def test_revert_gives_the_class_back(assert_bits_equal):
    layers, x = model(), torch.randn(4, 32)
    expected, before = layers(x), [set(vars(layer)) for layer in layers]
    f8.revert(f8.convert(layers, DELAYED))
    assert [type(layer) for layer in layers] == [Plain, nn.SiLU, Plain]
    assert [set(vars(layer)) for layer in layers] == before
    assert_bits_equal(layers(x), expected)
    assert type(f8.convert(layers, RECIPE)[0].to_linear()) is Plain


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layers: pickle.loads(pickle.dumps(layers)),
    "pickle protocol 0": lambda layers: pickle.loads(pickle.dumps(layers, protocol=0)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("recipe", [RECIPE, DELAYED], ids=["rowwise", "delayed"])
def test_copies_are_converted_layers_of_the_class(way, recipe, assert_bits_equal):
    layer, x = f8.convert(Plain(32, 48), recipe), torch.randn(4, 32)
    layer(x).sum().backward()  # delayed scaling has a state
    twin = COPIES[way](layer)
    assert type(twin) is type(layer)
    assert_bits_equal(twin(x), layer(x))
    assert list(twin.state_dict()) == list(layer.state_dict())
    f8.revert(twin)
    assert type(twin) is Plain


def test_a_class_made_of_a_converted_one_is_copied_as_itself():
    layer = f8.convert(Plain(32, 48), RECIPE)
    layer.__class__ = above = type("Above", (type(layer),), {})  # as FSDP2 does
    assert type(copy.deepcopy(layer)) is above
    with pytest.raises(TypeError, match="this is a Above, and its own forward"):
        f8.revert(layer)


def test_a_saved_model_loads_in_a_fresh_process(tmp_path):
    torch.save(
        f8.convert(nn.Sequential(nn.modules.linear.NonDynamicallyQuantizableLinear(32, 48)), RECIPE), tmp_path / "m"
    )
    program = f"""
import torch
layer = torch.load({str(tmp_path / "m")!r}, weights_only=False)[0]
print(type(layer).__mro__[1].__module__, isinstance(layer, torch.nn.modules.linear.NonDynamicallyQuantizableLinear))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.stdout.split() == ["fp8compile.nn.convertible.subclasses", "True"], finished.stderr


def test_state_dicts_go_both_ways(assert_bits_equal):
    layers, x = f8.convert(model(), RECIPE), torch.randn(4, 32)
    plain = model()
    assert list(plain.state_dict()) == list(layers.state_dict())
    buffer = BytesIO()
    torch.save(layers.state_dict(), buffer)
    buffer.seek(0)
    plain.load_state_dict(torch.load(buffer))
    assert_bits_equal(f8.convert(plain, RECIPE)(x), layers(x))


@pytest.mark.parametrize("recipe", [RECIPE, DELAYED], ids=["rowwise", "delayed"])
def test_it_compiles_to_one_graph_once_with_the_bits_of_eager(recipe, assert_bits_equal):
    eager, compiled = (f8.convert(model(), recipe) for _ in range(2))
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            outputs = [call(x) for call in (eager, run)]
            for output in outputs:
                output.sum().backward()
            assert_bits_equal(outputs[1], outputs[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert_bits_equal(compiled[0].weight.grad, eager[0].weight.grad)


# ---------------------------------------------------------------------------------- what stays as it is


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class OwnCall(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class OwnRecipe(nn.Linear):
    recipe = "of a cake"


class OwnAttribute(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.weight_scale = 3.0


LEFT = {
    OwnForward: "a subclass of nn.Linear (OwnForward), whose own forward would be lost",
    OwnCall: "a subclass of nn.Linear (OwnCall), whose own forward would be lost",
    OwnRecipe: "it already has an attribute recipe, which an FP8 layer also uses",
    OwnAttribute: "it already has an attribute weight_scale, which an FP8 layer also uses",
}


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_a_layer_that_would_lose_something_stays_and_says_what(cls):
    layers = f8.convert(nn.Sequential(cls(32, 32), nn.Linear(32, 32)), RECIPE)
    row = f8.conversion_report(layers).rows[0]
    assert (type(layers[0]), row.reason) == (cls, LEFT[cls])


# ---------------------------------------------------------------------------------- a convert that converts nothing


NOTHING = (
    "convert: no linear layer was converted. Skipped: 2 (tiny: a dim of 8 is less than 16), 1 (weights are "
    "torch.float64; FP8 layers support bfloat16, float16 and float32). See fp8compile.conversion_report(model) for "
    "the reason of each layer."
)


def nothing_to_gain():
    return nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32), nn.Linear(32, 32, dtype=torch.float64))


def test_a_convert_that_converts_nothing_warns_with_the_reasons_counted():
    layers = nothing_to_gain()
    with pytest.warns(UserWarning, match="no linear layer was converted") as caught:
        f8.convert(layers, RECIPE)
    assert ([str(each.message) for each in caught], caught[0].filename) == ([NOTHING], __file__)
    assert [row.reason[:4] for row in f8.conversion_report(layers).rows] == ["tiny", "tiny", "weig"]


def test_strict_raises_instead_and_changes_nothing():
    layers = nothing_to_gain()
    with pytest.raises(ValueError, match="no linear layer was converted") as caught:
        f8.convert(layers, RECIPE, strict=True)
    assert str(caught.value) == NOTHING
    assert {row.reason for row in f8.conversion_report(layers).rows} == {"convert() has not visited it"}


def test_a_convert_that_converts_something_or_has_done_so_before_is_silent():
    layers = f8.convert(nn.Sequential(nn.Linear(32, 8), nn.Linear(32, 32)), RECIPE, strict=True)
    assert f8.convert(layers, RECIPE, strict=True) is layers
    with pytest.warns(UserWarning, match="no linear layer was converted. Skipped: 1 "):
        f8.convert(layers, RECIPE, filter=lambda module, fqn: False)


def test_many_reasons_are_cut_short():
    layers = nn.Sequential(*(nn.Linear(32, width) for width in range(2, 9)))
    with pytest.warns(UserWarning, match=r"less than 16\), and 2 reasons more\. See"):
        f8.convert(layers, RECIPE)
