"""What a user gets wrong: an error of ours that says what was given and what to do, also in the text of torch.compile.

Each row is a call that must raise, or one that looks wrong and must work. The exact texts stand in
tests/nn/test_linear_errors.py and beside it; here a row has the parts that help.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from ways import WAYS, behaviour

import fp8compile as f8

GROUP = "Bad input"
RECIPE = f8.recipes.rowwise()
TENSOR, ROW = f8.CurrentScaling(), f8.CurrentScaling(block=(1, -1))
BF16 = torch.bfloat16
X, WEIGHT, BIAS = torch.ones(4, 32, dtype=BF16), torch.ones(48, 32, dtype=BF16), torch.ones(48, dtype=BF16)
EAGER = ("eager",)
TAKEN = "it must be bfloat16, float16 or float32"


@dataclass(frozen=True)
class Wrong:
    """A call that raises.

    Attributes:
        call: What is called.
        arguments: With what; a function without parameters among them is called first.
        error: What eager mode raises.
        says: Parts of its text, without quotes, which the tracer may escape.
        refused: What torch.compile says, of arguments that it turns down before it traces a line of ours.
        ways: In which columns the row makes sense.
    """

    call: Callable
    arguments: tuple[Any, ...]
    error: type[Exception]
    says: tuple[str, ...]
    refused: str | None = None
    ways: tuple[str, ...] = WAYS


def rows(cases: dict[str, Wrong]) -> Callable:
    """A row of the table for each case and way."""
    return pytest.mark.parametrize(
        ("way", "case"),
        [
            pytest.param(way, case, id=f"{row}-{way}", marks=pytest.mark.behaviour(GROUP, row))
            for row, case in cases.items()
            for way in case.ways
        ],
        indirect=["way"],
    )


def check(way: Any, case: Wrong) -> None:
    arguments = [a() if callable(a) and getattr(a, "__name__", "") == "<lambda>" else a for a in case.arguments]
    function = way(case.call)
    refused = way.compiled and case.refused is not None
    with way.raises(Unsupported, case.refused) if refused else way.raises(case.error, *case.says):
        function(*arguments)


# ---------------------------------------------------------------------------------- f8.linear


def linear(x: Any = X, weight: Any = WEIGHT, bias: Any = BIAS, recipe: Any = RECIPE) -> Wrong:
    """A call of linear with one wrong argument; what it raises is filled in by its row."""
    return lambda error, *says, **others: Wrong(
        lambda x, weight, bias: f8.linear(x, weight, bias, recipe=recipe), (x, weight, bias), error, says, **others
    )


NO_SPARSE = "torch.compile does not support sparse Tensors"
NO_NESTED = "torch.compile does not support strided NestedTensor"


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([X, X], layout=layout)


LINEAR = {
    "linear: x has other features": linear(X[:, :16])(
        ValueError, "linear: `x` has shape (4, 16) and `weight` has shape (48, 32)"
    ),
    "linear: x is a scalar": linear(X[0, 0])(ValueError, "linear: `x` has shape ()", "in_features, 32"),
    "linear: the weight is transposed": linear(weight=WEIGHT.t())(ValueError, "linear: `x` has shape", "(32, 48)"),
    "linear: the weight is a vector": linear(weight=WEIGHT[0])(
        ValueError, "linear: `weight` must be (out_features, in_features), got (32,)"
    ),
    "linear: the bias is too short": linear(bias=BIAS[:8])(ValueError, "linear: `bias` has shape (8,)", "(48,)"),
    "linear: x is an int tensor": linear(X.int())(TypeError, "linear: `x` is torch.int32", TAKEN),
    "linear: x is complex": linear(X.to(torch.complex64))(TypeError, "linear: `x` is torch.complex64", TAKEN),
    "linear: x is float64": linear(X.double())(TypeError, "linear: `x` is torch.float64", TAKEN),
    "linear: the weight is float8": linear(weight=WEIGHT.to(torch.float8_e4m3fn))(
        TypeError, "linear: `weight` is torch.float8_e4m3fn", TAKEN
    ),
    "linear: dtypes differ": linear(X.float())(
        TypeError, "linear: `weight` is torch.bfloat16, but x is torch.float32", "run under torch.autocast"
    ),
    "linear: devices differ": linear(X.to("meta"))(
        ValueError, "linear: `weight` is on cpu, but x is on meta. Move both to one device"
    ),
    "linear: x is sparse": linear(X.to_sparse())(
        TypeError, "linear: `x` has layout torch.sparse_coo", "Call .to_dense()", refused=NO_SPARSE
    ),
    "linear: the weight is sparse": linear(weight=lambda: WEIGHT.to_sparse_csr())(
        TypeError, "linear: `weight` has layout torch.sparse_csr", refused=NO_SPARSE
    ),
    "linear: x is nested": linear(lambda: nested(torch.strided))(
        TypeError, "linear: `x` is a nested tensor; it must be a dense tensor", refused=NO_NESTED
    ),
    "linear: x is jagged": linear(lambda: nested(torch.jagged))(TypeError, "linear: `x` has layout torch.jagged"),
    # in a graph a tensor of oneDNN passes for a dense one
    "linear: x is in oneDNN's layout": linear(X.float().to_mkldnn())(
        TypeError, "linear: `x` has layout torch._mkldnn", ways=EAGER
    ),
    "linear: x is a numpy array": linear(np.ones((4, 32), np.float32))(
        TypeError, "linear: `x` is a ndarray; it must be a tensor"
    ),
    "linear: x is a list": linear([[1.0]])(TypeError, "linear: `x` is a list; it must be a tensor"),
    "linear: the weight is None": linear(weight=None)(
        TypeError, "linear: `weight` is a NoneType; it must be a tensor"
    ),
    "linear: x is quantized already": linear(lambda: f8.quantize(X, TENSOR))(
        TypeError, "linear: `x` is a QuantizedTensor", ".dequantize()", "fp8compile.scaled_mm"
    ),
    "linear: the weight is quantized already": linear(weight=lambda: f8.quantize(WEIGHT, TENSOR))(
        ValueError, "linear: `weight` is a QuantizedTensor of CurrentScaling(", ".dequantize()"
    ),
    "linear: the recipe is a name": linear(recipe="rowwise")(TypeError, "linear: `recipe` is", "recipes.by_name("),
    "linear: the recipe is a quantizer": linear(recipe=TENSOR)(
        TypeError, "linear: `recipe` is CurrentScaling(", "it must be a fp8compile.Recipe"
    ),
    "linear: the recipe is None": linear(recipe=None)(
        TypeError, "linear: `recipe` is None; it must be a fp8compile.Recipe"
    ),
}


@rows(LINEAR)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
def test_linear(way, case):
    check(way, case)


@behaviour(GROUP, "linear: a class as recipe")
def test_recipe_that_was_not_called(way):
    function = way(lambda x: f8.linear(x, WEIGHT, recipe=f8.Recipe))
    # the class, not an instance: its repr is what the tracer of no version can follow
    with way.raises(TypeError, "linear: `recipe` is <class", "it must be a fp8compile.Recipe"):
        function(X)


@pytest.fixture
def mesh():
    """Two devices, of which this process is the first: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@behaviour(GROUP, "linear: x is a DTensor and weight is none")
