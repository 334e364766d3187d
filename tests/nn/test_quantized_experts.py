"""Experts whose weights are codes: each matrix quantized for itself, written once a step, saved and loaded."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass, replace

import expert_models
import fsdp_models as models
import pytest
import torch
from masters import ByHand
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import fp8compile as f8
from fp8compile.nn.experts.converted_class import class_of_spec
from fp8compile.nn.layer.codes_in_state import codes_and_scales
from fp8compile.tensor import QuantizedParameter
from fp8compile.testing.bits import difference

RECIPES = (
    *("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "blockwise_bf16_wgrad", "mxfp8", "nvfp4"),
    *(models.FOUR_BITS, models.SQUARES),
)


def mixture(kind, recipe, *, quantized=True, seed=0):
    options = {"weight_lifetime": "parameter", "keep_initial": True} if quantized else {}
    return expert_models.mixture_of(kind, 3, models.recipe_of(recipe), seed=seed, dtype=torch.bfloat16, **options)


def stacks_of(model):
    return {name: each for name, each in model.named_parameters() if each.ndim == 3}


def codes_that_differ(model, weights):
    """Which codes and scales are not those of other experts' values, each matrix quantized for itself."""
    found = []
    for (name, mine), other in zip(stacks_of(model).items(), weights.values(), strict=True):
        state = iter(codes_and_scales(name, mine).items())
        for own in mine.sets():
            expected = [f8.quantize(matrix, own.quantizer).parts() for matrix in other.detach()]
            for parts in zip(*expected, strict=True):
                key, part = next(state)
                rows = part.split(1) if "outer_scale" in key else part
                found += [
                    (f"{key} {index}", difference(mine, right))
                    for index, (mine, right) in enumerate(zip(rows, parts, strict=True))
                ]
    return [f"{name}: {words}" for name, words in found if words is not None]


# 200 of 400 rows, and 200 columns, are no multiple of blocks; gpt-oss has its matrices transposed
CASES = [
    ("torchtitan", "tensorwise", None),
    ("gpt-oss", "rowwise", None),
    ("gpt-oss", "blockwise", "aot_eager"),
    ("torchtitan", "mxfp8", "aot_eager"),
    ("gpt-oss", "nvfp4", None),
    ("gpt-oss", models.FOUR_BITS, "aot_eager"),
    ("gpt-oss", models.SQUARES, "aot_eager"),
]
EVERYTHING = [
    (kind, name, way) for kind in ("torchtitan", "gpt-oss") for name in RECIPES for way in (None, "aot_eager")
]


@pytest.mark.parametrize(
    ("kind", "recipe", "backend"),
    [pytest.param(*case, marks=() if case in CASES else pytest.mark.slow) for case in EVERYTHING],
)
def test_masters_equal_fp8_experts_over_bfloat16_copies_of_masters(kind, recipe, backend):
    model, other = mixture(kind, recipe), mixture(kind, recipe, quantized=False)
    optimizers = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=3e-3), ByHand(other, lr=3e-3)
    counters.clear()
    both = [model, other]
    calls = both if backend is None else [torch.compile(each, fullgraph=True, backend=backend) for each in both]
    losses = [models.trained(calls[0], 4, 0, optimizer=optimizers[0])]
    graphs = counters["stats"]["unique_graphs"]  # of four routings
    losses.append(models.trained(calls[1], 4, 0, optimizer=optimizers[1]))
    assert losses[0] == losses[1]
    assert codes_that_differ(model, stacks_of(other)) == []
    assert graphs == (backend is not None)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "nvfp4", models.FOUR_BITS, models.SQUARES])
def test_stock_optimizers_round_once_a_step(recipe, assert_bits_equal):
    (weight, *_) = stacks_of(mixture("torchtitan", recipe)).values()
    plain = nn.Parameter(weight.dequantize().detach())
    optimizers = [torch.optim.AdamW([each], lr=0.01, foreach=False) for each in (weight, plain)]
    for step in range(2):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        weight.grad, plain.grad = gradient, gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
        for own in weight.sets():
            expected = QuantizedParameter.of(plain.detach(), own.quantizer, batch=1)
            for mine, right in zip(own.parts(), expected.parts(), strict=True):
                assert_bits_equal(mine, right)
        plain.data.copy_(weight.dequantize())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "nvfp4", models.FOUR_BITS])
