"""Quantized parameters of which tensor parallel ranks have parts, alone and under FSDP2.

The reference has FP8 layers over bfloat16 copies of float32 masters, under the same plan: the same products, and the
same sums over ranks. Where no sum crosses ranks, one process has the same bits.
"""

from __future__ import annotations

import copy

import fsdp_models as models
import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from masters import ByHand, scaled_by_values
from test_quantized_parameters_ranks import OPTIMIZERS, RECIPES, quantized, train
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel

import fp8compile as f8
from fp8compile import _compat
from fp8compile._compat import local_itself

pytestmark = pytest.mark.skipif(
    _compat.TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def plain_model(hidden, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64)).bfloat16()


def converted(model, recipe, **options):
    return f8.convert(model, recipe, filter=lambda *_: True, **options)


def plan_of(module):
    if module is parallel:
        return {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    return {
        "0": module.ColwiseParallel(input_layouts=Replicate()),
        "2": module.RowwiseParallel(output_layouts=Replicate()),
    }


def parallelized(model, mesh, recipe, order, **options):
    """By PyTorch's plan before it is converted, or by ours after that."""
    if order == "plan first":
        return converted(parallel.parallelize_module(model, mesh, plan_of(parallel)), recipe, **options)
    return parallel.parallelize_module(converted(model, recipe, **options), mesh, plan_of(f8.parallel))


def steps_of(name, hidden, order, *, fsdp=False, backend=None, share=False):
    """Losses beside those of the reference, whether scales are those of whole weights, and graphs."""
    recipe = RECIPES[name]
    mesh = models.mesh_2d("data", "tensor") if fsdp else DeviceMesh.from_group(GROUPS["pair"], "cpu")
    own = mesh["tensor"] if fsdp else mesh
    model = parallelized(plain_model(hidden), own, recipe, order, weight_lifetime="parameter", keep_initial=True)
    reference = parallelized(plain_model(hidden), own, recipe, order)
    if fsdp:
        fully_shard(model, mesh=mesh["data"])
    if share:
        f8.parallel.share_scales(model)
    optimizer, by_hand = OPTIMIZERS["AdamW, masters"](model.parameters()), ByHand(reference, lr=0.02)
    run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    losses = train(run, optimizer, 4), train(reference, by_hand, 4)
    whole = [f8.quantize(weight.detach().full_tensor(), recipe.weight) for weight in by_hand.pairs]
    same = [
        torch.equal(layer.weight_codes.full_tensor(), q.codes) and torch.equal(_whole(layer.weight_scale), q.scale)
        for layer, q in zip((model[0], model[2]), whole, strict=True)
    ]
    return losses[0] == losses[1], same, counters["stats"]["unique_graphs"]


ANY = {name: f8.recipes.by_name(name) for name in ("rowwise", "mxfp8", "delayed", "nvfp4")}
ANY |= models.OTHER_BLOCKS


def of_any_recipe(name, order):
    """Losses beside those of layers over copies of masters, and sets of codes that are not those of whole weights."""
    mesh, recipe = DeviceMesh.from_group(GROUPS["pair"], "cpu"), ANY[name]
    model = parallelized(plain_model(128), mesh, recipe, order, weight_lifetime="parameter", keep_initial=True)
    reference = scaled_by_values(parallelized(plain_model(128), mesh, recipe, order))
    optimizer, by_hand = OPTIMIZERS["AdamW, masters"](model.parameters()), ByHand(reference, lr=0.02)
    losses, found = (train(model, optimizer, 4), train(reference, by_hand, 4)), []
    roles = [] if name == "delayed" else [("", recipe.weight)]
    roles += [] if recipe.shares_weight_codes() else [("_for_grad_input", recipe.weight_for_grad_input)]
    for index, weight in zip((0, 2), by_hand.pairs, strict=True):
        for end, quantizer in roles:
            q = f8.quantize(weight.detach().full_tensor(), quantizer)
            parts = dict(zip(("codes", "scale", "outer_scale"), q.parts(), strict=False))
            for what, expected in parts.items():
                own = _whole(getattr(model[index], f"weight_{what}{end}"))
                found += [] if torch.equal(own, expected) else [f"{index} {what}{end}"]
    return losses[0] == losses[1], found


def compiled_steps_under_fsdp():
    """Losses of the loop of AdamW, compiled, with codes and with values that are rounded by hand; and graphs."""
    mesh, recipe, losses, graphs = models.mesh_2d("data", "tensor"), RECIPES["tensorwise"], [], []
    for quantized_parameters in (True, False):
        torch._dynamo.reset()
        counters.clear()
        options = {"weight_lifetime": "parameter" if quantized_parameters else None}
        model = parallelized(plain_model(144), mesh["tensor"], recipe, "plan first", **options)
        fully_shard(model, mesh=mesh["data"])
        f8.parallel.share_scales(model)
        optimizer = OPTIMIZERS["AdamW, loop compiled"](model.parameters())
        own = []
        for step in range(3):
            if not quantized_parameters:
                _round(model, recipe.weight)
            own += train(model, optimizer, 1, step)
        losses.append(own)
        graphs.append(counters["stats"]["unique_graphs"])
    return losses[0] == losses[1], graphs[0] == graphs[1]


@torch.no_grad()
def _round(model, quantizer):
    for weight in (p for p in model.parameters() if p.ndim == 2):
        values = f8.quantize(weight.full_tensor(), quantizer).dequantize()
        weight.copy_(distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None))


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def one_layer(order):
    """A layer whose features ranks share, and one process: nothing crosses ranks but the maximum."""
    mesh, recipe = DeviceMesh.from_group(GROUPS["pair"], "cpu"), RECIPES["tensorwise"]
    options = {"weight_lifetime": "parameter", "keep_initial": True}
    whole, part = (nn.Sequential(plain_model(145)[0], plain_model(145)[2]) for _ in range(2))
    plan = {"0": f8.parallel.ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    chosen = {"filter": ["0"], **options}
    if order == "plan first":
        plan = {"0": parallel.ColwiseParallel(output_layouts=Replicate())}
        f8.convert(parallel.parallelize_module(part, mesh, plan), recipe, **chosen)
    else:
        parallel.parallelize_module(f8.convert(part, recipe, **chosen), mesh, plan)
    f8.convert(whole, recipe, **chosen)
    losses = [train(each, OPTIMIZERS["AdamW, masters"](each.parameters()), 5) for each in (whole, part)]
    codes = part[0].weight_codes.full_tensor(), part[0].weight_scale
    return losses[0] == losses[1], [
        torch.equal(*each) for each in zip(codes, (whole[0].weight.codes, whole[0].weight.scale), strict=True)
    ]


def from_rank_0():
    """Whether a plan gives all ranks the codes that the first one has, and what they were made of."""
    mesh, group = DeviceMesh.from_group(GROUPS["pair"], "cpu"), GROUPS["pair"]
    options = {"weight_lifetime": "parameter", "keep_initial": True}
    model = parallelized(plain_model(144, seed=group.rank()), mesh, RECIPES["tensorwise"], "convert first", **options)
    weight, first = model[2].weight, plain_model(144)[2].weight.detach()
    q = f8.quantize(first, RECIPES["tensorwise"].weight)
    columns = slice(72 * group.rank(), 72 * group.rank() + 72)
    local = local_itself(weight)
    pairs = ((local.codes, q.codes[:, columns]), (local.scale, q.scale), (local.initial, first[:, columns].float()))
    return [torch.equal(*pair) for pair in pairs]


def resumed():
    """Losses after a state dict, and those that the model it is of goes on with."""
    mesh, options = DeviceMesh.from_group(GROUPS["pair"], "cpu"), {"weight_lifetime": "parameter"}
    models = [
        parallelized(plain_model(144, seed), mesh, RECIPES["tensorwise"], "plan first", **options) for seed in (0, 7)
    ]
    optimizers = [OPTIMIZERS["AdamW, masters"](model.parameters()) for model in models]
    train(models[0], optimizers[0], 2)
    states = copy.deepcopy((models[0].state_dict(), optimizers[0].state_dict()))
    expected = train(models[0], optimizers[0], 2, first=2)
    models[1].load_state_dict(states[0])
    optimizers[1].load_state_dict(states[1])
    return train(models[1], optimizers[1], 2, first=2) == expected


def noise_over_both_dims():
    """Codes after a step that rounds up or down by chance, beside those of one process."""
    mesh, recipe, codes = models.mesh_2d("data", "tensor"), RECIPES["tensorwise"], []
    for is_whole in (True, False):
        model, options = plain_model(144), {"weight_lifetime": "parameter"}
        if is_whole:
            converted(model, recipe, **options)
        else:
            fully_shard(parallelized(model, mesh["tensor"], recipe, "plan first", **options), mesh=mesh["data"])
            f8.parallel.share_scales(model)
        optimizer = f8.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.01, rounding="stochastic")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        codes.append([_whole(model[index].weight_codes) for index in (0, 2)])
    return [torch.equal(*pair) for pair in zip(*codes, strict=True)]


