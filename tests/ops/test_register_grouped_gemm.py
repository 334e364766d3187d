"""A grouped GEMM of another package: who is asked when, what a registration checks, and that layers run by it."""

from __future__ import annotations

import pytest
import torch

import fp8compile as f8
from fp8compile.library import register_grouped_gemm
from fp8compile.ops.gemms.grouped.interface import REGISTERED_GROUPED
from fp8compile.ops.gemms.grouped.table import BEFORE_OURS, _selected, selected_grouped_gemm
from fp8compile.ops.groups.padding import group_of_rows, padded_length, row_of_columns
from fp8compile.quantizers import GemmConfig
from fp8compile.testing.explain.recipe_support import recipe_support

ROW, COLUMN = f8.CurrentScaling(block=(1, -1)), f8.CurrentScaling(block=(-1, 1))
CALLS = []


def takes(a, b):
    return (a.block, b.block) == ((1, -1), (-1, 1))


def lacks(problem):
    return None if problem.target.type == "cpu" else "needs a CPU."


def rows(a, b, offsets, out_dtype, config):
    """Without reading a group's size: every row by every matrix, and those of its own group kept."""
    CALLS.append("rows")
    left = a.quantizer.element_format().decode(a.codes).double() * a.scale.double()
    right = b.quantizer.element_format().decode(b.codes).double() * b.scale.double()
    group = group_of_rows(offsets, a.codes.shape[0])
    products = torch.einsum("rk,enk->ern", left, right)
    own = group == torch.arange(offsets.shape[0]).unsqueeze(1)
    return torch.where(own.unsqueeze(-1), products, 0).sum(0).to(out_dtype)


def outer(a, b, offsets, out_dtype, config):
    CALLS.append("outer")
    columns = a.codes.shape[1]
    row, group = row_of_columns(offsets, 16, columns)
    own = ((row >= 0) & (group == torch.arange(offsets.shape[0]).unsqueeze(1))).unsqueeze(1)
    left = a.quantizer.element_format().decode(a.codes).double() * own * a.scale.double().unsqueeze(-1)
    right = b.quantizer.element_format().decode(b.codes).double() * own * b.scale.double().unsqueeze(-1)
    return (left @ right.transpose(1, 2)).to(out_dtype)


PARTS = {"takes": takes, "lacks": lacks, "rows": rows, "outer": outer, "detail": "in two words"}


@pytest.fixture
def register():
    """`register_grouped_gemm` with parts of the good GEMM above replaced; forgets what was registered afterwards."""
    CALLS.clear()
    yield lambda name, **parts: register_grouped_gemm(name, **PARTS | parts)
    REGISTERED_GROUPED.clear()
    BEFORE_OURS.clear()
    _selected.cache_clear()


def selected(a=ROW, b=COLUMN, device="cpu"):
    return selected_grouped_gemm(a, b, torch.device(device), torch.bfloat16, GemmConfig()).name


def test_it_is_asked_before_the_loop_over_groups_and_ours_before_it(register, monkeypatch):
    assert selected() == "one_by_one"
    register("mine::own")
    assert selected() == "mine::own"
    assert [each.kind for each in recipe_support(f8.recipes.rowwise(), torch.device("cpu"), grouped=True)] == [
        "mine::own"
    ] * 3
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    register("mine::anywhere", lacks=lambda problem: None if problem.target.type == "cuda" else "needs a GPU.")
    assert selected(device="cuda") == "rowwise_triton"
    register("mine::first", lacks=lambda problem: None if problem.target.type == "cuda" else "no.", before_ours=True)
    assert selected(device="cuda") == "mine::first"


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_layer_runs_by_it(register, backend):
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(size, generator=generator).bfloat16() for size in ((60, 32), (3, 48, 32), (60, 48)))
    offsets = torch.tensor([20, 20, 50], dtype=torch.int32)

    def step(function):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(*leaves, offsets)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    def layer(x, weight, offsets):
        return f8.grouped_linear(x, weight, offsets, recipe=f8.recipes.rowwise())

    expected = step(layer)
    register("mine::own")
    found = step(layer if backend == "eager" else torch.compile(layer, backend=backend, fullgraph=True))
    assert {"rows", "outer"} == set(CALLS)
    # the loop over groups multiplies by the CPU's own kernel, in float32; these sums are float64: two roundings apart
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 2**-7 * other.abs().max()
    assert all(each[50:].eq(0).all() for each in found[:2])


def test_two_for_the_same_operands_raise(register):
    register("mine::own")
    register("other::own")
    with pytest.raises(RuntimeError, match="several GEMMs, mine::own and other::own"):
        selected()


def test_what_is_registered_is_checked(register):
    with pytest.raises(
        ValueError, match="register_grouped_gemm: the name of a GEMM must have the form 'package::name', got 'own'"
    ):
        register("own")
    register("mine::own")
    with pytest.raises(ValueError, match="already registered"):
        register("mine::own")
    with pytest.raises(TypeError, match="register_grouped_gemm: mine::a: `outer` is None; it must be a function"):
        register("mine::a", outer=None)
    with pytest.raises(
        TypeError,
        match=r"`rows` has the signature .*It is called as rows\(a, b, offsets, "
        r"out_dtype, config\)",
    ):
        register("mine::b", rows=lambda a, b: a)
    with pytest.raises(TypeError, match="`detail` is ''"):
        register("mine::c", detail="")


def test_a_result_of_another_shape_raises(register):
    register("mine::own", rows=lambda a, b, offsets, out_dtype, config: a.codes)
    x, weight = torch.randn(32, 16).bfloat16(), torch.randn(2, 24, 16).bfloat16()
    offsets = torch.tensor([10, padded_length(20, 1, 1)], dtype=torch.int32)
    with pytest.raises(
        TypeError, match=r"own: the registered function returned uint8 of shape \(32, 16\); it must return "
    ):
        f8.grouped_linear(x, weight, offsets, recipe=f8.recipes.rowwise())