def test_states_files_and_copies_have_the_codes(recipe):
    model, other = mixture("gpt-oss", recipe), mixture("gpt-oss", recipe, seed=1)
    state, batch = model.state_dict(), models.batch(0, 0)
    assert {type(each) for each in state.values()} == {torch.Tensor}
    assert state["blocks.0.experts.gate_up_proj_codes"].dtype == torch.uint8
    assert "blocks.0.experts.gate_up_proj" not in state
    expected = model(batch)
    other.load_state_dict(state)
    assert torch.equal(other(batch), expected)
    assert torch.equal(copy.deepcopy(model)(batch), expected)
    plain = mixture("gpt-oss", recipe, quantized=False, seed=1)
    other.load_state_dict(plain.state_dict())  # values
    assert torch.equal(other(batch), plain(batch))
    file = io.BytesIO()
    torch.save(list(stacks_of(model).values()), file)
    file.seek(0)
    for mine, found in zip(stacks_of(model).values(), torch.load(file, weights_only=True), strict=True):
        for one, two in zip(mine.sets(), found.sets(), strict=True):
            assert all(torch.equal(*parts) for parts in zip(one.parts(), two.parts(), strict=True))
    state["blocks.0.experts.down_proj_scale"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"experts.down_proj_scale has shape"):
        other.load_state_dict(state)


def test_the_report_and_what_can_not_change_any_more():
    model = mixture("torchtitan", "rowwise")
    rows = {row.fqn: row for row in f8.conversion_report(model).rows}
    assert rows["blocks.0.experts"].quantized_weight
    with pytest.raises(TypeError, match="its weights are FP8 parameters"):
        f8.revert(model)
    with pytest.raises(
        ValueError, match="its weight is quantized and can only be used with the recipe it was quantized for"
    ):
        f8.set_recipe(model, forward=None)
    with pytest.raises(ValueError, match=r"recipe of blocks.0.experts leaves a GEMM of the weight"):
        f8.convert(
            expert_models.MixtureModel("torchtitan", 2), replace(f8.recipes.rowwise(), input=None, weight=None),
            filter=lambda _, fqn: fqn.endswith("experts"), weight_lifetime="parameter",
        )  # fmt: skip
    shared = expert_models.MixtureModel("torchtitan", 2)
    shared.blocks[1].experts.down = shared.blocks[0].experts.down
    with pytest.raises(ValueError, match="use the same expert weights"):
        f8.convert(
            shared, f8.recipes.rowwise(), filter=lambda _, fqn: fqn.endswith("experts"), weight_lifetime="parameter"
        )


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight[0],
        lambda weight: weight.flatten(0, 1),
        lambda weight: weight.transpose(0, 1),
        lambda weight: weight.permute(2, 0, 1),
        lambda weight: weight[:, ::2],
    ],
)
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", models.FOUR_BITS])
def test_views_that_keep_no_matrix_raise(use, recipe):
    (weight, *_) = stacks_of(mixture("torchtitan", recipe)).values()
    with pytest.raises(
        TypeError,
        match="of quantized expert weights is not supported, because it does not keep "
        "full matrices, and tensors are never",
    ):
        use(weight.detach())


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4", models.FOUR_BITS])
def test_a_part_of_each_matrix_takes_no_values(recipe):
    (weight, *_) = stacks_of(mixture("torchtitan", recipe)).values()
    with torch.no_grad():
        weight[:1].zero_()  # an expert has a scale of its own
        with pytest.raises(RuntimeError, match="because the rest of the parameter shares its scale"):
            weight[:, :192].zero_()
    assert not weight.dequantize()[0].any()
    assert weight.dequantize()[1].any()


