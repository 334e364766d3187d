"""fp8compile.library: what a registration or a class lacks is said where it is written; entry points."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8compile as f8
from fp8compile.library import Cut, Quantizer, Split, register_op
from fp8compile.ops import OPS
from fp8compile.quantizers import entry_points


def impl(x: Tensor, quantizer: Quantizer) -> Tensor:
    return x + 1


PARTS = {
    "fake": impl,
    "backward": lambda ctx, grad: (grad, None),
    "setup_context": lambda ctx, inputs, output: None,
    "decompose": impl,
    "sharding": lambda x, quantizer: [],
    "samples": list,
}

# ---------------------------------------------------------------------------------- registering an op


@pytest.mark.parametrize("argument", PARTS)
def test_an_argument_left_out_is_named_with_what_to_write(argument):
    parts = {name: value for name, value in PARTS.items() if name != argument}
    with pytest.raises(TypeError, match=rf"register_op: mine::op .*\b{argument}\b.*\. Write {argument}= a function"):
        register_op("mine::op", impl, **parts)
    assert "mine::op" not in OPS


def test_all_that_is_left_out_is_named_at_once():
    text = r"(?s)lacks fake, sharding, samples\. Write fake= .* Write sharding= .* Write samples= "
    with pytest.raises(TypeError, match=text):
        register_op("mine::op", impl, **{name: PARTS[name] for name in ("backward", "setup_context", "decompose")})


def test_a_misspelled_argument_is_told_which_it_may_be():
    with pytest.raises(
        TypeError,
        match=r"mine::op: unknown decomposition; allowed are fake, .*Did you mean "
        r"decompose\?",
    ):
        register_op("mine::op", impl, **PARTS, decomposition=None)
    with pytest.raises(TypeError, match=r"mine::op: unknown speed; allowed are [a-z, _]*\.$"):
        register_op("mine::op", impl, **PARTS, speed=3)


def test_a_backward_left_out_as_none_with_its_context_is_named():
    with pytest.raises(TypeError, match=r"mine::op has a setup_context but no backward\. Pass backward= a func"):
        register_op("mine::op", impl, **PARTS | {"backward": None})


@pytest.mark.parametrize("argument", ["fake", "backward", "decompose", "sharding", "samples"])
def test_what_is_no_function_is_refused(argument):
    with pytest.raises(TypeError, match=f"register_op: mine::op: `{argument}` is 3; it must be a function"):
        register_op("mine::op", impl, **PARTS | {argument: 3})


def test_samples_can_not_be_none():
    with pytest.raises(
        TypeError, match="register_op: mine::op: `samples` is None; it must be a function that returns tuples"
    ):
        register_op("mine::op", impl, **PARTS | {"samples": None})


@pytest.mark.parametrize("argument", ["fake", "decompose", "sharding"])
def test_a_function_of_other_arguments_is_refused(argument):
    text = (
        rf"register_op: mine::op: `{argument}` has the signature \(x\), but impl has \(x, quantizer\): .* Give "
        r"both the same parameters"
    )
    with pytest.raises(TypeError, match=text):
        register_op("mine::op", impl, **PARTS | {argument: lambda x: x})


def test_an_unannotated_implementation_is_refused():
    with pytest.raises(
        ValueError,
        match=r"register_op: mine::op: PyTorch can't derive a schema .* Annotate every parameter and the result",
    ):
        register_op("mine::op", lambda x, quantizer: x, **PARTS)


@pytest.mark.parametrize("name", ["op", "::op", "mine::", "mine.op", "my-lib::op", "a::b::c"])
def test_a_name_without_namespace_is_refused(name):
    with pytest.raises(ValueError, match=r"name of an operator must have the form 'namespace::name', got .*"):
        register_op(name, impl, **PARTS)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"fp8compile::amax is already registered. Choose another name"):
        register_op("fp8compile::amax", impl, **PARTS)


@pytest.mark.parametrize("compiled", ["decompose", "backward"])
def test_compiled_code_without_a_constant_in_the_key_is_refused(compiled):
    def plain(x: Tensor) -> Tensor:
        return x + 1

    parts = {"fake": None, "backward": None, "decompose": None, "sharding": None, "samples": list}
    if compiled == "backward":
        parts |= {"backward": lambda ctx, grad: grad, "setup_context": PARTS["setup_context"]}
    else:
        parts |= {"decompose": plain}
    with pytest.raises(
        TypeError, match=r"mine::op has a decompose or a backward, .* but no argument that is a quantizer or recipe"
    ):
        register_op("mine::op", plain, **parts)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([Cut(0)], (0,)), r"Split: `inputs` must be a tuple of Cut or None, .* got \[Cut\(dim=0, unit=1\)\]"),
        (((0,), (0,)), r"Split: `inputs` must be .* got \(0,\)"),
        (
            ((Cut(0),), ("mean",)),
            r"Split: `outputs` is \('mean',\); it must be a tuple with a dim, 'max', 'min', "
            r"'sum' or None",
        ),
        (((Cut(0),), 0), "Split: `outputs` is 0"),
        (((Cut(0),), (True,)), r"Split: `outputs` is \(True,\)"),
    ],
)
def test_a_split_takes_cuts_dims_and_reductions(arguments, text):
    with pytest.raises(TypeError, match=text):
        Split(*arguments)


# ---------------------------------------------------------------------------------- defining a quantizer


def rule(self, amax: Tensor) -> Tensor:
    return torch.ones_like(amax)


def define(annotations: dict[str, Any] | None = None, **body: Any) -> type:
    """The class statement alone; the decorator comes after it."""
    return type("Mine", (Quantizer,), {"__annotations__": annotations or {}, "multiplier": rule, **body})


def test_the_scale_rule_is_asked_for_in_the_class_statement():
    with pytest.raises(TypeError, match=r"(?s)Mine has no scale rule. Define\n    def multiplier\(self, amax: Tensor"):
        define(multiplier=Quantizer.multiplier)

    class Family(Quantizer, abstract=True):
        """A base of others needs none."""

    with pytest.raises(TypeError, match="Member has no scale rule"):

        class Member(Family):
            pass


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("codes_shape", "values_shape"),
        ("scale_dtype", "scale_of"),
        ("scale_shape", "amax"),
    ],
)
def test_what_belongs_together_is_asked_for_together(first, second):
    with pytest.raises(TypeError, match=f"Mine overrides {first} but not {second}. Override {second} too"):
        define(**{first: lambda self, *shape: ()})


def test_a_step_with_other_arguments_raises_in_the_class_statement():
    with pytest.raises(
        TypeError, match=r"Mine.multiplier takes \(self\): .* It is called as multiplier\(self, amax\)"
    ):
        define(multiplier=lambda self: 1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"scale_dtyp": lambda self: torch.uint8}, r"Mine\.scale_dtyp is not a step .*\. Did you mean scale_dtype\?"),
        ({"code_shape": lambda self, shape: shape}, r"Did you mean codes_shape\? .* with an underscore: _code_shape"),
        ({"transpose": lambda self: self}, r"Did you mean transposed\?"),
        ({"multiplier": property(rule)}, r"Mine\.multiplier must be a method, because .* multiplier\(self, amax\)"),
        ({"annotations": {"cast": "str"}}, r"Mine\.cast must be a method, because it is called as cast\(self, x, "
                                           r"multiplier\)"),
        ({"a": 1}, r"Mine: a = 1 has no annotation, .* Write a: int, or ClassVar\[int\] if"),
        ({"held": torch.ones(1)}, r"Mine: held = tensor.* has no annotation"),
        ({"block": (1, -1)}, r"Mine: block = \(1, -1\) has no annotation"),
        ({"__post_init__": lambda self: None}, r"Mine\.__post_init__ skips the checks .* Call super"),
    ],
)  # fmt: skip
def test_what_nobody_would_call_or_count_raises_in_the_class_statement(body, text):
    with pytest.raises(TypeError, match=text):
        define(**body)


def test_methods_and_constants_of_its_own_are_left_alone():
    define({"LIMIT": "ClassVar[float]"}, LIMIT=2.0, _limit=3, headroom=lambda self: 1, _scale_dtyp=lambda self: 1)


def test_a_class_that_is_no_frozen_dataclass_raises_at_its_first_instance():
    with pytest.raises(TypeError, match=r"Mine must be a frozen dataclass .* Write @dataclass\(frozen=True, repr=Fal"):
        define({"held": int}, held=1)()
    with pytest.raises(TypeError, match=r"Mine must be a frozen dataclass .* Write @dataclass\(frozen=T"):
        dataclass(frozen=True, eq=False)(define())()
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclass(define())


@pytest.mark.parametrize("options", [{"compare": False}, {"init": False}, {"hash": False}], ids=str)
def test_a_field_that_equality_would_miss_raises_at_the_first_instance(options):
    cls = dataclass(frozen=True, repr=False)(define({"held": int}, held=field(default=1, **options)))
    with pytest.raises(TypeError, match=r"Mine: field held has init=.*Use the default for all three"):
        cls()


# ---------------------------------------------------------------------------------- recipes of quantizers


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 16), (16, 16)])
def test_a_quantizer_becomes_a_recipe_of_three_fp8_gemms(block):
    quantizer = f8.CurrentScaling(block=block)
    recipe = f8.library.recipe(quantizer)
    assert all(recipe.quantizers(gemm) is not None for gemm in f8.quantizers.GEMMS)
    assert (recipe.input, recipe.grad_output, recipe.weight) == (quantizer,) * 3
    assert recipe.input_for_grad_weight == quantizer.transposed()


def test_a_quantizer_that_no_gemm_takes_on_both_sides_raises():
    with pytest.raises(ValueError, match="Recipe: no GEMM supports the blocks of output"):
        f8.library.recipe(f8.CurrentScaling(block=(-1, 1)))
    with pytest.raises(TypeError, match=r"fp8compile\.library\.recipe: `quantizer` is 3; it must be a quantizer"):
        f8.library.recipe(3)


# ---------------------------------------------------------------------------------- entry points

PLUGIN = """
import fp8compile as f8