def test_dtensor(way, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(X, mesh, [Shard(0)])
    function = way(lambda x, w: f8.linear(x, w, recipe=RECIPE))
    with way.raises(TypeError, "linear: x is a DTensor, but weight is not.", "parallelize_module"):
        function(x, WEIGHT)


@behaviour(GROUP, "linear: all on the meta device")
def test_meta(way):
    y = way(lambda *tensors: f8.linear(*tensors, recipe=RECIPE))(X.to("meta"), WEIGHT.to("meta"), BIAS.to("meta"))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (4, 48), BF16)


@behaviour(GROUP, "linear: no rows")
def test_no_rows(way):
    layer = f8.Linear(32, 48, recipe=RECIPE)
    y = way(layer)(torch.ones(0, 32))
    y.sum().backward()
    assert y.shape == (0, 48)
    assert not layer.weight.grad.any()


# ---------------------------------------------------------------------------------- f8.Linear


MODULE = {
    "Linear: the recipe is a name": Wrong(
        lambda: f8.Linear(32, 48, recipe="rowwise"),
        (),
        TypeError,
        ("Linear: `recipe` is", "recipes.rowwise()"),
        ways=EAGER,
    ),
    "Linear: dtype is float64": Wrong(
        lambda: f8.Linear(32, 48, recipe=RECIPE, dtype=torch.float64),
        (),
        TypeError,
        ("Linear: `dtype` is torch.float64", TAKEN),
        ways=EAGER,
    ),
    "Linear: dtype is an int": Wrong(
        lambda: f8.Linear(32, 48, recipe=RECIPE, dtype=torch.int32),
        (),
        TypeError,
        ("Linear: `dtype` is torch.int32", TAKEN),
        ways=EAGER,
    ),
    "Linear: x is an int tensor": Wrong(
        f8.Linear(32, 48, recipe=RECIPE), (X.int(),), TypeError, ("linear: `x` is torch.int32", TAKEN)
    ),
    "Linear: x has another dtype than the weight": Wrong(
        f8.Linear(32, 48, recipe=RECIPE),
        (X,),
        TypeError,
        ("linear: `weight` is torch.float32, but x is torch.bfloat16",),
    ),
    "Linear: moved to float64": Wrong(
        f8.Linear(32, 48, recipe=RECIPE).double(), (X.double(),), TypeError, ("linear: `x` is torch.float64", TAKEN)
    ),
    "Linear: in torch.jit.script": Wrong(
        torch.jit.script,
        (f8.Linear(32, 48, recipe=RECIPE),),
        TypeError,
        ("Linear: torch.jit.script does not support recipes", "torch.export"),
        ways=EAGER,
    ),
    "Linear: in torch.jit.trace": Wrong(
        torch.jit.trace,
        (f8.Linear(32, 48, recipe=RECIPE), X.float()),
        RuntimeError,
        ("linear: torch.jit.trace does not support recipes", "fp8compile.revert"),
        ways=EAGER,
    ),
}


