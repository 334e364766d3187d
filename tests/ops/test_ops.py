"""The operators: their samples, results and derivatives, and what a layer keeps and calls.

What an operator of any package has to keep (PyTorch's opcheck on every sample, a decomposition and compiled code with
the bits of the kernel), `check_op` asks of each of ours in tests/ops/test_contracts.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eight_bits import EIGHT_BITS
from states import state_of
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fp8compile as f8
from fp8compile.ops import OPS, linear
from fp8compile.ops.layer.operands import STEPS, Phase
from fp8compile.testing.samples import samples_of

NAMESPACE = "fp8compile::"
RECIPE = f8.recipes.rowwise()
FSDP = ("fsdp_amaxes_together", "fsdp_gather", "fsdp_amax_carriers")
STRAIGHT = ("straight_through", "with_product_gradient")
differentiable = tuple(
    f"fp8compile::{op}"
    for op in (
        *("linear", "delayed_linear", "observe"),
        *("scatter_sum", "routed_rows", "dispatch", "combine", *STRAIGHT, *FSDP),
    )
)
KEEP_STRIDES = (
    "fp8compile::after",
    "fp8compile::scale",
    "fp8compile::stored",
    "fp8compile::straight_through",
    "fp8compile::two_scales",
    "fp8compile::observe",  # which returns y as it is
)  # elementwise
# as GEMMs read it
LAID_OUT = (
    "fp8compile::cast_transpose", "fp8compile::quantize_two_levels", "fp8compile::group_cast_transpose",
    "fp8compile::quantize_columns",
)  # fmt: skip
OURS = sorted(name for name in OPS if name.startswith(NAMESPACE))
every_op = pytest.mark.parametrize("name", OURS)


def _registered() -> set[str]:
    """Operators that PyTorch knows in our namespace, however they came there."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.partition(".")[0] for name in names if name.startswith(NAMESPACE)}


def _without_samples() -> set[str]:
    return {name for name in _registered() if name not in OPS or not list(samples_of(OPS[name])())}


def _samples(name: str) -> list[tuple]:
    return list(samples_of(OPS[name])())


def _tensors(args: tuple) -> list[Tensor]:
    given = (each for arg in args for each in (arg if isinstance(arg, list) else [arg]))
    return [each for each in given if isinstance(each, Tensor)]


# ---------------------------------------------------------------------------------- every op, by PyTorch's checks


def test_every_registered_op_has_samples():
    assert {"amax", "scale", "cast", "dequantize", "scaled_mm", "linear", "grad_input", "grad_weight"} <= {
        name.removeprefix(NAMESPACE) for name in _registered()
    }
    assert _without_samples() == set()


def test_a_planted_op_without_samples_is_found():
    planted = torch.library.Library("fp8compile", "FRAGMENT")
    planted.define("planted(Tensor x) -> Tensor")
    try:
        assert _without_samples() == {"fp8compile::planted"}
    finally:
        planted._destroy()
    assert _without_samples() == set()


@every_op
def test_samples_hold_odd_layouts_and_empty_tensors(name):
    tensors = [tensor for args in _samples(name) for tensor in _tensors(args)]
    assert any(tensor.numel() == 0 for tensor in tensors)
    assert any(not tensor.is_contiguous() for tensor in tensors)
    if name in ("fp8compile::amax", "fp8compile::cast", "fp8compile::linear"):
        assert {tensor.ndim for tensor in tensors} >= {1, 2, 3}
        assert {tensor.dtype for tensor in tensors} >= {torch.bfloat16, torch.float16, torch.float32}
        permuted = [t for t in tensors if t.ndim == 3 and sorted(t.stride(), reverse=True) != list(t.stride())]
        strided = [t for t in tensors if t.ndim == 2 and min(t.stride()) > 1]
        assert permuted
        assert strided


