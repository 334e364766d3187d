"""Delayed scaling: its golden sequences, and a layer's state from step to step."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from states import MULTIPLIERS, state_of
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8compile as f8
from fp8compile import ops
from fp8compile.quantizers.delayed_scaling import next_state

GOLDEN = Path(__file__).parents[1] / "golden"
ENTRIES = json.loads((GOLDEN / "manifest.json").read_text())["cases"]
SEQUENCES = [entry for entry in ENTRIES if entry["kind"] == "delayed"]
CASTS = [entry for entry in ENTRIES if entry["kind"] == "delayed_cast"]
RECIPE = f8.recipes.delayed(history=4)
BACKENDS = (None, "aot_eager", "inductor")
FRESH = (torch.zeros(3, 4), torch.ones(3))


def quantizer_of(entry):
    params = entry["params"]
    return f8.DelayedScaling(
        format=entry["format"],
        history=params["history_length"],
        algorithm=params["amax_compute_algo"],
        margin=params["margin"],
    )


def arrays_of(entry):
    arrays = np.load(GOLDEN / entry["file"])
    return {name: arrays[name] for name in arrays.files}


def tensor(array):
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.uint16
        else torch.from_numpy(array)
    )


# ---------------------------------------------------------------------------------- golden sequences


def test_21_sequences_and_3_casts_are_there():
    assert (len(SEQUENCES), len(CASTS)) == (21, 3)


def multiplier_of(golden, history, amax, quantizer):
    """The reference's; where that waits until an amax that is not finite has left the history, of the finite ones."""
    seen = np.array([amax, *history[1:]])
    finite = seen[np.isfinite(seen)]
    if quantizer.algorithm == "most_recent" or len(finite) == len(seen):
        return torch.tensor(golden)
    assert finite.max() > 0  # in these sequences
    return torch.tensor(np.float32(quantizer.room() / np.float64(finite.max())))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_histories_and_multipliers_are_the_references(backend, assert_bits_equal):
    steps = {}  # one graph for each different quantizer
    for entry in SEQUENCES:
        arrays, quantizer = arrays_of(entry), quantizer_of(entry)
        if quantizer not in steps:
            room = torch.tensor(quantizer.room(), dtype=torch.float64)
            step = functools.partial(next_state, room=room, algorithm=quantizer.algorithm)
            options = {"backend": backend, "fullgraph": True, "dynamic": False}
            torch._dynamo.reset()  # there are more quantizers than Dynamo allows graphs of one function
            steps[quantizer] = quantizer.next_state if backend is None else torch.compile(step, **options)
        history, multiplier = tensor(arrays["history_initial"]), tensor(arrays["qscale_initial"]).view(())
        for number, amax in enumerate(tensor(arrays["amax"])):
            before = history.numpy()
            history, multiplier = steps[quantizer](history, multiplier, amax)
            what = f"{entry['name']}, step {number}"
            assert_bits_equal(history, tensor(arrays["history"][number]), what)
            golden = arrays["qscale_truediv"][number]
            expected = multiplier_of(golden, before, amax.item(), quantizer)
            assert_bits_equal(multiplier, expected, what)
            if expected == golden:
                golden_scale = tensor(arrays["scale_truediv"][number : number + 1]).view(())
                assert_bits_equal(quantizer.scale_of(multiplier), golden_scale, what)


def cast_and_amax(x, multiplier, quantizer):
    return ops.cast(x, multiplier, quantizer), ops.amax(x, quantizer)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("entry", CASTS, ids=lambda entry: entry["name"])
def test_casts_are_the_references(entry, backend, assert_bits_equal):
    arrays, quantizer = arrays_of(entry), quantizer_of(entry)
    run = cast_and_amax if backend is None else torch.compile(cast_and_amax, backend=backend, fullgraph=True)
    xs, multipliers = tensor(arrays["x"]), tensor(arrays["qscale_used"])
    for step, (x, multiplier) in enumerate(zip(xs, multipliers, strict=True)):
        codes, amax = run(x, multiplier.view(1, 1), quantizer)
        assert_bits_equal(codes, tensor(arrays["codes"])[step], f"codes of step {step}")
        assert_bits_equal(amax.view(()), tensor(arrays["amax"])[step], f"amax of step {step}")


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_nan_and_inf_becomes_nan_and_finite_overflow_saturates(format, dtype):
    quantizer = f8.DelayedScaling(format=format)
    x = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan, 1e38, -1e38, 0.0, -0.0]], dtype=dtype)
    largest = quantizer.element_format().max
    for multiplier in (1.0, 1e10):  # with the second one, the product of a finite value overflows float32
        scale = torch.full((1, 1), multiplier)
        values = quantizer.element_format().decode(quantizer.cast(x, scale))
        expected = [[min(multiplier, largest), *[torch.nan] * 3, largest, -largest, 0.0, -0.0]]
        assert torch.equal(values.nan_to_num(-1), torch.tensor(expected).nan_to_num(-1))
        assert values.signbit()[0, -1]