@rows(MODULE)
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*torch.jit.*deprecated")
def test_module(way, case):
    check(way, case)


# ---------------------------------------------------------------------------------- recipes and quantizers


def named(*arguments: Any, **others: Any) -> Callable:
    return lambda error, *says, **ways: Wrong(
        lambda x: x * f8.recipes.by_name(*arguments, **others).fast_accumulation_output, (X,), error, says, **ways
    )


def scaling(**fields: Any) -> Callable:
    return lambda error, *says, **ways: Wrong(lambda x: x * f8.CurrentScaling(**fields).eps, (X,), error, says, **ways)


def recipe(**roles: Any) -> Callable:
    return lambda error, *says, **ways: Wrong(
        lambda x: x * f8.Recipe(**roles).fast_accumulation_output, (X,), error, says, **ways
    )


VALUES = {
    "by_name: a near miss": named("rowise")(ValueError, "no recipe named", "Did you mean", "rowwise"),
    "by_name: another spelling": named("Tensor-Wise")(ValueError, "no recipe named", "Did you mean", "tensorwise"),
    "by_name: nothing like it": named("int4")(ValueError, "recipes are tensorwise, rowwise,", "nvfp4."),
    "by_name: the function": named(f8.recipes.rowwise)(
        ValueError, "recipes are tensorwise, rowwise, rowwise_bf16_wgrad", ways=EAGER
    ),
    "by_name: a format that does not exist": named("rowwise", format="e3m4")(ValueError, "it must be one of "),
    "CurrentScaling: format is a torch dtype": scaling(format=torch.float8_e4m3fn)(
        TypeError, "CurrentScaling: field format holds a dtype", "Name a dtype by a string"
    ),
    "CurrentScaling: block is a word": scaling(block="rowwise")(
        ValueError, "CurrentScaling: `block` is", "(1, -1) rowwise"
    ),
    "CurrentScaling: block is one number": scaling(block=128)(
        ValueError, "CurrentScaling: `block` is 128", "(128, 128)"
    ),
    "CurrentScaling: block is a list": scaling(block=[1, -1])(TypeError, "CurrentScaling: field block holds a list"),
    # a constant is made while tracing, of constants: the tracer turns down what is none
    "CurrentScaling: block of numpy ints": scaling(block=(np.int64(1), -1))(
        TypeError, "CurrentScaling: field block holds a int64", ways=EAGER
    ),
    "CurrentScaling: a scale rule that does not exist": scaling(scale="ue8m0")(
        ValueError, "CurrentScaling: `scale` is", "e8m0_rceil"
    ),
    "CurrentScaling: eps is negative": scaling(eps=-1.0)(ValueError, "CurrentScaling: `eps` is -1.0", "from 0"),
    "CurrentScaling: eps is NaN": scaling(eps=float("nan"))(ValueError, "CurrentScaling: field eps is nan"),
    "CurrentScaling: eps is a tensor": scaling(eps=torch.tensor(1.0))(
        TypeError, "CurrentScaling: field eps holds a Tensor", ways=EAGER
    ),
    "Recipe: one operand of a product only": recipe(input=TENSOR)(
        ValueError, "Recipe: the GEMM of output has a quantizer for input but none for weight", "None for both"
    ),
    "Recipe: blocks that no GEMM multiplies": recipe(input=ROW, weight=TENSOR)(
        ValueError, "Recipe: no GEMM supports the blocks of output: input has block (1, -1)", "Supported are"
    ),
    "Recipe: e5m2 by e5m2": recipe(input=f8.CurrentScaling(format="e5m2"), weight=f8.CurrentScaling(format="e5m2"))(
        ValueError, "Recipe: the GEMM of output has e5m2", "Use e4m3 for at least one of them"
    ),
    "Recipe: a format in the place of a quantizer": recipe(input="e4m3", weight="e4m3")(
        TypeError, "Recipe: `input` is", "fp8compile.CurrentScaling(...)"
    ),
    "Recipe: a switch that is no bool": recipe(fast_accumulation_output=1)(
        TypeError, "Recipe: `fast_accumulation_output` is 1; it must be True or False"
    ),
}