@pytest.mark.parametrize("index", range(8))
def test_linear_passes_opcheck_with_gradients_and_dynamic_shapes(index):
    # one recipe an input: all 8 layouts and dtypes, each recipe at least twice
    *tensors, offs, known, sizes, sharding, recipe = _samples("fp8compile::linear")[3 * index + index % 3]
    leaves = (tensor.detach().clone().requires_grad_() for tensor in tensors)
    args = (*leaves, offs, known, sizes, sharding, recipe)
    torch.library.opcheck(linear, args, test_utils="test_aot_dispatch_dynamic")


def _tensors_of(result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@every_op
def test_results_are_new_contiguous_tensors(name):
    for args in _samples(name):
        storages = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args) if tensor.numel()}
        for result in _tensors_of(OPS[name].overload(*args)):
            assert not result.numel() or result.untyped_storage().data_ptr() not in storages
            assert result.is_contiguous() or name in (*KEEP_STRIDES, *LAID_OUT)


# ---------------------------------------------------------------------------------- derivatives


def _layer(*, x_grad: bool = True, weight_grad: bool = True) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(6, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    return x.requires_grad_(x_grad), weight.requires_grad_(weight_grad)


@pytest.mark.parametrize("operand", [0, 1])
def test_second_derivatives_raise_and_say_what_to_do(operand):
    inputs = _layer()
    y = f8.linear(*inputs, recipe=RECIPE)
    (first,) = torch.autograd.grad(y.sum(), inputs[operand], create_graph=True)
    name = ("grad_input", "grad_weight")[operand]
    with pytest.raises(RuntimeError, match=f"fp8compile::{name} has no derivative.*only once.*unconverted model"):
        first.sum().backward()


@pytest.mark.parametrize("name", sorted(set(OURS) - set(differentiable)))
def test_a_backward_through_an_op_without_derivative_raises(name):
    args = next(args for args in samples_of(OPS[name])() if all(t.numel() for t in _tensors(args)))
    args = tree_map_only(Tensor, lambda a: a.detach().requires_grad_() if a.is_floating_point() else a, args)
    result = _tensors_of(OPS[name].overload(*args))[0]
    if name == "fp8compile::add_pieces":  # of ops that observe, which detach what they count
        assert not result.requires_grad
        return
    if not result.is_floating_point():
        assert not result.requires_grad  # codes: integers, constants to autograd
        return
    with pytest.raises(RuntimeError, match=f"{name} has no derivative"):
        result.sum().backward()


def test_torch_func_grad_and_vjp_give_autograds_gradients(assert_bits_equal):
    x, weight = _layer()
    grad_output = torch.randn(6, 16).bfloat16()
    expected = torch.autograd.grad(f8.linear(x, weight, recipe=RECIPE), (x, weight), grad_output)
    x, weight = x.detach(), weight.detach()

    def weighted(x: Tensor, weight: Tensor) -> Tensor:
        return (f8.linear(x, weight, recipe=RECIPE).float() * grad_output.float()).sum()

    _, vjp = torch.func.vjp(lambda x, weight: f8.linear(x, weight, recipe=RECIPE), x, weight)
    for results in (torch.func.grad(weighted, argnums=(0, 1))(x, weight), vjp(grad_output)):
        for got, want in zip(results, expected, strict=True):
            assert_bits_equal(got, want)


def test_functional_call_uses_the_parameters_it_is_given(assert_bits_equal):
    module = f8.Linear(32, 16, recipe=RECIPE, dtype=torch.bfloat16)
    x, weight = _layer()
    parameters = {"weight": weight, "bias": torch.ones(16).bfloat16()}
    y = torch.func.functional_call(module, parameters, (x,))
    assert_bits_equal(y, f8.linear(x, weight, parameters["bias"], recipe=RECIPE))
    y.sum().backward()
    assert weight.grad is not None
    assert module.weight.grad is None


@pytest.mark.parametrize(("x_grad", "weight_grad"), [(False, False), (True, False), (False, True)])
def test_forward_mode_raises_instead_of_returning_zeros(x_grad, weight_grad):
    x, weight = _layer(x_grad=x_grad, weight_grad=weight_grad)
    with pytest.raises(RuntimeError, match=r"fp8compile::linear has no forward-mode derivative\. Use reverse mode"):
        torch.func.jvp(lambda x: f8.linear(x, weight, recipe=RECIPE), (x,), (torch.ones_like(x),))
    with pytest.raises(RuntimeError, match=r"fp8compile::linear has no forward-mode derivative\. Use reverse mode"):
        torch.func.jvp(lambda w: f8.linear(x, w, recipe=RECIPE), (weight,), (torch.ones_like(weight),))


def test_where_gradients_are_off_derivatives_are_as_elsewhere(assert_bits_equal):
    """The call takes a shorter way there, unless it can be differentiated all the same."""
    x, weight = _layer(x_grad=False, weight_grad=False)

    def layer(x):
        return f8.linear(x, weight, recipe=RECIPE)

    gradient = torch.func.grad(lambda x: layer(x).float().sum())
    expected = gradient(x)
    assert expected.any()
    with torch.no_grad():
        assert_bits_equal(gradient(x), expected)
        with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
            torch.func.jvp(layer, (x,), (torch.ones_like(x),))
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="has no forward-mode derivative"):
            layer(forward_ad.make_dual(x, torch.ones_like(x)))


