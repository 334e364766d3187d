"""Modules of experts, of transformers and torchtitan: what convert makes of them, to the bit, and what it leaves."""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.nn.experts.routers import routers
from fp8compile.target import Target, pretend_target

sys.path.insert(0, str(Path(__file__).parents[1] / "behaviour"))

from mixtures import MIXTURES
from transformers.integrations import use_experts_implementation
from zoo import ZOO, bf16_model

RECIPE = f8.recipes.rowwise()
ROUTER = "a router: the scores that select experts stay in high precision"
HIDDEN, TOKENS, COUNT, TOP_K = 64, 24, 4, 2
FLAGS = ("gate", "bias", "transposed", "norm")


class Experts(nn.Module):
    """As models of transformers write them, with every choice that its flags offer."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, inner = config.count, 48
        up, first = (2 * inner, "gate_up_proj") if config.gate else (inner, "up_proj")
        for name, (out, given) in {first: (up, HIDDEN), "down_proj": (HIDDEN, inner)}.items():
            shape = (given, out) if config.transposed else (out, given)
            setattr(self, name, nn.Parameter(torch.randn(config.count, *shape) / 8))
            if config.bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(config.count, out)))
        self.act_fn = nn.SiLU()
        if config.norm:
            self.post_expert_norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("the loop over experts ran")


def experts(*flags, count=COUNT, dtype=torch.bfloat16, implementation="eager"):
    """Experts that `use_experts_implementation` of transformers made; their own forward is a loop that can't run."""
    given = {flag: flag in flags for flag in FLAGS}
    config = SimpleNamespace(**given, count=count, _experts_implementation=implementation)
    return use_experts_implementation(
        type("Experts", (Experts,), {"forward": Experts.forward}),
        is_transposed=config.transposed, has_bias=config.bias, has_gate=config.gate, has_post_expert_norm=config.norm,
    )(config).to(dtype)  # fmt: skip


def routing(*, sentinels=False, dtype=torch.bfloat16):
    """Tokens, chosen experts of which the second to last has none, and weights.

    With sentinels, as transformers marks the experts of other ranks: an index behind the last, a weight of zero. The
    first token has none of this rank's experts, and NaNs.
    """
    generator = torch.Generator().manual_seed(0)
    x, scores = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, COUNT, generator=generator)
    scores[:, COUNT - 2] = -1
    weights, index = scores.topk(TOP_K)
    if sentinels:
        elsewhere = torch.rand(TOKENS, TOP_K, generator=generator) < 0.3
        elsewhere[0], x[0] = True, torch.nan
        weights, index = weights.masked_fill(elsewhere, 0), index.masked_fill(elsewhere, COUNT)
    return x.to(dtype).requires_grad_(), index, weights.requires_grad_()


def expert_by_expert(module, x, index, weights):
    """What converted experts give: `f8.linear` for each expert's rows, weighted and summed as transformers does."""
    recipe = module.recipe

    def linear(rows, name, expert):
        weight = getattr(module, name).unbind()[expert]
        bias = getattr(module, f"{name}_bias").unbind()[expert] if module.has_bias else None
        return f8.linear(rows, weight.t() if module.is_transposed else weight, bias, recipe=recipe)

    chosen, order = torch.sort(index.reshape(-1), stable=True)
    sizes = [int((chosen == expert).sum()) for expert in range(COUNT)]
    rows, y = x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN)[order], []
    for expert, own in enumerate(rows[: sum(sizes)].split(sizes)):
        inner = linear(own, "gate_up_proj" if module.has_gate else "up_proj", expert)
        y.append(linear(module._apply_gate(inner) if module.has_gate else module.act_fn(inner), "down_proj", expert))
    y = F.pad(torch.cat(y), (0, 0, 0, len(rows) - sum(sizes)))
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    y = (y * weights.reshape(-1)[order].unsqueeze(-1))[order.argsort()]
    return y.view(TOKENS, TOP_K, HIDDEN).sum(dim=1).to(x.dtype)