@rows(VALUES)
def test_recipes_and_quantizers(way, case):
    check(way, case)


# ---------------------------------------------------------------------------------- quantize and scaled_mm


def quantize(x: Any = X, quantizer: Any = TENSOR, **others: Any) -> Callable:
    return lambda error, *says, **columns: Wrong(
        lambda x: f8.quantize(x, quantizer, **others).codes, (x,), error, says, **columns
    )


def scaled_mm(a: Any, b: Any, out_dtype: Any = BF16) -> Callable:
    return lambda error, *says: Wrong(lambda a, b: f8.scaled_mm(a, b, out_dtype=out_dtype), (a, b), error, says)


def quantized(quantizer: f8.Quantizer = TENSOR, rows: int = 4, columns: int = 32) -> Callable:
    return lambda: f8.quantize(torch.ones(rows, columns, dtype=BF16), quantizer)


def used(use: Callable) -> Callable:
    return lambda error, *says, **columns: Wrong(use, (lambda: quantized()(),), error, says, **columns)


COLUMN = f8.CurrentScaling(block=(-1, 1))
A, B = (lambda: quantized(ROW)()), (lambda: quantized(COLUMN, 32, 48)())
DENSE = "bfloat16, float16 or float32"
QUANTIZED = {
    "quantize: x is an int tensor": quantize(X.int())(TypeError, "quantize: `x` is torch.int32", DENSE),
    "quantize: x is float64": quantize(X.double())(TypeError, "quantize: `x` is torch.float64", "Cast it first"),
    "quantize: x is complex": quantize(X.to(torch.complex64))(TypeError, "quantize: `x` is torch.complex64", DENSE),
    "quantize: x is sparse": quantize(X.to_sparse())(
        TypeError, "quantize: `x` has layout torch.sparse_coo; it must be a dense tensor", refused=NO_SPARSE
    ),
    "quantize: x is nested": quantize(lambda: nested(torch.strided))(
        TypeError, "quantize: `x` is a nested tensor; it must be a dense tensor", refused=NO_NESTED
    ),
    "quantize: x is a numpy array": quantize(np.ones((4, 32), np.float32))(TypeError, "quantize: `x` is ndarray"),
    "quantize: x is None": quantize(None)(TypeError, "quantize: `x` is NoneType; it must be a dense tensor"),
    "quantize: x is quantized already": quantize(lambda: quantized()())(
        TypeError, "quantize: `x` is already quantized"
    ),
    "quantize: the quantizer is a format": quantize(quantizer="e4m3")(
        TypeError, "quantize: `quantizer` is", "fp8compile.CurrentScaling()"
    ),
    "quantize: the quantizer is the class": quantize(quantizer=f8.CurrentScaling)(
        TypeError, "quantize: `quantizer` is <class", "fp8compile.CurrentScaling()"
    ),
    "quantize: the quantizer is a recipe": quantize(quantizer=RECIPE)(
        TypeError, "quantize: `quantizer` is Recipe(", "it must be a fp8compile.Quantizer"
    ),
    "quantize: shard_dim without a group": quantize(shard_dim=0)(
        ValueError, "quantize: `group` is None and `shard_dim` is 0; pass both"
    ),
    "quantize: the group is a name": quantize(group="tp", shard_dim=0)(
        TypeError, "quantize: `group` must be a ProcessGroup", "got 'tp'"
    ),
    "scaled_mm: an operand is no QuantizedTensor": scaled_mm(X, B)(
        TypeError, "scaled_mm: `a` is a Tensor; it must be a QuantizedTensor, created by fp8compile.quantize"
    ),
    "scaled_mm: shapes do not fit": scaled_mm(A, A)(
        ValueError, "scaled_mm: shapes must be (m, k) and (k, n), got (4, 32) and (4, 32)", "(k, n)"
    ),
    "scaled_mm: out_dtype is float64": scaled_mm(A, B, torch.float64)(
        TypeError, "scaled_mm: `out_dtype` is torch.float64"
    ),
    "scaled_mm: out_dtype is a word": scaled_mm(A, B, "bf16")(TypeError, "scaled_mm: `out_dtype` is bf16", DENSE),
    "scaled_mm: devices differ": scaled_mm(lambda: quantized(ROW)().to("meta"), B)(
        ValueError, "scaled_mm: a is on meta, but b is on cpu. Move them to one device"
    ),
    "dequantize: to an int dtype": used(lambda q: q.dequantize(torch.int32))(
        TypeError, "dequantize: `dtype` is torch.int32", "floating point"
    ),
    "dequantize: the dtype is a word": used(lambda q: q.dequantize("bf16"))(
        TypeError, "dequantize: `dtype` is bf16", "floating point"
    ),
    "QuantizedTensor: arithmetic": used(lambda q: q + 1)(
        TypeError, "Tensor.__add__ is not supported", ".dequantize()"
    ),
    "QuantizedTensor: cast to another dtype": used(lambda q: q.float())(
        TypeError, "can't be cast to torch.float32", ".dequantize(torch.float32)"
    ),
}