QUANTIZER = f8.CurrentScaling(block=(1, 16))
RECIPE = f8.Recipe(input=QUANTIZER, weight=QUANTIZER)
number = 3

def recipe():
    return RECIPE

def fails():
    raise OSError("no licence")
"""
ENTRIES = {
    "a-value": "plugin_of_test:QUANTIZER",
    "a-recipe": "plugin_of_test:RECIPE",
    "a-function": "plugin_of_test:recipe",
    "a-class": "fp8compile:CurrentScaling",
    "a-number": "plugin_of_test:number",
    "a-failure": "plugin_of_test:fails",
    "a-typo": "plugin_of_test:recpie",
    "a-module": "plugin_that_is_not_there:x",
}


def distribution(folder, name, entries):
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{entry_points.GROUP}]", *lines]))


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A folder on the path with a package of these entry points."""
    (tmp_path / "plugin_of_test.py").write_text(PLUGIN)
    distribution(tmp_path, "plugin-of-test", ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plugin_of_test", raising=False)
    monkeypatch.setattr(entry_points, "LOADED", {})
    yield tmp_path
    sys.modules.pop("plugin_of_test", None)


def test_recipes_of_packages_are_found_by_name(plugin):
    line = f8.CurrentScaling(block=(1, 16))
    assert f8.recipes.by_name("a-value") == f8.library.recipe(line)
    assert f8.recipes.by_name("a-recipe") == f8.Recipe(input=line, weight=line) == f8.recipes.by_name("a-function")
    assert f8.recipes.by_name("a-class") == f8.library.recipe(f8.CurrentScaling())


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (
            "a-number",
            TypeError,
            "entry point a-number = plugin_of_test:number of plugin-of-test is 3; it must be",
        ),
        (
            "a-failure",
            ImportError,
            "a-failure = plugin_of_test:fails of plugin-of-test can't be used: OSError: no lic",
        ),
        (
            "a-typo",
            ImportError,
            "of plugin-of-test can't be used: AttributeError: .*Update or uninstall plugin-of-test",
        ),
        ("a-module", ImportError, "of plugin-of-test can't be used: ModuleNotFoundError"),
    ],
)
def test_a_broken_entry_point_names_its_package_when_it_is_asked_for(plugin, name, error, text):
    assert name in entry_points.installed()
    with pytest.raises(error, match=text):
        f8.recipes.by_name(name)
    with pytest.raises((ImportError, TypeError), match="of plugin-of-test"):
        f8.library.quantizers()


