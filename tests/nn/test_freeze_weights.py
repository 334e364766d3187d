"""freeze_weights: one set of codes a weight, the bits of the trained model, and no way to train on; calibrate."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from gloo_ranks import shared_ranks
from torch import nn

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.tensor import QuantizedParameter

RECIPES = f8.recipes.names()


def model_of(recipe, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)).bfloat16()
    return f8.convert(model, recipe, filter="*", **options)


def experts_of(recipe):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2)
    model = nn.ModuleDict({"experts": Qwen3MoeExperts(config)})
    for each in model.parameters():
        nn.init.normal_(each, std=0.1)
    return f8.convert(model.bfloat16(), recipe, filter="*")


def rows(count=24):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def parameter_bytes(model):
    own = [part for each in model.parameters() for part in (each.parts() if hasattr(each, "parts") else (each,))]
    return sum(each.numel() * each.element_size() for each in own)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("is_codes", [False, True], ids=["values", "codes"])
def test_a_frozen_model_has_the_bits_of_the_trained_one_and_one_set_of_codes(name, is_codes):
    model, x = model_of(f8.recipes.by_name(name), weight_lifetime="parameter" if is_codes else None), rows()
    model(x).float().square().mean().backward()  # with delayed scaling, the state is no longer the first one
    with torch.no_grad():
        expected = model(x)
        assert f8.freeze_weights(model) is model
        assert torch.equal(model(x), expected)
    for layer in (model[0], model[2]):
        assert isinstance(layer.weight, QuantizedParameter)
        assert layer.weight.quantizer_for_grad_input is None
        assert not layer.weight.requires_grad
    values = (64 * 96 * 2 + 96 + 64) * 2
    assert parameter_bytes(model) < (0.36 if name == "nvfp4" else 0.58) * values


class Attention(nn.Module):
    """Two layers that share an outer scale; the second has the larger weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(64, 96), nn.Linear(64, 96)
        with torch.no_grad():
            self.k_proj.weight.mul_(3)

    def forward(self, x):
        return self.q_proj(x) + self.k_proj(x)


def attention(recipe):
    return f8.convert(Attention().bfloat16(), recipe, filter="*", share_outer_scale=[("q_proj", "k_proj")])


SHARING = {
    "tensorwise": f8.recipes.tensorwise(),
    "nvfp4": f8.recipes.nvfp4(),
    "nvfp4 rows": f8.recipes.nvfp4(weight_block=(1, 16)),
}


@pytest.mark.parametrize("name", SHARING)
def test_frozen_layers_keep_the_outer_scale_that_they_share(name):
    model, x = attention(SHARING[name]), rows()
    with torch.no_grad():
        expected, exported = model(x), dict(f8.export.tensors(model, "compressed-tensors"))
        f8.freeze_weights(model)
        assert torch.equal(model(x), expected)
        assert torch.equal(copy.deepcopy(model)(x), expected)
    scales = [each.weight.sets()[0].scales[-1] for each in (model.q_proj, model.k_proj)]
    assert torch.equal(*scales)
    for key, each in f8.export.tensors(model, "compressed-tensors"):
        assert torch.equal(each.view(torch.uint8), exported[key].view(torch.uint8))


def test_a_part_of_the_layers_that_share_an_outer_scale_is_not_frozen():
    model = attention(f8.recipes.tensorwise())
    with pytest.raises(ValueError, match="freeze_weights: the model shares a global scale with layers"):
        f8.freeze_weights(model.q_proj)
    model.q_proj.weight = model.k_proj.weight
    alone = f8.convert(nn.Linear(64, 96).bfloat16(), f8.recipes.tensorwise(), filter="*")
    alone.weight = model.k_proj.weight
    with pytest.raises(ValueError, match="share global scales with different layers"):
        f8.freeze_weights(nn.ModuleList([model, alone]))
    assert type(alone.weight) is nn.Parameter


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "nvfp4"])
def test_frozen_experts_have_the_bits_of_trained_ones(name):
    model = experts_of(f8.recipes.by_name(name))
    given = torch.randn(7, 32).bfloat16(), torch.randint(4, (7, 2)), torch.rand(7, 2).bfloat16()
    with torch.no_grad():
        expected = model["experts"](*given)
        f8.freeze_weights(model)
        assert torch.equal(model["experts"](*given), expected)
    assert model["experts"].down_proj.quantizer_for_grad_input is None


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_gradients_flow_to_inputs_and_are_those_of_the_codes_values(name):
    model = f8.freeze_weights(model_of(f8.recipes.by_name(name)))
    layer, x = model[0], rows().requires_grad_()
    grad = torch.randn(24, 96).bfloat16()
    layer(x).backward(grad)
    values = grad @ layer.weight.dequantize()
    if name == "rowwise":  # that GEMM is in high precision
        assert torch.equal(x.grad, values)
    else:  # codes of 3 bits of mantissa: 2**-4 of each product, of which errors partly cancel
        assert (x.grad - values).float().norm() < 2**-4 * values.float().norm()