def refusals():
    mesh, pair = models.mesh_2d("data", "tensor"), DeviceMesh.from_group(GROUPS["pair"], "cpu")
    weight = quantized(converted(plain_model(144), RECIPES["tensorwise"], weight_lifetime="parameter"))[0]
    cut = parallel.parallelize_module(plain_model(200), pair, plan_of(parallel))
    sharded = fully_shard(
        parallel.parallelize_module(plain_model(144), mesh["tensor"], plan_of(parallel)), mesh=mesh["data"]
    )
    both = parallelized(
        plain_model(144), mesh["tensor"], RECIPES["tensorwise"], "plan first", weight_lifetime="parameter"
    )
    fully_shard(both, mesh=mesh["data"])
    calls = (
        lambda: converted(cut, RECIPES["blockwise"], weight_lifetime="parameter"),
        lambda: parallelized(
            plain_model(200), pair, RECIPES["blockwise"], "convert first", weight_lifetime="parameter"
        ),
        lambda: converted(sharded, RECIPES["tensorwise"], weight_lifetime="parameter"),
        lambda: distribute_tensor(weight, pair, [Shard(0)]),
        lambda: torch.compile(lambda p: p.mul_(2), backend="eager", fullgraph=True)(local_itself(both[0].weight)),
    )
    texts = []
    for call in calls:
        try:
            texts.append(f"nothing: {call()}")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts, type(cut[0]) is nn.Linear