def test_listing_gives_what_each_package_offers(tmp_path, monkeypatch):
    distribution(tmp_path, "good", {"good": "fp8compile:CurrentScaling", "also": "fp8compile.recipes:rowwise"})
    monkeypatch.syspath_prepend(tmp_path)
    assert f8.library.quantizers() == {"also": f8.recipes.rowwise(), "good": f8.CurrentScaling()}


def test_two_packages_of_one_name_are_both_named(plugin):
    distribution(plugin, "another", {"a-value": "another:x"})
    with pytest.raises(
        ValueError, match=r"two packages define a quantizer named 'a-value': .* of (another|plugin-of-test), and"
    ):
        f8.library.quantizers()


def test_a_name_of_a_ready_recipe_is_not_for_packages(tmp_path, monkeypatch):
    distribution(tmp_path, "bold", {"rowwise": "fp8compile:CurrentScaling"})
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        r"entry point rowwise = .* of bold has the same name as fp8compile\.recipes\.rowwise.*Rename the entry "
        r"point"
    )
    for look in (f8.library.quantizers, lambda: f8.recipes.by_name("something")):
        with pytest.raises(ValueError, match=text):
            look()


def test_a_quantizer_that_makes_no_recipe_names_its_package(tmp_path, monkeypatch):
    (tmp_path / "odd_plugin.py").write_text("import fp8compile as f8\n\nQ = f8.CurrentScaling(block=(-1, 1))\n")
    distribution(tmp_path, "odd", {"odd": "odd_plugin:Q"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"entry point odd = odd_plugin:Q of odd is .*, which is not a valid recipe\. Rec"
    ):
        f8.recipes.by_name("odd")


def test_an_unknown_name_is_told_those_of_packages_too(plugin):
    with pytest.raises(ValueError, match=r"no recipe named 'a-recip'; recipes are tensorwise, .*a-recipe.*Did you m"):
        f8.recipes.by_name("a-recip")
    assert "a-recipe" not in f8.recipes.names()


def test_arguments_are_not_for_recipes_of_packages(plugin):
    with pytest.raises(
        TypeError, match=r"by_name: 'a-recipe' is a recipe of an installed package and accepts no arguments, .* eps"
    ):
        f8.recipes.by_name("a-recipe", eps=1.0)


def test_a_recipe_of_a_package_is_found_inside_a_compiled_function(plugin, assert_bits_equal):
    x, weight = torch.randn(4, 32), torch.randn(16, 32)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return f8.linear(x, weight, recipe=f8.recipes.by_name("a-value"))

    assert_bits_equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, weight), layer(x, weight))