# ---------------------------------------------------------------------------------- the value


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"format": "e2m1"}, "`format` is 'e2m1'; it must be 'e4m3' or 'e5m2'"),
        (
            {"block": (1, -1)},
            r"`block` is \(1, -1\); it must be \(-1, -1\), because the history stores one amax "
            r"for the full tensor",
        ),
        ({"history": 0}, "`history` is 0; it must be an int of at least 1"),
        ({"history": True}, "`history` is True; it must be an int of at least"),
        ({"algorithm": "mean"}, "`algorithm` is 'mean'; it must be 'max' or 'most_recent'"),
        ({"margin": -1}, "`margin` is -1; it must be an int from 0 to 8"),
        ({"margin": 9}, "`margin` is 9; it must be an int from 0 to 8"),
        ({"margin": 1.0}, "`margin` is 1.0; it must be an int from 0 to 8"),
    ],
)
def test_a_field_of_another_kind_raises(arguments, says):
    with pytest.raises(ValueError, match=f"DelayedScaling: {says}"):
        f8.DelayedScaling(**arguments)


def test_with_the_largest_margin_every_finite_amax_has_a_finite_scale():
    quantizer = f8.DelayedScaling(margin=8, history=1)
    amaxes = torch.tensor([torch.finfo(torch.float32).max, 1e-45])
    for amax in amaxes:
        _, multiplier = quantizer.next_state(torch.zeros(1), torch.ones(()), amax)
        assert 0 < multiplier < torch.inf
        assert 0 < quantizer.scale_of(multiplier) < torch.inf


def test_two_roles_of_one_tensor_need_one_quantizer():
    four, e5m2 = f8.DelayedScaling(history=4), f8.DelayedScaling(history=4, format="e5m2")
    with pytest.raises(
        ValueError, match="Recipe: grad_output has only one history of amaxes, but grad_output and grad_output_for"
    ):
        f8.Recipe(
            grad_output=four, weight_for_grad_input=four, grad_output_for_grad_weight=e5m2, input_for_grad_weight=four
        )
    for other in (f8.DelayedScaling(history=5), f8.DelayedScaling(history=4, algorithm="most_recent")):
        with pytest.raises(ValueError, match="use the same two for each"):
            f8.Recipe(input=four, weight=other)


def test_a_tensor_by_itself_has_no_delayed_scale():
    with pytest.raises(RuntimeError, match=r"DelayedScaling: its scale comes from previous steps and.*CurrentScaling"):
        f8.quantize(torch.randn(4, 4), f8.DelayedScaling())


# ---------------------------------------------------------------------------------- the function


def layer(dtype=torch.bfloat16):
    x, weight = torch.randn(6, 32).to(dtype), torch.randn(16, 32).to(dtype)
    return x.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_without_a_state_it_raises(backend):
    def call(x, weight):
        return f8.linear(x, weight, recipe=RECIPE)

    fn = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    with pytest.raises(
        Exception, match=r"the recipe uses delayed scaling, whose scales come from previous steps.*state="
    ):
        fn(*layer())


@pytest.mark.parametrize(
    ("recipe", "state", "error", "says"),
    [
        (RECIPE, FRESH, TypeError, "(?s)linear: `state` is .*; it must be a fp8compile.DelayedState"),
        (f8.recipes.rowwise(), f8.DelayedState(*FRESH), ValueError, "the recipe has no delayed scaling. Omit state"),
        (
            f8.recipes.delayed(),
            f8.DelayedState(*FRESH),
            ValueError,
            r"amax_history of the state is \(3, 4\).*\(3, 1024\)",
        ),
        (RECIPE, f8.DelayedState(FRESH[0], torch.ones(3).half()), ValueError, "multiplier of the state is .*float16"),
        (RECIPE, f8.DelayedState(FRESH[0], torch.ones(3).requires_grad_()), ValueError, ".*Call .detach.. on it"),
    ],
)
def test_a_state_that_is_not_the_recipes_raises(recipe, state, error, says):
    with pytest.raises(error, match=says):
        f8.linear(*layer(), recipe=recipe, state=state)