def results(call, module, given):
    """The output and all gradients, by name."""
    tensors = {"x": given[0], "weights": given[-1], **dict(module.named_parameters())}
    y = call(*given)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return {"y": y, **dict(zip(tensors, torch.autograd.grad(y, list(tensors.values()), grad), strict=True))}


def assert_same(actual, expected, assert_bits_equal):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bits_equal(actual[name], tensor, name)


def rows_of(model):
    return {row.fqn: row for row in f8.conversion_report(model).rows}


# ---------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("flags", "recipe", "sentinels"),
    [
        (("gate",), "rowwise", False),
        (("gate",), "tensorwise", False),
        (("gate",), "blockwise", False),
        (("gate",), "mxfp8", False),
        (("gate",), "rowwise_bf16_wgrad", True),
        (("gate", "bias", "transposed"), "rowwise", True),
        (("gate", "bias", "transposed"), "blockwise", False),
        (("bias", "norm"), "rowwise", True),
        ((), "tensorwise", True),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_outputs_and_gradients_are_those_of_linear_expert_by_expert(flags, recipe, sentinels, assert_bits_equal):
    module = f8.convert(experts(*flags), f8.recipes.by_name(recipe))
    module._is_expert_parallel = sentinels
    given = routing(sentinels=sentinels)
    expected = results(lambda *args: expert_by_expert(module, *args), module, given)
    assert all(tensor.isfinite().all() for tensor in expected.values())
    assert_same(results(module, module, given), expected, assert_bits_equal)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, module, given), expected, assert_bits_equal)


@pytest.mark.parametrize(
    "flags",
    [("gate",), ("gate", "bias", "transposed"), ("gate", "transposed"), ("bias", "norm"), ("gate", "norm")],
    ids="+".join,
)
def test_in_high_precision_experts_are_those_of_transformers(flags, assert_bits_equal):
    """A recipe of nothing quantizes nothing: what is left is what transformers' `grouped_mm` computes."""
    module, given = experts(*flags, implementation="grouped_mm"), routing(sentinels=True)
    module._is_expert_parallel = True
    with torch.no_grad():
        expected = module(*given)
        actual = f8.convert(module, f8.Recipe())(*given)
    assert expected.isfinite().all()
    assert_bits_equal(actual, expected)


def test_experts_of_transformers_5_0_which_has_fewer_flags_have_a_gate_and_no_norm(assert_bits_equal):
    module, given = f8.convert(experts("gate"), RECIPE), routing()
    expected = module(*given)
    for flag in ("has_gate", "has_post_expert_norm", "is_concatenated", "_is_expert_parallel"):
        delattr(module, flag)
    assert_bits_equal(module(*given), expected)


def test_experts_of_llama_4_are_linears_expert_by_expert(assert_bits_equal):
    model = f8.convert(bf16_model(MIXTURES["Llama 4"]), RECIPE)
    module = model.model.layers[0].feed_forward.experts
    x = torch.randn(8 * 5, HIDDEN).bfloat16().requires_grad_()

    def by_hand(x):
        y = []
        matrices = zip(module.gate_up_proj.unbind(), module.down_proj.unbind(), strict=True)
        for rows, (both, down) in zip(x.chunk(8), matrices, strict=True):
            gate, up = f8.linear(rows, both.t(), recipe=RECIPE).chunk(2, dim=-1)
            y.append(f8.linear(up * module.act_fn(gate), down.t(), recipe=RECIPE))
        return torch.cat(y)

    assert_same(results(module, module, (x,)), results(by_hand, module, (x,)), assert_bits_equal)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(use_reentrant, assert_bits_equal):
    module = f8.convert(experts("gate"), RECIPE)
    x, index, weights = routing()

    def run(call):
        module.zero_grad()
        x.grad = None
        call(x, index, weights).float().square().sum().backward()
        return {name: tensor.grad.clone() for name, tensor in {"x": x, **dict(module.named_parameters())}.items()}

    expected = run(module)
    assert_same(
        run(lambda *given: checkpoint(module, *given, use_reentrant=use_reentrant)), expected, assert_bits_equal
    )


