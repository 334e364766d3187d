"""Autograd does with a converted model what it did before."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from eight_bits import EIGHT_BITS
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils import checkpoint as ckpt
from ways import behaviour

import fp8compile as f8

RECIPE = f8.recipes.rowwise()


def mlp(recipe=RECIPE):
    return f8.convert(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).bfloat16(), recipe)


def sample(*shape, dtype=torch.bfloat16):
    return torch.randn(*(shape or (32, 64)), dtype=dtype)


def loss_of(y):
    return y.float().square().sum()


def gradients(model, x, call):
    """Gradients of x and of the parameters after one backward of ``call(x)``; None where there is none."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    loss_of(call(x)).backward()
    return [x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


@pytest.fixture
def assert_same(assert_bits_equal):
    """Two lists of gradients have the same bits."""

    def check(actual, expected):
        for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert (a is None) == (e is None), f"gradient {number}: {a} beside {e}"
            if a is not None:
                assert_bits_equal(a, e, f"gradient {number}")

    return check


class CountOps(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts calls of our operators in eager mode."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fp8compile":
            self.calls.append(func._opname)
        return func(*args, **(kwargs or {}))


def backward_ops(way, model, x):
    """Names of our operators in the backward pass: those called in eager mode, those in the graph when compiled."""
    loss = loss_of
    if way.compiled:
        found = []

        def keep(graph, inputs):
            found.extend(node.target._opname for node in graph.graph.nodes if "fp8compile" in str(node.target))
            return make_boxed_func(graph)

        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=keep)
        loss(torch.compile(model, fullgraph=True, backend=backend)(x)).backward()
        return sorted(found)
    y = loss(model(x))
    with CountOps() as counter:
        y.backward()
    return sorted(op for op in counter.calls if op.startswith("grad_"))


# ------------------------------------------------------------------------------- checkpointing


@behaviour("Autograd", "activation checkpointing, non-reentrant")
def test_checkpoint_non_reentrant(way, assert_same):
    model, x = mlp(), sample()
    call = way(lambda x: ckpt.checkpoint(model, x, use_reentrant=False))
    assert_same(gradients(model, x, call), gradients(model, x, model))


@behaviour("Autograd", "activation checkpointing, reentrant")
def test_checkpoint_reentrant(way, assert_same):
    model, x = mlp(), sample()
    call = way(lambda x: ckpt.checkpoint(model, x, use_reentrant=True))
    assert_same(gradients(model, x, call), gradients(model, x, model))


def keep_products(ctx, op, *args, **kwargs):
    keep = op in f8.ops.GEMM_OPS
    return ckpt.CheckpointPolicy.MUST_SAVE if keep else ckpt.CheckpointPolicy.PREFER_RECOMPUTE


keep_products_contexts = partial(ckpt.create_selective_checkpoint_contexts, keep_products)


@behaviour("Autograd", "selective checkpointing that keeps `f8.ops.GEMM_OPS`")
def test_selective_checkpoint(way, assert_same):
    model, x = mlp(), sample()

    def run(x):
        return ckpt.checkpoint(model, x, use_reentrant=False, context_fn=keep_products_contexts)

    assert_same(gradients(model, x, way(run)), gradients(model, x, model))
    if not way.compiled:
        with CountOps() as counter:
            gradients(model, x, run)
        assert counter.calls.count("linear") == 2, "a product was computed again"
        with CountOps() as counter:
            gradients(model, x, lambda x: ckpt.checkpoint(model, x, use_reentrant=False))
        assert counter.calls.count("linear") > 2, "without the policy, products are computed again"


@behaviour("Autograd", "saved tensors moved away by `save_on_cpu` around the call")
def test_saved_tensor_hooks(way, assert_same):
    model, x = mlp(), sample()
    call = way(model)

    def run(x):
        with torch.autograd.graph.save_on_cpu():
            return call(x)

    assert_same(gradients(model, x, run), gradients(model, x, model))


# ------------------------------------------------------------------------------- what is computed


@behaviour("Autograd", "gradient accumulation over microbatches")
def test_accumulation(way, assert_same):
    model = mlp()
    call = way(model)
    batches = [sample() for _ in range(3)]
    for x in batches:
        loss_of(call(x)).backward()
    accumulated = [p.grad.clone() for p in model.parameters()]
    parts = [gradients(model, x, model)[1:] for x in batches]
    assert_same(accumulated, [(a + b) + c for a, b, c in zip(*parts, strict=True)])


@behaviour("Autograd", "an input that needs no gradient: no grad_input GEMM in the backward pass")
def test_input_without_grad(way):
    model = f8.convert(nn.Sequential(nn.Linear(64, 96)).bfloat16(), RECIPE)
    assert backward_ops(way, model, sample()) == ["grad_weight"]


@behaviour("Autograd", "frozen weights: no grad_weight GEMM in the backward pass")
def test_frozen_weight(way):
    model = mlp().requires_grad_(requires_grad=False)
    assert backward_ops(way, model, sample().requires_grad_()) == ["grad_input", "grad_input"]


@behaviour("Autograd", "only biases trained: no grad_weight GEMM in the backward pass")
def test_only_biases(way):
    model = mlp()
    model[0].weight.requires_grad_(requires_grad=False)
    model[2].weight.requires_grad_(requires_grad=False)
    assert backward_ops(way, model, sample()) == ["grad_input"]


@behaviour("Autograd", "first layers frozen: the backward pass stops there")
def test_frozen_prefix(way):
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    assert backward_ops(way, model, sample()) == ["grad_weight"]


@behaviour("Autograd", "one layer used twice")
def test_layer_used_twice(way, assert_same):
    layer = f8.convert(nn.Sequential(nn.Linear(64, 64)).bfloat16(), RECIPE)[0]
    other = f8.Linear.from_linear(nn.Linear(64, 64).bfloat16(), RECIPE)
    other.load_state_dict(layer.state_dict())
    x = sample()
    actual = gradients(layer, x, way(lambda x: layer(layer(x))))
    pair = nn.Sequential(layer, other)
    grads = gradients(pair, x, pair)
    # autograd adds in the order of its graph, the last use first
    assert_same(actual, [grads[0], grads[3] + grads[1], grads[4] + grads[2]])


@behaviour("Autograd", "writing to a layer's output in place: `ReLU(inplace=True)`, `y += residual`")
def test_in_place_on_the_output(way, assert_same):
    model, x = mlp(), sample()

    def in_place(x):
        y = nn.functional.relu(model[0](x), inplace=True)
        y = model[2](y)
        y += x
        return y

    assert_same(gradients(model, x, way(in_place)), gradients(model, x, lambda x: model(x) + x))


@behaviour("Autograd", "the layer called by name: `layer(input=x)`")
def test_called_by_name(way, assert_bits_equal):
    model, x = mlp(), sample()
    call = way(model[0])
    assert_bits_equal(call(input=x), model[0](x))


@behaviour("Autograd", "`torch.autograd.grad` for some of the parameters")
def test_autograd_grad(way, assert_same):
    model, x = mlp(), sample()
    expected = gradients(model, x, model)
    x = x.requires_grad_()
    grads = torch.autograd.grad(loss_of(way(model)(x)), [model[2].weight, x])
    assert_same(grads, [expected[3], expected[0]])


@behaviour("Autograd", "backward twice through one forward (`retain_graph`)")
def test_retain_graph(way, assert_same):
    model, x = mlp(), sample()
    expected = gradients(model, x, model)[1:]
    call = way(model)

    def run():
        model.zero_grad()
        loss = loss_of(call(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters()]

    # a compiled graph asks for this setting, with any model
    with torch._functorch.config.patch(donated_buffer=False):
        assert_same(run(), [grad + grad for grad in expected])


@behaviour("Autograd", "hooks: forward, on tensors, after accumulation")
def test_hooks(way, assert_same):
    model, x = mlp(), sample()
    expected = gradients(model, x, lambda x: model[2](model[1](model[0](x) * 2)))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 1,))
    model[2].weight.register_hook(lambda grad: grad * 8)
    seen = []
    model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    grads = gradients(model, x, way(model))
    assert_same(grads, [*expected[:3], expected[3] * 8, expected[4]])
    assert_same(seen, [expected[4]])