def test_a_state_needs_a_recipe_with_delayed_scaling_and_a_group():
    with pytest.raises(ValueError, match="DelayedState: the recipe contains no DelayedScaling"):
        f8.DelayedState.initial(f8.recipes.rowwise())
    with pytest.raises(TypeError, match=r"DelayedState: a group must be a ProcessGroup, .* got 'pair'"):
        f8.DelayedState.initial(RECIPE, group="pair")


def test_the_backward_updates_each_history_once_by_what_was_seen(assert_bits_equal):
    (x, weight), state = layer(), state_of(RECIPE)
    y = f8.linear(x, weight, recipe=RECIPE, state=state)
    assert not state.amax_history.any()
    grad_output = torch.randn_like(y)
    y.backward(grad_output)
    seen = torch.stack([t.detach().abs().amax().float() for t in (x, weight, grad_output)])
    expected = torch.zeros(3, 4)
    expected[:, -1] = seen
    assert_bits_equal(state.amax_history, expected)
    assert_bits_equal(state.multiplier, (torch.tensor([448.0, 448.0, 57344.0]).double() / seen.double()).float())


def test_reset_is_the_state_before_the_first_step():
    (x, weight), state = layer(), f8.DelayedState.initial(RECIPE)
    f8.linear(x, weight, recipe=RECIPE, state=state).sum().backward()
    tensors = state[:2]
    state.reset()
    for tensor, fresh in zip(tensors, FRESH, strict=True):
        assert torch.equal(tensor, fresh)


def test_where_no_backward_runs_nothing_is_updated():
    (x, weight), state = layer(), state_of(RECIPE)
    with torch.no_grad():
        f8.linear(x, weight, recipe=RECIPE, state=state)
    f8.linear(x, weight, recipe=RECIPE, state=state)
    assert not state.amax_history.any()
    assert state.multiplier.tolist() == list(MULTIPLIERS.values())


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_an_amax_that_is_not_finite_shows_and_does_not_make_a_scale(algorithm, backend):
    recipe = f8.recipes.delayed(history=4, algorithm=algorithm)
    (x, weight), state = layer(), state_of(recipe)
    run = f8.linear if backend is None else torch.compile(f8.linear, backend=backend, fullgraph=True)

    def step(value):
        x.data[2, 3] = value
        y = run(x, weight, recipe=recipe, state=state)
        y.backward(torch.ones_like(y))
        return y

    def multiplier_of_finite():
        amax = x.detach()[x.isfinite()].abs().amax()
        return (448 / amax.double()).float()

    step(torch.inf)
    assert state.multiplier[0] == MULTIPLIERS["input"]  # nothing is known of the input yet
    assert (state.multiplier[1:] != torch.tensor([5.0, 7.0])).all()
    step(9.0)
    assert state.multiplier[0] == multiplier_of_finite()  # at once, not when the bad one has left the history
    for bad in (torch.inf, -torch.inf, torch.nan):
        y = step(bad)
        assert y[2].isnan().all()  # one by one: the row that reads it, and no other
        assert y[[0, 1, 3, 4, 5]].isfinite().all()
        assert not state.amax_history[0, -1].isfinite()
        assert state.multiplier[0] == (448 / torch.tensor(9.0).double()).float()
    step(1.0)
    assert state.multiplier[0] == multiplier_of_finite()


def test_only_tensors_with_delayed_scaling_change_their_row(assert_bits_equal):
    value, own = f8.DelayedScaling(history=4), f8.CurrentScaling()
    recipe = f8.Recipe(input=value, weight=own, grad_output=own, weight_for_grad_input=own)
    (x, weight), state = layer(), state_of(recipe)
    y = f8.linear(x, weight, recipe=recipe, state=state)
    dx, dw = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert state.amax_history[0].any()
    assert not state.amax_history[1:].any()
    assert state.multiplier.tolist()[1:] == [5.0, 7.0]
    same = f8.Recipe(input=own, weight=own, grad_output=own, weight_for_grad_input=own)
    expected = torch.autograd.grad(f8.linear(x, weight, recipe=same), (x, weight), torch.ones_like(y))
    assert_bits_equal(dx, expected[0])
    assert_bits_equal(dw, expected[1])


# ---------------------------------------------------------------------------------- torch.func