def test_under_autocast_experts_are_those_of_its_dtype(assert_bits_equal):
    module = f8.convert(experts("gate", "bias", dtype=torch.float32), RECIPE)
    x, index, weights = routing(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = module(x, index, weights)
    expected = module.bfloat16()(x.bfloat16(), index, weights)
    assert actual.dtype == torch.float32  # of the tokens, as transformers gives
    assert_bits_equal(actual.bfloat16(), expected)


# ---------------------------------------------------------------------------------- what changes, what stays


@pytest.mark.parametrize("name", MIXTURES)
def test_a_models_state_is_as_before_and_revert_gives_it_back(name, assert_bits_equal):
    model, other = bf16_model(MIXTURES[name]), bf16_model(MIXTURES[name])
    modules = {fqn: (type(module), dict(vars(module))) for fqn, module in model.named_modules()}
    parameters, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    found = [fqn for fqn, (cls, _) in modules.items() if cls.__name__.endswith("Experts")]
    f8.convert(model, RECIPE)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert_same(model.state_dict(), state, assert_bits_equal)
    assert [type(module) for _, module in other.named_modules()] == [cls for cls, _ in modules.values()]
    rows = rows_of(model)
    assert found
    assert all(rows[fqn].converted and rows[fqn].module == modules[fqn][0].__name__ for fqn in found)
    assert all(isinstance(model.get_submodule(fqn), modules[fqn][0]) for fqn in found)
    left = {row.module: row.reason for row in rows.values() if not row.converted}
    assert left.pop(next(module for module in left if "outer" in module)) == ROUTER
    assert set(left) <= {"Linear"}  # of Qwen3-Next, with 1 and 8 outputs
    other.load_state_dict(model.state_dict())
    f8.revert(model)
    for fqn, module in model.named_modules():
        assert (type(module), vars(module)) == modules[fqn], fqn
    assert_same(model.state_dict(), state, assert_bits_equal)


def by_pickle(module):
    return pickle.loads(pickle.dumps(module))


def by_torch_save(module):
    torch.save(module, buffer := io.BytesIO())
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("name", ["Mixtral", "Llama 4", "gpt-oss"])
def test_copies_are_converted_too(name, copied, assert_bits_equal):
    model = f8.convert(bf16_model(MIXTURES[name]), RECIPE)
    other, batch = copied(model), MIXTURES[name].batch(0)
    assert_bits_equal(other(**batch).loss, model(**batch).loss)
    assert str(f8.conversion_report(other)) == str(f8.conversion_report(model))
    f8.revert(other)
    assert not any(row.converted for row in rows_of(other).values())
    assert all(row.converted for row in rows_of(model).values() if row.experts)


def test_another_model_of_the_process_multiplies_as_before(assert_bits_equal):
    plain, batch = bf16_model(ZOO["Mixtral"]), ZOO["Mixtral"].batch(0)
    before = plain(**batch).logits
    converted = f8.convert(bf16_model(ZOO["Mixtral"]), RECIPE)
    assert not torch.equal(converted(**batch).logits, before)
    assert_bits_equal(plain(**batch).logits, before)
    assert converted.config._experts_implementation == plain.config._experts_implementation


def test_convert_again_does_nothing_and_with_another_recipe_raises():
    model = bf16_model(ZOO["Mixtral"])
    f8.convert(model, RECIPE, filter="*experts")
    before = str(f8.conversion_report(model))
    f8.convert(model, RECIPE, filter="*experts")
    assert str(f8.conversion_report(model)) == before
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts is already converted"):
        f8.convert(model, f8.recipes.tensorwise(), filter="*experts")


def test_experts_show_their_recipe_and_take_another():
    module = f8.convert(experts("gate"), RECIPE)
    assert "recipe=rowwise" in repr(module)
    module.recipe = f8.recipes.tensorwise()
    assert rows_of(module)[""].recipe == f8.recipes.tensorwise()
    with pytest.raises(ValueError, match="delayed scaling"):
        module.recipe = f8.recipes.delayed()
    with pytest.raises(TypeError, match="it must be a fp8compile"):
        module.recipe = "rowwise"
    with pytest.raises(TypeError, match="script the model after"):
        torch.jit.script(module)


# ---------------------------------------------------------------------------------- which experts, and what is said


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (f8.recipes.delayed(), "experts do not support this recipe: grouped_linear: delayed scaling is not supported"),
    ],
)
def test_experts_that_a_recipe_is_not_for_stay_and_the_report_says_why(recipe, reason):
    rows = rows_of(f8.convert(bf16_model(ZOO["Mixtral"]), recipe))
    kept = rows["model.layers.0.mlp.experts"]
    assert not kept.converted
    assert re.match(reason, kept.reason), kept.reason
    assert rows["model.layers.0.self_attn.q_proj"].converted