# ---------------------------------------------------------------------------------- what they answer


@pytest.mark.parametrize(
    ("name", "hidden", "order"),
    [
        ("tensorwise", 144, "plan first"),
        ("tensorwise", 144, "convert first"),
        ("blockwise", 512, "plan first"),
        ("blockwise", 256, "convert first"),
    ],
)
def test_parts_have_the_bits_of_layers_that_quantize_their_weights(ranks, name, hidden, order):
    assert ranks.run(steps_of, name, hidden, order) == [(True, [True, True], 0)] * 4


def compiled(*args):
    return steps_of(*args, backend="aot_eager")


def test_compiled_parts_are_one_graph(ranks):
    for same, scales, graphs in ranks.run(compiled, "tensorwise", 144, "convert first"):
        assert same
        assert all(scales)
        assert graphs == 1


def under_fsdp(*args):
    return steps_of(*args[:-1], fsdp=True, share=args[-1])


@pytest.mark.parametrize(
    ("name", "hidden", "order", "share"),
    [
        ("tensorwise", 144, "plan first", False),
        ("tensorwise", 144, "convert first", True),
        ("nvfp4", 96, "plan first", False),  # 24 rows of a rank, blocks of 16
    ],
)
def test_parts_under_fsdp_have_the_bits_too(ranks, name, hidden, order, share):
    assert ranks.run(under_fsdp, name, hidden, order, share) == [(True, [True, True], 0)] * 4


def test_a_compiled_step_of_parts_under_fsdp_rounds_once(ranks):
    assert ranks.run(compiled_steps_under_fsdp) == [(True, True)] * 4


@pytest.mark.parametrize("order", ["plan first", "convert first"])
def test_a_layer_without_sums_has_the_bits_of_one_process(ranks, order):
    assert ranks.run(one_layer, order) == [(True, [True, True])] * 4


def test_noise_is_that_of_the_place_in_the_whole_weight(ranks):
    """Both dims of the mesh cut the same rows of the first layer's weight."""
    assert ranks.run(noise_over_both_dims) == [[True, True]] * 4


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("rowwise", "convert first"),
        ("mxfp8", "plan first"),
        ("mxfp8", "convert first"),
        ("delayed", "convert first"),
        ("nvfp4", "plan first"),
        ("nvfp4", "convert first"),
        (models.FOUR_BITS, "plan first"),
        (models.FOUR_BITS, "convert first"),
        (models.SQUARES, "plan first"),
        (models.SQUARES, "convert first"),
    ],
)
def test_both_sets_and_delayed_scaling_have_parts_in_both_orders(ranks, name, order):
    assert ranks.run(of_any_recipe, name, order, within="pair") == [(True, [])] * 2


def test_a_plan_sends_the_first_rank_s_codes(ranks):
    assert ranks.run(from_rank_0) == [[True, True, True]] * 4


def test_a_state_dict_of_parts_resumes_to_the_bit(ranks):
    assert ranks.run(resumed) == [True] * 4


def test_what_parts_can_not_be_raises(ranks):
    for texts, unchanged in ranks.run(refusals):
        expected = (
            "ValueError: convert: weight_lifetime='parameter': the weight of 0 is sharded along dim 0 as (100, 100), "
            "which",
            "ValueError: tensor parallel: a quantized weight is sharded along dim 0 as (100, 100), which splits",
            "ValueError: convert: weight_lifetime='parameter': weights must be quantized before fully_shard, which "
            "was already called for the model.",
            "TypeError: c10d.scatter_.default of a QuantizedParameter",
            "an argument of a compiled graph",
        )
        for text, words in zip(texts, expected, strict=True):
            assert words in text, text
        assert unchanged
