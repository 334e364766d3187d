"""Weights that are trained as codes and scale: what optimizers write, what nothing may write, what is saved."""

from __future__ import annotations

import copy
import io
import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fp8compile as f8
from benchmarks.living import bytes_since, living
from fp8compile.tensor import QuantizedParameter, QuantizedTensor, requantize
from fp8compile.testing.bits import difference

TENSOR, TILE = f8.CurrentScaling(), f8.CurrentScaling(block=(128, 128))
RECIPES = {"tensorwise": f8.recipes.tensorwise(), "blockwise": f8.recipes.blockwise()}
STEPS = 100


def values(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(*shape, quantizer=TENSOR, seed=0, dtype=torch.bfloat16):
    return nn.Parameter(QuantizedParameter.of(values(*shape, seed=seed, dtype=dtype), quantizer))


def model_of(seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 144), nn.ReLU(), nn.Linear(144, 64)).to(dtype)


def converted(seed=0, name="tensorwise", quantized=True, **options):
    return f8.convert(model_of(seed), RECIPES[name], weight_lifetime="parameter" if quantized else None, **options)


def gradients(model, step):
    x = values(16, 64, seed=step)
    loss = (model(x).float() - x.float()).square().mean()
    loss.backward()
    return loss.item()


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        losses.append(gradients(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model):
    return [each for each in model.parameters() if isinstance(each, QuantizedParameter)]


def rounded(x, quantizer=TENSOR):
    return f8.quantize(x, quantizer).dequantize()


# ---------------------------------------------------------------------------------- optimizers

ONCE_A_STEP = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD, foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW, loop": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1, "foreach": False}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1, "foreach": True}),
    "Adam, L2": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "NAdam, decoupled": (torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.001}),
}


@pytest.mark.parametrize("quantizer", [TENSOR, TILE], ids=["tensorwise", "blockwise"])
@pytest.mark.parametrize("name", ONCE_A_STEP)
def test_optimizer_equals_a_reference_that_quantizes_after_each_step(name, quantizer, assert_bits_equal):
    kind, options = ONCE_A_STEP[name]
    quantized, plain = parameter(144, 160, quantizer=quantizer), nn.Parameter(values(144, 160))
    reference = f8.quantize(plain.detach(), quantizer)
    plain.data.copy_(reference.dequantize())
    optimizers = [kind([each], **options) for each in (quantized, plain)]
    before = quantized.codes.clone()
    for step in range(STEPS):
        for each, optimizer in zip((quantized, plain), optimizers, strict=True):
            each.grad = values(144, 160, seed=step)
            optimizer.step()
        reference = f8.quantize(plain.detach(), quantizer)
        plain.data.copy_(reference.dequantize())
    assert_bits_equal(quantized.codes, reference.codes)
    assert_bits_equal(quantized.scale, reference.scale)
    assert not torch.equal(quantized.codes, before)


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("name", ["AdamW, loop", "AdamW, foreach", "SGD", "SGD, foreach"])
def test_a_compiled_step_is_the_graph_of_plain_parameters_and_rounds_once(name, sets, assert_bits_equal):
    """PyTorch's compiled loops have other bits than eager ones, for plain parameters too: they correct in float32."""
    kind, options = ONCE_A_STEP[name]
    recipe, found, graphs = f8.recipes.rowwise(), [], []
    quantizers = [recipe.weight, recipe.weight_for_grad_input][:sets]
    for quantized in (True, False):
        torch._dynamo.reset()
        counters.clear()
        weight = values(48, 32)
        if quantized:
            weight = nn.Parameter(QuantizedParameter.of(weight, *quantizers))
        else:
            weight = nn.Parameter(rounded(weight, recipe.weight))
        optimizer = kind([weight], **options)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for index in range(3):
            weight.grad = values(48, 32, seed=index)
            step()
            latest = weight.detach().clone()
            if not quantized:
                weight.data.copy_(rounded(weight.detach(), recipe.weight))
        graphs.append((counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]))
        found.append(
            [own.codes for own in latest.sets()] if quantized else [f8.quantize(latest, q) for q in quantizers]
        )
    assert graphs[0] == graphs[1]
    for codes, expected in zip(*found, strict=True):
        assert_bits_equal(codes, expected.codes)


