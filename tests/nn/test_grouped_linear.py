"""grouped_linear: bit for bit fp8compile.linear on each group's rows and matrix, whatever the groups."""

from __future__ import annotations

import copy
import re

import fsdp_models as models
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fp8compile as f8

RECIPES = (
    "tensorwise",
    "rowwise",
    "rowwise_bf16_wgrad",
    "blockwise",
    "blockwise_bf16_wgrad",
    "mxfp8",
    "nvfp4",
    models.SQUARES,
)
ROWS, K, N = 200, 40, 72
ENDS = {
    "even": (50, 100, 150, 200),
    "skewed, an empty one, rows behind": (0, 140, 141, 160),
    "one row each": (1, 2, 3, 4),
    "none has rows": (0, 0, 0, 0),
    "one has all": (0, 0, 200, 200),
}


def tensors(ends, *, dtype=torch.bfloat16, bias=True, rows=ROWS, k=K, n=N):
    """x, weight, offsets, bias and the output's gradient; whatever is behind the last group is NaN."""
    generator = torch.Generator().manual_seed(1)
    x, weight, b, grad = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, k), (len(ends), n, k), (len(ends), n), (rows, n))
    )
    x[ends[-1] :] = grad[ends[-1] :] = torch.nan
    leaves = [x.requires_grad_(), weight.requires_grad_(), *([b.requires_grad_()] if bias else [])]
    return leaves, torch.tensor(ends, dtype=torch.int32), grad


def group_by_group(x, weight, offsets, bias, recipe):
    parts, start = [], 0
    for group, end in enumerate(offsets.tolist()):
        own = None if bias is None else bias[group]
        parts.append(f8.linear(x[start:end], weight[group], own, recipe=recipe))
        start = end
    return torch.cat([*parts, x.new_zeros((x.shape[0] - start, weight.shape[1]))])


def results(function, leaves, offsets, grad, recipe):
    x, weight, *bias = leaves
    y = function(x, weight, offsets, bias[0] if bias else None, recipe)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def ours(x, weight, offsets, bias, recipe):
    return f8.grouped_linear(x, weight, offsets, bias, recipe=recipe)


def assert_same(found, expected):
    for name, one, other in zip(("y", "dx", "dw", "dbias"), found, expected, strict=False):
        assert torch.equal(one, other), f"{name}: {int((one != other).sum())} of {one.numel()} elements differ"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_each_group_is_a_linear_layer(recipe, ends):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        case = tensors(ends, dtype=dtype, bias=dtype != torch.float16)
        chosen = models.recipe_of(recipe)
        assert_same(results(ours, *case, chosen), results(group_by_group, *case, chosen))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_all_groups_with_the_bits_of_eager_mode(recipe, backend):
    torch._dynamo.reset()
    chosen = models.recipe_of(recipe)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ends in ENDS.values():
            case = tensors(ends)
            assert_same(results(compiled, *case, chosen), results(ours, *case, chosen))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("trained", [0, 1], ids=["x", "weight"])
def test_a_gradient_alone_is_that_beside_the_other(recipe, backend, trained):
    torch._dynamo.reset()
    chosen = models.recipe_of(recipe)
    (x, weight), offsets, grad = tensors((50, 100, 150, 180), bias=False)
    y, *gradients = results(ours, (x, weight), offsets, grad, chosen)
    leaves = [x.detach(), weight.detach()]
    leaves[trained].requires_grad_()
    layer = ours if backend is None else torch.compile(ours, fullgraph=True, backend=backend)
    alone = layer(*leaves, offsets, None, chosen)
    assert torch.equal(alone, y)
    assert torch.equal(torch.autograd.grad(alone, leaves[trained], grad)[0], gradients[trained])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("k", "n"), [(128, 256), (129, 131), (1, 3), (48, 200)])
def test_any_sizes_of_features(recipe, k, n):
    case, chosen = tensors((3, 60, 60, 90), k=k, n=n, rows=90), models.recipe_of(recipe)
    assert_same(results(ours, *case, chosen), results(group_by_group, *case, chosen))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_nan_stays_in_its_group(recipe):
    leaves, offsets, grad = tensors((50, 100, 150, 180))
    with torch.no_grad():
        leaves[0][60, 3] = torch.nan
        grad[120, 5] = torch.inf
    y, dx, dw, _ = results(ours, leaves, offsets, grad, models.recipe_of(recipe))
    others = [*range(50), *range(150, 200)]
    assert y[50:100].isnan().any()
    assert dw[1].isnan().any()
    assert not dw[2].isfinite().all()
    assert not any(each.isnan().any() for each in (y[others], dx[others], dw[0], dw[3]))


