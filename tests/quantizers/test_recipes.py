"""Ready recipes: by name, described, and what their arguments reach."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields, replace

import pytest
import torch
from eight_bits import EIGHT_BITS

import fp8compile as f8
from fp8compile import recipes
from fp8compile.quantizers import GEMMS

ROLES = tuple(operand for gemm in GEMMS for operand in (gemm.a, gemm.b))
GRADIENTS = ("grad_output", "grad_output_for_grad_weight")


@pytest.mark.parametrize("name", recipes.names())
def test_name_gives_the_recipe_and_the_recipe_its_name(name):
    recipe = recipes.by_name(name)
    assert isinstance(recipe, f8.Recipe)
    assert recipe == getattr(recipes, name)()
    assert recipes.describe(recipe) == name
    assert name in recipes.__all__


def test_ready_recipes_differ():
    ready = [recipes.by_name(name) for name in recipes.names()]
    assert {*EIGHT_BITS, "blockwise_bf16_wgrad", "nvfp4"} == set(recipes.names())
    assert len(set(ready)) == len(ready)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rowise", "there is no recipe named 'rowise'; recipes are {}. Did you mean 'rowwise'?"),
        ("tensor_wise", "there is no recipe named 'tensor_wise'; recipes are {}. Did you mean 'tensorwise'?"),
        ("xyz", "there is no recipe named 'xyz'; recipes are {}."),
        ("", "there is no recipe named ''; recipes are {}."),
        (None, "there is no recipe named None; recipes are {}."),
    ],
    ids=str,
)
def test_unknown_name_raises_with_the_closest_one(name, message):
    with pytest.raises(ValueError, match="there is no recipe named") as caught:
        recipes.by_name(name)
    assert str(caught.value) == message.format(", ".join(recipes.names()))


def test_mxfp8_may_be_emulated_if_asked():
    assert not recipes.mxfp8().emulate
    assert recipes.mxfp8(emulate=True) == replace(recipes.mxfp8(), emulate=True)


def test_mxfp8_has_no_scale_of_another_kind():
    with pytest.raises(ValueError, match="mxfp8: `scale` is 'pow2'; it must be 'e8m0_rceil' or 'e8m0_floor'"):
        recipes.mxfp8(scale="pow2")


@pytest.mark.parametrize("block", [(32, 1), (16, 16), (128, 128), [32, 32], 32, None], ids=str)
def test_mxfp8_has_no_weights_in_other_blocks(block):
    with pytest.raises(ValueError, match=r"mxfp8: `weight_block` is .*; it must be \(1, 32\) or \(32, 32\)") as caught:
        recipes.mxfp8(weight_block=block)
    assert f"`weight_block` is {block!r};" in str(caught.value)


def test_mxfp8_with_square_blocks_has_one_quantizer_of_the_weight_and_all_else_of_the_other():
    square, line = recipes.mxfp8(weight_block=(32, 32)), recipes.mxfp8()
    assert recipes.describe(square) == "mxfp8(weight_block=(32, 32))"
    assert recipes.mxfp8(weight_block=(1, 32)) == line
    assert square.shares_weight_codes()
    assert not line.shares_weight_codes()
    assert replace(square, weight=line.weight, weight_for_grad_input=line.weight_for_grad_input) == line
    assert square.weight == replace(line.weight, block=(32, 32))


@pytest.mark.parametrize(
    ("argument", "value", "field", "roles"),
    [
        ("format", "e5m2", "format", [role for role in ROLES if role not in GRADIENTS]),
        ("scale", "another", "scale", ROLES),
        ("eps", 1e-6, "eps", ROLES),
        ("grad_rounding", "stochastic", "rounding", GRADIENTS),
        ("history", 16, "history", ROLES),
        ("algorithm", "most_recent", "algorithm", ROLES),
        ("margin", 2, "margin", ROLES),
    ],
    ids=["format", "scale", "eps", "grad_rounding", "history", "algorithm", "margin"],
)
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_argument_reaches_every_role_it_speaks_of(name, argument, value, field, roles):
    if argument not in inspect.signature(getattr(recipes, name)).parameters:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{argument}'"):
            recipes.by_name(name, **{argument: value})
        return
    if argument == "scale":
        value = "e8m0_floor" if name == "mxfp8" else "pow2"
    arguments = {argument: value} | ({"grad_format": "e4m3"} if argument == "format" else {})
    if argument == "format":
        with pytest.raises(ValueError, match="e5m2 for input and for weight"):
            recipes.by_name(name, **arguments)
        return
    default, changed = recipes.by_name(name), recipes.by_name(name, **arguments)
    assert recipes.describe(changed) == f"{name}({argument}={value!r})"
    for role in roles:
        before, after = getattr(default, role), getattr(changed, role)
        assert (before is None) is (after is None), role
        if after is not None:
            assert after == replace(before, **{field: value}), role


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_grad_format_reaches_gradients_and_nothing_else(name):
    e4m3, e5m2 = (recipes.by_name(name, grad_format=grad_format) for grad_format in ("e4m3", "e5m2"))
    for role in ROLES:
        quantizer = getattr(e5m2, role)
        if quantizer is not None:
            assert quantizer.format == ("e5m2" if role in GRADIENTS else "e4m3"), role
            assert replace(quantizer, format="e4m3") == getattr(e4m3, role), role


@pytest.mark.parametrize("name", recipes.names())
def test_arguments_are_keywords_with_defaults_and_no_others(name):
    function = getattr(recipes, name)
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.kind is parameter.KEYWORD_ONLY, parameter
        assert parameter.default is not parameter.empty, parameter
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocks'"):
        recipes.by_name(name, blocks=(1, -1))


@pytest.mark.parametrize("name", recipes.names())
def test_recipe_is_a_value(name):
    recipe = recipes.by_name(name)
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe
    assert hash(again) == hash(recipe)
    with pytest.raises(AttributeError, match="cannot assign to field 'input'"):
        recipe.input = None


@pytest.mark.parametrize("name", [name for name in recipes.names() if name != "delayed"])  # which needs a state
def test_a_recipe_may_be_made_in_the_compiled_function(name):
    x, weight = torch.randn(16, 32).bfloat16(), torch.randn(32, 32).bfloat16()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x):
        return f8.linear(x, weight, recipe=recipes.by_name(name))

    assert torch.equal(layer(x), f8.linear(x, weight, recipe=recipes.by_name(name)))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_a_recipe_is_described_by_the_call_that_makes_it(name):
    made = recipes.by_name(name, grad_format="e4m3" if name in ("tensorwise", "delayed") else "e5m2")
    assert eval(f"recipes.{recipes.describe(made)}") == made
    assert recipes.describe(replace(made, fast_accumulation_output=False)) == "custom"


@pytest.mark.parametrize(
    "text",
    [
        "rowwise(by_mx=True)", "tensorwise(by_mx=True)", "blockwise(scale='pow2')", "nvfp4(outer='reciprocal')",
        "nvfp4(weight_block=(1, 16), backward='bf16', outer='reciprocal')", "mxfp8(weight_block=(32, 32))",
    ],
)  # fmt: skip
def test_the_text_of_a_call_makes_the_recipe_that_is_described_by_it(text):
    made = recipes.by_name(text)
    assert made == eval(f"recipes.{text}")
    assert eval(f"recipes.{recipes.describe(made)}") == made
    assert recipes.by_name(recipes.describe(made)) == made


@pytest.mark.parametrize("text", ["rowwise(True)", "rowwise(eps=x)", "rowwise(**{})", "rowwise(", "f8.rowwise()"])
def test_a_text_that_is_no_call_of_a_recipe_makes_none(text):
    said = r"recipe named 'rowwise\('; recipes are|recipe '.*'; it must be a name, such as rowwise, or a call"
    with pytest.raises(ValueError, match=said):
        recipes.by_name(text)


def test_blocks_of_the_ready_recipes():
    blocks = {
        name: [getattr(quantizer, "block", None) for quantizer in (getattr(recipes.by_name(name), s) for s in ROLES)]
        for name in (*recipes.names()[:5], "delayed")
    }
    row, column, line, tile, pillar = (1, -1), (-1, 1), (1, 128), (128, 128), (128, 1)
    assert blocks == {
        "tensorwise": [(-1, -1)] * 6,
        "rowwise": [row, row, row, column, column, column],
        "rowwise_bf16_wgrad": [row, row, row, column, None, None],
        "blockwise": [line, tile, line, tile, pillar, pillar],
        "blockwise_bf16_wgrad": [line, tile, line, tile, None, None],
        "delayed": [(-1, -1)] * 6,
    }


def test_a_recipe_of_nothing_is_custom_and_has_no_float8_gemm():
    nothing = f8.Recipe()
    assert recipes.describe(nothing) == "custom"
    assert [nothing.quantizers(gemm) for gemm in GEMMS] == [None] * 3
    assert {f.name for f in fields(f8.Recipe)} >= set(ROLES)