@pytest.mark.parametrize("size", [(2, 5, 6), (2, 6, 5), (3, 32, 48)], ids=str)
def test_codes_share_a_byte_where_a_matrix_has_an_even_number_of_them(size):
    """Ten rows of two matrices of five are no reason for two codes of a column to share one."""
    values, recipe = torch.randn(size).bfloat16(), models.recipe_of(models.FOUR_BITS)
    for quantizer in (recipe.weight, recipe.weight_for_grad_input):
        weight = QuantizedParameter.of(values, quantizer, batch=1)
        expected = [f8.quantize(matrix, quantizer.for_shape(matrix.shape)) for matrix in values]
        assert weight.shape == size
        assert weight.stride() == values.stride()
        assert difference(weight.codes, torch.stack([each.codes for each in expected])) is None
        assert difference(weight.dequantize(), torch.stack([each.dequantize() for each in expected])) is None
        assert difference(weight.outer_scale, torch.cat([each.outer_scale for each in expected])) is None
        turned = weight.transpose(1, 2)
        assert (turned.shape, turned.stride()) == (values.mT.shape, values.mT.stride())
        assert difference(turned.dequantize(), weight.dequantize().mT) is None


@dataclass(frozen=True, repr=False)
class _OfOneMatrix(f8.TwoLevelScaling):
    """As another package may write it, by rules that know the amax of one tensor alone."""

    def block_scale(self, amax, outer_amax):
        assert outer_amax.shape == (1,)
        return super().block_scale(amax, outer_amax)


@pytest.mark.parametrize("kind", [f8.TwoLevelScaling, _OfOneMatrix])
@pytest.mark.parametrize("scale", ["transformer_engine", "torchao"])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_each_matrix_has_the_scales_that_it_has_alone(kind, scale, block):
    """Of zeros, of values that are not finite, of the smallest and of the largest ones."""
    values = torch.randn(6, 32, 48)
    values[1] = 0
    values[2, 3, 5], values[3, 3, 5] = torch.nan, torch.inf
    values[4] *= 1e-44
    values[5, 17] *= 3e37
    for dtype in (torch.float32, torch.bfloat16):
        quantizer, own = kind(block=block, scale=scale), values.to(dtype)
        weight = QuantizedParameter.of(own, quantizer, batch=1)
        expected = [f8.quantize(matrix, quantizer).parts() for matrix in own]
        for mine, right in zip(weight.parts(), zip(*expected, strict=True), strict=True):
            right = torch.cat(right) if mine.ndim == 1 else torch.stack(right)
            assert difference(mine, right) is None
    none = QuantizedParameter.of(values[:0], quantizer, batch=1)
    assert [tuple(each.shape) for each in none.parts()[::2]] == [(0, 32, 24), (0,)]


def test_codes_of_another_recipe_are_refused():
    weight = QuantizedParameter.of(torch.randn(2, 32, 64).bfloat16(), f8.recipes.blockwise().weight, batch=1)
    x, offsets = torch.randn(4, 64).bfloat16(), torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"grouped_linear: the weight was quantized with .* the recipe quantizes"):
        f8.grouped_linear(x, weight, offsets, recipe=f8.recipes.tensorwise())
    plain = f8.quantize(torch.randn(2, 32, 64).bfloat16(), f8.recipes.tensorwise().weight)
    with pytest.raises(
        TypeError, match="only `weight` can be quantized, with each matrix quantized separately, because"
    ):
        f8.grouped_linear(x, plain, offsets, recipe=f8.recipes.tensorwise())


@pytest.mark.parametrize(
    ("kind", "recipe"), [("torchtitan", "tensorwise"), ("gpt-oss", "rowwise"), ("gpt-oss", "nvfp4")]
)
def test_checkpoints_of_pytorch_reach_each_key_of_a_state_dict(kind, recipe):
    options = StateDictOptions(full_state_dict=True)
    model, other = mixture(kind, recipe), mixture(kind, recipe, seed=1)
    state = get_model_state_dict(model, options=options)
    set_model_state_dict(other, dict(state), options=options)
    own, loaded = model.state_dict(), other.state_dict()
    assert state.keys() == own.keys() == loaded.keys()
    assert [name for name in own if difference(own[name], loaded[name])] == []
    assert [name for name in own if difference(own[name], state[name])] == []

    class_of_spec.cache_clear()  # as in another process, which has no such class yet
    copied = pickle.loads(pickle.dumps(model.blocks[0].experts))
    for name, part in model.blocks[0].experts.state_dict().items():
        assert difference(getattr(copied, name), part) is None
    plain = mixture(kind, recipe, quantized=False).blocks[0].experts
    assert not [name for name in copied.state_dict() if name.endswith("_codes") and hasattr(plain, name)]
