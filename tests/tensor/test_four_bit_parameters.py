"""Weights that are trained in four bits: packed codes, scales of blocks and an outer scale, written together."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from masters import ByHand, train
from torch import nn
from torch._dynamo.utils import counters

import fp8compile as f8
from fp8compile.tensor import QuantizedParameter
from fp8compile.testing.bits import difference

RECIPES = {
    "nvfp4": f8.recipes.nvfp4(),
    "torchao's rule, nearest": f8.recipes.nvfp4(scale="torchao", grad_rounding="nearest", hadamard=()),
    "1 x 16": f8.recipes.nvfp4(weight_block=(1, 16)),
    "dequantized": f8.recipes.nvfp4(backward="dequantized"),  # one set of codes, whichever the blocks
    "1 x 16, dequantized": f8.recipes.nvfp4(backward="dequantized", weight_block=(1, 16)),
}
TILE = RECIPES["nvfp4"].weight
NAMES = ["weight_codes", "weight_scale", "weight_outer_scale"]


def model_of(seed=0, hidden=144):
    """144 is a multiple of 16 and of no 32; of 145 columns no two share a byte."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64)).bfloat16()


def converted(name="nvfp4", seed=0, hidden=144, **options):
    options = {"weight_lifetime": "parameter", **options}
    return f8.convert(model_of(seed, hidden), RECIPES[name], filter=lambda *_: True, **options)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def parameter(*shape, seed=0):
    return nn.Parameter(QuantizedParameter.of(values(*shape, seed=seed), TILE))


def differing(mine, expected):
    """Where parts of two quantized tensors differ."""
    pairs = zip(mine.parts(), expected.parts(), strict=True)
    return [words for words in (difference(*pair) for pair in pairs) if words is not None]


# ---------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("name", "hidden"), [*((name, 144) for name in RECIPES), ("nvfp4", 145), ("dequantized", 145)]
)
def test_training_has_the_bits_of_layers_that_cast_masters_in_each_forward(name, hidden):
    model = converted(name, hidden=hidden, keep_initial=True)
    other = converted(name, hidden=hidden, weight_lifetime=None)
    by_hand = ByHand(other, lr=0.02)
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.02)
    assert train(model, optimizer, 8) == train(other, by_hand, 8)
    for layer, weight in zip((model[0], model[2]), by_hand.pairs, strict=True):
        for own in layer.weight.sets():
            assert not differing(own, f8.quantize(weight.detach(), own.quantizer))


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_without_masters_rounds_once_a_step(foreach):
    weight, plain = parameter(48, 32), nn.Parameter(f8.quantize(values(48, 32), TILE).dequantize())
    optimizers = [torch.optim.AdamW([each], lr=0.1, weight_decay=0.1, foreach=foreach) for each in (weight, plain)]
    before = weight.codes.clone()
    for step in range(10):
        for each, optimizer in zip((weight, plain), optimizers, strict=True):
            each.grad = values(48, 32, seed=step)
            optimizer.step()
        expected = f8.quantize(plain.detach(), TILE)
        plain.data.copy_(expected.dequantize())
    assert not differing(weight, expected)
    assert not torch.equal(weight.codes, before)


def test_masters_of_one_step_round_up_or_down_by_the_noise_of_their_place():
    """0.004 is far below half the distance of two codes: only chance keeps it."""
    start = torch.full((64, 64), 1.0).index_fill_(1, torch.tensor([0, 16, 32, 48]), 4.0)
    drifts = []
    for rounding in ("nearest", "stochastic"):
        weight = nn.Parameter(QuantizedParameter.of(start, TILE))
        optimizer = f8.MasterWeights(torch.optim.SGD, [weight], lr=1.0, keep=False, rounding=rounding)
        for _ in range(20):
            weight.grad = torch.full((64, 64), 0.004)
            weight.grad[start == 4.0] = 0.0  # the largest value of each block, and with it the scales, stay
            optimizer.step()
        drifts.append(1.0 - weight.dequantize(torch.float32)[start == 1.0].mean().item())
    # 20 x 0.004; codes are a third apart, so a rounding has a variance of at most 1 / 36: the mean of 3840 values
    # after 20 of them is known to sqrt(20 / 36 / 3840) = 0.012, and four of these are 0.048
    assert drifts[0] == 0
    assert abs(drifts[1] - 0.08) < 0.048


def test_a_compiled_model_and_a_compiled_step_are_one_graph_each():
    losses, graphs = [], []
    for backend in (None, "aot_eager"):
        counters.clear()
        model = converted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        # in both, for compiled steps of PyTorch 2.11 have other bits than eager ones, of plain parameters too
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
        losses.append(train(run, optimizer, 3))
        graphs.append(counters["stats"]["unique_graphs"])
    assert losses[0] == losses[1]
    assert graphs == [1, 2]