def replaced(module):
    module.forward = module.forward


def sparse(module):
    module.down_proj = nn.Parameter(module.down_proj.detach().to_sparse())


def named(module):
    module.recipe = "of a cake"


def parametrized(module):
    nn.utils.parametrize.register_parametrization(module, "down_proj", nn.Identity())


def parametrized_in_all(module):
    for name in ("gate_up_proj", "down_proj"):
        nn.utils.parametrize.register_parametrization(module, name, nn.Identity())


def test_experts_parametrized_after_convert_stay_in_the_report_and_do_not_go_back_without_a_word():
    model = nn.Sequential(f8.convert(experts("gate"), RECIPE))
    sizes = rows_of(model)["0"].matrices
    parametrized_in_all(model[0])
    row = rows_of(model)["0"]
    assert (row.converted, row.experts, row.matrices) == (True, COUNT, sizes)
    with pytest.raises(TypeError, match="its own methods would be lost"):
        f8.revert(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, "its forward was replaced on the instance"),
        (parametrized_in_all, "a weight is parametrized"),
        (sparse, "its down_proj is not a dense tensor"),
        (named, "it already has an attribute recipe"),
        (parametrized, "a weight is parametrized"),
        (nn.Module.double, "its gate_up_proj is torch.float64"),
    ],
)
def test_experts_that_can_not_be_converted_say_why(change, reason):
    model = nn.Sequential(experts("gate"))
    change(model[0])
    with pytest.warns(UserWarning, match=reason):
        f8.convert(model, RECIPE)
    assert rows_of(model)["0"].reason.startswith(reason)


def test_a_row_of_the_report_is_a_module_of_experts():
    module = experts("gate", "bias", "transposed")
    row = rows_of(f8.convert(nn.ModuleDict({"experts": module}), RECIPE))["experts"]
    assert (row.module, row.converted, row.reason, row.recipe) == ("Experts", True, "", RECIPE)
    assert (row.experts, row.matrices) == (COUNT, ((96, 64), (64, 48)))
    assert (row.out_features, row.in_features) == (96, 64)
    report = f8.conversion_report(module, forward=lambda: module(*routing()))
    assert [row.called for row in report.rows] == [True]
    assert str(report).endswith("1 of 1 converted")
    assert "4 x (96 x 64, 64 x 48)" in str(report)
    never = f8.conversion_report(module, forward=lambda: None)
    assert str(never).endswith("0 of 1 converted, 1 more converted but never called")