def test_what_needs_no_gradient_gets_none():
    recipe = f8.recipes.rowwise()
    (x, weight, _), offsets, grad = tensors(ENDS["even"])
    y = f8.grouped_linear(x.detach(), weight, offsets, recipe=recipe)
    (dw,) = torch.autograd.grad(y, [weight], grad)
    y = f8.grouped_linear(x, weight.detach(), offsets, recipe=recipe)
    (dx,) = torch.autograd.grad(y, [x], grad)
    _, *both = results(ours, [x, weight], offsets, grad, recipe)
    assert_same([y.detach(), dx, dw], [y.detach(), *both])


def test_the_drop_in_for_torch_grouped_mm():
    (x, weight, _), offsets, _ = tensors(ENDS["even"], k=48)
    recipe = f8.recipes.rowwise()
    y = f8.grouped_mm(x, weight.transpose(-2, -1), offs=offsets, recipe=recipe)
    assert torch.equal(y, f8.grouped_linear(x, weight, offsets, recipe=recipe))
    expected = grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    assert (y - expected).abs().max() < 0.1 * expected.abs().max()  # e4m3 has 3 bits of mantissa: 1/16 a factor
    with pytest.raises(
        ValueError, match=r"`out_dtype` is torch.float32; it must be the dtype of mat_a, torch.bfloat16"
    ):
        f8.grouped_mm(x, weight.transpose(-2, -1), offs=offsets, out_dtype=torch.float32, recipe=recipe)
    with pytest.raises(ValueError, match="`mat_b` has shape"):
        f8.grouped_mm(x.t(), x, offs=offsets, recipe=recipe)
    with pytest.raises(TypeError, match="grouped_mm: `mat_b` is a int; it must be a tensor"):
        f8.grouped_mm(x, 5, offs=offsets, recipe=recipe)
    with pytest.raises(ValueError, match=r"`weight` has shape \(.*, 0, 48\).* one row"):
        f8.grouped_mm(x, weight.transpose(-2, -1)[:, :, :0], offs=offsets, recipe=recipe)


def test_autocast_casts_as_for_linear():
    leaves, offsets, grad = tensors(ENDS["even"], dtype=torch.float32)
    recipe = f8.recipes.rowwise()
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(leaves[0], leaves[1], offsets, leaves[2], recipe)
    assert y.dtype == torch.bfloat16
    low = [each.detach().bfloat16() for each in leaves]
    assert torch.equal(y, ours(low[0], low[1], offsets, low[2], recipe))
    assert all(each.dtype == torch.float32 for each in torch.autograd.grad(y, leaves, grad.bfloat16()))


def test_gradients_by_torch_func_and_of_checkpointed_regions():
    leaves, offsets, grad = tensors(ENDS["even"])
    recipe = f8.recipes.rowwise()
    expected = results(ours, leaves, offsets, grad, recipe)
    values = [each.detach() for each in leaves]
    y, pull = torch.func.vjp(lambda x, weight, bias: ours(x, weight, offsets, bias, recipe), *values)
    assert_same([y, *pull(grad)], expected)
    repeated = lambda x, w, o, b, r: checkpoint(ours, x, w, o, b, r, use_reentrant=False)  # noqa: E731
    assert_same(results(repeated, leaves, offsets, grad, recipe), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap runs our ops in a loop
def test_each_sample_may_have_groups_of_its_own_under_vmap():
    (x, weight), _, grad = tensors(ENDS["even"], bias=False)
    recipe, offsets = f8.recipes.rowwise(), torch.tensor([ENDS["even"], ENDS["one has all"]], dtype=torch.int32)

    def loss(weight, ends):
        return (f8.grouped_linear(x.detach(), weight, ends, recipe=recipe) * grad).sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight.detach(), offsets)
    for found, ends in zip(together, offsets, strict=True):
        assert torch.equal(found, torch.func.grad(loss)(weight.detach(), ends))
    with pytest.raises(ValueError, match="never negative or decreasing"):
        torch.func.vmap(loss, in_dims=(None, 0))(weight.detach(), offsets.flip(1))


def test_tensors_without_data_are_taken():
    leaves, offsets, _ = tensors(ENDS["even"])
    with FakeTensorMode():
        x, weight, bias, ends = (torch.empty(each.shape, dtype=each.dtype) for each in (*leaves, offsets))
        y = f8.grouped_linear(x, weight, ends, bias, recipe=f8.recipes.rowwise())
    assert (y.shape, y.dtype) == ((ROWS, N), torch.bfloat16)


