"""fp8compile.linear: every wrong argument raises with its text, also while torch.compile traces."""

from __future__ import annotations

import pytest
import torch

import fp8compile as f8

RECIPE = f8.recipes.rowwise()
DTYPE = torch.bfloat16
X, WEIGHT, BIAS = torch.ones(4, 32, dtype=DTYPE), torch.ones(48, 32, dtype=DTYPE), torch.ones(48, dtype=DTYPE)
TAKEN = "it must be bfloat16, float16 or float32. Cast it, or leave this layer unconverted."
ONE_DTYPE = "Cast one of them to the dtype of the other, or run under torch.autocast."
DENSE = (
    "it must be a dense tensor. Call .to_dense() on a sparse tensor, or pad a nested tensor with "
    ".to_padded_tensor(0.0)."
)
RECIPES = (
    "it must be a fp8compile.Recipe, such as fp8compile.recipes.rowwise() or fp8compile.recipes.by_name('rowwise')."
)


def jagged():
    return torch.nested.nested_tensor([X, X], layout=torch.jagged)


# what differs from a call that works: (argument, value or function that makes it, error, text)
WRONG = {
    "scalar x": (
        "x",
        X[0, 0],
        ValueError,
        "`x` has shape () and `weight` has shape (48, 32); the last dim of x must be in_features, 32.",
    ),
    "x of other features": (
        "x",
        X[:, :16],
        ValueError,
        "`x` has shape (4, 16) and `weight` has shape (48, 32); the last dim of x must be in_features, 32.",
    ),
    "transposed weight": (
        "weight",
        WEIGHT.t(),
        ValueError,
        "`x` has shape (4, 32) and `weight` has shape (32, 48); the last dim of x must be in_features, 48.",
    ),
    "1-D weight": ("weight", WEIGHT[0], ValueError, "`weight` must be (out_features, in_features), got (32,)."),
    "3-D weight": (
        "weight",
        WEIGHT[None],
        ValueError,
        "`weight` must be (out_features, in_features), got (1, 48, 32).",
    ),
    "2-D bias": (
        "bias",
        BIAS[None],
        ValueError,
        "`bias` has shape (1, 48) and `weight` has shape (48, 32); bias must be (out_features,), (48,).",
    ),
    "short bias": (
        "bias",
        BIAS[:8],
        ValueError,
        "`bias` has shape (8,) and `weight` has shape (48, 32); bias must be (out_features,), (48,).",
    ),
    "int x": ("x", X.int(), TypeError, f"`x` is torch.int32; {TAKEN}"),
    "bool x": ("x", X.bool(), TypeError, f"`x` is torch.bool; {TAKEN}"),
    "complex x": ("x", X.to(torch.complex64), TypeError, f"`x` is torch.complex64; {TAKEN}"),
    "float64 x": ("x", X.double(), TypeError, f"`x` is torch.float64; {TAKEN}"),
    "float8 x": ("x", X.to(torch.float8_e4m3fn), TypeError, f"`x` is torch.float8_e4m3fn; {TAKEN}"),
    "int weight": ("weight", WEIGHT.int(), TypeError, f"`weight` is torch.int32; {TAKEN}"),
    "float64 bias": ("bias", BIAS.double(), TypeError, f"`bias` is torch.float64; {TAKEN}"),
    "other weight": (
        "weight",
        WEIGHT.float(),
        TypeError,
        f"`weight` is torch.float32, but x is torch.bfloat16. {ONE_DTYPE}",
    ),
    "other bias": ("bias", BIAS.half(), TypeError, f"`bias` is torch.float16, but x is torch.bfloat16. {ONE_DTYPE}"),
    "weight elsewhere": (
        "weight",
        WEIGHT.to("meta"),
        ValueError,
        "`weight` is on meta, but x is on cpu. Move both to one device.",
    ),
    "bias elsewhere": (
        "bias",
        BIAS.to("meta"),
        ValueError,
        "`bias` is on meta, but x is on cpu. Move both to one device.",
    ),
    "jagged x": ("x", jagged, TypeError, f"`x` has layout torch.jagged; {DENSE}"),
    "list x": ("x", [1.0], TypeError, "`x` is a list; it must be a tensor."),
    "float bias": ("bias", 1.0, TypeError, "`bias` is a float; it must be a tensor."),
    "recipe by name": ("recipe", "rowwise", TypeError, f"`recipe` is 'rowwise'; {RECIPES}"),
    "no recipe": ("recipe", None, TypeError, f"`recipe` is None; {RECIPES}"),
}
# torch.compile refuses these before it traces a line of ours; the last while it formats the text (2.13)
WRONG_IN_EAGER_ONLY = {
    "sparse x": ("x", X.to_sparse, TypeError, f"`x` has layout torch.sparse_coo; {DENSE}"),
    "sparse weight": ("weight", WEIGHT.to_sparse, TypeError, f"`weight` has layout torch.sparse_coo; {DENSE}"),
    "quantizer as recipe": (
        "recipe",
        f8.CurrentScaling(),
        TypeError,
        "`recipe` is CurrentScaling(format='e4m3', block=(-1, -1), scale='fp32', eps=0.0, rounding='nearest', "
        f"seed=0); {RECIPES}",
    ),
}


def call(changes, backend=None):
    arguments = {"x": X, "weight": WEIGHT, "bias": BIAS, "recipe": RECIPE} | changes
    recipe = arguments.pop("recipe")

    def function(x, weight, bias):
        return f8.linear(x, weight, bias, recipe=recipe)

    run = function if backend is None else torch.compile(function, fullgraph=True, backend=backend)
    return run(*arguments.values())


def wrong(case):
    name, value, error, text = (WRONG | WRONG_IN_EAGER_ONLY)[case]
    return {name: value() if callable(value) else value}, error, f"linear: {text}"


@pytest.mark.parametrize("case", [*WRONG, *WRONG_IN_EAGER_ONLY])
def test_wrong_argument_raises(case):
    changes, error, text = wrong(case)
    with pytest.raises(error) as caught:
        call(changes)
    assert type(caught.value) is error
    assert str(caught.value) == text


@pytest.mark.parametrize("case", WRONG)
def test_text_survives_while_compiling(case):
    changes, _, text = wrong(case)
    with pytest.raises(Exception) as caught:
        call(changes, backend="aot_eager")
    # the tracer may print the exception as Python code, with its quotes escaped
    assert text in str(caught.value).replace("\\'", "'")


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_the_call_that_the_cases_change_works(backend):
    assert call({}, backend).shape == (4, 48)
    assert call({"bias": None}, backend).shape == (4, 48)


@pytest.mark.parametrize(("name", "error"), [("x", TypeError), ("weight", ValueError)])
def test_quantized_operand_raises_naming_dequantize(name, error):
    value = {"x": X, "weight": WEIGHT}[name]
    with pytest.raises(error, match=r"\.dequantize\(\)"):
        call({name: f8.quantize(value, f8.CurrentScaling())})


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_meta_tensors_give_a_meta_result(backend):
    on_meta = {"x": X.to("meta"), "weight": WEIGHT.to("meta"), "bias": BIAS.to("meta")}
    y = call(on_meta, backend)
    assert (y.device.type, y.shape, y.dtype) == ("meta", (4, 48), DTYPE)
