"""Experts that are no 3-D parameters of one module with the routing: DBRX's, JetMoE's, and registered ones."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.nn.experts import known_modules

EVERY = {"filter": lambda *_: True}
COUNT, WIDTH, INNER, TOKENS = 4, 64, 48, 24
RECIPES = ["rowwise", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
ENDS = torch.tensor([5, 5, 20, 22], dtype=torch.int32)


def drawn(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return nn.ModuleDict({"experts": module.bfloat16()})


def dbrx():
    sizes = {"ffn_hidden_size": INNER, "hidden_size": WIDTH, "moe_num_experts": COUNT, "moe_top_k": 2}
    config = transformers.DbrxConfig(d_model=WIDTH, ffn_config=sizes).ffn_config
    config.hidden_size = WIDTH
    return drawn(DbrxExperts(config))


def given():
    """Tokens, which experts they go to, of which the last has none, and weights."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(TOKENS, COUNT, generator=generator)
    scores[:, -1] = 0
    weights, index = scores.topk(2)
    x = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16().requires_grad_()
    return x, index, weights.bfloat16().requires_grad_()


def gradients(y, tensors):
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return torch.autograd.grad(y, tensors, grad)


def expert_by_expert(module, recipe, x, index, weights):
    """`f8.linear` for the rows of each expert, weighted and summed as converted experts do."""
    w1, v1, w2 = (each.unflatten(0, (COUNT, -1)).unbind() for each in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
    chosen, order = index.flatten().sort(stable=True)
    sizes = [int((chosen == expert).sum()) for expert in range(COUNT)]
    rows, y = x.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1)[order], []
    for expert, own in enumerate(rows.split(sizes)):
        gate, up = (f8.linear(own, each[expert], recipe=recipe) for each in (w1, v1))
        y.append(f8.linear(module.mlp.activation_fn(gate) * up, w2[expert].t(), recipe=recipe))
    y = (torch.cat(y) * weights.flatten()[order].unsqueeze(-1))[order.argsort()]
    return y.unflatten(0, (-1, 2)).sum(1).unsqueeze(1)  # (batch, tokens of a batch, hidden), as DBRX gives it


@pytest.mark.parametrize("name", RECIPES)
def test_experts_of_dbrx_are_linears_expert_by_expert(name, assert_bits_equal):
    recipe, model = f8.recipes.by_name(name), dbrx()
    f8.convert(model, recipe, **EVERY)
    found = []
    for call in (model.experts, lambda *args: expert_by_expert(model.experts, recipe, *args)):
        args = given()
        y = call(*args)
        found.append([y, *gradients(y, [args[0], args[2], *model.parameters()])])
    for actual, expected in zip(*found, strict=True):
        assert_bits_equal(actual, expected)


def test_experts_of_dbrx_in_high_precision_are_those_of_transformers(assert_bits_equal):
    model = dbrx()
    plain = copy.deepcopy(model)
    f8.convert(model, f8.Recipe(), **EVERY)
    assert_bits_equal(model.experts(*given()), plain.experts(*given()))
    assert type(f8.revert(model).experts) is DbrxExperts


def test_the_report_has_one_row_for_experts_of_dbrx():
    model = f8.convert(dbrx(), f8.recipes.rowwise(), **EVERY)
    (row,) = f8.conversion_report(model, forward=lambda: model.experts(*given())).rows
    assert (row.fqn, row.experts, row.called) == ("experts", COUNT, True)
    assert row.matrices == ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    assert row.past_forward == ""


NO_STACKS = r"does not store its experts as 3-D parameters of shape \(experts, out_features, in_features\)"


def test_quantized_parameters_need_stacks():
    with pytest.raises(ValueError, match=f"weight_lifetime='parameter': experts {NO_STACKS}"):
        f8.convert(dbrx(), f8.recipes.rowwise(), weight_lifetime="parameter", **EVERY)


@pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)
def test_a_gather_of_codes_needs_stacks():
    model = f8.convert(nn.ModuleList([dbrx(), nn.Linear(32, 32)]), f8.recipes.rowwise(), **EVERY)
    f8.parallel.fsdp_float8_all_gather(model)
    experts, dense = f8.conversion_report(model).rows
    assert experts.gathered.startswith("param_dtype: the module does not store its experts as 3-D parameters")
    assert dense.converted


@pytest.mark.parametrize("name", RECIPES)
def test_experts_of_jetmoe_are_grouped_linears(name, assert_bits_equal):
    recipe, model = f8.recipes.by_name(name), drawn(JetMoeParallelExperts(COUNT, WIDTH, INNER))
    plain = copy.deepcopy(model)
    f8.convert(model, recipe, **EVERY)
    x = given()[0]
    sizes = [5, 0, 15, TOKENS - 20]
    ends = torch.tensor([5, 5, 20, TOKENS], dtype=torch.int32)
    y, expected = model.experts(x, sizes), f8.grouped_linear(x, plain.experts.weight, ends, recipe=recipe)
    assert_bits_equal(y, expected)
    grads = [gradients(y, [x, model.experts.weight]), gradients(expected, [x, plain.experts.weight])]
    for actual, other in zip(*grads, strict=True):
        assert_bits_equal(actual, other)
    assert_bits_equal(f8.revert(model).experts(x, sizes), plain.experts(x, sizes))