def test_flops_are_those_of_all_rows():
    leaves, offsets, grad = tensors(ENDS["even"], bias=False)
    for recipe in RECIPES:
        with FlopCounterMode(display=False) as counted:
            results(ours, leaves, offsets, grad, models.recipe_of(recipe))
        assert counted.get_total_flops() == 3 * 2 * ROWS * K * N


def test_a_module_of_ones_own_trains_and_copies():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, N, K).bfloat16())

        def forward(self, x, offsets):
            return f8.grouped_linear(x, self.weight, offsets, recipe=f8.recipes.blockwise())

    own = Own()
    (x, _, _), offsets, _ = tensors(ENDS["even"])
    optimizer = torch.optim.SGD(own.parameters(), 0.1)
    losses = []
    for _ in range(5):
        loss = own(x.detach(), offsets).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(copy.deepcopy(own)(x, offsets), own(x, offsets))


# ---------------------------------------------------------------------------------- what raises

GOOD = {"x": (ROWS, K), "weight": (4, N, K), "offsets": (50, 100, 150, 200), "bias": (4, N)}


def called(recipe=None, *, dtype=torch.bfloat16, check_in_graph=False, **given):
    sizes = {**GOOD, **given}
    made = {name: torch.ones(sizes[name], dtype=dtype) for name in ("x", "weight", "bias")}
    offsets = torch.tensor(sizes["offsets"], dtype=torch.int32)
    return f8.grouped_linear(
        made["x"], made["weight"], offsets, made["bias"], recipe=recipe or f8.recipes.rowwise(),
        check_in_graph=check_in_graph,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": (2, 3, K)}, "x must be (rows, 40)"),
        ({"x": (ROWS, K + 1)}, "x must be (rows, 40)"),
        ({"weight": (N, K)}, "must be (groups, out_features, in_features)"),
        ({"weight": (0, N, K), "offsets": (), "bias": (0, N)}, "at least one group"),
        ({"offsets": (50, 100, 150)}, "torch.int32 of shape (4,)"),
        ({"bias": (N,)}, "bias must be (groups, out_features), (4, 72)"),
        ({"offsets": (50, 40, 150, 200)}, "never negative or decreasing"),
        ({"offsets": (-1, 40, 150, 200)}, "never negative or decreasing"),
        ({"offsets": (50, 100, 150, 201)}, "x has 200 rows"),
    ],
)
def test_wrong_sizes_raise_and_say_what_is_right(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        called(**given)


SQUARE = f8.CurrentScaling(block=(128, 128))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (f8.recipes.delayed(), "delayed scaling"),
        (f8.recipes.rowwise(grad_rounding="stochastic"), "uses stochastic rounding"),
        (f8.Recipe(input=SQUARE, weight=SQUARE), "input has block (128, 128)"),
    ],
)
def test_recipes_that_mix_groups_raise(recipe, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        called(recipe)


def test_wrong_types_raise():
    with pytest.raises(TypeError, match="`recipe` is 'rowwise'"):
        called("rowwise")
    with pytest.raises(TypeError, match="float64"):
        called(dtype=torch.float64)
    x, weight = torch.ones(ROWS, K), torch.ones(4, N, K, dtype=torch.bfloat16)
    offsets = torch.tensor(GOOD["offsets"], dtype=torch.int32)
    with pytest.raises(TypeError, match="Cast one of them to the dtype of the other"):
        f8.grouped_linear(x, weight, offsets, recipe=f8.recipes.rowwise())
    with pytest.raises(ValueError, match=r"torch\.int64"):
        f8.grouped_linear(x.bfloat16(), weight, offsets.long(), recipe=f8.recipes.rowwise())
    codes = f8.quantize(torch.ones(N, K).bfloat16(), f8.CurrentScaling())
    with pytest.raises(TypeError, match="QuantizedTensor"):
        f8.grouped_linear(codes, weight, offsets, recipe=f8.recipes.rowwise())


def test_compiled_code_looks_at_offsets_where_it_is_asked_to():
    torch._dynamo.reset()
    wrong = (50, 40, 150, 200)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, weight, offsets, check):
        return f8.grouped_linear(x, weight, offsets, recipe=f8.recipes.rowwise(), check_in_graph=check)

    (x, weight, _), _, _ = tensors(ENDS["even"])
    right = torch.tensor(ENDS["even"], dtype=torch.int32)
    assert torch.equal(step(x, weight, right, True), step(x, weight, right, False))  # noqa: FBT003
    with pytest.raises(ValueError, match="never negative or decreasing"):
        step(x, weight, torch.tensor(wrong, dtype=torch.int32), True)  # noqa: FBT003