def test_training_a_frozen_weight_raises():
    model = f8.freeze_weights(model_of(f8.recipes.tensorwise()))
    model.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters())
    model(rows()).float().square().mean().backward()
    with pytest.raises(RuntimeError, match="froze"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="froze"), torch.no_grad():
        copy.deepcopy(model)[0].weight.copy_(torch.zeros(96, 64))


def test_a_frozen_model_loads_codes_and_refuses_values():
    model, other = (f8.freeze_weights(model_of(f8.recipes.rowwise())) for _ in range(2))
    with torch.no_grad():
        expected = model(rows())
    plain = model_of(f8.recipes.rowwise()).state_dict()
    for each in other.state_dict().values():
        each.zero_()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(rows()), expected)
    with pytest.raises(RuntimeError, match="froze"):
        other.load_state_dict(plain)


def test_a_frozen_model_in_a_pickle_stays_frozen():
    model = pickle.loads(pickle.dumps(f8.freeze_weights(model_of(f8.recipes.rowwise()))))
    with pytest.raises(RuntimeError, match="froze"):
        model.load_state_dict(model_of(f8.recipes.rowwise()).state_dict())
    with pytest.raises(RuntimeError, match="froze"), torch.no_grad():
        model[0].weight.mul_(0.5)


def test_a_frozen_model_is_one_graph_without_a_cast_of_the_weight():
    model, x = f8.freeze_weights(model_of(f8.recipes.rowwise())), rows()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(step(x), model(x))


def test_what_can_not_be_frozen_is_said_and_nothing_changes():
    with pytest.raises(ValueError, match=r"Call fp8compile\.convert first"):
        f8.freeze_weights(nn.Linear(16, 16))
    tied = nn.ModuleDict({"embedding": nn.Embedding(64, 64), "head": nn.Linear(64, 64, bias=False)}).bfloat16()
    tied["head"].weight = tied["embedding"].weight
    f8.convert(tied, f8.recipes.tensorwise(), filter="*")
    with pytest.raises(ValueError, match="freeze_weights: the weight of head is shared with embedding"):
        f8.freeze_weights(tied)
    assert type(tied["head"].weight) is nn.Parameter


