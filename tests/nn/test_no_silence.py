"""What once went wrong without a word, each found by trying to break it: a test a case, named after it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8compile as f8

RECIPE = f8.recipes.rowwise()
ROOT = Path(__file__).parents[2]
ONCE = "has no derivative. Among the ops with GEMMs, only fp8compile::linear and delayed_linear are differentiable"


def square_of_linear(weight):
    return lambda x: f8.linear(x, weight, recipe=RECIPE).square().sum()


SECOND_DERIVATIVES = {
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda b: torch.func.grad(f)(b).sum())(x),
    "jacrev of jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap runs our ops in a loop
@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
def test_second_derivatives_of_torch_func_raise_instead_of_zeros(name):
    reason = "has no forward-mode derivative" if name == "hessian" else ONCE  # a hessian is forward over reverse
    with pytest.raises(RuntimeError, match=reason):
        SECOND_DERIVATIVES[name](square_of_linear(torch.randn(48, 64)), torch.randn(64))


def test_a_gradient_through_a_gradient_raises_instead_of_zeros():
    x, weight = torch.randn(64), torch.randn(48, 64)
    with pytest.raises(RuntimeError, match=ONCE):
        torch.func.grad(lambda w: torch.func.grad(square_of_linear(w))(x).sum())(weight)


def test_an_interrupted_first_import_of_inductor_keeps_the_decompositions():
    program = """
        import sys, unittest.mock as mock
        import fp8compile as f8, torch

        class Interrupted(Exception): pass
        import torch._decomp as decomp  # what the table's module calls first
        with mock.patch.object(decomp, "core_aten_decompositions", side_effect=Interrupted):
            try:
                import torch._inductor.decomposition
                raise SystemExit("the import was to fail")
            except Interrupted:
                sys.modules.pop("torch._inductor.decomposition", None)
        from torch._inductor.decomposition import select_decomp_table
        assert torch.ops.fp8compile.linear.default in select_decomp_table()
    """
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-2000:]


def test_looking_for_inductors_module_gives_a_loader_that_reads_source():
    program = """
        import importlib.util, fp8compile
        spec = importlib.util.find_spec("torch._inductor.decomposition")
        assert "def register_decomposition" in spec.loader.get_source(spec.name)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-2000:]


def test_layers_that_an_encoder_layer_reads_past_their_forward_stay_and_say_so():
    model = f8.convert(nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128), nn.Linear(64, 64)), RECIPE)
    rows = {row.fqn: row for row in f8.conversion_report(model).rows}
    assert "reads its weight directly" in rows["0.linear1"].reason
    assert "reads its weight directly" in rows["0.linear2"].reason
    assert rows["1"].converted


def test_a_layer_held_in_a_list_runs_in_fp8_too(assert_bits_equal):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.by_name = {"layer": self.layer}

        def forward(self, x):
            return self.by_name["layer"](x)

    model, x = f8.convert(Model(), RECIPE), torch.randn(4, 64)
    assert_bits_equal(model(x), f8.linear(x, model.layer.weight, model.layer.bias, recipe=RECIPE))


@pytest.mark.parametrize("filter", ["!b", lambda module, fqn: fqn != "b"], ids=["pattern", "function"])
def test_leaving_out_one_name_of_a_shared_layer_leaves_it_out(filter):
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(64, 64)})
    f8.convert(model, RECIPE, filter=filter)
    assert type(shared) is nn.Linear
    assert type(model["c"]) is f8.Linear


@pytest.mark.parametrize("how", ["compiled", "forward replaced", "parametrized", "subclass"])
def test_revert_refuses_a_layer_that_would_go_on_in_fp8_or_lose_its_forward(how):
    class Doubled(f8.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = (Doubled if how == "subclass" else f8.Linear)(64, 64, recipe=RECIPE)
    model = nn.Sequential(f8.Linear(64, 64, recipe=RECIPE), layer)
    if how == "compiled":
        layer.compile()
    elif how == "forward replaced":
        layer.forward = layer.forward
    elif how == "parametrized":
        torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(TypeError, match=r"revert: .*Undo that"):
        f8.revert(model)
    assert isinstance(model[0], f8.Linear)


@pytest.mark.parametrize("function", [f8.revert, f8.conversion_report])
def test_what_is_no_module_is_refused_by_name(function):
    with pytest.raises(TypeError, match=rf"{function.__name__}: `model` is a int; it must be a torch\.nn\.Module"):
        function(3)


def test_assigning_data_of_a_quantized_tensor_raises():
    q = f8.quantize(torch.randn(4, 32), f8.CurrentScaling())
    with pytest.raises(TypeError, match=r"assigning \.data of a QuantizedTensor"):
        q.data = f8.quantize(torch.randn(4, 32), f8.CurrentScaling())


def test_a_recipe_name_that_is_no_string_is_refused_as_a_name():
    with pytest.raises(ValueError, match="no recipe named"):
        f8.recipes.by_name(["rowwise"])