@behaviour("Autograd", "full backward hooks of modules")
def test_module_backward_hooks(way, assert_same):
    plain, model, x = nn.Sequential(nn.Linear(64, 96)).bfloat16(), mlp(), sample()
    expected = gradients(model, x, model)
    for layer in (plain[0], model[0]):
        layer.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 4,))
    if way.compiled:
        error = torch._dynamo.exc.Unsupported
        way.raises_as_before(error, "Module-level backwards hooks", lambda m: way(m)(x.requires_grad_()), plain, model)
    else:
        assert_same(gradients(model, x, model), [expected[0] * 4, *expected[1:]])


# ------------------------------------------------------------------------------- modes


@behaviour("Autograd", "`no_grad`: nothing is saved")
def test_no_grad(way, assert_bits_equal):
    model, x = mlp(), sample()
    call = way(model)
    with torch.no_grad():
        y = call(x)
    assert not y.requires_grad
    assert_bits_equal(y, model(x))


@behaviour("Autograd", "`inference_mode`")
def test_inference_mode(way, assert_bits_equal):
    model, x = mlp(), sample()
    call = way(model)
    with torch.inference_mode():
        y = call(x)
    assert y.is_inference()
    assert_bits_equal(y.clone(), model(x))


@behaviour("Autograd", "anomaly mode finds a NaN gradient; eager, the line of the layer")
def test_anomaly_mode(way, assert_same):
    model, x = mlp(), sample()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly():
            actual = gradients(model, x, way(model))
            assert_same(actual, gradients(model, x, model))
            y = way(model)(x.requires_grad_())
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with pytest.raises(RuntimeError, match="returned nan values"):
                    y.backward(torch.full_like(y, torch.nan))
    if not way.compiled:  # a compiled graph is one function to autograd, with any model
        assert any("return linear(input, self.weight" in str(warning.message) for warning in said)


