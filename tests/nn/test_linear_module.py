"""fp8compile.Linear: a nn.Linear to everything that looks for one."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fp8compile as f8

RECIPE = f8.recipes.rowwise()


def hooked_linear():
    linear = nn.Linear(32, 48)
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    linear.register_forward_hook(lambda module, args, output: output + 1)
    linear.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 3,))
    return linear


def test_from_linear_shares_parameters_buffers_and_attributes():
    linear = nn.Linear(32, 48).eval()
    linear.register_buffer("step", torch.zeros(1))
    linear.note = {"a": 1}
    module = f8.Linear.from_linear(linear, RECIPE)
    assert type(module) is f8.Linear
    assert isinstance(module, nn.Linear)
    for name in ("weight", "bias", "step", "note"):
        assert getattr(module, name) is getattr(linear, name), name
    assert (module.in_features, module.out_features, module.training) == (32, 48, False)
    assert module.recipe is RECIPE


def test_from_linear_keeps_hooks(assert_bits_equal):
    module = f8.Linear.from_linear(hooked_linear(), RECIPE)
    x = torch.randn(4, 32, requires_grad=True)
    doubled = (x.detach() * 2).requires_grad_()
    y, expected = module(x), f8.linear(doubled, module.weight, module.bias, recipe=RECIPE) + 1
    assert_bits_equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    assert_bits_equal(x.grad, doubled.grad * 3 * 2)


def test_hooks_of_the_state_dict_outlive_the_linear_they_were_made_on():
    linear, calls = nn.Linear(32, 48), []
    linear.register_load_state_dict_pre_hook(lambda module, *args: calls.append(type(module)))
    linear.register_load_state_dict_post_hook(lambda module, keys: calls.append(type(module)))
    model = f8.convert(nn.Sequential(linear), RECIPE)
    del linear
    gc.collect()
    model.load_state_dict(model.state_dict())
    assert len(calls) == 2


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_to_linear_is_the_way_back(bias):
    linear = nn.Linear(32, 48, bias=bias)
    linear.register_buffer("step", torch.zeros(1))
    handle = linear.register_forward_hook(lambda module, args, output: output + 1)
    back = f8.Linear.from_linear(linear, RECIPE).to_linear()
    assert type(back) is nn.Linear
    assert vars(back).keys() == vars(linear).keys()
    assert back.weight is linear.weight
    assert back.bias is linear.bias
    assert back.step is linear.step
    x = torch.randn(4, 32)
    with_hook = back(x)
    handle.remove()
    assert torch.equal(with_hook, back(x) + 1)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (Scaled(32, 48), "Scaled"),
        (nn.Bilinear(4, 4, 4), "Bilinear"),
        (nn.LazyLinear(48), "LazyLinear"),
        (f8.Linear(32, 48, recipe=RECIPE), "Linear"),
        (None, "NoneType"),
    ],
    ids=["subclass", "Bilinear", "LazyLinear", "f8.Linear", "None"],
)
def test_from_linear_refuses_all_but_a_plain_linear(given, name):
    with pytest.raises(TypeError, match="from_linear") as caught:
        f8.Linear.from_linear(given, RECIPE)
    assert str(caught.value) == (
        "Linear.from_linear: expected a torch.nn.Linear and not a subclass, because the class would be lost; got a "
        f"{name}. fp8compile.convert keeps the class."
    )


@pytest.mark.parametrize(
    "make",
    [lambda recipe: f8.Linear(32, 48, recipe=recipe), lambda recipe: f8.Linear.from_linear(nn.Linear(32, 48), recipe)],
    ids=["init", "from_linear"],
)
@pytest.mark.parametrize("recipe", ["rowwise", None, f8.CurrentScaling()], ids=str)
def test_recipe_of_another_kind_raises(make, recipe):
    with pytest.raises(TypeError, match="recipe") as caught:
        make(recipe)
    assert str(caught.value) == (
        f"Linear: `recipe` is {recipe!r}; it must be a fp8compile.Recipe, such as fp8compile.recipes.rowwise() or "
        "fp8compile.recipes.by_name('rowwise')."
    )


def test_made_from_scratch_it_starts_like_nn_linear(assert_bits_equal):
    torch.manual_seed(3)
    plain = nn.Linear(32, 48, dtype=torch.bfloat16)
    torch.manual_seed(3)
    module = f8.Linear(32, 48, recipe=RECIPE, dtype=torch.bfloat16)
    assert_bits_equal(module.weight, plain.weight)
    assert_bits_equal(module.bias, plain.bias)
    assert f8.Linear(32, 48, bias=False, recipe=RECIPE).bias is None
    assert f8.Linear(32, 48, recipe=RECIPE, device="meta").weight.is_meta


# ---------------------------------------------------------------------------------- state


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_state_dict_is_that_of_nn_linear_both_ways(bias, assert_bits_equal):
    plain, module = nn.Linear(32, 48, bias=bias), f8.Linear(32, 48, bias=bias, recipe=RECIPE)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert str(module.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert_bits_equal(module.weight, plain.weight)
    other = f8.Linear(32, 48, bias=bias, recipe=RECIPE)
    assert str(plain.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert_bits_equal(plain.weight, other.weight)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert list(torch.load(file, weights_only=True)) == list(plain.state_dict())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_have_the_recipe_and_their_own_parameters(copied, assert_bits_equal):
    module = f8.Linear(32, 48, recipe=RECIPE)
    twin = copied(module)
    assert type(twin) is f8.Linear
    assert twin.recipe == RECIPE
    assert twin.weight is not module.weight
    x = torch.randn(4, 32)
    assert_bits_equal(twin(x), module(x))


def test_to_another_dtype_computes_in_it():
    module = f8.Linear(32, 48, recipe=RECIPE)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert module.to(dtype)(torch.randn(4, 32, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("shape", [(32,), (1, 32), (0, 32), (3, 5, 32), (2, 1, 3, 32)], ids=str)
def test_any_leading_dims(shape, assert_bits_equal):
    module, x = f8.Linear(32, 48, recipe=RECIPE), torch.randn(shape)
    y = module(x)
    assert y.shape == (*shape[:-1], 48)
    assert_bits_equal(y.reshape(-1, 48), module(x.reshape(-1, 32)))


def test_extra_repr_ends_with_the_recipe():
    recipe = f8.Recipe(input=f8.CurrentScaling(), weight=f8.CurrentScaling())
    module = f8.Linear(32, 48, bias=False, recipe=recipe)
    assert_expected_inline(
        repr(module).replace(", ", ",\n"),
        """\
Linear(in_features=32,
out_features=48,
bias=False,
recipe=Recipe(input=CurrentScaling(format='e4m3',
block=(-1,
-1),
scale='fp32',
eps=0.0,
rounding='nearest',
seed=0),
weight=CurrentScaling(format='e4m3',
block=(-1,
-1),
scale='fp32',
eps=0.0,
rounding='nearest',
seed=0),
grad_output=None,
weight_for_grad_input=None,
grad_output_for_grad_weight=None,
input_for_grad_weight=None,
fast_accumulation_output=True,
fast_accumulation_grad_input=False,
fast_accumulation_grad_weight=False,
weight_lifetime='call',
dequantized_output=False,
dequantized_gradients=False,
emulate=False,
by_mx=False))""",
    )