@pytest.mark.parametrize("option", [{"by_mx": True}, {"emulate": True}, {"fast_accumulation_output": False}], ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_options_of_the_output_stay(name, option):
    recipe = dataclasses.replace(f8.recipes.by_name(name), **option)
    frozen = f8.freeze_weights(model_of(recipe))[0].recipe
    assert {each: getattr(frozen, each) for each in option} == option


# ---------------------------------------------------------------------------------- ranks


def on_ranks(name):
    """On a rank: what is wrong with a frozen model over a pair of ranks, in words."""
    from gloo_ranks import GROUPS
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, x, wrong = DeviceMesh.from_group(GROUPS["pair"], "cpu"), rows(), []
    recipe, plan = f8.recipes.by_name(name), {"0": f8.parallel.ColwiseParallel(), "2": f8.parallel.RowwiseParallel()}
    with torch.no_grad():
        trained = parallelize_module(model_of(recipe), mesh, plan)
        expected = trained(x)
        over_tp = {
            "spread, then frozen": f8.freeze_weights(trained),
            "frozen, then spread": parallelize_module(f8.freeze_weights(model_of(recipe)), mesh, plan),
        }
        sharded = fully_shard(f8.freeze_weights(model_of(recipe)), mesh=mesh)
        outputs = {way: (model(x), expected) for way, model in over_tp.items()}
        outputs["sharded"] = sharded(x), model_of(recipe)(x)
        wrong += [way for way, (found, wanted) in outputs.items() if not torch.equal(found, wanted)]
        sharded.reshard()
        for model in (*over_tp.values(), sharded):
            with pytest.raises(RuntimeError, match="froze"):
                model[0].weight.to_local().zero_()
    return wrong


def sharing_on_ranks(name):
    """On a rank: whether frozen layers over a pair of ranks keep the outer scale that they share."""
    from gloo_ranks import GROUPS
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    plan = dict.fromkeys(("q_proj", "k_proj"), f8.parallel.ColwiseParallel())
    model = parallelize_module(attention(SHARING[name]), DeviceMesh.from_group(GROUPS["pair"], "cpu"), plan)
    with torch.no_grad():
        expected = model(rows())
        return torch.equal(f8.freeze_weights(model)(rows()), expected)


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups of ranks in a subclass need PyTorch 2.12")
@pytest.mark.parametrize("name", SHARING)
def test_frozen_weights_on_ranks_keep_the_outer_scale_that_they_share(name):
    assert shared_ranks().run(sharing_on_ranks, name, within="pair") == [True] * 2


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups of ranks in a subclass need PyTorch 2.12")
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_frozen_weights_on_ranks_have_the_bits_of_trained_ones_and_stay(name):
    assert shared_ranks().run(on_ranks, name) == [[]] * 4


# ---------------------------------------------------------------------------------- static scales of inputs


def test_calibrated_scales_are_those_of_the_data_and_stay():
    model, x = model_of(f8.recipes.tensorwise()), rows()
    with torch.no_grad():
        expected = model(x)
        f8.calibrate(model, lambda given: [given(x[:8] / 2), given(x)])
        assert torch.equal(model(x), expected)  # the scales of the data at hand, for that data
        f8.freeze_weights(model)
        assert torch.equal(model(x), expected)
        before = model[0].multiplier.clone()
        assert not torch.equal(model(x / 64), f8.freeze_weights(model_of(f8.recipes.tensorwise()))(x / 64))
        assert torch.equal(model[0].multiplier, before)
    assert model[0].multiplier[0] == 448 / x.float().abs().max()


def test_layers_with_delayed_scaling_are_calibrated_anew():
    model, x = model_of(f8.recipes.delayed()), rows()
    model(x).float().square().mean().backward()
    with torch.no_grad():
        f8.calibrate(model, lambda given: given(x * 4))
        assert model[0].multiplier[0] == 448 / (4 * x.float().abs().max())
    model(x).float().square().mean().backward()  # trains on


class ByName(nn.Module):
    """Calls its layers by keyword."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.second(input=self.first(input=x))


def test_layers_called_by_keyword_are_calibrated():
    x = rows()
    model = f8.calibrate(f8.convert(ByName().bfloat16(), f8.recipes.tensorwise(), filter="*"), lambda own: own(x))
    assert model.first.multiplier[0] == 448 / x.float().abs().max()


@pytest.mark.parametrize("std", [0.02, 0.0005])
def test_weights_with_delayed_scaling_that_was_not_trained_are_calibrated_by_their_values(std):
    x, plain, found = rows(), nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).bfloat16(), []
    for each in (0, 1):
        nn.init.normal_(plain[each].weight, std=std)
    for recipe in (f8.recipes.delayed(), f8.recipes.tensorwise()):
        model = f8.convert(copy.deepcopy(plain), recipe, filter="*")
        if recipe.history():  # so that the inputs of the second layer are compared
            model[0].multiplier[0] = 448 / x.float().abs().max()
        f8.calibrate(model, lambda own: own(x))
        with torch.no_grad():
            outputs = [model(x), f8.freeze_weights(model)(x)]
        assert torch.equal(*outputs)
        found.append((outputs[0], model[0].multiplier, model[1].multiplier))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_calibrated_layers_keep_the_outer_scale_that_they_share():
    model, x = attention(f8.recipes.tensorwise()), rows()
    with torch.no_grad():
        expected, exported = model(x), dict(f8.export.tensors(model, "compressed-tensors"))
        f8.calibrate(model, lambda given: given(x))
        assert torch.equal(model(x), expected)
        f8.freeze_weights(model)
        assert torch.equal(model(x), expected)
    assert torch.equal(model.q_proj.multiplier, model.k_proj.multiplier)
    found = dict(f8.export.tensors(model, "compressed-tensors"))
    assert all(torch.equal(each.view(torch.uint8), found[key].view(torch.uint8)) for key, each in exported.items())
    model = f8.calibrate(attention(f8.recipes.tensorwise()), lambda given: given(x))
    model(x).float().square().mean().backward()  # trains on, by a state for each layer


def test_a_part_of_the_layers_that_share_an_outer_scale_is_not_calibrated():
    model = attention(f8.recipes.tensorwise())
    with pytest.raises(ValueError, match="calibrate: the model shares a global scale with layers"):
        f8.calibrate(model.q_proj, lambda given: given(rows()))
    assert model.q_proj.recipe == f8.recipes.tensorwise()


def partly_delayed(history, *tensors):
    """Tensorwise codes, for ``tensors`` by delayed scaling and for the others by current scaling."""
    recipe = f8.recipes.tensorwise()
    roles = [role for role in ("input", "weight", "grad_output") if role in tensors]
    roles += [
        {"input": "input_for_grad_weight", "weight": "weight_for_grad_input"}.get(role, f"{role}_for_grad_weight")
        for role in roles
    ]
    return dataclasses.replace(
        recipe, **{role: f8.DelayedScaling(format=getattr(recipe, role).format, history=history) for role in roles}
    )


@pytest.mark.parametrize("history", [1, 16])
@pytest.mark.parametrize("delayed", [("grad_output",), ("input", "grad_output"), ("weight",)], ids="+".join)
def test_layers_with_delayed_scaling_of_some_tensors_are_calibrated(history, delayed):
    model, x = model_of(partly_delayed(history, *delayed)), rows()
    for _ in range(2):
        model(x).float().square().mean().backward()
    before, layer = model[0].multiplier.clone(), model[0]
    f8.calibrate(model, lambda given: given(x * 4))
    assert layer.recipe == partly_delayed(history, "input", "weight", *delayed)
    assert layer.multiplier[0] == 448 / (4 * x.float().abs().max())
    assert layer.multiplier[1] == (before[1] if "weight" in delayed else 448 / layer.weight.float().abs().max())
    assert torch.equal(layer.multiplier[2], before[2])
    model(x).float().square().mean().backward()  # trains on


@pytest.mark.parametrize(
    ("recipe", "run", "text"),
    [
        (f8.recipes.blockwise(), lambda model: model(rows()), "no layer has a single scale"),
        (f8.recipes.nvfp4(), lambda model: model(rows()), "no layer has a single scale"),
        (f8.recipes.weight_only(f8.CurrentScaling()), lambda model: model(rows()), "no layer has a single scale"),
        (f8.recipes.tensorwise(), lambda model: model[0](rows()), "run never called 2"),
        (f8.recipes.tensorwise(), lambda model: model(rows() * 0), "the inputs of 0 "),
        (f8.recipes.tensorwise(), lambda model: model(rows() / 0), "the inputs of 0 "),
    ],
    ids=["blocks", "four bits", "one side", "never called", "zeros", "infinite"],
)
def test_what_can_not_be_calibrated_is_said_and_nothing_changes(recipe, run, text):
    model = model_of(recipe)
    with pytest.raises(ValueError, match=text):
        f8.calibrate(model, run)
    assert model[0].recipe == recipe
    assert "multiplier" not in model[0]._buffers


def test_codes_are_calibrated_before_they_are_frozen():
    model = f8.freeze_weights(model_of(f8.recipes.tensorwise()))
    with pytest.raises(ValueError, match="Calibrate before freeze_weights"):
        f8.calibrate(model, lambda given: given(rows()))