# ---------------------------------------------------------------------------------- registered by others


def test_jetmoe_takes_a_size_for_each_row():
    model = f8.convert(drawn(JetMoeParallelExperts(COUNT, WIDTH, INNER)), f8.recipes.rowwise(), **EVERY)
    for sizes in ([5, 0, 15, 1], [5, 0, 15, 3]):
        with pytest.raises(ValueError, match=rf"JetMoeParallelExperts: expert_size sums to {sum(sizes)} rows, but"):
            model.experts(torch.randn(22, WIDTH).bfloat16(), sizes)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def counted(x, experts):
        return model.experts(x, (experts == torch.arange(COUNT).unsqueeze(1)).sum(1).tolist())

    x, experts = torch.randn(22, WIDTH).bfloat16(), torch.tensor([0] * 5 + [2] * 15 + [3] * 2)
    assert torch.equal(counted(x, experts), model.experts(x, [5, 0, 15, 2]))  # sizes that the graph does not know


class Branches(nn.Module):
    """Somebody's experts: stacks of their own, and a method of their own that multiplies."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.empty(COUNT, WIDTH, INNER))
        self.second = nn.Parameter(torch.empty(COUNT, INNER, WIDTH))

    def mix(self, rows, ends):
        raise AssertionError("the loop over experts ran")

    def forward(self, rows, ends):
        return self.mix(rows, ends)


def mix(self, rows, ends):
    inner = f8.grouped_mm(rows, self.first, offs=ends, recipe=self.recipe)
    return f8.grouped_mm(inner.relu(), self.second, offs=ends, recipe=self.recipe)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(known_modules, "SPECS", list(known_modules.SPECS))
    known_modules.spec_of_class.cache_clear()
    yield
    known_modules.spec_of_class.cache_clear()


@pytest.mark.parametrize("quantized", [False, True])
def test_registered_experts_are_converted(registry, quantized, assert_bits_equal):
    f8.library.register_experts(Branches, method="mix", replacement=mix, is_transposed=True)
    model, recipe = drawn(Branches()), f8.recipes.rowwise()
    weights = model.experts.first.detach(), model.experts.second.detach()
    f8.convert(model, recipe, weight_lifetime="parameter" if quantized else None, **EVERY)
    (row,) = f8.conversion_report(model).rows
    assert (row.converted, row.experts, row.quantized_weight) == (True, COUNT, quantized)
    assert row.matrices == ((INNER, WIDTH), (WIDTH, INNER))
    x = given()[0]
    inner = f8.grouped_mm(x, weights[0], offs=ENDS, recipe=recipe).relu()
    assert_bits_equal(model.experts(x, ENDS), f8.grouped_mm(inner, weights[1], offs=ENDS, recipe=recipe))


def test_without_a_registration_the_report_lists_what_they_hold():
    model = drawn(Branches())
    assert [row.reason for row in f8.conversion_report(model).rows] == [
        "a 3-D parameter (experts?), not a nn.Linear"
    ] * 2


@pytest.mark.parametrize(
    ("cls", "options", "text"),
    [
        (nn.Linear, {"method": "forward", "replacement": mix}, "is a nn.Linear"),
        (Branches, {"method": "mixed", "replacement": mix}, "has no method mixed"),
        (Branches, {"method": "mix", "replacement": 3}, "`replacement` is 3; it must be a function, the FP8 version"),
        ("Branches", {"method": "mix", "replacement": mix}, "expected a subclass of torch.nn.Module"),
    ],
)
def test_what_can_not_be_registered(cls, options, text):
    with pytest.raises(TypeError, match=text):
        f8.library.register_experts(cls, **options)


# ---------------------------------------------------------------------------------- which experts


@pytest.mark.parametrize("wrong", [-1, COUNT + 1])
def test_an_index_of_no_expert_raises(wrong):
    """-1 was multiplied by the first expert, and an index behind the last one gave zeros."""
    model = f8.convert(dbrx(), f8.recipes.rowwise(), **EVERY)
    x, index, weights = given()
    index[3, 0] = wrong
    with pytest.raises(
        ValueError, match=f"values from .* to .*; indices must be from 0 to {COUNT - 1}, or {COUNT} for"
    ):
        model.experts(x, index, weights)


def test_an_index_behind_the_last_expert_is_one_of_another_rank():
    model = f8.convert(dbrx(), f8.recipes.rowwise(), **EVERY)
    x, index, weights = given()
    index[3] = COUNT
    assert model.experts(x, index, weights)[3].eq(0).all()