@pytest.mark.parametrize("name", ["a-value", "a-function", "a-class"])
def test_a_recipe_of_a_package_is_printed_by_its_name(plugin, name):
    layer = nn.Linear(32, 32)
    f8.convert(layer, f8.recipes.by_name(name))
    shown = {"a-class": "tensorwise(grad_format='e4m3')"}.get(name, name)  # which it is
    assert repr(layer).endswith(f"recipe={shown})")
    assert shown in str(f8.conversion_report(layer))


def test_printing_imports_no_package(plugin):
    line = f8.CurrentScaling(block=(1, 16))
    layer = f8.convert(nn.Linear(32, 32), f8.library.recipe(line))
    assert "recipe=Recipe(input=" in repr(layer)
    assert "plugin_of_test" not in sys.modules
    assert f8.recipes.by_name("a-value") == layer.recipe
    assert repr(layer).endswith("recipe=a-value)")


def test_two_packages_of_one_name_do_not_keep_a_model_from_printing(plugin):
    distribution(plugin, "another", {"a-value": "another:x", "rowwise": "another:y"})
    assert "recipe=Recipe(" in repr(f8.convert(nn.Linear(32, 32), f8.Recipe()))


def test_importing_fp8compile_looks_for_no_entry_point():
    program = """
import importlib.metadata as metadata

def entry_points(**given):
    raise SystemExit(f"looked for {given}")

import torch
metadata.entry_points = entry_points
import fp8compile as f8
f8.recipes.by_name("rowwise"), f8.recipes.names(), f8.recipes.describe(f8.recipes.rowwise())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def capped(limit):
    """A class of one name, another one in each call."""

    @dataclass(frozen=True, repr=False)
    class Capped(f8.CurrentScaling):
        def multiplier(self, amax):
            return f8.CurrentScaling.multiplier(self, amax).clamp(max=limit)

    return Capped()


def test_two_classes_of_one_name_in_one_graph_are_two(assert_bits_equal):
    recipes = [f8.library.recipe(capped(limit)) for limit in (1e9, 0.01)]
    model = torch.nn.Sequential(*(f8.Linear(32, 32, recipe=recipe) for recipe in recipes))
    x = torch.randn(4, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_bits_equal(compiled(x), model(x))


def test_numbers_of_numpy_are_refused_before_a_graph_can_not_print_them():
    with pytest.raises(TypeError, match="field eps holds a float64"):
        f8.recipes.rowwise(eps=np.float64(1e-3))
