"""Wrong calls: what a right call is made of, one or more arguments replaced by what is surely wrong."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import fp8compile as f8

__all__ = ["BadCall", "bad_calls", "raised_by_us"]

PACKAGE = Path(f8.__file__).parent
# how our texts begin: with what the user called, or what stands in the way
OURS = re.compile(
    r"(linear|Linear|quantize|scaled_mm|dequantize|convert|revert|CurrentScaling|Recipe|conversion_report): "
    r"|there is no recipe |format .* is not known|a QuantizedTensor "
    r"|(aten|Tensor)\..* is not supported for a QuantizedTensor"
    r"|aten\..*(would move elements between|splits|would not keep its|requires a matrix|of a QuantizedTensor)"
)
X, WEIGHT, BIAS = torch.ones(4, 32), torch.ones(48, 32), torch.ones(48)
NO_TENSOR: dict[str, object] = {
    "None": None,
    "a list": [[1.0, 2.0]],
    "a number": 1.5,
    "a string": "x",
    "an array": np.ones((4, 32), np.float32),
    "a module": nn.Linear(4, 4),
    "a recipe": f8.recipes.rowwise(),
}
DTYPES_REFUSED = (
    *(torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
NOT_DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "qint8": lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
}
# torch.compile itself turns these down before it traces a line of ours, or (mkldnn) takes them for dense ones
NOT_DENSE_COMPILED = ("jagged",)
NO_RECIPE: dict[str, object] = {
    "None": None,
    "a name": "rowwise",
    "a quantizer": f8.CurrentScaling(),
    "the function": f8.recipes.rowwise,
    "the class": f8.Recipe,
    "a dtype": torch.float8_e4m3fn,
    "a dict": {"input": "e4m3"},
}
NO_QUANTIZER: dict[str, object] = {
    "None": None,
    "a format": "e4m3",
    "a recipe": f8.recipes.rowwise(),
    "the class": f8.CurrentScaling,
    "a dtype": torch.float8_e4m3fn,
    "a block": (1, -1),
}
Pair = tuple[str, object]


@dataclass(frozen=True)
class BadCall:
    """A wrong call.

    Attributes:
        function: What is called.
        arguments: By name, right ones too.
        wrong: What is wrong with it, in words.
    """

    function: str
    arguments: tuple[Pair, ...]
    wrong: tuple[str, ...]


CALLS: dict[str, Callable] = {
    "linear": lambda x, weight, bias, recipe: f8.linear(x, weight, bias, recipe=recipe),
    "quantize": lambda x, quantizer: f8.quantize(x, quantizer).codes,
    "quantize a shard": lambda x, group, shard_dim: (
        f8.quantize(x, f8.CurrentScaling(), group=group, shard_dim=shard_dim).codes
    ),
    "scaled_mm": lambda a, b, out_dtype: f8.scaled_mm(a, b, out_dtype=out_dtype),
    "dequantize": lambda q, dtype: q.dequantize(dtype),
    "operation": lambda q, operation: OPERATIONS[operation](q),
    "CurrentScaling": lambda **fields: f8.CurrentScaling(**fields),
    "Recipe": lambda **roles: f8.Recipe(**roles),
    "by_name": lambda name: f8.recipes.by_name(name),
    "convert": f8.convert,
    "revert": lambda model: f8.revert(model),
    "Linear": lambda in_features, out_features, recipe, dtype: f8.Linear(
        in_features, out_features, recipe=recipe, dtype=dtype
    ),
}
OPERATIONS: dict[str, Callable] = {
    "add": lambda q: q + 1,
    "matmul": lambda q: q @ q,
    "sum": lambda q: q.sum(),
    "softmax": lambda q: q.softmax(-1),
    "cat": lambda q: torch.cat([q, q]),
    "double": lambda q: q.double(),
    "compare": lambda q: q == q,
    "embedding": lambda q: nn.functional.embedding(torch.tensor([0]), q),
    "index": lambda q: q[torch.tensor([0])],
    "in place": lambda q: q.mul_(2),
    "linear": lambda q: nn.functional.linear(torch.ones(4, q.shape[-1]), q),
    "relu": lambda q: torch.relu(q),
    "fill": lambda q: q.zero_(),
}


def _no_tensor(draw: st.DrawFn, name: str, *, but: tuple[str, ...] = ()) -> tuple[object, str]:
    kind = draw(st.sampled_from([k for k in NO_TENSOR if k not in but]))
    return NO_TENSOR[kind], f"{name} is {kind}"


def _wrong_tensor(draw: st.DrawFn, name: str, right: Tensor, *, compiled: bool) -> tuple[object, str]:
    """A value that no function takes in the place of a dense float tensor."""
    # None is a right bias
    how = draw(st.sampled_from(("no tensor", "dtype", "layout", "quantized")))
    if how == "no tensor":
        return _no_tensor(draw, name, but=("None",) if name == "bias" else ())
    if how == "dtype":
        dtype = draw(st.sampled_from(DTYPES_REFUSED))
        return right.to(dtype), f"{name} is {dtype}"
    if how == "layout":
        names = [n for n in (NOT_DENSE_COMPILED if compiled else NOT_DENSE) if right.ndim == 2 or n != "sparse rows"]
        layout = draw(st.sampled_from(names))
        with warnings.catch_warnings():  # that nested tensors are a prototype: the first time only
            warnings.simplefilter("ignore")
            return NOT_DENSE[layout](right), f"{name} is {layout}"
    return f8.quantize(right, f8.CurrentScaling()), f"{name} is quantized"


def _misfit(draw: st.DrawFn, name: str, right: Tensor) -> tuple[object, str]:
    """A tensor that would do in another call, and does not fit the other arguments of this one."""
    how = draw(st.sampled_from(("shape", "shape", "dtype", "device")))
    if how == "dtype":
        dtype = draw(st.sampled_from((torch.bfloat16, torch.float16)))
        return right.to(dtype), f"{name} is {dtype}, others float32"
    if how == "device":
        return right.to("meta"), f"{name} is on meta, others on cpu"
    size = st.integers(0, 50)
    shape = {
        "x": st.one_of(st.just(()), st.lists(size, min_size=1, max_size=4).filter(lambda s: s[-1] != 32)),
        "weight": st.lists(size, max_size=3).filter(lambda s: len(s) != 2 or s[1] != 32),
        "bias": st.lists(size, max_size=2).filter(lambda s: s != [48]),
    }[name]
    shape = tuple(draw(shape))
    return torch.ones(shape), f"{name} has another shape"


def _bad_linear(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    arguments: dict[str, object] = {"x": X, "weight": WEIGHT, "bias": BIAS, "recipe": f8.recipes.rowwise()}
    wrong = []
    for name in draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True)):
        if name == "recipe":
            kind = draw(st.sampled_from(sorted(NO_RECIPE)))
            arguments[name], what = NO_RECIPE[kind], f"recipe is {kind}"
        elif not wrong and draw(st.booleans()):  # two misfits might fit each other
            arguments[name], what = _misfit(draw, name, arguments[name])
        else:
            arguments[name], what = _wrong_tensor(draw, name, arguments[name], compiled=compiled)
        wrong.append(what)
    return BadCall("linear", tuple(arguments.items()), tuple(wrong))


def _bad_quantize(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    x, quantizer, wrong = X, f8.CurrentScaling(), []
    which = draw(st.sampled_from(("x", "quantizer", "both")))
    if which != "quantizer":
        x, what = _wrong_tensor(draw, "x", X, compiled=compiled)
        wrong.append(what)
    if which != "x":
        kind = draw(st.sampled_from(sorted(NO_QUANTIZER)))
        quantizer = NO_QUANTIZER[kind]
        wrong.append(f"quantizer is {kind}")
    return BadCall("quantize", (("x", x), ("quantizer", quantizer)), tuple(wrong))


def _bad_shard(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    group, shard_dim = draw(
        st.sampled_from(((None, 0), ("tp", 0), (1, 0), ([0, 1], 0), ("tp", None), (None, -1), ("tp", "rows")))
    )
    return BadCall("quantize a shard", (("x", X), ("group", group), ("shard_dim", shard_dim)), (f"group {group!r}",))


def _quantized(rows: int, columns: int, block: tuple[int, int]) -> f8.QuantizedTensor:
    return f8.quantize(torch.ones(rows, columns), f8.CurrentScaling(block=block))


def _bad_scaled_mm(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    arguments: dict[str, object] = {
        "a": _quantized(4, 32, (1, -1)),
        "b": _quantized(32, 48, (-1, 1)),
        "out_dtype": torch.bfloat16,
    }
    how = draw(st.sampled_from(("operand", "dtype", "blocks", "shape", "device")))
    name = draw(st.sampled_from("ab"))
    if how == "operand":
        arguments[name], what = draw(
            st.sampled_from(((X, "a plain tensor"), *((value, kind) for kind, value in NO_TENSOR.items())))
        )
        what = f"{name} is {what}"
    elif how == "dtype":
        arguments["out_dtype"] = draw(st.sampled_from((*DTYPES_REFUSED, "bf16", None, 16)))
        what = f"out_dtype {arguments['out_dtype']!r}"
    elif how == "blocks":
        block = draw(st.sampled_from(((-1, -1), (-1, 16), (3, 5), (1, 16), (16, 1))))
        arguments[name], what = _quantized(*arguments[name].shape, block), f"{name} has block {block}"
    elif how == "shape":
        arguments[name] = draw(
            st.sampled_from(
                (_quantized(5, 7, (1, -1)), f8.quantize(X[0], f8.CurrentScaling()), _quantized(6, 32, (1, -1))[None])
            )
        )
        what = f"{name} has another shape"
    else:
        arguments[name], what = arguments[name].to("meta"), f"{name} is on meta"
    return BadCall("scaled_mm", tuple(arguments.items()), (what,))


def _bad_dequantize(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    dtype = draw(st.sampled_from((torch.int32, torch.bool, torch.complex64, "bf16", 16, torch.uint8)))
    return BadCall("dequantize", (("q", _quantized(4, 32, (1, 16))), ("dtype", dtype)), (f"dtype {dtype!r}",))


def _bad_operation(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    operation, block = draw(st.sampled_from(sorted(OPERATIONS))), draw(st.sampled_from(((-1, -1), (1, -1), (16, 16))))
    return BadCall("operation", (("q", _quantized(16, 32, block)), ("operation", operation)), (operation,))


BAD_FIELDS: dict[str, tuple] = {
    "format": ("e3m4", "E4M3", "float8_e4m3fn", "fp8", "", None, 8, torch.float8_e4m3fn, ["e4m3"], "e2m1"),
    "block": ("rowwise", (0, 1), (1,), (1, -2), (1, 2, 3), 128, None, [1, -1], (1.0, -1), (True, 1), (), ("1", "-1")),
    "scale": ("ue8m0", "float32", "", None, 1.0, ["fp32"], "pow", torch.float32),
    "eps": (-1.0, float("nan"), float("inf"), "1e-12", 1e39, True, None, torch.tensor(1.0), -0.1),
}


def _bad_current_scaling(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    names = draw(st.lists(st.sampled_from(sorted(BAD_FIELDS)), min_size=1, max_size=3, unique=True))
    fields = tuple((name, draw(st.sampled_from(BAD_FIELDS[name]))) for name in names)
    return BadCall("CurrentScaling", fields, tuple(f"{name}={value!r}" for name, value in fields))


def _bad_recipe(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    q, e5m2, row = f8.CurrentScaling(), f8.CurrentScaling(format="e5m2"), f8.CurrentScaling(block=(1, -1))
    pairs = (("input", "weight"), ("grad_output", "weight_for_grad_input"))
    a, b = draw(st.sampled_from((*pairs, ("grad_output_for_grad_weight", "input_for_grad_weight"))))
    left, right = draw(
        st.sampled_from(
            (
                (q, None),
                (None, q),
                (q, row),
                (e5m2, e5m2),
                ("e4m3", "e4m3"),
                (q, f8.CurrentScaling),
                (1, q),
                ([q], [q]),
            )
        )
    )
    return BadCall("Recipe", ((a, left), (b, right)), (f"{a}={left!r}", f"{b}={right!r}"))


def _bad_name(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    other = st.sampled_from((None, 3, "rowise", "Rowwise", "row-wise", "tensor wise", "blockwise_", "", ("rowwise",)))
    text = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
    name = draw(st.one_of(other, text).filter(lambda n: n not in f8.recipes.names()))
    return BadCall("by_name", (("name", name),), (f"name {type(name).__name__}",))


def _compiled_model() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(32, 32)), backend="eager")


def _converted_otherwise() -> nn.Module:
    return f8.convert(nn.Sequential(nn.Linear(32, 32)), f8.recipes.tensorwise())


# a right model is made anew for each call: convert works in place
MODELS: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "a list": lambda: [nn.Linear(32, 32)],
    "a tensor": lambda: WEIGHT,
    "the class": lambda: nn.Linear,
    "no linear": lambda: nn.Sequential(nn.ReLU()),
    "compiled": _compiled_model,
    "converted otherwise": _converted_otherwise,
    "traced": lambda: torch.jit.trace(nn.Sequential(nn.Linear(32, 32)), X, check_trace=False),
}
BAD_FILTERS = (1, "layers.*", ("0", "1", "nowhere"), [1], {}, (), b"0", nn.Linear, ["!head"])


def _bad_convert(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    model, recipe, filter, wrong = nn.Sequential(nn.Linear(32, 32)), f8.recipes.rowwise(), None, []
    for name in draw(st.lists(st.sampled_from(("model", "recipe", "filter")), min_size=1, max_size=2, unique=True)):
        if name == "model":
            kind = draw(st.sampled_from(sorted(MODELS)))
            with warnings.catch_warnings():  # that torch.jit is deprecated
                warnings.simplefilter("ignore")
                model = MODELS[kind]()
            wrong.append(f"model: {kind}")
        elif name == "recipe":
            kind = draw(st.sampled_from(sorted(NO_RECIPE)))
            recipe = NO_RECIPE[kind]
            wrong.append(f"recipe is {kind}")
        else:
            filter = draw(st.sampled_from(BAD_FILTERS))
            wrong.append(f"filter {filter!r}")
    return BadCall("convert", (("model", model), ("recipe", recipe), ("filter", filter)), tuple(wrong))


def _bad_revert(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    kind = draw(st.sampled_from(("None", "a list", "a tensor", "the class")))
    return BadCall("revert", (("model", MODELS[kind]()),), (f"model: {kind}",))


def _bad_module(draw: st.DrawFn, *, compiled: bool) -> BadCall:
    arguments: dict[str, object] = {
        "in_features": 32,
        "out_features": 48,
        "recipe": f8.recipes.rowwise(),
        "dtype": None,
    }
    if draw(st.booleans()):
        kind = draw(st.sampled_from(sorted(NO_RECIPE)))
        arguments["recipe"], what = NO_RECIPE[kind], f"recipe is {kind}"
    else:
        arguments["dtype"] = draw(st.sampled_from((*DTYPES_REFUSED, "bf16", 16)))
        what = f"dtype {arguments['dtype']!r}"
    return BadCall("Linear", tuple(arguments.items()), (what,))


MAKERS = {
    "linear": _bad_linear,
    "quantize": _bad_quantize,
    "quantize a shard": _bad_shard,
    "scaled_mm": _bad_scaled_mm,
    "dequantize": _bad_dequantize,
    "operation": _bad_operation,
    "CurrentScaling": _bad_current_scaling,
    "Recipe": _bad_recipe,
    "by_name": _bad_name,
    "convert": _bad_convert,
    "revert": _bad_revert,
    "Linear": _bad_module,
}
# the others make models and constants, which is done outside of a graph
MAKERS_COMPILED = ("linear", "quantize", "quantize a shard", "scaled_mm", "dequantize", "operation", "by_name")


@st.composite
def bad_calls(draw: st.DrawFn, *, compiled: bool = False) -> BadCall:
    """Any wrong call; ``compiled``: of those that one would make inside a graph."""
    name = draw(st.sampled_from(MAKERS_COMPILED if compiled else sorted(MAKERS)))
    return MAKERS[name](draw, compiled=compiled)


# ---------------------------------------------------------------------------------- who raised


def _bytes_of(arguments: dict[str, object]) -> dict[str, Tensor]:
    return {
        name: value.clone()
        for name, value in arguments.items()
        if type(value) is Tensor
        and value.layout == torch.strided
        and not value.is_nested
        and value.device.type == "cpu"
        if not value.is_quantized and not value.is_complex()
    }


def _own_error(case: BadCall, arguments: dict[str, object]) -> Exception:
    try:
        CALLS[case.function](**arguments)
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised by {case}")


def raised_by_us(case: BadCall, same: Callable[..., None], backend: str | None = None) -> None:
    """Raise an AssertionError unless the call raises one of our errors, and changes no argument.

    Args:
        case: The call.
        same: Bit-exact comparison.
        backend: Then also: what the compiled call raises contains the text of it.
    """
    arguments = dict(case.arguments)
    before = _bytes_of(arguments)
    error = _own_error(case, arguments)
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1].is_relative_to(PACKAGE), f"foreign error, raised in {frames[-1]}: {error!r}"
    assert isinstance(error, (TypeError, ValueError, RuntimeError)), f"of another kind: {error!r}"
    assert OURS.match(str(error)), f"does not say who speaks: {error!r}"
    for name, copy in before.items():
        same(arguments[name], copy, f"{name} was changed:")
    if backend is not None:
        _same_text_compiled(case, arguments, str(error), backend)


def _same_text_compiled(case: BadCall, arguments: dict[str, object], text: str, backend: str) -> None:
    names, values = list(arguments), list(arguments.values())
    call = CALLS[case.function]
    compiled = torch.compile(
        lambda *values: call(**dict(zip(names, values, strict=True))), fullgraph=True, backend=backend
    )
    try:
        compiled(*values)
    except Exception as error:
        # the tracer prints an exception as Python code, and 2.11 names a constant of a graph by its stand-in
        said = str(error).replace("\\", "").replace("FakeScriptObject", "Recipe")
        assert text.replace("\\", "") in said, f"says nothing of {text!r}: {error!r}"  # noqa: PT017
    else:
        raise AssertionError(f"nothing was raised by the compiled {case}")
