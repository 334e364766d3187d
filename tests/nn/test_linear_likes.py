"""Linears by another name: the Conv1D of transformers, and classes that others register."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

import fp8compile as f8
from fp8compile.nn.experts import known_modules
from fp8compile.testing import Recording, gemm_share
from fp8compile.testing.bits import bits
from fp8compile.testing.explain import explain, explain_mesh

EVERY = {"filter": lambda *_: True}
RECIPES = [name for name in f8.recipes.names() if name != "delayed"]


def conv_and_linear(recipe, **options):
    """The same layer as a Conv1D and as a linear, both converted."""
    torch.manual_seed(0)
    conv, dense = nn.Sequential(Conv1D(96, 64)).bfloat16(), nn.Sequential(nn.Linear(64, 96)).bfloat16()
    with torch.no_grad():
        dense[0].weight.copy_(conv[0].weight.t())
        dense[0].bias.normal_()
        conv[0].bias.copy_(dense[0].bias)
    return [f8.convert(model, recipe, **EVERY, **options) for model in (conv, dense)]


def trained_once(model):
    """The output and all gradients of one step, the weight's as (out, in)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 17, 64, generator=generator).bfloat16().requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    grad = model[0].weight.grad
    return [y, x.grad, model[0].bias.grad, grad.t() if grad.shape == (64, 96) else grad]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_conv1d_has_the_bits_of_a_linear(name, backend):
    found = []
    for model in conv_and_linear(f8.recipes.by_name(name)):
        torch._dynamo.reset()
        if backend is not None:
            model.compile(fullgraph=True, backend=backend)
        found.append(trained_once(model))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_weights_that_are_codes(name):
    conv, dense = conv_and_linear(f8.recipes.by_name(name), weight_lifetime="parameter")
    found = [trained_once(conv)[:3], trained_once(dense)[:3]]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*found, strict=True))
    assert conv[0].is_quantized()
    state = {name: each.clone() for name, each in get_model_state_dict(conv).items()}
    assert state.keys() == dense.state_dict().keys()
    for model in (conv, dense):
        optimizer = f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.5)
        optimizer.step()
    assert torch.equal(conv[0].weight.dequantize().t(), dense[0].weight.dequantize())
    conv.load_state_dict(state)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(trained_once(conv)[:2], found[0][:2], strict=True))


def tied(recipe, **options):
    """A Conv1D and a linear that have one weight, each as it keeps it."""
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(64, 64), nn.Linear(64, 64)).bfloat16()
    model[1].weight = model[0].weight
    return f8.convert(model, recipe, **EVERY, **options)


def test_codes_of_a_weight_that_a_linear_keeps_the_other_way():
    x = torch.randn(8, 64).bfloat16()
    assert torch.equal(tied(f8.recipes.tensorwise(), weight_lifetime="parameter")(x), tied(f8.recipes.tensorwise())(x))
    with pytest.raises(ValueError, match=r"1 shares its weight with 0, but one stores it as \(in_features, out"):
        tied(f8.recipes.rowwise(), weight_lifetime="parameter")


def test_all_of_gpt2_is_in_fp8():
    """3.7 % of the operations of its products were, when Conv1D was left out."""
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16, bos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).bfloat16()
    f8.convert(model, f8.recipes.rowwise())
    assert all(row.converted for row in f8.conversion_report(model).rows)
    torch._dynamo.reset()
    recording = Recording()
    compiled = torch.compile(model, fullgraph=True, backend=recording)
    compiled(input_ids=torch.zeros(1, 16, dtype=torch.int64), use_cache=False).logits.float().sum().backward()
    assert gemm_share(*recording.traced).linear_share == 1


def test_it_stays_what_it_was_to_others():
    (conv, _), plain = conv_and_linear(f8.recipes.rowwise()), Conv1D(96, 64)
    layer = conv[0]
    assert isinstance(layer, Conv1D)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert layer.recipe == f8.recipes.rowwise()
    for again in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(trained_once(again), trained_once(conv), strict=True))
        conv.zero_grad()
    f8.set_recipe(conv, forward=f8.recipes.tensorwise())
    assert layer.recipe.input == f8.recipes.tensorwise().input
    assert type(f8.revert(conv)[0]) is Conv1D
    assert "_recipe" not in vars(layer)


def test_delayed_scaling_is_for_linears():
    model = nn.Sequential(Conv1D(96, 64), nn.Linear(96, 64)).bfloat16()
    report = f8.conversion_report(f8.convert(model, f8.recipes.delayed(), **EVERY))
    assert [row.converted for row in report.rows] == [False, True]
    assert report.rows[0].reason.startswith("delayed scaling is only supported for fp8compile.Linear")
    layer = f8.convert(nn.Sequential(Conv1D(96, 64)), f8.recipes.rowwise(), **EVERY)[0]
    with pytest.raises(ValueError, match=r"state\. Use a recipe"):
        layer.recipe = f8.recipes.delayed()


