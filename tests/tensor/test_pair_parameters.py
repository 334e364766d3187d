"""Parameters with two sets of codes, for the output and for grad_input: one value, written to both, rounded once."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import test_quantized_parameters as single
import torch
from test_written_between import WRITERS
from torch import nn
from torch._dynamo.utils import counters

import fp8compile as f8
from benchmarks.living import bytes_since, living
from fp8compile.tensor import QuantizedParameter, is_quantized_parameter
from fp8compile.testing.bits import difference

RECIPES = {name: f8.recipes.by_name(name) for name in ("rowwise", "rowwise_bf16_wgrad", "mxfp8")}


def converted(name="mxfp8", seed=0, quantized=True, **options):
    return f8.convert(
        single.model_of(seed), RECIPES[name], weight_lifetime="parameter" if quantized else None, **options
    )


def weights_of(model):
    return [each for each in model.parameters() if is_quantized_parameter(each) and len(each.sets()) == 2]


def parts(weight):
    return [part for own in weight.sets() for part in (own.codes, own.scale)]


def made_of(value, weight):
    """Codes and scales that a value has by the quantizers of a weight."""
    sets = (f8.quantize(value, own.quantizer) for own in weight.sets())
    return [part for own in sets for part in (own.codes, own.scale)]


def masters(model, **options):
    return f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01, **options)


# ---------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_masters_equal_fp8_layers_over_bfloat16_copies_of_masters(name, backend, assert_bits_equal):
    model, other = converted(name, keep_initial=True), converted(name, quantized=False)
    optimizer = masters(model)
    pairs = {each: each.detach().float().requires_grad_() for each in other.parameters() if each.ndim == 2}
    reference = torch.optim.AdamW([pairs.get(each, each) for each in other.parameters()], lr=0.01)
    call = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    losses = [[], []]
    for step in range(20):
        losses[0] += single.train(call, optimizer, 1, step)
        losses[1].append(single.gradients(other, step))
        for weight, master in pairs.items():
            master.grad = weight.grad.float()
        reference.step()
        for weight, master in pairs.items():
            weight.data.copy_(master)
        other.zero_grad()
    assert losses[0] == losses[1]
    for mine, weight in zip(weights_of(model), pairs, strict=True):
        for found, expected in zip(parts(mine), made_of(weight.detach(), mine), strict=True):
            assert_bits_equal(found, expected)
    assert counters["stats"]["unique_graphs"] == (backend is not None)


ONCE_A_STEP = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW, foreach, no decay": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, weight_decay=0.0),
    "SGD, loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ONCE_A_STEP)
def test_both_sets_are_made_of_one_value_once_a_step(kind, name, assert_bits_equal):
    weight = nn.Parameter(QuantizedParameter.of(single.values(80, 96), *_quantizers(name)))
    plain = nn.Parameter(weight.dequantize().detach())
    optimizers = [ONCE_A_STEP[kind]([each]) for each in (weight, plain)]
    for step in range(4):
        weight.grad = plain.grad = single.values(80, 96, seed=step)
        for optimizer in optimizers:
            optimizer.step()
        for found, expected in zip(parts(weight), made_of(plain.detach(), weight), strict=True):
            assert_bits_equal(found, expected)
        plain.data.copy_(weight.dequantize())


def _quantizers(name):
    return RECIPES[name].weight, RECIPES[name].weight_for_grad_input


def test_fills_write_both_sets(assert_bits_equal):
    weight = nn.Parameter(QuantizedParameter.of(single.values(64, 96), *_quantizers("mxfp8")))
    torch.manual_seed(3)
    nn.init.kaiming_uniform_(weight)
    torch.manual_seed(3)
    expected = nn.init.kaiming_uniform_(torch.empty(64, 96, dtype=torch.bfloat16))
    for found, part in zip(parts(weight), made_of(expected, weight), strict=True):
        assert_bits_equal(found, part)


def test_functional_calls_take_the_codes_of_other_parameters():
    model, other, x = converted("rowwise"), converted("rowwise", seed=1), single.values(8, 64)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).float().square().sum()

    expected = other(x).float().square().sum()
    expected.backward()
    parameters = dict(other.named_parameters())
    assert torch.equal(loss(parameters), expected)
    for name, grad in torch.func.grad(loss)(parameters).items():
        assert torch.equal(grad, other.get_parameter(name).grad), name


def test_merging_an_adapter_raises():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(converted("rowwise"), peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    model(single.values(8, 64))
    with pytest.raises(TypeError, match="keep that layer's weight in high precision"):
        model.merge_and_unload()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("write", ["optimizer, fused", "MasterWeights", "codes", "state dict of values"])
def test_a_write_between_forward_and_backward_is_noticed(write, compiled):
    model = converted("rowwise")
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x = single.values(8, 64).requires_grad_()
    call(x).float().sum().backward()  # gives optimizers their gradients
    y = call(x)
    if write == "codes":
        with torch.no_grad():
            [own.copy_(new) for own, new in zip(model.parameters(), converted("rowwise", 1).parameters(), strict=True)]
    elif write == "state dict of values":
        model.load_state_dict(single.model_of(1).state_dict())
    else:
        WRITERS[write](model, x)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.float().sum().backward()


# ---------------------------------------------------------------------------------- state


@pytest.mark.parametrize("name", RECIPES)
def test_run_that_is_resumed_has_the_same_losses(name):
    model = converted(name)
    optimizer = masters(model)
    single.train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = single.train(model, optimizer, 3, first=3)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert sorted(state["model"])[:5] == [
        "0.bias",
        "0.weight_codes",
        "0.weight_codes_for_grad_input",
        "0.weight_scale",
        "0.weight_scale_for_grad_input",
    ]
    model = converted(name, seed=1)
    optimizer = masters(model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert single.train(model, optimizer, 3, first=3) == expected


def stepped_without_learning_rate(optimizer):
    """The step by which torch.distributed.checkpoint makes states, before it loads some."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for each in group["params"]:
            each.grad = torch.zeros(each.shape, dtype=each.dtype)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("keep_initial", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_without_learning_rate_leaves_both_sets_of_loaded_codes(name, keep_initial, assert_bits_equal):
    trained = converted(name)
    single.train(trained, masters(trained), 2)
    model = converted(name, seed=1, keep_initial=keep_initial)
    model.load_state_dict(trained.state_dict())
    stepped_without_learning_rate(masters(model))
    for weight, other in zip(weights_of(model), weights_of(trained), strict=True):
        for mine, theirs in zip(parts(weight), parts(other), strict=True):
            assert_bits_equal(mine, theirs)


def test_states_of_other_kinds():
    model = converted()
    model.load_state_dict(single.model_of(1).state_dict())  # of values
    for found, expected in zip(weights_of(model), weights_of(converted(seed=1)), strict=True):
        assert not [words for each in zip(parts(found), parts(expected), strict=True) if (words := difference(*each))]
    half = {key: value for key, value in model.state_dict().items() if "for_grad_input" not in key}
    with pytest.raises(RuntimeError, match="Missing key"):
        converted().load_state_dict(half)


def test_copies_and_pickles_are_the_same_and_belong_to_themselves(assert_bits_equal):
    model = converted(keep_initial=True)
    file = io.BytesIO()
    torch.save(model[0].weight, file)
    file.seek(0)
    copies = [copy.deepcopy(model[0].weight), pickle.loads(pickle.dumps(model[0].weight))]
    for other in [*copies, torch.load(file, weights_only=True)]:
        assert isinstance(other, nn.Parameter)
        assert_bits_equal(other.initial, model[0].weight.initial)
        for one, same in zip(parts(model[0].weight), parts(other), strict=True):
            assert_bits_equal(one, same)
            assert one.data_ptr() != same.data_ptr()


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_and_pickles_gather_as_before_and_stay_frozen(copy_of):
    weight = converted()[0].weight
    weight.gathers.checkpointed, weight.gathers.name, weight.frozen = True, "gate_up_proj", True
    found = copy_of(weight)
    assert (found.gathers.checkpointed, found.gathers.name, found.frozen) == (True, "gate_up_proj", True)
    assert found.gathers is not weight.gathers


def test_start_on_the_meta_device(assert_bits_equal):
    with torch.device("meta"):
        model = single.model_of()
    f8.convert(model, RECIPES["rowwise"], weight_lifetime="parameter")
    model.to_empty(device="cpu")
    assert model[0].weight.dequantize().isnan().all()  # until there are values
    torch.manual_seed(3)
    model[0].reset_parameters()
    torch.manual_seed(3)
    plain = nn.Linear(64, 144, dtype=torch.bfloat16)
    for found, expected in zip(parts(model[0].weight), made_of(plain.weight.detach(), model[0].weight), strict=True):
        assert_bits_equal(found, expected)


def test_nothing_in_high_precision_stays_alive():
    """Two bytes an element and scales, as bfloat16 has: what is saved is the cast, and on the wire the half."""
    start = living()
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).bfloat16()
    plain = bytes_since(start)
    f8.convert(model, RECIPES["mxfp8"], weight_lifetime="parameter")
    assert plain < bytes_since(start) <= 1.04 * plain  # a byte for 32, in both sets
    optimizer = f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1, keep=False)
    model(single.values(4, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert bytes_since(start) <= 1.04 * plain


def test_other_recipes_and_ops_raise():
    model = converted()
    with pytest.raises(TypeError, match="is not supported for a weight with two sets of quantized data"):
        model[0].weight @ model[0].weight.t()
    model[0].recipe = RECIPES["rowwise"].with_lifetime("parameter")
    with pytest.raises(ValueError, match="Set the recipe of a layer before its weight is quantized"):
        model(single.values(4, 64))