@rows(QUANTIZED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_quantize_and_scaled_mm(way, case):
    check(way, case)


@behaviour(GROUP, "scaled_mm: blocks that no GEMM multiplies")
def test_scaled_mm_blocks(way):
    function = way(lambda a, b: f8.scaled_mm(a, b, out_dtype=BF16))
    a, b = quantized(ROW)(), quantized(TENSOR, 32, 48)()
    with way.raises(ValueError, "scaled_mm: operand a has block (1, -1)"):
        function(a, b)


@behaviour(GROUP, "quantize: the group is a DeviceMesh", ways=EAGER)
def test_mesh_as_group(way, mesh):
    with way.raises(
        TypeError,
        "quantize: `group` must be a ProcessGroup, such as mesh.get_group(), got DeviceMesh(",
        "mesh.get_group()",
    ):
        f8.quantize(X, TENSOR, group=mesh, shard_dim=0)


# ---------------------------------------------------------------------------------- f8.convert, f8.revert


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48, dtype=dtype), nn.SiLU(), nn.Linear(48, 32, dtype=dtype))


def converting(model: Callable, recipe: Any = RECIPE, **others: Any) -> Callable:
    return lambda error, *says: Wrong(lambda: f8.convert(model(), recipe, **others), (), error, says, ways=EAGER)