def test_filters_recipes_and_ends_are_asked_about_experts_as_about_linears():
    def converted(**options):
        model = f8.convert(bf16_model(ZOO["Mixtral"]), **({"recipe": RECIPE} | options))
        return {fqn: row.recipe for fqn, row in rows_of(model).items() if row.converted}

    first, second = (f"model.layers.{layer}.mlp.experts" for layer in range(2))
    other = f8.recipes.tensorwise()
    assert converted(filter=lambda module, fqn: fqn.endswith("experts")) == {first: RECIPE, second: RECIPE}
    assert converted(filter=["*.0.*", "!*_proj"]) == {first: RECIPE}
    assert converted(recipe={"*.1.mlp.*": other}) == {second: other}
    assert converted(recipe=lambda module, fqn: other if fqn == first else None) == {first: other}
    with pytest.warns(UserWarning, match="at one end of the model"):
        assert converted(keep_ends=1) == {}


def test_experts_that_fp8_can_not_help_are_left_by_default():
    model = nn.ModuleDict({"experts": experts("gate"), "linear": nn.Linear(512, 512, dtype=torch.bfloat16)})
    with pretend_target(Target("cuda", (9, 0))):
        f8.convert(model, RECIPE)
    # of 96 x 64 and 64 x 48 the smaller one decides
    assert rows_of(model)["experts"].reason.startswith("small: K N / (K + N) is 27; on a GPU")
    assert rows_of(f8.convert(model, RECIPE))["experts"].converted
    model["experts"].down_proj = nn.Parameter(torch.randn(COUNT, HIDDEN, 8))
    assert rows_of(f8.convert(f8.revert(model), RECIPE))["experts"].reason == "tiny: a dim of 8 is less than 16"


# ---------------------------------------------------------------------------------- torchtitan's way, and one's own


class GroupedExperts(nn.Module):
    """Multiplies by the method that torchtitan's class of this name gives to override; its parameters and forward."""

    def __init__(self, count=COUNT):
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(count, 48, HIDDEN) / 8)
        self.w2_EDF = nn.Parameter(torch.randn(count, HIDDEN, 48) / 8)
        self.w3_EFD = nn.Parameter(torch.randn(count, 48, HIDDEN) / 8)

    def forward(self, x_RD, num_tokens_per_expert_E):
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        h = F.silu(self._grouped_mm(A=x_RD.bfloat16(), B_t=w1, offs=offs))
        h = h * self._grouped_mm(A=x_RD.bfloat16(), B_t=w3, offs=offs)
        return self._grouped_mm(A=h, B_t=w2, offs=offs).type_as(x_RD)

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)


def titan_experts():
    """The class of torchtitan itself, made by its config."""
    moe = pytest.importorskip("torchtitan.models.common.moe")
    config = moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=48, num_experts=COUNT)
    module = config.build()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


class OnOneOfTwoWays(GroupedExperts):
    """Has a loop over its experts beside the method, as older classes of torchtitan have, and a flag between them."""

    def __init__(self, *, grouped):
        super().__init__()
        self.grouped = grouped

    def forward(self, x_RD, num_tokens_per_expert_E):
        if self.grouped:
            return super().forward(x_RD, num_tokens_per_expert_E)
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        return torch.cat([own @ w1.t() @ w2.t() for own, w1, w2 in zip(rows, self.w1_EFD, self.w2_EDF, strict=True)])


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_whose_forward_goes_past_their_method_are_not_reported_as_called(grouped):
    module = f8.convert(OnOneOfTwoWays(grouped=grouped), RECIPE)
    x, sizes = torch.randn(24, HIDDEN), torch.tensor([5, 0, 12, 7])
    before = dict(vars(module))
    report = f8.conversion_report(module, forward=lambda: module(x, sizes))
    assert [row.called for row in report.rows] == [grouped]
    assert ("none [1]" in str(report)) is not grouped
    assert vars(module) == before