# ---------------------------------------------------------------------------------- what a layer calls and keeps


class _Recorder(TorchDispatchMode):
    """Names of the ops of our namespace that autograd calls (not those that their kernels call)."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fp8compile":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("x_grad", "weight_grad", "called"),
    [(True, True, {"grad_input", "grad_weight"}), (True, False, {"grad_input"}), (False, True, {"grad_weight"})],
)
def test_backward_computes_only_the_gradients_asked_for(x_grad, weight_grad, called):
    x, weight = _layer(x_grad=x_grad, weight_grad=weight_grad)
    y = f8.linear(x, weight, recipe=RECIPE)
    with _Recorder() as recorder:
        y.sum().backward()
    assert set(recorder.names) & {"grad_input", "grad_weight"} == called
    assert (x.grad is not None, weight.grad is not None) == (x_grad, weight_grad)


@pytest.mark.parametrize("recipe", f8.recipes.names())
@pytest.mark.parametrize(
    ("x_grad", "weight_grad", "kept"), [(True, True, "xw"), (True, False, "w"), (False, True, "x"), (False, False, "")]
)
def test_forward_saves_its_inputs_and_nothing_else(recipe, x_grad, weight_grad, kept):
    x, weight = _layer(x_grad=x_grad, weight_grad=weight_grad)
    saved = []
    recipe = f8.recipes.by_name(recipe)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        f8.linear(x, weight, recipe=recipe, state=state_of(recipe))
    if kept and recipe.history():
        assert saved.pop().shape == (3,)  # the multipliers that were used
    pointers = {"x": x.data_ptr(), "w": weight.data_ptr()}
    assert sorted(t.data_ptr() for t in saved) == sorted(pointers[name] for name in kept)


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_codes_live_no_longer_than_the_gemm_that_reads_them(recipe, monkeypatch):
    name, recipe, storages, cast = recipe, f8.recipes.by_name(recipe), [], OPS["fp8compile::cast"].impl

    def watched(*args) -> Tensor:
        codes = cast(*args)
        storages.append(StorageWeakRef(codes.untyped_storage()))
        return codes

    monkeypatch.setitem(STEPS, Phase.EAGER, replace(STEPS[Phase.EAGER], cast=watched))
    x, weight = _layer()
    y = f8.linear(x, weight, recipe=recipe, state=state_of(recipe))
    assert len(storages) == 2
    assert all(storage.expired() for storage in storages)
    y.sum().backward()
    assert len(storages) == {"rowwise_bf16_wgrad": 4}.get(name, 6)
    assert all(storage.expired() for storage in storages)


def test_without_gradients_nothing_is_saved_and_no_graph_is_made():
    x, weight = _layer()
    with torch.no_grad():
        assert f8.linear(x, weight, recipe=RECIPE).grad_fn is None
    assert not f8.linear(x.detach(), weight.detach(), recipe=RECIPE).requires_grad
    assert isinstance(f8.Linear(32, 16, recipe=RECIPE), nn.Linear)