LOSSES = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "jacrev": lambda f, x: torch.func.jacrev(lambda x: f(x).sum(0))(x),
}


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=str)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap calls the op a sample at a time
def test_transforms_that_can_not_write_to_the_state_say_what_to_do(name, backend):
    (x, weight), state = layer(), f8.DelayedState.initial(RECIPE)

    def call(x):
        return LOSSES[name](lambda x: f8.linear(x, weight, recipe=RECIPE, state=state), x)

    fn = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    with pytest.raises(Exception, match=r"(?s)the backward updates the state of delayed scaling.*Call backward\(\)"):
        fn(x.detach())
    assert not state.amax_history.any()


def test_a_transform_writes_to_a_state_that_it_was_given(assert_bits_equal):
    (x, weight), given, usual = layer(), f8.DelayedState.initial(RECIPE), f8.DelayedState.initial(RECIPE)
    f8.linear(x, weight, recipe=RECIPE, state=usual).sum().backward()

    def loss(x, history, multiplier):
        return f8.linear(x, weight.detach(), recipe=RECIPE, state=f8.DelayedState(history, multiplier)).sum()

    assert_bits_equal(torch.func.grad(loss)(x.detach(), *given[:2]), x.grad)
    for own, expected in zip(given[:2], usual[:2], strict=True):
        assert_bits_equal(own, expected)


# ---------------------------------------------------------------------------------- several forwards


def test_a_backward_casts_by_what_its_forward_used(assert_bits_equal):
    """Forward, forward, backward, backward: the second one casts by the multipliers of its own forward."""
    inputs, grads = [layer() for _ in range(2)], [torch.randn(6, 16).bfloat16() for _ in range(2)]
    state = state_of(RECIPE)
    outputs = [f8.linear(*each, recipe=RECIPE, state=state) for each in inputs]
    for each, y, grad in zip(inputs, outputs, grads, strict=True):
        found = torch.autograd.grad(y, each, grad)
        alone = f8.linear(*each, recipe=RECIPE, state=state_of(RECIPE))
        for got, expected in zip(found, torch.autograd.grad(alone, each, grad), strict=True):
            assert_bits_equal(got, expected)
    assert state.amax_history.count_nonzero(1).tolist() == [2, 2, 2]


def keep_products(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in f8.ops.GEMM_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def test_checkpointing_that_would_repeat_a_forward_by_other_scales_raises(assert_bits_equal):
    selective = functools.partial(create_selective_checkpoint_contexts, keep_products)
    module = f8.Linear(32, 32, recipe=RECIPE, dtype=torch.bfloat16)
    x, grads = layer()[0], []
    for options in ({}, {"context_fn": selective}, None):
        own = copy.deepcopy(module)
        first, second = (
            own(x) if options is None else checkpoint(own, x, use_reentrant=False, **options) for _ in "12"
        )
        first.sum().backward()
        if options == {}:
            with pytest.raises(RuntimeError, match=r"recomputed this layer's forward with different scales.*GEMM_OPS"):
                second.sum().backward()
        else:
            second.sum().backward()
            grads.append(own.weight.grad)
    assert_bits_equal(*grads)


# ---------------------------------------------------------------------------------- the module


def trained(module, steps=range(3)):
    for step in steps:
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(step)).to(module.weight.dtype)
        module(x).sum().backward()
    return module


@pytest.fixture
def module():
    torch.manual_seed(0)
    return f8.Linear(32, 16, recipe=RECIPE, dtype=torch.bfloat16)


def assert_state_equal(module, other, assert_bits_equal):
    assert_bits_equal(module.amax_history, other.amax_history)
    assert_bits_equal(module.multiplier, other.multiplier)