@behaviour("Autograd", "compiled autograd", ways=("compiled",))
def test_compiled_autograd(way, assert_same):
    model, x = mlp(), sample()
    expected = gradients(model, x, model)
    with compiled_autograd._enable(partial(torch.compile, backend="aot_eager", fullgraph=True)):
        actual = gradients(model, x, way(model))
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == 1
    assert_same(actual, expected)


# ------------------------------------------------------------------------------- torch.func

# A layer with delayed scaling writes its state in the backward, which no function of torch.func may do.
EACH_RECIPE = [f8.recipes.by_name(name) for name in EIGHT_BITS if name != "delayed"]


def functional_loss(parameters, model, x):
    return loss_of(torch.func.functional_call(model, parameters, (x,)))


@behaviour("Autograd", "`torch.func.functional_call` and `torch.func.grad`")
def test_func_grad(way, assert_same):
    for model in map(mlp, EACH_RECIPE):
        x = sample()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        grads = way(partial(torch.func.grad(functional_loss), model=model, x=x))(parameters)
        assert_same(list(grads.values()), gradients(model, x, model)[1:])


@behaviour("Autograd", "`torch.func.vjp`")
def test_func_vjp(way, assert_same):
    def call(x, model):
        y, back = torch.func.vjp(model, x)
        return back(torch.ones_like(y))[0]

    for model in map(mlp, EACH_RECIPE):
        model.requires_grad_(requires_grad=False)
        x = sample()
        actual = way(call)(x, model)
        x = x.requires_grad_()
        model(x).sum().backward()
        assert_same([actual], [x.grad])


@behaviour("Autograd", "per-sample gradients by `vmap(grad(...))`: a loop, PyTorch warns", ways=("eager",))
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_per_sample_gradients(way, assert_same):
    for model in map(mlp, EACH_RECIPE):
        x = sample(4, 2, 64)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(functional_loss), (None, None, 0))(parameters, model, x)
        for number in range(4):
            assert_same([g[number] for g in grads.values()], gradients(model, x[number], model)[1:])


@behaviour("Autograd", "double backward")
def test_double_backward(way):
    model, x = mlp(), sample().requires_grad_()
    if way.compiled:
        (grad,) = torch.autograd.grad(loss_of(way(model)(x)), x, create_graph=True)
        with way.raises(RuntimeError, "does not currently support double backward"):
            grad.float().sum().backward()
        return
    (grad,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
    with way.raises(RuntimeError, "only once", "fp8compile.revert"):
        grad.float().sum().backward()


@behaviour("Autograd", "forward-mode derivatives (`torch.func.jvp`)")
def test_jvp(way):
    for model in map(mlp, EACH_RECIPE):
        call = way(partial(lambda x, model: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1], model=model))
        with way.raises(RuntimeError, "forward-mode", "fp8compile.revert"):
            call(sample())