class Halved(torch.optim.Optimizer):
    """An optimizer of somebody else: it writes through ``.data``, and to one half after the other."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - group["lr"])
                p.data.add_(p.grad, alpha=-group["lr"])


class Nested(torch.optim.SGD):
    """Its step runs that of another optimizer of the same parameters, and then its own: two steps."""

    def step(self, closure=None):
        torch.optim.SGD(self.param_groups[0]["params"], lr=0.1).step()
        super().step(closure)


def test_optimizers_of_others_round_once_a_step(assert_bits_equal):
    for kind in (Halved, Nested):
        weight = parameter(48, 32)
        plain = nn.Parameter(weight.dequantize().detach())
        for each in (weight, plain):
            each.grad = values(48, 32, seed=1)
            kind([each], lr=0.05).step()
        if kind is Nested:
            plain = nn.Parameter(
                rounded(parameter(48, 32).dequantize().detach().add(values(48, 32, seed=1), alpha=-0.1))
            )
            plain.data.add_(values(48, 32, seed=1), alpha=-0.05)
        assert_bits_equal(weight.codes, f8.quantize(plain.detach(), TENSOR).codes)


def test_a_forward_in_a_closure_reads_what_the_step_has_written():
    losses = []
    for quantized in (True, False):
        model = converted(quantized=quantized)
        if not quantized:
            for each in model.parameters():
                each.data.copy_(rounded(each) if each.ndim == 2 else each)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=3)
        optimizer.step(lambda model=model: _closure(model, losses))
    assert len(losses) == 6
    assert losses[0] == losses[3]
    assert len(set(losses[:3])) == 3  # each reads new codes


def _closure(model, losses):
    model.zero_grad()
    losses.append(gradients(model, 0))
    return torch.tensor(losses[-1])


def test_a_step_that_raises_loses_nothing(assert_bits_equal):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].mul_(0.7)
            raise RuntimeError("in the middle")

    weight = parameter(48, 32)
    expected = weight.dequantize().detach() * 0.7
    with torch.no_grad(), pytest.raises(RuntimeError, match="in the middle"):
        Fails([weight], lr=0.1).step()
    with torch.no_grad():
        weight.add_(1.0)
    assert_bits_equal(weight.codes, f8.quantize(expected + 1.0, TENSOR).codes)
    weight.grad = torch.zeros(48, 32, dtype=torch.bfloat16)
    torch.optim.SGD([weight], lr=0.1).step()
    before = weight.codes.clone()
    with torch.no_grad():
        weight.mul_(0.5)  # after the step, at once
    assert weight.pending is None
    assert_bits_equal(weight.codes, before)  # by two, and so does the scale


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {"lr": 0.01}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
    ids=["AdamW", "SGD"],
)
def test_masters_equal_fp8_layers_over_bfloat16_copies_of_masters(kind, options, name, assert_bits_equal):
    model, other = converted(name=name, keep_initial=True), converted(name=name, quantized=False)
    optimizer = f8.MasterWeights(kind, model.parameters(), **options)
    # by hand: float32 masters of the weights; biases are the optimizer's own
    pairs = {each: each.detach().float().requires_grad_() for each in other.parameters() if each.ndim == 2}
    reference = kind([pairs.get(each, each) for each in other.parameters()], **options)
    losses = [[], []]
    for step in range(STEPS):
        losses[0] += train(model, optimizer, 1, step)
        losses[1].append(gradients(other, step))
        for weight, master in pairs.items():
            master.grad = weight.grad.float()
        reference.step()
        for weight, master in pairs.items():
            weight.data.copy_(master)
        other.zero_grad()
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    for mine, weight in zip(weights_of(model), pairs, strict=True):
        assert_bits_equal(mine.codes, f8.quantize(weight.detach(), mine.quantizer).codes)


def test_masters_of_one_step_start_from_the_codes(assert_bits_equal):
    model = converted()
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01, keep=False)
    weight = model[0].weight
    plain = nn.Parameter(weight.dequantize(torch.float32))
    reference = torch.optim.AdamW([plain], lr=0.01)
    for step in range(10):
        gradients(model, step)
        plain.grad = weight.grad.float()
        optimizer.step()
        reference.step()
        expected = f8.quantize(plain.detach().bfloat16(), TENSOR)
        plain.data.copy_(expected.dequantize(torch.float32))
        model.zero_grad()
    assert_bits_equal(weight.codes, expected.codes)
    assert all(each.untyped_storage().nbytes() == 0 for each in optimizer._masters.values())


@pytest.mark.parametrize(("rounding", "moves"), [("nearest", False), ("stochastic", True)])
def test_stochastic_rounding_keeps_small_updates_on_average(rounding, moves):
    weight = nn.Parameter(
        QuantizedParameter.of(torch.full((64, 64), 1.0).index_fill_(0, torch.tensor(0), 4.0), TENSOR)
    )
    optimizer = f8.MasterWeights(torch.optim.SGD, [weight], lr=1.0, keep=False, rounding=rounding)
    quantizer = weight.quantizer
    for _ in range(20):
        weight.grad = torch.full((64, 64), 0.004)
        weight.grad[0] = 0.0  # the largest value, and with it the scale, stays
        optimizer.step()
    drift = 1.0 - weight.dequantize(torch.float32)[1:].mean().item()
    # 20 x 0.004; codes are 1 / 14 apart here, so the mean of 4032 of them is known to about 0.001 a step
    assert (abs(drift - 0.08) < 0.01) if moves else drift == 0
    assert weight.quantizer == quantizer


def test_learning_rate_schedules_and_groups_reach_the_optimizer():
    model = converted()
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias, *model[2].parameters()]}]
    optimizer = f8.MasterWeights(torch.optim.SGD, groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    train(model, optimizer, 1)
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.5, 0.1]
    schedule.step()
    train(model, optimizer, 1)
    assert [group["lr"] for group in optimizer.inner.param_groups] == pytest.approx([0.05, 0.01])


def test_run_that_is_resumed_has_the_same_losses():
    model = converted()
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, 3, first=3)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    model = converted(seed=1)
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.3)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert train(model, optimizer, 3, first=3) == expected


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_either_state_may_be_loaded_first(first):
    model = converted()
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    states = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(model, optimizer, 3, first=3)
    for name in [first, *({"model", "optimizer"} - {first})]:
        {"model": model, "optimizer": optimizer}[name].load_state_dict(states[name])
    assert train(model, optimizer, 3, first=3) == expected


def test_weights_that_something_else_wrote_to_are_not_undone(assert_bits_equal):
    model = converted()
    optimizer = f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.0)
    train(model, optimizer, 1)
    model.load_state_dict(converted(seed=1).state_dict())
    train(model, optimizer, 1)
    assert_bits_equal(model[0].weight.codes, converted(seed=1)[0].weight.codes)
    model[0].weight.data.mul_(2)
    expected = model[0].weight.dequantize()
    train(model, optimizer, 1)
    assert_bits_equal(model[0].weight.dequantize(), expected)


def test_state_without_masters_is_refused_where_they_are_kept():
    model = converted()
    state = f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1, keep=False).state_dict()
    with pytest.raises(ValueError, match="the state has no master for a quantized weight"):
        f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1).load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda p: f8.MasterWeights("adamw", p),
            TypeError,
            "`optimizer` must be a class such as torch.optim.AdamW, got 'adamw'",
        ),
        (lambda p: f8.MasterWeights(torch.optim.SGD, p, rounding="up"), ValueError, "`rounding` is 'up'"),
        (
            lambda p: f8.MasterWeights(torch.optim.SGD, p, lr=0.1).add_param_group({"params": []}),
            NotImplementedError,
            "add_param_group is not supported. Pass all groups when creating it",
        ),
    ],
)
def test_wrong_arguments_of_master_weights(call, error, text):
    with pytest.raises(error, match=text):
        call([parameter(16, 16)])


# ---------------------------------------------------------------------------------- writing, op by op

OTHER = values(32, 48, seed=5)
ARGUMENTS = [(), (2.0,), (OTHER,), (OTHER, OTHER), (OTHER, 0.5), (0.0, 1.0), (OTHER.bool(), 1.0), (0,), (0, 1)]
IN_PLACE = sorted(
    name
    for name in dir(torch.Tensor)
    if name.endswith("_") and not name.startswith("_") and name not in ("requires_grad_", "retain_grad_")
)


@pytest.mark.parametrize("name", IN_PLACE)
def test_op_in_place_quantizes_what_it_computes_or_raises(name):
    for arguments in ARGUMENTS:
        weight, plain = parameter(32, 48).detach(), rounded(values(32, 48))
        before = weight.codes.clone(), weight.scale.clone()
        try:
            torch.manual_seed(0)
            result = getattr(weight, name)(*arguments)
        except Exception:
            assert torch.equal(weight.codes, before[0])
            assert torch.equal(weight.scale, before[1])
            continue
        if name in ("detach_", "share_memory_"):
            continue
        torch.manual_seed(0)
        getattr(plain, name)(*arguments)
        assert result is weight
        if tuple(weight.shape) == tuple(plain.shape):
            assert difference(weight.codes, f8.quantize(plain, weight.quantizer).codes) is None, (name, arguments)
        else:
            raise AssertionError(f"{name} changed the shape of codes")


@pytest.mark.parametrize("name", ["mul_", "add_", "addcdiv_", "zero_", "uniform_", "copy_", "_foreach_add_"])
def test_ops_that_optimizers_need_are_there(name):
    weight = parameter(32, 48).detach()
    calls = {
        "mul_": lambda: weight.mul_(0.5),
        "add_": lambda: weight.add_(OTHER, alpha=-0.1),
        "addcdiv_": lambda: weight.addcdiv_(OTHER, OTHER.abs() + 1, value=-0.1),
        "zero_": weight.zero_,
        "uniform_": weight.uniform_,
        "copy_": lambda: weight.copy_(OTHER),
        "_foreach_add_": lambda: torch._foreach_add_([weight], [OTHER], alpha=-0.1),
    }
    before = weight.dequantize()
    calls[name]()
    assert not torch.equal(weight.dequantize(), before)


def test_foreach_quantizes_all_at_once(monkeypatch):
    calls, assign = [], requantize.assign
    monkeypatch.setattr("fp8compile.tensor.optimizer_steps.assign", lambda *a: calls.append(len(a[0])) or assign(*a))
    weights = [parameter(32, 48, seed=seed).detach() for seed in range(3)]
    torch._foreach_mul_([*weights, plain := torch.ones(2)], 0.5)
    assert calls == [3]
    assert torch.equal(plain, torch.full((2,), 0.5))


def test_scale_of_a_part_is_not_written_to():
    for part in (
        lambda w: w[:16],
        lambda w: w[0],
        lambda w: w.chunk(2)[0],
        lambda w: w.t()[:, :3],
        lambda w: w[:, 3:],
    ):
        weight = parameter(32, 48).detach()
        before = weight.codes.clone(), weight.scale.clone()
        with pytest.raises(
            RuntimeError, match=r"of a part of a QuantizedParameter is not supported.*Write to the full"
        ):
            part(weight).mul_(100)
        with pytest.raises(RuntimeError, match="Write to the full"):
            part(weight).copy_(torch.ones_like(part(weight).codes, dtype=torch.bfloat16))
        assert torch.equal(weight.codes, before[0])
        assert torch.equal(weight.scale, before[1])


def test_whole_views_write_through(assert_bits_equal):
    for view in (
        lambda w: w.t(),
        lambda w: w.view(-1),
        lambda w: w.detach(),
        lambda w: w[:],
        lambda w: w.unsqueeze(0),
    ):
        weight = parameter(32, 48).detach()
        expected = f8.quantize(weight.dequantize() * 3, TENSOR)
        view(weight).mul_(3)
        assert_bits_equal(weight.codes, expected.codes)
        assert_bits_equal(weight.scale, expected.scale)


def test_part_of_whole_blocks_is_written_to(assert_bits_equal):
    weight = parameter(256, 160, quantizer=TILE).detach()
    rest = weight[128:].dequantize()
    weight[:128].mul_(100)
    assert_bits_equal(weight[128:].dequantize(), rest)
    assert_bits_equal(weight[:128].dequantize(), rounded(rounded(values(256, 160), TILE)[:128] * 100, TILE))


def test_an_initial_value_is_computed_in_a_plain_tensor():
    weight = parameter(16, 16)
    with pytest.raises(
        RuntimeError, match=r"normal_.* of a tensor that new_zeros or new_empty created.* copy it: weight"
    ):
        nn.init.orthogonal_(weight)
    with torch.no_grad():
        weight.copy_(nn.init.orthogonal_(torch.empty(weight.shape)))
    product = weight.dequantize(torch.float32) @ weight.dequantize(torch.float32).T
    # 16 products of which each has an error of at most 2**-4, the half of E4M3's last digit twice: far below the 1s
    assert (product - torch.eye(16)).abs().max() < 0.25


def test_new_zeros_has_a_scale_of_its_own():
    weight = parameter(32, 48).detach()
    zeros = weight.new_zeros((8, 48))
    assert type(zeros) is QuantizedParameter
    assert not zeros.dequantize().any()
    scale = weight.scale.clone()
    zeros.copy_(parameter(8, 48, seed=3).detach())
    assert torch.equal(weight.scale, scale)
    with pytest.raises(
        RuntimeError, match=r"is not supported, because such a tensor can only receive quantized data.*share_scales"
    ):
        zeros.mul_(2)


def test_what_is_like_a_parameter():
    weight = parameter(32, 48)
    for make, expected in ((torch.zeros_like, 0.0), (torch.ones_like, 1.0), (lambda w: torch.full_like(w, 3.0), 3.0)):
        made = make(weight)
        assert type(made) is torch.Tensor
        assert (made.shape, made.dtype) == (weight.shape, torch.bfloat16)
        assert bool((made == expected).all())
    empty = torch.empty_like(weight)
    assert type(empty) is QuantizedParameter
    assert empty.dequantize().isnan().all()
    for same in (weight.detach(), weight.clone(), weight.to("cpu"), copy.deepcopy(weight)):
        assert type(same) is QuantizedParameter
        assert torch.equal(same.dequantize(), weight.dequantize())
    again = copy.deepcopy(weight)
    assert isinstance(again, nn.Parameter)
    assert again.codes.data_ptr() != weight.codes.data_ptr()


def test_memory_is_pinned_as_that_of_a_plain_tensor(assert_bits_equal):
    weight = parameter(32, 48).detach()
    assert not weight.is_pinned()
    if torch.cuda.is_available():
        pinned = weight.pin_memory()
        assert pinned.is_pinned()
        assert_bits_equal(pinned.dequantize(), weight.dequantize())
        return
    with pytest.raises(RuntimeError) as plain:
        torch.empty(2).pin_memory()
    with pytest.raises(RuntimeError, match=re.escape(str(plain.value).splitlines()[0])):
        weight.pin_memory()


def test_codes_are_copied_with_their_scale_and_other_codes_refused(assert_bits_equal):
    weight, other = parameter(32, 48).detach(), parameter(32, 48, seed=1).detach()
    weight.copy_(other)
    assert_bits_equal(weight.codes, other.codes)
    assert_bits_equal(weight.scale, other.scale)
    with pytest.raises(TypeError, match=r"copy_ into a QuantizedParameter of Cur.* Use target\.copy_\(source\.dequan"):
        weight.copy_(f8.quantize(values(32, 48), TILE))
    with pytest.raises(TypeError, match=r"of shape \(32, 48\) got a source of shape \(48, 32\)\. The shapes must be"):
        weight.copy_(parameter(48, 32).detach())
    with pytest.raises(TypeError, match="tensors are never dequantized implicitly"):
        torch.empty(32, 48).copy_(weight)
    with pytest.raises(TypeError, match=r"copy_ into a QuantizedParameter supports .*, got torch\.int32"):
        weight.copy_(torch.ones(32, 48, dtype=torch.int32))


def test_a_product_without_a_layer_raises():
    weight = parameter(32, 48)
    for call in (lambda: nn.functional.linear(values(4, 48), weight), lambda: weight.sum(), lambda: weight * 2):
        with pytest.raises(TypeError, match="is not supported"):
            call()


def test_what_quantize_returns_is_not_written_to():
    q = f8.quantize(values(32, 48), TENSOR)
    with pytest.raises(TypeError, match="is not supported"):
        q.mul_(2)
    with pytest.raises(TypeError, match="would write to a QuantizedTensor, which can't be modified"):
        torch._foreach_mul_([parameter(32, 48).detach(), q], 2)


# ---------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", RECIPES)
def test_model_has_the_bits_of_one_that_quantizes_its_weights(name, assert_bits_equal):
    x = values(16, 64)
    model, other = converted(name=name), converted(name=name, quantized=False)
    assert_bits_equal(model(x), other(x))
    assert all(type(each) is QuantizedParameter for each in (model[0].weight, model[2].weight))
    assert isinstance(model[0].weight, nn.Parameter)


def test_report_says_which_weights_are_codes():
    report = f8.conversion_report(converted(filter=["0"]))
    assert [row.quantized_weight for row in report.rows] == [True, False]
    assert "all three; FP8 parameter" in str(report)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_model_trains_as_eager_in_one_graph(backend):
    losses = []
    for compiled in (False, True):
        model = converted()
        optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01)
        losses.append(
            train(torch.compile(model, fullgraph=True, backend=backend) if compiled else model, optimizer, 4)
        )
    assert losses[0] == losses[1]
    assert counters["stats"]["unique_graphs"] == 1


OWN = f8.CurrentScaling()


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (
            replace(f8.recipes.delayed(weight_lifetime="call"), grad_output=OWN, weight_for_grad_input=OWN),
            "uses delayed scaling for only one of the two GEMMs that read the weight",
        ),
        (
            replace(f8.recipes.rowwise(), grad_output=None, weight_for_grad_input=None),
            "leaves a GEMM of the weight",
        ),
    ],
)
def test_recipe_that_needs_the_values_raises_and_changes_nothing(recipe, why):
    model = model_of()
    with pytest.raises(ValueError, match=f"weight_lifetime='parameter': the recipe of 0 {why}"):
        f8.convert(model, recipe, weight_lifetime="parameter")
    assert type(model[0]) is nn.Linear


def test_weight_that_another_module_reads_raises():
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    model["head"].weight = model["embedding"].weight
    with pytest.raises(
        ValueError, match="the weight of head is shared with embedding, which needs the original values"
    ):
        f8.convert(model, RECIPES["tensorwise"], weight_lifetime="parameter")


def test_shared_weight_stays_shared_and_frozen_ones_frozen():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad = False
    f8.convert(model, RECIPES["tensorwise"], weight_lifetime="parameter")
    assert model[0].weight is model[1].weight
    assert [layer.weight.requires_grad for layer in model] == [True, True, False]


def test_initial_values_are_those_of_the_same_elements_in_every_view_and_copy(assert_bits_equal):
    model, other = converted(keep_initial=True).to("cpu"), converted(keep_initial=True)
    expected, weight = model_of()[0].weight.detach().float(), model[0].weight
    for view in (weight.t(), weight[16:48, 3:], weight.chunk(2)[1].t(), weight.view(-1), weight[:]):
        rows = torch.arange(expected.numel()).as_strided(view.shape, view.stride(), view.storage_offset())
        assert_bits_equal(view.initial, expected.flatten()[rows])
        assert view.initial.untyped_storage().data_ptr() == weight.initial.untyped_storage().data_ptr()
    for copied in (weight.detach().clone(), copy.deepcopy(weight)):
        with torch.no_grad():
            copied.zero_()
        assert not copied.initial.any()
        assert_bits_equal(weight.initial, expected)
    with torch.no_grad():  # what was written last, in float32 where it was written so
        weight.copy_(values(144, 64, dtype=torch.float32))
        assert_bits_equal(weight.initial, values(144, 64, dtype=torch.float32))
        weight.copy_(other[0].weight)
        assert_bits_equal(weight.initial, expected)
    state = converted(seed=1).state_dict()
    model.load_state_dict(state)  # of codes, which tell no more
    assert_bits_equal(weight.initial, weight.dequantize(torch.float32))
    assert other.to_empty(device="cpu")[0].weight.initial.isnan().all()


def test_keep_initial_without_quantized_parameters_raises():
    with pytest.raises(ValueError, match="keep_initial requires weight_lifetime='parameter'"):
        f8.convert(model_of(), RECIPES["tensorwise"], keep_initial=True)


def test_masters_take_the_initial_values_and_nothing_keeps_them():
    model = converted(keep_initial=True)
    initial, view = model[0].weight.initial, model[0].weight[:8]
    assert torch.equal(initial, model_of()[0].weight.detach().float())
    optimizer = f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.0)
    assert torch.equal(optimizer._masters[model[0].weight], initial)
    assert model[0].weight.initial is None
    assert view.initial is None


def test_revert_and_casts_raise():
    model = converted()
    with pytest.raises(TypeError, match="its weight is an FP8 parameter"):
        f8.revert(model)
    with pytest.raises(TypeError, match=r"can't be cast to torch\.float32"):
        model.float()


def test_start_on_the_meta_device(assert_bits_equal):
    with torch.device("meta"):
        model = model_of()
    f8.convert(model, RECIPES["tensorwise"], weight_lifetime="parameter")
    model.to_empty(device="cpu")
    assert model[0].weight.dequantize().isnan().all()  # until there are values
    torch.manual_seed(3)
    model[0].reset_parameters()
    torch.manual_seed(3)
    plain = nn.Linear(64, 144, dtype=torch.bfloat16)
    assert_bits_equal(model[0].weight.codes, f8.quantize(plain.weight.detach(), TENSOR).codes)
    assert isinstance(model[0].weight, nn.Parameter)


def test_nothing_in_high_precision_stays_alive():
    start = living()
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).bfloat16()
    plain = bytes_since(start)
    f8.convert(model, RECIPES["tensorwise"], weight_lifetime="parameter")
    assert bytes_since(start) <= 0.55 * plain
    optimizer = f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1, keep=False)
    model(values(4, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert bytes_since(start) <= 0.55 * plain


# ---------------------------------------------------------------------------------- state dicts


def test_state_dict_has_plain_tensors_and_loads_into_the_same_bits(assert_bits_equal):
    model, other = converted(), converted(seed=1)
    state = model.state_dict()
    assert sorted(state) == [
        "0.bias",
        "0.weight_codes",
        "0.weight_scale",
        "2.bias",
        "2.weight_codes",
        "2.weight_scale",
    ]
    assert all(type(each) is torch.Tensor for each in state.values())
    other.load_state_dict(state)
    for mine, theirs in zip(weights_of(other), weights_of(model), strict=True):
        assert_bits_equal(mine.codes, theirs.codes)
        assert_bits_equal(mine.scale, theirs.scale)
    assert other[0].weight_codes is other[0].weight.codes


def test_state_dict_of_values_is_quantized_as_it_is_loaded(assert_bits_equal):
    model = converted(seed=1)
    model.load_state_dict(model_of().state_dict())
    assert_bits_equal(model[0].weight.codes, f8.quantize(model_of()[0].weight.detach(), TENSOR).codes)


def test_state_dict_of_codes_does_not_load_where_values_are():
    with pytest.raises(RuntimeError, match="Missing key") as caught:
        converted(quantized=False).load_state_dict(converted().state_dict())
    assert "0.weight_codes" in str(caught.value)
    assert not hasattr(converted(quantized=False)[0], "weight_codes")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("0.weight_scale"), "Missing key"),
        (lambda state: state.update({"0.weight_codes": torch.zeros(3, 3, dtype=torch.uint8)}), r"shape \(3, 3\)"),
        (lambda state: state.update({"0.weight_codes": torch.zeros(144, 64)}), "torch.float32, but the model has"),
    ],
)
def test_wrong_state_dict_raises(change, text):
    state = converted().state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=text):
        converted().load_state_dict(state)


def test_assigning_a_state_dict_raises():
    with pytest.raises(RuntimeError, match="Load without assign=True, after to_empty"):
        converted().load_state_dict(converted().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="Load without assign=True, after to_empty"):
        converted().load_state_dict(model_of().state_dict(), assign=True)


def test_pickled_parameter_is_the_same_and_none_with_a_group_is_pickled(assert_bits_equal):
    weight = parameter(16, 16)
    weight.initial = values(16, 16).float()
    weight.written = True
    again = pickle.loads(pickle.dumps(weight))
    assert isinstance(again, nn.Parameter)
    assert (again.requires_grad, again.written, again.extent) == (True, True, "whole")
    for mine, other in ((again.codes, weight.codes), (again.scale, weight.scale), (again.initial, weight.initial)):
        assert_bits_equal(mine, other)
    weight.group = object()
    with pytest.raises(
        TypeError, match=r"whose scale is shared over ranks can't be pickled.* Save its module's state_dict"
    ):
        pickle.dumps(weight)


def test_key_of_the_compile_cache_tells_a_parameter_from_a_tensor():
    weight = parameter(16, 16).detach()
    same = QuantizedTensor(weight.codes, weight.scale, weight.quantizer, weight.dtype)
    assert weight._stable_hash_for_caching() != same._stable_hash_for_caching()