def test_the_state_dict_is_that_of_nn_linear_and_two_buffers(module, assert_bits_equal):
    trained(module)
    assert list(module.state_dict()) == [*nn.Linear(32, 16).state_dict(), "amax_history", "multiplier"]
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = f8.Linear(32, 16, recipe=RECIPE, dtype=torch.bfloat16)
    assert str(other.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    assert_state_equal(other, module, assert_bits_equal)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_without_the_buffers_starts_them_anew(module, assign):
    trained(module)
    plain = nn.Linear(32, 16, dtype=torch.bfloat16)
    assert str(module.load_state_dict(plain.state_dict(), assign=assign)) == "<All keys matched successfully>"
    assert torch.equal(module.amax_history, FRESH[0])
    assert torch.equal(module.multiplier, FRESH[1])


def test_half_a_state_is_missing_keys(module):
    state = module.state_dict()
    del state["multiplier"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"multiplier"'):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for amax_history"):
        f8.Linear(32, 16, recipe=f8.recipes.delayed(), dtype=torch.bfloat16).load_state_dict(module.state_dict())


def test_a_state_dict_of_other_layers_leaves_the_state(module, assert_bits_equal):
    trained(module)
    before = copy.deepcopy(module)
    module.load_state_dict({}, strict=False)
    assert_state_equal(module, before, assert_bits_equal)


@pytest.mark.parametrize(
    "cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.float, nn.Module.double, lambda m: m.to(torch.float16)]
)
def test_a_cast_of_the_module_is_none_of_its_state(module, cast, assert_bits_equal):
    trained(module)
    before = copy.deepcopy(module)
    assert cast(module).amax_history.dtype == torch.float32
    assert_state_equal(module, before, assert_bits_equal)


def test_from_meta_it_starts_anew(module):
    with torch.device("meta"):
        empty = f8.Linear(32, 16, recipe=RECIPE)
    assert empty.amax_history.is_meta
    empty.to_empty(device="cpu")
    assert torch.equal(empty.amax_history, FRESH[0])
    assert torch.equal(empty.multiplier, FRESH[1])
    trained(module).reset_parameters()
    assert torch.equal(module.amax_history, FRESH[0])
    assert torch.equal(module.multiplier, FRESH[1])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_goes_on_by_itself(module, copied, assert_bits_equal):
    twin = copied(trained(module))
    assert_state_equal(twin, module, assert_bits_equal)
    trained(twin, range(3, 6))
    assert not torch.equal(twin.amax_history, module.amax_history)


def test_conversion_gives_the_buffers_and_its_way_back_takes_them():
    linear = nn.Linear(32, 16)
    before = vars(linear).keys(), list(linear.state_dict())
    module = f8.Linear.from_linear(linear, RECIPE)
    assert (vars(linear).keys(), list(linear.state_dict())) == before  # nothing came to the one it was made of
    assert "amax_history" in module.state_dict()
    back = module.to_linear()
    assert (vars(back).keys(), list(back.state_dict())) == before
    assert "amax_history" in module.state_dict()
    model = f8.convert(nn.Sequential(linear), RECIPE)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "0.amax_history", "0.multiplier"]
    f8.revert(model)
    assert (vars(linear).keys(), list(linear.state_dict())) == before
    assert "amax_history" not in f8.convert(nn.Sequential(linear), f8.recipes.rowwise())[0].state_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: f8.Linear(32, 16, **options),
        lambda **options: f8.Linear.from_linear(nn.Linear(32, 16), **options),
        lambda **options: f8.convert(nn.Sequential(nn.Linear(32, 16)), **options),
    ],
    ids=["Linear", "from_linear", "convert"],
)
def test_a_group_of_another_kind_raises(make):
    with pytest.raises(TypeError, match=r"a group must be a ProcessGroup, .* got 'pair'"):
        make(recipe=RECIPE, amax_group="pair")


def test_delayed_scaling_of_a_whole_model_is_reset():
    model = f8.convert(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16)), RECIPE)
    compiled = torch.compile(model, backend="eager")
    model(torch.randn(4, 32)).sum().backward()
    assert f8.reset_delayed_scaling(compiled) is compiled
    for each in (model[0], model[2]):
        assert torch.equal(each.amax_history, FRESH[0])
        assert torch.equal(each.multiplier, FRESH[1])
    with pytest.raises(ValueError, match="reset_delayed_scaling: no layer of the model uses delayed scaling"):
        f8.reset_delayed_scaling(f8.revert(model))
    with pytest.raises(TypeError, match=r"reset_delayed_scaling: `model` is a dict; it must be a torch.nn.Module"):
        f8.reset_delayed_scaling({})


# ---------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("after", [1, 7])
def test_resumed_it_is_the_same_run(after, assert_bits_equal):
    def run(model, optimizer, steps):
        for step in steps:
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(step)).bfloat16() * (1 + step % 3)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).bfloat16()
        f8.convert(model, RECIPE)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    straight, optimizer = made()
    run(straight, optimizer, range(12))
    first, optimizer = made()
    run(first, optimizer, range(after))
    second, optimizer = made()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(second, optimizer, range(after, 12))
    for (name, got), expected in zip(second.state_dict().items(), straight.state_dict().values(), strict=True):
        assert_bits_equal(got, expected, name)