# ---------------------------------------------------------------------------------- registered by others


class Projection(nn.Module):
    """A linear in somebody's class, without a bias."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 32) / 6)

    def forward(self, x):
        return linear(x, self.weight)


class Scaled(Projection):
    """Does more than it inherits."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(known_modules, "SPECS", list(known_modules.SPECS))
    known_modules.spec_of_class.cache_clear()
    yield f8.library.register_linear_like(Projection)
    known_modules.spec_of_class.cache_clear()


def test_a_registered_class_is_converted_and_a_subclass_with_its_own_forward_is_not(registered):
    torch.manual_seed(0)
    model = nn.Sequential(registered(), nn.SiLU(), nn.Linear(48, 32), Scaled()).bfloat16()
    before = f8.conversion_report(model)
    assert [row.fqn for row in before.rows] == ["0", "2", "3.weight"]
    f8.convert(model, f8.recipes.rowwise(), **EVERY)
    assert [row.converted for row in f8.conversion_report(model).rows] == [True, True, False]
    x = torch.randn(8, 32).bfloat16()
    assert torch.equal(model[0](x), f8.linear(x, model[0].weight, recipe=f8.recipes.rowwise()))
    assert "recipe=rowwise" in repr(model[0])


def test_the_last_registration_counts_from_the_next_convert_on(registered):
    torch.manual_seed(0)
    recipe, x = f8.recipes.rowwise(), torch.randn(8, 32).bfloat16()
    old, new = (nn.Sequential(registered()).bfloat16() for _ in range(2))
    for model in (old, new):
        model[0].weight = nn.Parameter(torch.randn(32, 32).bfloat16())
    before = f8.convert(old, recipe, **EVERY)(x)
    f8.library.register_linear_like(registered, is_transposed=True)
    f8.convert(new, recipe, **EVERY)
    assert torch.equal(new(x), f8.linear(x, new[0].weight.t(), recipe=recipe))
    assert torch.equal(old(x), before)
    assert type(f8.revert(old)[0]) is registered


class Kernel(nn.Module):
    """No linear, whatever its registration says."""

    def __init__(self, **parameters):
        super().__init__()
        for name, shape in parameters.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        raise AssertionError("it has no weight")


def test_registered_modules_that_are_no_linears(registered):
    f8.library.register_linear_like(Kernel)
    for function in (f8.conversion_report, lambda model: f8.convert(model, f8.recipes.rowwise())):
        with pytest.raises(
            TypeError, match="Kernel is registered as a linear layer of another library, but it has no "
        ):
            function(nn.Sequential(Kernel(kernel=(32, 32))))
    model = f8.convert(nn.Sequential(Kernel(weight=(2, 32, 32)), nn.Linear(32, 32)), f8.recipes.rowwise(), **EVERY)
    rows = f8.conversion_report(model).rows
    assert [row.converted for row in rows if row.fqn in "01"] == [False, True]
    assert rows[0].reason == "its weight has 3 dims; that of a linear layer must have 2"


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (nn.Linear, "is a nn.Linear, which convert already supports"),
        (nn.Module, "has no method forward"),
        ("Projection", "expected a subclass of torch.nn.Module"),
    ],
)
def test_what_is_no_class_to_register(cls, text):
    with pytest.raises(TypeError, match=text):
        f8.library.register_linear_like(cls)


# ---------------------------------------------------------------------------------- what explain says


class Half(nn.Module):
    """A Conv1D and a linear, of which a caller may make the first multiply past its forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Conv1D(128, 64), nn.Linear(128, 64, bias=False)
        self.bypasses = False

    def forward(self, x):
        y = x @ self.up.weight if self.bypasses else self.up(x)
        return self.down(y.relu())


@pytest.mark.parametrize("bypasses", [False, True])
def test_explain_judges_a_conv1d_by_its_own_weight(bypasses):
    def build(mesh):
        model = f8.convert(Half().bfloat16(), f8.recipes.rowwise(), **EVERY)
        model.bypasses = bypasses
        return model, (torch.randn(32, 64).bfloat16().requires_grad_(),)

    found = explain_mesh(build, {"fsdp": 2})
    assert bool(found.problem) == bypasses
    assert not bypasses or "up" in found.problem
    up, down = explain(*build(None), gpu=None).layers
    assert [gemm.status for gemm in down.gemms] == ["fp8"] * 3
    assert all(gemm.status == "fp8" for gemm in up.gemms) != bypasses
