"""Recipe: which operands it takes, what it refuses, and that it is a value."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
import torch._dynamo.testing

import fp8compile as f8
from fp8compile import CurrentScaling, Recipe
from fp8compile.quantizers import GEMMS, GemmConfig, gemm_kind

TENSOR, ROW, COLUMN = (CurrentScaling(block=block) for block in ((-1, -1), (1, -1), (-1, 1)))
LINE, TILE, PILLAR = (CurrentScaling(block=block) for block in ((1, 128), (128, 128), (128, 1)))
E5M2 = CurrentScaling(format="e5m2")
PAIRS = [(gemm.name, gemm.a, gemm.b) for gemm in GEMMS]
every_recipe = pytest.mark.parametrize("name", f8.recipes.names())


@pytest.mark.parametrize(("gemm", "a", "b"), PAIRS)
def test_one_quantized_operand_is_refused(gemm, a, b):
    for given, missing in ((a, b), (b, a)):
        text = (
            f"Recipe: the GEMM of {gemm} has a quantizer for {given} but none for {missing}; .*Pass a quantizer "
            "for both, or None"
        )
        with pytest.raises(ValueError, match=text):
            Recipe(**{given: TENSOR})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (TENSOR, ROW),
        (ROW, TENSOR),
        (ROW, COLUMN),  # of the output's operands: w_NK enters transposed, so rowwise is right for both
        (COLUMN, COLUMN),
        (COLUMN, ROW),
        (LINE, PILLAR),
        (LINE, TENSOR),
        (ROW, TILE),
        (PILLAR, LINE),
        (LINE, CurrentScaling(block=(64, 64))),
        (CurrentScaling(block=(2, 128)), TILE),
    ],
)
def test_pairs_that_no_gemm_multiplies_are_refused_for_the_output(a, b):
    with pytest.raises(
        ValueError, match=r"Recipe: no GEMM supports the blocks of output: input has block .* Supported are "
    ) as e:
        Recipe(input=a, weight=b)
    assert str(a.block) in str(e.value)
    assert str(b.block) in str(e.value)


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ((-1, -1), (-1, -1), "tensorwise"),
        ((1, -1), (-1, 1), "rowwise"),
        ((1, 128), (128, 1), "blockwise"),
        ((1, 128), (128, 128), "blockwise"),
        ((128, 128), (128, 1), "blockwise"),
        ((1, 16), (16, 16), "blockwise"),
        ((1, 1), (1, 1), None),
        ((1, -1), (1, -1), None),
        ((-1, 1), (-1, 1), None),
        ((1, 128), (64, 1), None),
        ((2, 128), (128, 1), None),
        ((-1, 128), (128, 1), None),
        ((-1, -1), (-1, 1), None),
    ],
)
def test_kinds_of_gemm(a, b, kind):
    assert gemm_kind(a, b) == kind


@pytest.mark.parametrize(
    ("gemm", "a", "b"),
    [
        ("output", ROW, ROW),
        ("grad_input", ROW, COLUMN),
        ("grad_weight", COLUMN, COLUMN),
        ("output", LINE, TILE),
        ("grad_input", LINE, TILE),
        ("grad_weight", PILLAR, PILLAR),
    ],
)
def test_blocks_are_those_of_operands_as_the_layer_holds_them(gemm, a, b):
    fields_ = next((g.a, g.b) for g in GEMMS if g.name == gemm)
    recipe = Recipe(**dict(zip(fields_, (a, b), strict=True)))
    for other in GEMMS:
        assert recipe.quantizers(other) == ((a, b) if other.name == gemm else None)


@pytest.mark.parametrize(("gemm", "a", "b"), PAIRS)
def test_e5m2_by_e5m2_is_refused_and_by_e4m3_taken(gemm, a, b):
    text = (
        f"Recipe: the GEMM of {gemm} has e5m2 for {a} and for {b}, but tensor cores multiply e4m3 by e4m3 or by e5m2"
    )
    with pytest.raises(ValueError, match=text):
        Recipe(**{a: E5M2, b: E5M2})
    for left, right in ((E5M2, TENSOR), (TENSOR, E5M2)):
        assert getattr(Recipe(**{a: left, b: right}), a) == left


@pytest.mark.parametrize("role", [name for _, *roles in PAIRS for name in roles])
@pytest.mark.parametrize("bad", ["rowwise", 1, 2.0, True, f8.recipes.rowwise()])
def test_a_role_takes_a_quantizer_or_none(role, bad):
    with pytest.raises(
        TypeError, match=f"Recipe: `{role}` is .*; it must be a quantizer, such as .* or None for high precision"
    ):
        Recipe(**{role: bad})


@pytest.mark.parametrize("bad", [CurrentScaling, torch.float8_e4m3fn, torch.ones(1), [ROW]])
def test_a_role_takes_no_class_dtype_tensor_or_list(bad):
    with pytest.raises(TypeError, match=f"Recipe: field input holds a {type(bad).__name__}"):
        Recipe(input=bad, weight=bad)


@pytest.mark.parametrize("switch", ["emulate", "by_mx", *(f"fast_accumulation_{gemm.name}" for gemm in GEMMS)])
@pytest.mark.parametrize("bad", [1, 0, None, "yes"])
def test_switches_are_bools(switch, bad):
    with pytest.raises(TypeError, match=f"Recipe: `{switch}` is {bad!r}; it must be True or False"):
        Recipe(**{switch: bad})


@pytest.mark.parametrize("switch", ["emulate", "fast_accumulation", "by_mx"])
def test_switches_of_a_gemm_are_bools(switch):
    with pytest.raises(TypeError, match=f"GemmConfig: `{switch}` is 1; it must be True or False"):
        GemmConfig(**{switch: 1})


def test_switches_reach_their_gemm():
    for gemm in GEMMS:
        for switch in (True, False):
            others = {"emulate": not switch, "by_mx": switch}
            recipe = Recipe(**{f"fast_accumulation_{gemm.name}": switch}, **others)
            assert recipe.gemm_config(gemm) == GemmConfig(fast_accumulation=switch, **others)


def test_arguments_are_by_keyword():
    with pytest.raises(TypeError, match="positional"):
        Recipe(ROW, ROW)


# ---------------------------------------------------------------------------------- values


@every_recipe
def test_a_recipe_survives_pickle_copy_repr_and_fx_repr(name):
    recipe = f8.recipes.by_name(name)
    text, names = recipe.__fx_repr__()
    for other in (
        pickle.loads(pickle.dumps(recipe)),
        copy.copy(recipe),
        copy.deepcopy(recipe),
        replace(recipe),
        eval(repr(recipe), vars(f8)),
        eval(text, dict(names)),
        f8.recipes.by_name(name),
    ):
        assert other == recipe
        assert hash(other) == hash(recipe)


def test_each_field_of_a_recipe_decides_equality():
    for field in fields(Recipe):
        # a gradient in high precision, where the field is about one
        recipe = (
            f8.recipes.nvfp4(backward="bf16") if field.name == "dequantized_gradients" else f8.recipes.tensorwise()
        )
        value = getattr(recipe, field.name)
        others = {True: False, False: True, "call": "step"}
        changed = replace(recipe, **{field.name: others[value] if value in others else replace(value, eps=1.0)})
        assert changed != recipe
        assert changed.__fx_repr__()[0] != recipe.__fx_repr__()[0]


def test_recipes_are_frozen():
    with pytest.raises(FrozenInstanceError):
        f8.recipes.rowwise().input = None


def test_ready_recipes_differ_and_know_their_names():
    made = [f8.recipes.by_name(name) for name in f8.recipes.names()]
    assert len(set(made)) == len(made)
    assert [f8.recipes.describe(recipe) for recipe in made] == list(f8.recipes.names())
    assert f8.recipes.describe(Recipe()) == "custom"


def test_an_unknown_recipe_is_refused_with_the_closest_name():
    with pytest.raises(ValueError, match=r"no recipe named 'rowwize'; recipes are .*\. Did you mean 'rowwise'\?"):
        f8.recipes.by_name("rowwize")


# ---------------------------------------------------------------------------------- recompiles


def test_a_changed_recipe_recompiles_once_and_an_equal_one_never():
    counter = torch._dynamo.testing.CompileCounter()

    def layer(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        return f8.linear(x, weight, recipe=recipe)

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    for recipe, graphs in (
        (f8.recipes.rowwise(), 1),
        (f8.recipes.rowwise(), 1),
        (pickle.loads(pickle.dumps(f8.recipes.rowwise())), 1),
        (f8.recipes.rowwise(eps=1e-6), 2),
        (f8.recipes.rowwise(eps=1e-6), 2),
        (f8.recipes.rowwise(), 2),
    ):
        compiled(x, weight, recipe)
        assert counter.frame_count == graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_module_recompiles_when_its_recipe_is_replaced(backend):
    module = f8.Linear(32, 16, recipe=f8.recipes.tensorwise())
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    x = torch.randn(4, 32)
    outputs = []
    for recipe, graphs in ((f8.recipes.tensorwise(), 1), (f8.recipes.rowwise(), 2), (f8.recipes.tensorwise(), 2)):
        module.recipe = recipe
        outputs.append(compiled(x))
        assert counter.frame_count == graphs
        assert torch.equal(outputs[-1], f8.linear(x, module.weight, module.bias, recipe=recipe))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name", ["rowwise", "rowwise_bf16_wgrad", "mxfp8"])
def test_codes_that_do_not_serve_grad_input_are_not_to_be_kept(name):
    with pytest.raises(
        ValueError,
        match=r"Recipe: weight_lifetime='pass' requires the same quantizer for weight and weight_for_grad_input",
    ):
        replace(f8.recipes.by_name(name), weight_lifetime="pass")
    with pytest.raises(ValueError, match="got None and None"):
        Recipe(weight_lifetime="pass")


def test_delayed_scaling_keeps_codes_of_weights_unless_told_otherwise():
    assert f8.recipes.delayed().keeps_weight_for_backward()
    assert not f8.recipes.delayed(weight_lifetime="call").keeps_weight_for_backward()
    assert not f8.recipes.tensorwise().keeps_weight_for_backward()
    with pytest.raises(ValueError, match="Recipe: `weight_lifetime` is 1; it must be 'call', 'pass', 'step', 'param"):
        f8.recipes.delayed(weight_lifetime=1)


@pytest.mark.parametrize("recipe", [None, "rowwise", []])
def test_a_layer_is_given_no_other_recipe_than_a_recipe(recipe):
    layer = f8.Linear(32, 16, recipe=f8.recipes.tensorwise())
    with pytest.raises(TypeError, match=r"Linear: `recipe` is .*; it must be a fp8compile.Recipe"):
        layer.recipe = recipe
    assert layer.recipe == f8.recipes.tensorwise()