@pytest.mark.parametrize("make", [GroupedExperts, titan_experts])
def test_experts_with_torchtitans_method_multiply_by_grouped_linear(make, assert_bits_equal):
    module, sizes = make(), torch.tensor([5, 0, 12, 7])
    x, offsets = torch.randn(24, HIDDEN).requires_grad_(), sizes.cumsum(0, dtype=torch.int32)
    plain, state = type(module), copy.deepcopy(module.state_dict())

    def by_hand(x, _):
        def multiply(rows, weight):
            return f8.grouped_linear(rows.bfloat16(), weight.bfloat16(), offsets, recipe=RECIPE)

        h = F.silu(multiply(x, module.w1_EFD)) * multiply(x, module.w3_EFD)
        return multiply(h, module.w2_EDF).type_as(x)

    def both(call):
        y = call(x, sizes)
        return dict(enumerate((y, *torch.autograd.grad(y.sum(), [x, *module.parameters()]))))

    f8.convert(module, RECIPE)
    expected = both(by_hand)
    assert_same(both(module), expected, assert_bits_equal)
    assert_same(both(torch.compile(module, fullgraph=True, backend="aot_eager")), expected, assert_bits_equal)
    assert rows_of(module)[""].matrices == ((48, 64), (64, 48), (48, 64))
    assert_same(module.state_dict(), state, assert_bits_equal)
    assert type(f8.revert(module)) is plain


class Dispatch(nn.Module):
    """Experts below a module of their own, the router beside it, as torchtitan has them."""

    def __init__(self):
        super().__init__()
        self.routed_experts = nn.ModuleDict({"inner_experts": GroupedExperts(32)})
        self.router = nn.ModuleDict({"gate": nn.Linear(HIDDEN, 32)})
        self.shared_experts = nn.ModuleDict({"up": nn.Linear(HIDDEN, 32), "down": nn.Linear(32, HIDDEN)})
        self.attention = nn.Linear(HIDDEN, HIDDEN)


@pytest.mark.parametrize("filter", [None, "*"])
def test_a_router_that_is_a_linear_stays_and_a_shared_expert_as_narrow_does_not(filter):
    model = f8.convert(nn.Sequential(Dispatch(), nn.Linear(HIDDEN, 32)), RECIPE, filter=filter)
    left = {fqn: row.reason for fqn, row in rows_of(model).items() if not row.converted}
    assert left == {"0.router.gate": ROUTER}


class Wrapped(nn.Module):
    """A block whose experts lie in several wrappers, its attention as narrow as a router."""

    def __init__(self, *, local, counted, wrappers):
        super().__init__()
        experts = GroupedExperts(local)
        if counted == "experts":
            experts.num_experts = 32
        for _ in range(wrappers):
            experts = nn.ModuleDict({"wrapped": experts, "activation": nn.SiLU()})
        router = nn.ModuleDict({"gate": nn.Linear(HIDDEN, 32)})
        if counted == "router":
            router.num_experts = 32
        self.moe = nn.ModuleDict({"router": router, "experts": experts})
        self.attention = nn.Linear(HIDDEN, 32)


@pytest.mark.parametrize(("local", "counted"), [(32, None), (8, "experts"), (8, "router")])
@pytest.mark.parametrize("wrappers", [0, 1, 3])
def test_a_router_stands_beside_wrapped_experts_and_scores_those_of_other_ranks_too(local, counted, wrappers):
    block = Wrapped(local=local, counted=counted, wrappers=wrappers)
    assert routers(nn.ModuleList([block])) == {block.moe["router"], block.moe["router"]["gate"]}


def test_linears_of_a_model_without_experts_are_no_routers():
    assert routers(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))) == set()


def test_a_module_that_calls_grouped_mm_of_this_library_needs_no_convert(assert_bits_equal):
    x, weight, offsets = torch.randn(24, HIDDEN), torch.randn(COUNT, HIDDEN, 48), torch.tensor([3, 3, 20, 24]).int()
    plain = torch.nn.functional.grouped_mm(x, weight, offs=offsets)
    actual = f8.grouped_mm(x, weight, offs=offsets, recipe=RECIPE)
    assert actual.shape == plain.shape
    assert_bits_equal(actual, f8.grouped_linear(x, weight.transpose(1, 2), offsets, recipe=RECIPE))