def scripted() -> nn.Module:
    return torch.jit.script(mlp())


def exported() -> nn.Module:
    return torch.export.export(mlp(), (X.float(),)).module()


def compiled_in_part() -> nn.Module:
    model = nn.Sequential(mlp(), nn.Linear(32, 32))
    model[0].compile(backend="eager")
    return model


COMPILED_ALREADY, GRAPH = (
    "is already compiled with torch.compile. Call convert first",
    "is a graph from torch.jit or torch.export",
)
CONVERT = {
    "convert: a list of layers": converting(lambda: [nn.Linear(32, 32)])(TypeError, "convert: `model` is a list"),
    "convert: no model": converting(lambda: None)(
        TypeError, "convert: `model` is a NoneType; it must be a torch.nn.Module"
    ),
    "convert: an ExportedProgram": converting(lambda: torch.export.export(mlp(), (X.float(),)))(
        TypeError, "convert: `model` is a ExportedProgram"
    ),
    "convert: the recipe is a name": converting(mlp, "rowwise")(TypeError, "convert: `recipe` is", "recipes.by_name("),
    "convert: no linear in the model": converting(lambda: nn.Conv2d(3, 3, 1))(
        ValueError, "convert: Conv2d has no nn.Linear, so there is nothing to convert"
    ),
    "convert: again with another recipe": converting(lambda: f8.convert(mlp(), RECIPE), f8.recipes.tensorwise())(
        ValueError, "convert: 0 is already converted, with another recipe", "fp8compile.revert(model)"
    ),
    "convert: what torch.compile returned": converting(lambda: torch.compile(mlp(), backend="eager"))(
        ValueError, f"convert: the model {COMPILED_ALREADY}"
    ),
    "convert: a part was compiled": converting(compiled_in_part)(ValueError, f"convert: 0 {COMPILED_ALREADY}"),
    "convert: a scripted model": converting(scripted)(
        ValueError, f"convert: the model {GRAPH}", "Convert the original model"
    ),
    "convert: a traced model": converting(lambda: torch.jit.trace(mlp(), X.float()))(
        ValueError, f"convert: the model {GRAPH}"
    ),
    "convert: a frozen model (torch.jit.freeze)": converting(lambda: torch.jit.freeze(scripted().eval()))(
        ValueError, f"convert: the model {GRAPH}"
    ),
    "convert: an exported model": converting(exported)(ValueError, f"convert: the model {GRAPH}"),
    "convert: a part is an exported model": converting(lambda: nn.Sequential(exported(), nn.Linear(32, 32)))(
        ValueError, f"convert: 0 {GRAPH}", "only the submodules that are not graphs"
    ),
    "convert: the filter matches no layer": converting(mlp, filter="layers.*")(
        ValueError, "matches no linear layer", "0, 2"
    ),
    "convert: the filter is a class": converting(mlp, filter=nn.Linear)(TypeError, "convert: `filter` is <class"),
    "convert: the filter is a list of classes": converting(mlp, filter=[nn.Linear])(
        TypeError, "convert: `filter` is [<class"
    ),
    "revert: no model": Wrong(lambda: f8.revert(None), (), TypeError, ("revert: `model` is a NoneType",), ways=EAGER),
    "revert: a layer that was compiled": Wrong(
        lambda: f8.revert(torch.compile(f8.Linear(32, 32, recipe=RECIPE), backend="eager")),
        (),
        TypeError,
        ("revert: the model is a compiled FP8 layer", "Revert the module that was passed to torch.compile"),
        ways=EAGER,
    ),
}


