"""explain follows weights: what multiplies a form of one outside FP8 is called out, what only reads it is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.testing.explain import explain

ROWWISE = "e4m3 x e4m3 rowwise"
RECIPE = f8.recipes.rowwise()


def bf16(*size):
    return torch.randn(*size, dtype=torch.bfloat16)


def linear():
    return nn.Linear(32, 32, dtype=torch.bfloat16)


class Model(nn.Module):
    """Two linears, parameters and a buffer, with any forward."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.scale = nn.Parameter(bf16(32, 1))
        self.down, self.up = nn.Parameter(bf16(4, 32)), nn.Parameter(bf16(32, 4))
        self.turn = nn.Parameter(bf16(32, 32))
        self.queries = nn.Parameter(bf16(8, 32))
        self.register_buffer("average", bf16(32, 32))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def explained(forward, x=None, prepare=None):
    """The explanation of a Model both of whose linears are converted, each by itself: convert(model) would leave
    a layer alone whose weight the model's forward reads."""
    model = Model(forward)
    model.a, model.b = f8.convert(model.a, RECIPE), f8.convert(model.b, RECIPE)
    if prepare is not None:
        prepare(model)
    return explain(model, (bf16(16, 32) if x is None else x,), gpu=None)


@torch.library.custom_op("explained::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


product.register_fake(lambda x, weight: x @ weight.t())


@torch.compiler.nested_compile_region
def region(layer, x):
    return layer(x).relu()


@torch.compiler.nested_compile_region
def multiplied(weight, x):
    return (x @ weight.t()).relu()


@torch.compiler.nested_compile_region
def regularized(layer, x):
    return layer(x) + (layer.weight @ layer.weight.t()).square().sum()


class Backward(torch.autograd.Function):
    """The forward in FP8, the backward not."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return f8.linear(x, weight, recipe=RECIPE)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@torch.compiler.disable
def aside(model, x):
    return F.linear(x, model.a.weight)


class Loss:
    def __init__(self, loss):
        self.loss = loss


def branches(model, x):
    return torch.cond(
        x.sum() > 0, lambda t: F.linear(t, model.b.weight), lambda t: model.a(t), (model.a(x),)
    )  # fmt: skip


def average(model, x):
    model.average.lerp_(model.a.weight.detach(), 0.1)
    return model.a(x)


def gram(model, x):
    weight = model.a.weight
    return model.a(x).float().sum() + (weight @ weight.t() - torch.eye(32, dtype=weight.dtype)).square().sum()


# ---------------------------------------------------------------------------------- outside FP8


@pytest.mark.parametrize(
    ("forward", "layers"),
    [
        pytest.param(lambda m, x: F.linear(x, m.a.weight * m.scale), "a", id="scaled"),
        pytest.param(lambda m, x: F.linear(x, m.a.weight + m.up @ m.down), "a", id="merged"),
        pytest.param(lambda m, x: sum(F.linear(x, part) for part in m.a.weight.chunk(2)), "a", id="in parts"),
        pytest.param(lambda m, x: F.linear(x, torch.cat([m.a.weight, m.b.weight])), "ab", id="joined"),
        pytest.param(lambda m, x: F.linear(m.a(x), m.a.weight * 1.0), "a", id="used again"),
        pytest.param(lambda m, x: F.linear(x, m.a.weight * x.mean()), "a", id="scaled by data"),
        pytest.param(lambda m, x: x @ F.linear(m.queries, m.a.weight).t(), "a", id="by a parameter"),
        pytest.param(branches, "b", id="in a branch"),
        pytest.param(lambda m, x: multiplied(m.a.weight, multiplied(m.b.weight, x)), "ab", id="in a region"),
        pytest.param(
            lambda m, x: checkpoint(lambda t: (t @ m.a.weight.t()).relu(), m.b(x), use_reentrant=False),
            "a",
            id="computed again",
        ),
    ],
)
def test_a_weight_multiplied_in_another_form_is_called_out(forward, layers):
    found = explained(forward)
    assert found.verdict.startswith("NO: ")
    assert [line.partition(":")[0] for line in found.fell_back] == list(layers)
    for line in found.fell_back:
        assert "output runs in" in line
        assert "aten::mm at " in line
        assert "test_explain_weights.py:" in line


@pytest.mark.parametrize("weight", [lambda m: m.a.weight, lambda m: m.a.weight * m.scale])
def test_a_backward_of_its_own_is_called_out(weight):
    found = explained(lambda m, x: Backward.apply(x, weight(m)), x=bf16(16, 32).requires_grad_())
    assert [gemm.runs for gemm in found.layers[0].gemms] == [ROWWISE, "bfloat16", "bfloat16"]
    assert found.verdict.startswith("NO: 1 converted layer fell back")


def test_a_matrix_times_a_vector_is_a_product():
    found = explained(lambda m, x: m.a.weight @ x, x=bf16(32))
    assert "aten::mv at " in found.fell_back[0]


def test_a_frozen_weight_that_is_merged_is_called_out():
    found = explained(
        lambda m, x: F.linear(x, m.a.weight + m.up @ m.down), prepare=lambda m: m.a.requires_grad_(requires_grad=False)
    )
    assert [str(gemm) for gemm in found.layers[0].gemms] == [
        f"FELL BACK to bfloat16, the recipe specifies {ROWWISE}",
        "not in the graph: its input needs no gradient",
        f"FELL BACK to bfloat16, the recipe specifies {ROWWISE}",
    ]


@pytest.mark.parametrize(
    ("forward", "op"),
    [
        (lambda m, x: product(m.a(x), m.a.weight), "explained::product"),
        (lambda m, x: F.conv1d(m.a(x).t(), m.a.weight[:, :, None]), "aten::convolution"),
        (lambda m, x: m.a((x[:, None, :] * m.a.weight).sum(-1)), "aten::mul"),
        (lambda m, x: m.a(F.linear(x, m.a.weight[x[0].argsort()])), "aten::index"),
    ],
)
def test_what_takes_a_weight_and_cannot_be_looked_into_is_a_doubt(forward, op):
    with torch.no_grad():
        found = explained(forward)
    assert found.verdict.startswith("NOT PROVEN: 1 converted layer without proof")
    (line,) = found.unproven
    assert line.startswith(f"a: output: its weight is combined with data in {op} at ")
    assert "test_explain_weights.py:" in line


# ---------------------------------------------------------------------------------- in FP8


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda m, x: m.a(x).float().sum() + m.a.weight.square().sum(), id="weight decay"),
        pytest.param(lambda m, x: m.a(x) * m.a.weight.norm(), id="norm"),
        pytest.param(lambda m, x: m.scale.view(-1) / m.a.weight.norm(dim=1) * m.a(x), id="norm of rows"),
        pytest.param(gram, id="product with itself"),
        pytest.param(lambda m, x: regularized(m.a, regularized(m.b, x)), id="product with itself in a region"),
        pytest.param(average, id="moving average"),
        pytest.param(lambda m, x: f8.linear(x, m.a.weight * m.scale, recipe=RECIPE), id="scaled"),
        pytest.param(lambda m, x: f8.linear(x, m.turn @ m.a.weight, recipe=RECIPE), id="turned"),
        pytest.param(lambda m, x: checkpoint(lambda t: m.a(t).relu(), x, use_reentrant=False), id="computed again"),
    ],
)
def test_what_only_reads_a_weight_is_no_product_of_its_layer(forward):
    for tokens in (16, 1):  # of one token there are as many data as rows of a weight
        layer = explained(forward, x=bf16(tokens, 32).requires_grad_()).layers[0]
        assert [str(gemm) for gemm in layer.gemms] == [ROWWISE] * 3


def test_a_layer_that_is_an_embedding_too():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(64, 32, dtype=torch.bfloat16)
            self.middle, self.head = linear(), nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.middle(self.embedding(tokens)))

    found = explain(f8.convert(Tied(), RECIPE), (torch.arange(16),), gpu=None)
    assert found.verdict.startswith("YES, as the recipes specify: 6 of 6 GEMMs")


def test_a_layer_whose_input_is_a_parameter():
    plain = explain(Model(lambda m, x: x @ m.a(m.queries).t()), (bf16(16, 32),), gpu=None)
    assert [gemm.runs for gemm in plain.layers[0].gemms] == ["bfloat16"] * 3
    found = explained(lambda m, x: x @ m.a(m.queries).t())
    assert [gemm.runs for gemm in found.layers[0].gemms] == [ROWWISE] * 3
    model = f8.convert(Model(lambda m, x: x @ m.a(m.queries).t()), RECIPE, filter="*")
    model(bf16(16, 32))  # what this forward has shown of `queries` makes it no layer, which would own a's gradient
    found = explain(model, (bf16(16, 32),), gpu=None)
    assert [(layer.fqn, [gemm.runs for gemm in layer.gemms]) for layer in found.layers[:1]] == [("a", [ROWWISE] * 3)]


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = region(layer, x)
        return x


def test_layers_of_a_repeated_region_are_each_called():
    found = explain(f8.convert(Three(), RECIPE), (bf16(16, 32).requires_grad_(),), gpu=None)
    assert found.verdict.startswith("YES, as the recipes specify: 9 of 9 GEMMs")
    assert [[len(gemm.ops) for gemm in layer.gemms] for layer in found.layers] == [[1, 1, 1]] * 3


def test_gradients_of_branches_are_found():
    found = explained(lambda m, x: torch.cond(x.sum() > 0, lambda t: m.a(t), lambda t: m.b(t), (m.a(x),)))
    assert [len(gemm.ops) for layer in found.layers for gemm in layer.gemms] == [2, 1, 2, 1, 1, 1]
    assert found.verdict.startswith("YES")


class Scores(nn.Module):
    def forward(self, q, k):
        return q @ k.t()


def test_a_module_without_a_weight_is_not_taken_for_a_layer_of_its_name():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.q, self.k = Scores(), linear(), linear()

        def forward(self, x):
            return self.head(self.q(x), self.k(x))

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = Attention(), linear()

        def forward(self, x):
            return self.head(self.attention(x) @ x)

    found = explain(f8.convert(Whole(), RECIPE), (bf16(16, 32),), gpu=None)
    assert found.verdict.startswith("YES, as the recipes specify: 7 of 7 GEMMs")


def test_a_weight_that_is_computed_with_products_of_its_own():
    model = f8.convert(Model(lambda m, x: m.a(x)), RECIPE)
    nn.utils.parametrizations.spectral_norm(model.a)
    found = explain(model, (bf16(16, 32).requires_grad_(),), gpu=None)
    assert [str(gemm) for gemm in found.layers[0].gemms] == [ROWWISE] * 3


def test_parameters_beside_a_layers_weight_are_not_the_layers():
    class Adapted(f8.Linear):
        def __init__(self):
            super().__init__(32, 32, recipe=RECIPE, dtype=torch.bfloat16)
            self.down, self.up = nn.Parameter(bf16(32, 4)), nn.Parameter(bf16(4, 32))

        def forward(self, x):
            return super().forward(x) + x @ self.down @ self.up

    found = explain(nn.Sequential(Adapted()), (bf16(16, 32).requires_grad_(),), gpu=None)
    assert found.verdict.startswith("YES, as the recipes specify: 3 of 9 GEMMs")
    assert [[gemm.runs for gemm in layer.gemms] for layer in found.layers] == [[ROWWISE] * 3, *[["bfloat16"] * 3] * 2]


# ---------------------------------------------------------------------------------- the verdict


def test_what_runs_at_a_graph_break_is_a_doubt():
    found = explained(lambda m, x: aside(m, m.b(m.a(x))))
    assert found.verdict.startswith("NOT PROVEN: 1 graph break: what runs outside of the graphs is unknown")
    assert not found.runs_in_fp8


def test_layers_that_are_never_called_are_named():
    found = explained(lambda m, x: m.a(x))
    assert found.verdict.endswith("2 of 2 layers are converted; never called: b")


def test_without_a_gemm_in_fp8_the_answer_is_no():
    unused = explained(lambda m, x: x * m.scale.view(-1))
    assert unused.verdict == "NO: no converted layer is called; 0 of 0 GEMMs of linear layers run in FP8"
    nothing = explain(f8.convert(nn.Sequential(linear()), f8.Recipe()), (bf16(16, 32),), gpu=None)
    assert nothing.verdict == "NO: no recipe uses it; 0 of 2 GEMMs of linear layers run in FP8"
    assert not unused.runs_in_fp8
    assert not nothing.runs_in_fp8


def test_the_backward_of_what_is_returned_in_an_object_is_explained():
    found = explained(lambda m, x: Loss(m.a(x)))
    assert found.verdict.startswith("YES, as the recipes specify: 2 of 2 GEMMs")
    assert found.graphs.graphs[0].backward is not None


def test_without_gradients_graphs_and_layers_agree():
    with torch.no_grad():
        found = explained(lambda m, x: m.a(x))
    assert found.graphs.graphs[0].backward is None
    assert [str(gemm) for gemm in found.layers[0].gemms[1:]] == ["not in the graph: there is no backward"] * 2


def test_explain_leaves_a_model_as_it_was():
    def forward(model, x):
        return model.norm(model.a(x).float())

    model = f8.convert(Model(forward), RECIPE)
    model.norm = nn.BatchNorm1d(32)
    nn.utils.parametrizations.spectral_norm(model.b)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explain(model, (bf16(16, 32),))
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == []


def test_a_parametrized_weight_is_known_by_its_parameter():
    from fp8compile.testing.explain.layers import layer_weights

    model = f8.convert(Model(lambda m, x: m.a(x)), RECIPE)
    nn.utils.parametrize.register_parametrization(model.a, "weight", nn.Tanh())
    original = model.a.parametrizations["weight"].original
    assert layer_weights(model) == {id(original): ["a"], id(model.b.weight): ["b"]}


def test_a_compiled_model_is_refused_by_the_name_of_what_was_called():
    for compiled in (torch.compile(linear()), linear()):
        if isinstance(compiled, nn.Linear):
            compiled.compile()
        with pytest.raises(TypeError, match=r"explain: the model is already compiled. Pass the model before"):
            explain(compiled, (bf16(16, 32),))