@pytest.mark.parametrize("name", ["nvfp4", "1 x 16"])
def test_a_run_that_is_resumed_has_the_same_losses(name):
    model = converted(name)
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, 2, first=2)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    model = converted(name, seed=1)
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.3)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert train(model, optimizer, 2, first=2) == expected


# ---------------------------------------------------------------------------------- what it is made of


def test_it_takes_half_a_byte_an_element_and_its_scales():
    weight = converted()[0].weight
    assert type(weight) is QuantizedParameter
    assert [each.nbytes for each in weight.parts()] == [144 * 64 // 2, 144 * 64 // 256, 4]
    pair = converted("1 x 16")[0].weight
    assert len(pair.sets()) == 2
    assert [own.codes.nbytes for own in pair.sets()] == [144 * 64 // 2] * 2


def test_a_state_dict_has_its_parts_and_takes_values_too():
    model, state = converted(seed=1), converted().state_dict()
    assert list(state) == [*["0.bias", *(f"0.{each}" for each in NAMES)], "2.bias", *(f"2.{each}" for each in NAMES)]
    for given in (state, model_of().state_dict()):
        model.load_state_dict(converted(seed=1).state_dict())
        model.load_state_dict(given)
        assert not differing(model[0].weight, converted()[0].weight)
    assert model[0].weight_outer_scale is model[0].weight.outer_scale
    del state["0.weight_outer_scale"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        model.load_state_dict(state)
    of_one_level = f8.convert(model_of(), f8.recipes.tensorwise(), weight_lifetime="parameter")[0]
    assert not hasattr(of_one_level, "weight_outer_scale")
    pair = converted("1 x 16")[0]
    assert pair.weight_outer_scale_for_grad_input is pair.weight.outer_scale_for_grad_input


def test_a_copy_and_a_file_have_what_it_has():
    weight = parameter(48, 32)
    weight.initial = values(48, 32).float()
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    for again in (copy.deepcopy(weight), torch.load(file, weights_only=True)):
        assert isinstance(again, nn.Parameter)
        assert not differing(again, weight)
        assert difference(again.initial, weight.initial) is None
        with torch.no_grad():
            again.mul_(2)
        assert not differing(weight, parameter(48, 32))
    empty = torch.empty_like(weight)
    assert empty.dequantize().isnan().all()
    assert empty.outer_scale.isnan().all()
    zeros = torch.zeros_like(weight)
    assert (type(zeros), zeros.shape, zeros.stride()) == (torch.Tensor, weight.shape, (32, 1))


def test_views_have_the_places_of_the_values_that_they_show():
    weight = parameter(48, 64)
    weight.initial = values(48, 64).float()
    whole = weight.dequantize()
    for show in (
        lambda w: w.t(),
        lambda w: w[16:48],
        lambda w: w[:, 32:],
        lambda w: w.t()[16:, 16:32],
        lambda w: w.chunk(3)[1],
    ):
        view = show(weight.detach())
        assert (view.stride(), view.storage_offset()) == (show(whole).stride(), show(whole).storage_offset())
        assert difference(view.dequantize(), show(whole)) is None
        assert difference(view.initial, show(values(48, 64).float())) is None
    tensor = f8.quantize(values(48, 64), TILE)
    assert difference(tensor[16:, :32].dequantize(), tensor.dequantize()[16:, :32]) is None
    with pytest.raises(TypeError, match="along dim 1 of 64 splits blocks of 16"):
        tensor[:, 8:]


def test_a_part_is_not_written_to_for_the_rest_has_its_outer_scale():
    weight = parameter(48, 64).detach()
    for part in (lambda w: w[16:], lambda w: w[:, :32]):
        with pytest.raises(
            RuntimeError, match=r"of a part of a QuantizedParameter is not supported.*Write to the full"
        ):
            part(weight).mul_(100)
    assert not differing(weight, parameter(48, 64))
    weight.t().mul_(2)
    assert not differing(weight, f8.quantize(f8.quantize(values(48, 64), TILE).dequantize() * 2, TILE))


# ---------------------------------------------------------------------------------- what can't be


def test_memory_for_an_odd_number_of_rows_that_share_bytes_is_refused():
    with pytest.raises(
        TypeError,
        match=r"values of two rows in one byte \(.*\) requires an "
        r"even.*fully_shard.*weight_block=\(16, 16\)",
    ):
        converted("1 x 16")[0].weight.new_zeros((33, 64))