@rows(CONVERT)
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*torch.jit.*deprecated")
def test_convert(way, case):
    check(way, case)


def assert_reason(model: nn.Module, fqn: str, reason: str) -> None:
    row = next(row for row in f8.conversion_report(model).rows if row.fqn == fqn)
    assert not row.converted
    assert reason in row.reason


@behaviour(GROUP, "convert: again with an equal recipe")
def test_convert_twice(way, assert_bits_equal):
    model, x = f8.convert(mlp(), RECIPE), X.float()
    expected = model(x)
    assert f8.convert(model, f8.recipes.rowwise()) is model
    assert_bits_equal(way(model)(x), expected)


@behaviour(GROUP, "convert: the model that was compiled, after its graph ran", ways=("compiled",))
def test_convert_behind_the_compiler(way, assert_bits_equal):
    model, x = mlp(), X.float()
    compiled = way(model)
    high_precision = compiled(x)
    f8.convert(model, RECIPE)
    assert_bits_equal(compiled(x), model(x))
    assert not torch.equal(compiled(x), high_precision)


@behaviour(GROUP, "convert: a model traced by torch.fx")
def test_convert_fx(way, assert_bits_equal):
    model = mlp()
    graph = torch.fx.symbolic_trace(copy.deepcopy(model))
    f8.convert(model, RECIPE), f8.convert(graph, RECIPE)
    assert_bits_equal(way(graph)(X.float()), model(X.float()))


@behaviour(GROUP, "convert: then Inductor's freezing", ways=("compiled",))
def test_freezing(way, assert_bits_equal):
    model = f8.convert(mlp(), RECIPE).eval()
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        assert_bits_equal(way(model, backend="inductor")(X.float()), model(X.float()))


@behaviour(GROUP, "convert: weights in float64 are left, and say so")
def test_float64_model(way):
    with pytest.warns(UserWarning, match=r"no linear layer was converted\. Skipped: 2 \(weights are torch\.float64;"):
        model = f8.convert(mlp(torch.float64), RECIPE)
    assert_reason(model, "0", "weights are torch.float64; FP8 layers support bfloat16, float16 and float32")
    assert way(model)(X.double()).dtype == torch.float64


@behaviour(GROUP, "convert: a weight that is quantized already is left, and says so", ways=EAGER)
def test_quantized_weight(way):
    model = mlp()
    model[0].weight = nn.Parameter(f8.quantize(model[0].weight, TENSOR), requires_grad=False)
    f8.convert(model, RECIPE)
    assert_reason(model, "0", "its weight is QuantizedTensor; it must be a dense tensor,")
    with way.raises(TypeError, "is not supported for a QuantizedTensor", "fp8compile.linear"):
        model(X.float())


@behaviour(GROUP, "convert: a sparse weight is left, and says so", ways=EAGER)
def test_sparse_weight(way):
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse())
    f8.convert(model, RECIPE)
    assert_reason(model, "0", "its weight is torch.sparse_coo; it must be a dense tensor,")


@behaviour(GROUP, "convert: a LazyLinear is left, and says so", ways=EAGER)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy(way):
    model = f8.convert(nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32)), RECIPE)
    assert_reason(model, "0", "a subclass of nn.Linear (LazyLinear) whose parameters are not initialized")


# ---------------------------------------------------------------------------------- weights that are shared


