"""f8.advise: errors of products against float64, planted outliers, budgets, and a model that stays as it is."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.testing.bits import bits
from fp8compile.testing.numerics.advice import HIGH_PRECISION, least_of
from fp8compile.testing.numerics.layer_calls import LayerCall
from fp8compile.testing.numerics.product_costs import cost_of

GEMMS = ("output", "grad_input", "grad_weight")
FOUR_BITS = {"recipes": ("tensorwise", "mxfp8", "nvfp4"), "gpu": "b200", "rows_factor": 256}


class Block(nn.Module):
    """A feed-forward block; ``buffer`` counts calls, as a module with state does."""

    def __init__(self, dim=128, inner=256):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, inner, bias=False)
        self.down = nn.Linear(inner, dim)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.dropout(self.down(nn.functional.silu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks, and the loss of what they return."""

    def __init__(self, blocks=2, **options):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))

    def forward(self, x, weight=1.0):
        for block in self.blocks:
            x = block(x)
        return {"loss": weight * x.float().square().mean(), "x": x}


def model(seed=0, **options):
    torch.manual_seed(seed)
    return Model(**options).bfloat16()


def batch(rows=256, dim=128):
    return {"x": torch.randn(4, rows // 4, dim, generator=torch.Generator().manual_seed(1)).bfloat16(), "weight": 3.0}


def plant_outliers(block, factor=300.0, channels=8):
    """The function stays: some channels of the input are larger, and their columns of the weight smaller."""
    scale = torch.ones(block.norm.weight.shape)
    scale[:channels] = factor
    with torch.no_grad():
        block.norm.weight.mul_(scale)
        block.up.weight.div_(scale)


def layer(advice, name):
    return next(each for each in advice.layers if each.name == name)


def test_errors_are_those_of_the_products_against_float64():
    x, weight = torch.randn(64, 48).bfloat16(), torch.randn(32, 48).bfloat16()
    linear = nn.Linear(48, 32, bias=False).bfloat16()
    linear.weight.data.copy_(weight)
    found = f8.advise(linear, x.requires_grad_(), recipes=["rowwise"], loss=lambda y: (y.float() ** 3).sum())
    y = linear(x.detach())
    dy = (3 * y.float().square()).bfloat16().detach()
    xx, ww = x.detach().clone().requires_grad_(), weight.clone().requires_grad_()
    got = f8.linear(xx, ww, recipe=f8.recipes.rowwise())
    got.backward(dy)
    exact = x.double() @ weight.double().t(), dy.double() @ weight.double(), dy.double().t() @ x.double()
    for ratio, mine, want in zip(found.layers[0].errors["rowwise"], (got, xx.grad, ww.grad), exact, strict=True):
        noise = (mine.detach().double() - want.detach()).square().sum()
        # sums of float64 in another order
        assert ratio == pytest.approx(10 * math.log10(want.detach().square().sum() / noise), rel=1e-9)


def test_planted_outliers_cost_four_bits_in_their_layer_and_nowhere_else():
    plain, planted = model(), model()
    plant_outliers(planted.blocks[1])
    before, after = (f8.advise(each, batch(), **FOUR_BITS) for each in (plain, planted))
    for name in ("blocks.0.up", "blocks.0.down", "blocks.1.down"):
        assert layer(before, name).takes == layer(after, name).takes == "nvfp4"
        assert least_of(layer(after, name).errors["nvfp4"]) > 14.5
        # the rest of the model computes the same function, up to bfloat16's roundings in the planted layer
        assert layer(after, name).errors["nvfp4"] == pytest.approx(layer(before, name).errors["nvfp4"], abs=0.5)
    hit, without = layer(after, "blocks.1.up"), layer(before, "blocks.1.up")
    assert min(without.errors["nvfp4"]) > 14.5
    assert least_of(hit.errors["nvfp4"]) < 11.5
    assert hit.takes == "tensorwise", "eight bits have range enough for a factor of 300, and it is the faster of two"
    for name in ("tensorwise", "mxfp8"):
        assert hit.errors[name] == pytest.approx(without.errors[name], abs=1.0)


def test_convert_takes_the_advice_and_prints_it_with_its_data():
    planted = model()
    plant_outliers(planted.blocks[1])
    advice = f8.advise(planted, batch(), **FOUR_BITS)
    text = advice.text(width=100)
    assert "Errors were measured on one batch: 256 rows per layer, of 256." in text
    assert "Layers: nvfp4 3, tensorwise 1." in text
    assert all(len(line) <= 100 for line in text.splitlines())
    products = advice.text(products=True)
    assert all(gemm in products for gemm in GEMMS)
    f8.convert(planted, advice)
    given = {name: each.recipe for name, each in planted.named_modules() if isinstance(each, f8.Linear)}
    nvfp4 = f8.recipes.nvfp4()
    assert given == {
        "blocks.0.up": nvfp4, "blocks.0.down": nvfp4, "blocks.1.down": nvfp4, "blocks.1.up": f8.recipes.tensorwise(),
    }  # fmt: skip
    with pytest.raises(ValueError, match="'0' is not a layer of the model that was measured"):
        f8.convert(nn.Sequential(nn.Linear(64, 64)), advice)
    assert advice.to_dict()["layers"][0]["sqnr"]["nvfp4"].keys() == set(GEMMS)


def state_of(module):
    """Everything that advise could change."""
    return {
        "classes": [type(each) for each in module.modules()],
        "attributes": [set(vars(each)) for each in module.modules()],
        "modes": [each.training for each in module.modules()],
        "hooks": [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()],
        "buffers": [bits(each).tolist() for each in module.buffers()],
        "parameters": [id(each) for each in module.parameters()],
        "values": [bits(each).tolist() for each in module.parameters()],
        "gradients": [None if each.grad is None else bits(each.grad).tolist() for each in module.parameters()],
        "random": torch.random.get_rng_state().tolist(),
        "python": random.getstate(),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before_also_after_an_error(fails):
    one = model()
    one.blocks[0].eval()
    one(**batch())["loss"].backward()
    one.blocks[1].up.weight.grad = None
    before = state_of(one)
    if fails:
        with pytest.raises(TypeError, match="not a scalar loss"):
            f8.advise(one, batch(), loss=lambda output: output["x"])
    else:
        f8.advise(one, batch(), recipes=["nvfp4", "rowwise"])
    assert state_of(one) == before


def test_nothing_is_measured_that_the_backward_leaves_out():
    one = model()
    one.blocks[1].up.weight.requires_grad_(requires_grad=False)
    found = f8.advise(one, batch(), recipes=["rowwise"])
    assert layer(found, "blocks.1.up").errors["rowwise"][2] is None
    assert None not in layer(found, "blocks.0.down").errors["rowwise"]
    assert layer(found, "blocks.0.up").errors["rowwise"][1] is not None, "the norm's weight is trained"
    costs = [layer(found, f"blocks.{block}.up").costs["rowwise"].bytes for block in (0, 1)]
    assert costs[1] < costs[0]


def test_activation_checkpoints_are_recorded_once():
    class Checkpointed(Model):
        def forward(self, x, weight=1.0):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return weight * x.float().square().mean()

    torch.manual_seed(0)
    one = Checkpointed().bfloat16()
    plain = f8.advise(model(), batch(), recipes=["rowwise"])
    found = f8.advise(one, batch(), recipes=["rowwise"])
    assert [each.rows for each in found.layers] == [256] * 4
    assert [each.errors for each in found.layers] == [each.errors for each in plain.layers]


def test_autocast_measures_what_the_layer_would_multiply():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x).float().square().mean()

    torch.manual_seed(0)
    found = f8.advise(Cast(), torch.randn(128, 64), recipes=["rowwise"])
    ratio = found.layers[0].errors[HIGH_PRECISION][0]
    assert 50 < ratio < 60, "of bfloat16, and not of float32"


def test_experts_are_measured_by_group_and_starved_ones_are_said():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=32, num_experts_per_tok=1,
        max_position_embeddings=32,
    )  # fmt: skip
    one = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    ids = torch.randint(0, 64, (1, 16))
    options = {"recipes": ["rowwise", "delayed"], "filter": "*experts", "rows_factor": 4096}
    found = f8.advise(one, {"input_ids": ids, "labels": ids}, **options)
    (experts,) = found.layers
    assert experts.name.endswith("mlp.experts")
    assert len(experts.matrices) == 2
    assert experts.groups is not None
    assert experts.groups[0] <= 16 < experts.groups[1] == 32
    assert experts.rows == 32, "16 rows of each of two matrices"
    assert all(25 < each < 40 for each in experts.errors["rowwise"])
    assert "delayed" in experts.refused
    assert "delayed" not in experts.errors
    assert "experts had no rows" in str(found)
    assert experts.takes == HIGH_PRECISION, "matrices this small gain less in eight bits than their casts cost"
    assert found(one, experts.name) is None


def test_a_budget_of_time_spends_it_where_it_removes_most_noise():
    planted = model()
    plant_outliers(planted.blocks[1])
    every = f8.advise(planted, batch(), **FOUR_BITS)
    least, plain = every.total("nvfp4").seconds, every.total(HIGH_PRECISION).seconds
    share = (least / plain + 1) / 2
    found = f8.advise(planted, batch(), budget={"time": share}, **FOUR_BITS)
    assert least <= found.total().seconds <= share * plain
    assert layer(found, "blocks.1.up").takes != "nvfp4", "the outliers are the most noise"
    exact = f8.advise(planted, batch(), budget={"time": 2.0}, **FOUR_BITS)
    assert {each.takes for each in exact.layers} == {HIGH_PRECISION}
    with pytest.raises(ValueError, match="the fastest recipes take 0"):
        f8.advise(planted, batch(), budget={"time": 0.1}, **FOUR_BITS)


def test_a_gpu_without_a_gemm_for_a_recipe_never_gets_it():
    found = f8.advise(model(), batch(), recipes=["nvfp4", "rowwise"], gpu="h200", rows_factor=256)
    assert all("nvfp4" in each.refused and each.takes != "nvfp4" for each in found.layers)
    assert all(min(each.errors["nvfp4"]) > 14 for each in found.layers), "its errors are shown all the same"
    named = f8.advise(model(), batch(), gpu="h200").recipes
    assert set(named) == {"tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "blockwise_bf16_wgrad"}


def test_costs_are_operations_and_bytes_by_the_peaks():
    from fp8compile.testing.explain import PEAKS

    m, k, n = 4096, 1024, 2048
    call = LayerCall(
        x=torch.empty(1, k, dtype=torch.bfloat16), weight=torch.empty(n, k, dtype=torch.bfloat16), ends=None, rows=m,
        needs_x=True, needs_weight=True, grad_output=torch.empty(1, n),
    )  # fmt: skip
    peaks = PEAKS["h200"]
    plain, eight = (cost_of(call, recipe, peaks) for recipe in (None, f8.recipes.rowwise()))
    sizes = m * k, n * k, m * n
    assert plain.bytes == 3 * 2 * sum(sizes)
    operations = 2 * m * k * n
    assert plain.seconds == pytest.approx(3 * operations / peaks.bf16)
    # two casts of each tensor, and the weight is read for each
    casts = 2 * (sizes[0] + 3 * sizes[1] + sizes[2])
    assert (
        eight.bytes == sum(sizes[a] + sizes[b] + 2 * sizes[c] for a, b, c in ((0, 1, 2), (2, 1, 0), (2, 0, 1))) + casts
    )
    products = [
        max(operations / peaks.fp8, (sizes[a] + sizes[b] + 2 * sizes[c]) / peaks.bandwidth)
        for a, b, c in ((0, 1, 2), (2, 1, 0), (2, 0, 1))
    ]
    assert eight.seconds == pytest.approx(sum(products) + casts / peaks.bandwidth)
    assert cost_of(call, None, peaks, rows_factor=2).seconds == pytest.approx(2 * plain.seconds)


def test_rows_are_sampled_in_runs_and_the_sample_is_said():
    rows = {"x": torch.randn(1, 4096, 128).bfloat16()}
    found = f8.advise(model(), rows, recipes=["blockwise"], sample=256)
    assert {(each.sampled, each.rows) for each in found.layers} == {(256, 4096)}
    assert "256 rows per layer, of 4096" in found.text(width=200)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": 14.0}, ValueError, "it must be {'sqnr': dB}"),
        ({"budget": {"sqnr": 1.0, "time": 1.0}}, ValueError, "it must be {'sqnr': dB}"),
        ({"budget": {"sqnr": math.nan}}, ValueError, "it must be {'sqnr': dB}"),
        ({"recipes": "rowwise"}, TypeError, "it must be a list or tuple of names"),
        ({"recipes": []}, ValueError, "it must contain at least one recipe"),
        ({"recipes": [3]}, TypeError, "`recipe` is 3"),
        ({"gpu": "v100"}, ValueError, "it must be one of h200"),
        ({"sample": 0}, ValueError, "`sample` must be an int of at least 1"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments, error, words):
    with pytest.raises(error, match=words):
        f8.advise(model(), batch(), **arguments)


def test_converted_and_compiled_models_are_refused():
    with pytest.raises(ValueError, match="is already converted, but"):
        f8.advise(f8.convert(model(), f8.recipes.rowwise()), batch())
    one = model()
    one.blocks[0].compile()
    with pytest.raises(TypeError, match=r"blocks.0 is compiled"):
        f8.advise(one, batch())
    with pytest.raises(ValueError, match="no layer can be measured, because excluded by the filter"):
        f8.advise(model(), batch(), filter=lambda module, fqn: False)
    with pytest.raises(TypeError, match="does not require grad"):
        f8.advise(copy.deepcopy(model()).requires_grad_(requires_grad=False), batch())