class LanguageModel(nn.Module):
    """Embedding, body, and a head that has the embedding's weight."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32, dtype=dtype)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        return self.head(self.body(embedded.float()).to(embedded.dtype))


@behaviour(GROUP, "shared weights: embedding and head")
def test_tied(way):
    model = f8.convert(LanguageModel(), RECIPE)
    way(model)(torch.tensor([[1, 2]])).sum().backward()
    assert isinstance(model.head, f8.Linear)
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.grad[5].any()  # of the head: token 5 was not looked up


@behaviour(GROUP, "shared weights: the head's is the embedding's in float64")
def test_tied_with_float64(way):
    model = f8.convert(LanguageModel(torch.float64), RECIPE)
    assert_reason(model, "head", "weights are torch.float64")
    assert way(model)(torch.tensor([[1, 2]])).dtype == torch.float64


@behaviour(GROUP, "shared weights: two layers have halves of one tensor")
def test_halves_of_one_storage(way, assert_bits_equal):
    whole = torch.randn(96, 32)
    layers = nn.Sequential(nn.Linear(32, 48), nn.Linear(32, 48))
    for layer, half in zip(layers, whole.chunk(2), strict=True):
        layer.weight = nn.Parameter(half)
    f8.convert(layers, RECIPE)
    actual = way(lambda x: [layer(x) for layer in layers])(X.float())
    for layer, half, y in zip(layers, whole.chunk(2), actual, strict=True):
        assert_bits_equal(y, f8.linear(X.float(), half.clone(), layer.bias, recipe=RECIPE))
        assert layer.weight.data_ptr() == half.data_ptr()


@behaviour(GROUP, "shared weights: a weight that is a view of another parameter")
def test_view_of_a_parameter(way):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Parameter(torch.randn(96, 32))
            self.layer = nn.Linear(32, 48)
            del self.layer.weight
            self.layer.weight = self.both[:48]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = f8.convert(Model(), RECIPE)
    way(model)(X.float()).sum().backward()
    assert isinstance(model.layer, f8.Linear)
    assert model.both.grad[:48].any()
    assert not model.both.grad[48:].any()


@behaviour(GROUP, "shared weights: one layer's is the other's transposed")
def test_transposed(way, assert_bits_equal):
    down, up = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)
    up.weight = nn.Parameter(down.weight.detach().t())
    model = f8.convert(nn.Sequential(down, up), RECIPE)
    hidden = f8.linear(X.float(), down.weight, recipe=RECIPE)
    assert_bits_equal(way(model)(X.float()), f8.linear(hidden, down.weight.t().contiguous(), recipe=RECIPE))


@behaviour(GROUP, "shared weights: the shape fits only one of two layers")
def test_shared_with_another_shape(way):
    down, up = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)
    up.weight = down.weight
    model = f8.convert(nn.Sequential(down, up), RECIPE)
    with way.raises(ValueError, "linear: `x` has shape (4, 48) and `weight` has shape (48, 32)"):
        way(model)(X.float())


@behaviour(GROUP, "shared weights: one layer under two names, one of them left out")
def test_two_names(way, assert_bits_equal):
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.Linear(32, 32), shared)
    expected = shared(X.float())
    f8.convert(model, RECIPE, filter="!2")
    assert [type(layer) for layer in model] == [nn.Linear, f8.Linear, nn.Linear]
    assert_bits_equal(way(shared)(X.float()), expected)


# ---------------------------------------------------------------------------------- torch.func


@behaviour(GROUP, "torch.func: forward-mode derivative")
def test_jvp(way):
    function = way(lambda x: torch.func.jvp(lambda x: f8.linear(x, WEIGHT, recipe=RECIPE), (x,), (x,)))
    with way.raises(RuntimeError, "fp8compile::linear has no forward-mode derivative", "reverse mode"):
        function(X)


@behaviour(GROUP, "torch.func: vmap over x and weight")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(way, assert_bits_equal):
    xs, weights = torch.randn(3, 4, 32), torch.randn(3, 48, 32)
    function = way(torch.vmap(lambda x, weight: f8.linear(x, weight, recipe=RECIPE)))
    expected = torch.stack([f8.linear(x, w, recipe=RECIPE) for x, w in zip(xs, weights, strict=True)])
    assert_bits_equal(function(xs, weights), expected)
