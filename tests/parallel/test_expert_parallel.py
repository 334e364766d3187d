"""Rows that travel to the ranks of their experts: the bits of one process, whatever the routing, and what is sent.

One process runs the same ops on a group of itself alone, where rows that would travel as codes are rounded as well.
Outputs and gradients of rows also have the bits of experts without any dispatch.
"""

from __future__ import annotations

import itertools
import os
import signal
import time

import fsdp_models as models
import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import GROUPS, shared_ranks
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fp8compile as f8
from fp8compile import parallel
from fp8compile.nn.layer.expert_routes import Routes
from fp8compile.testing.bits import difference

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "blockwise_bf16_wgrad", "mxfp8")
GROUP_NAMES = {2: "pair", 3: "three", 4: "all"}
FEATURES, HIDDEN = 64, 96
# tokens of each rank, from uneven to none, for up to four ranks
TOKENS = {"even": (16, 16, 16, 16), "uneven": (40, 3, 0, 17), "one token": (0, 1, 0, 0), "none": (0, 0, 0, 0)}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- one process


def chosen(tokens, experts, routing):
    """Which expert each token goes to."""
    generator = torch.Generator().manual_seed(tokens + experts)
    if routing == "one expert":
        return torch.full((tokens,), experts - 1)
    every = torch.randint(experts, (tokens,), generator=generator)
    return every // 2 * 2 if routing == "empty experts" else every


def tensors(tokens, experts, seed=0):
    """Rows of all tokens, the two stacks of matrices, and the gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, FEATURES), (experts, HIDDEN, FEATURES), (experts, FEATURES, HIDDEN), (tokens, FEATURES)
    spread = [torch.exp2(torch.randint(-4, 4, (*shape[:-1], 1), generator=generator)) for shape in shapes]
    return [
        (torch.randn(shape, generator=generator) * by).bfloat16() for shape, by in zip(shapes, spread, strict=True)
    ]


def on_one_rank(counts, capacity):
    """Routes of a group that is one rank alone."""
    sent = counts.view(1, -1)
    sizes = torch.stack((sent.sum(1), sent.sum(1)))
    ends = counts.cumsum(0, dtype=torch.int32)
    return Routes(
        offsets=ends,
        overflow=sent.new_zeros(()),
        sent=sent,
        received=sent,
        sizes=None if capacity else sizes,
        capacity=capacity and max(capacity, int(counts.sum())),
        group="",
    )


def experts_layer(rows, expert, up, down, routes_of, recipe, traveling):
    """Two products of experts, each row by its own, for rows in any order."""
    order = expert.sort(stable=True).indices
    routes = routes_of(expert)
    grouped = routes.dispatch(rows[order], recipe=traveling)
    inner = F.silu(f8.grouped_linear(grouped, up, routes.offsets, recipe=recipe))
    grouped = f8.grouped_linear(inner, down, routes.offsets, recipe=recipe)
    return routes.combine(grouped, rows.shape[0], recipe=traveling)[order.argsort()]


def results(layer, rows, expert, up, down, grad, *others):
    """y, and the gradients of rows and both stacks."""
    rows, up, down = (t.clone().requires_grad_() for t in (rows, up, down))
    y = layer(rows, expert, up, down, *others)
    return [y.detach(), *torch.autograd.grad(y, (rows, up, down), grad)]


def plain_layer(rows, expert, up, down, recipe):
    """The same without a dispatch."""
    order = expert.sort(stable=True).indices
    ends = torch.bincount(expert, minlength=up.shape[0]).cumsum(0, dtype=torch.int32)
    inner = F.silu(f8.grouped_linear(rows[order], up, ends, recipe=recipe))
    return f8.grouped_linear(inner, down, ends, recipe=recipe)[order.argsort()]


# ---------------------------------------------------------------------------------- on ranks


def beside_one_process(name, world, recipe_name, capacity, codes, routing, tokens, backend):
    """Texts of what differs on this rank, in four tensors, from one process; and from experts without a dispatch."""
    group, experts = GROUPS[name], 2 * world
    rank, recipe = group.rank(), models.recipe_of(recipe_name)
    per_rank, traveling = TOKENS[tokens][:world], recipe if codes else None
    rows, up, down, grad = tensors(sum(per_rank), experts)
    expert = chosen(sum(per_rank), experts, routing)
    own, mine = slice(sum(per_rank[:rank]), sum(per_rank[: rank + 1])), slice(2 * rank, 2 * rank + 2)

    def routes_of(expert):
        counts = torch.zeros(experts, dtype=torch.int64).index_add(0, expert, torch.ones_like(expert))
        return parallel.expert_routes(counts, group=group, capacity=capacity)

    layer = torch.compile(experts_layer, fullgraph=True, backend=backend) if backend else experts_layer
    found = results(layer, rows[own], expert[own], up[mine], down[mine], grad[own], routes_of, recipe, traveling)

    def whole_routes(expert):
        return on_one_rank(torch.bincount(expert, minlength=experts), capacity)

    one = results(experts_layer, rows, expert, up, down, grad, whole_routes, recipe, traveling)
    plain = results(plain_layer, rows, expert, up, down, grad, recipe)
    parts = (own, own, mine, mine)
    return [[difference(a, b[part]) for a, b, part in zip(found, whole, parts, strict=True)] for whole in (one, plain)]


CASES = [
    *itertools.product(("even", "uneven", "one token", "none"), ("any", "empty experts", "one expert"), (None, 64)),
]


def all_cases(name, world, recipe_name, codes):
    """What differs, by case."""
    return {
        (tokens, routing, capacity): beside_one_process(
            name, world, recipe_name, capacity, codes, routing, tokens, None
        )
        for tokens, routing, capacity in CASES
    }


@pytest.mark.parametrize(
    ("world", "recipe", "codes"),
    [
        *((2, recipe, True) for recipe in (*RECIPES, models.SQUARES)),
        *((4, recipe, True) for recipe in ("tensorwise", "rowwise")),
        *((2, recipe, False) for recipe in ("tensorwise", "rowwise")),
    ],
)
def test_experts_on_ranks_have_the_bits_of_one_process(ranks, world, recipe, codes):
    name = GROUP_NAMES[world]
    exact_weights = not codes or recipe == "tensorwise" or recipe.endswith("bf16_wgrad")
    for rank, found in enumerate(ranks.run(all_cases, name, world, recipe, codes, within=name)):
        for case, (beside_one, beside_plain) in found.items():
            assert beside_one == [None] * 4, (rank, case)
            assert beside_plain[:2] == [None, None], (rank, case)
            assert not exact_weights or beside_plain == [None] * 4, (rank, case)


def compiled_cases(name, world, recipe_name, backend):
    """What differs, over one compilation for all routings; graphs, and why there are more than one."""
    group, experts = GROUPS[name], 2 * world
    rank, recipe = group.rank(), models.recipe_of(recipe_name)
    found, mine = {}, slice(2 * rank, 2 * rank + 2)
    tokens = (24,) * world
    own = slice(24 * rank, 24 * rank + 24)
    for capacity in (None, 64):

        def routes_of(expert, capacity=capacity):
            counts = torch.zeros(experts, dtype=torch.int64).index_add(0, expert, torch.ones_like(expert))
            return parallel.expert_routes(counts, group=group, capacity=capacity)

        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(experts_layer, fullgraph=True, backend=backend)
        for routing in ("any", "empty experts", "one expert"):
            rows, up, down, grad = tensors(sum(tokens), experts)
            expert = chosen(sum(tokens), experts, routing)
            given = rows[own], expert[own], up[mine], down[mine], grad[own], routes_of, recipe, recipe
            eager, other = results(experts_layer, *given), results(compiled, *given)
            found[capacity, routing] = [difference(a, b) for a, b in zip(other, eager, strict=True)]
        found[capacity] = counters["stats"]["unique_graphs"]
    return found


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *itertools.product((*RECIPES, models.SQUARES), ["aot_eager"]),
        ("rowwise", "inductor"),
        ("tensorwise", "inductor"),
    ],
)
def test_a_compiled_layer_is_one_graph_for_every_routing_with_the_bits_of_eager_mode(ranks, recipe, backend):
    for found in ranks.run(compiled_cases, "pair", 2, recipe, backend, within="pair"):
        for case, texts in found.items():
            if isinstance(case, tuple):
                assert texts == [None] * 4, case
            else:
                assert texts == 1, case


# ---------------------------------------------------------------------------------- what goes wrong


def with_a_nan(name, recipe_name):
    """Where y and the gradient of rows are NaN, of two ranks whose second has one NaN in its fourth row."""
    group, recipe = GROUPS[name], models.recipe_of(recipe_name)
    rank = group.rank()
    rows, up, down, grad = tensors(32, 4)
    rows[16 + 3, 5] = torch.nan
    own, mine, expert = slice(16 * rank, 16 * rank + 16), slice(2 * rank, 2 * rank + 2), chosen(32, 4, "any")

    def routes_of(expert):
        return parallel.expert_routes(torch.bincount(expert, minlength=4), group=group)

    y, dx, dup, _ = results(
        experts_layer, rows[own], expert[own], up[mine], down[mine], grad[own], routes_of, recipe, recipe
    )
    return y.isnan().any(1).nonzero().flatten().tolist(), bool(dx.isnan().any()), bool(dup.isnan().any())


def test_a_nan_of_one_rank_reaches_the_rank_of_its_expert_and_comes_back(ranks):
    (first, _, first_weights), (second, _, second_weights) = ranks.run(with_a_nan, "pair", "rowwise", within="pair")
    assert (first, second) == ([], [3])
    assert first_weights or second_weights


def overflowing(name, compiled):
    """Of a layer whose capacity is too small: the error; or what is left, and how many rows were not."""
    group = GROUPS[name]
    rows, counts = torch.ones(8, 16), torch.tensor([6, 0, 2, 0]) if group.rank() == 0 else torch.tensor([1, 1, 1, 5])

    def layer(rows, counts):
        routes = parallel.expert_routes(counts, group=group, capacity=4)
        return routes.combine(routes.dispatch(rows), rows.shape[0]), routes.overflow

    if compiled:
        y, overflow = torch.compile(layer, fullgraph=True, backend="aot_eager")(rows, counts)
        return y[:, 0].tolist(), int(overflow)
    with pytest.raises(ValueError, match="a rank has 6 rows for the experts of another rank, but `capacity` is 4"):
        layer(rows, counts)
    return None


def test_rows_beyond_the_capacity_raise_on_all_ranks_and_are_counted_in_a_graph(ranks):
    assert ranks.run(overflowing, "pair", None, within="pair") == [None, None]
    assert ranks.run(overflowing, "pair", "aot_eager", within="pair") == [
        ([1, 1, 1, 1, 0, 0, 1, 1], 2),
        ([1, 1, 1, 1, 1, 1, 0, 0], 2),
    ]


def refused(name):
    """The words of each refusal."""
    group = GROUPS[name]
    for counts, options, error, words in (
        (
            torch.zeros(3, dtype=torch.int64),
            {},
            ValueError,
            "3 experts, which can't be divided equally among the 2 ranks of the group",
        ),
        (torch.zeros(4), {}, TypeError, "torch.float32 of shape"),
        ([1, 2], {}, TypeError, "`counts` must be int64 or int32"),
        (torch.zeros(4, dtype=torch.int64), {"capacity": 0}, ValueError, "`capacity` is 0"),
        (torch.zeros(4, dtype=torch.int64), {"group": None}, TypeError, "`group` is None"),
        (torch.zeros(4, dtype=torch.int64), {"group": "pair"}, TypeError, "ProcessGroup"),
    ):
        with pytest.raises(error, match=words):
            parallel.expert_routes(counts, **{"group": group, **options})


def test_counts_and_capacities_that_no_ranks_can_have_are_refused(ranks):
    ranks.run(refused, "pair", within="pair")


def dies_before_it_sends(name):
    group = GROUPS[name]
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    routes = parallel.expert_routes(torch.tensor([2, 2]), group=group)
    return routes.dispatch(torch.ones(4, 16))


def test_a_rank_that_dies_is_an_error_on_the_others_soon(ranks):
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 0:\n(.|\n)*Error"):
        ranks.run(dies_before_it_sends, "pair", within="pair")
    assert time.monotonic() - started < 120  # a bound on a hang: gloo notices at once, however busy the machine


# ---------------------------------------------------------------------------------- checkpoints


class Holder(torch.nn.Module):
    """A stack of experts alone, as `ExpertParallel` places it."""

    def __init__(self, mesh):
        super().__init__()
        stack = torch.arange(8 * 4 * 6, dtype=torch.float32).view(8, 4, 6)
        self.up = torch.nn.Parameter(distribute_tensor(stack, mesh, [Shard(0)]))


def saved_and_loaded(folder):
    """Whether experts that four ranks saved are those that pairs of ranks load."""
    import torch.distributed.checkpoint as dcp

    every, pairs = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "ep"))["ep"]
    dcp.save(Holder(every).state_dict(), checkpoint_id=folder)
    other = Holder(pairs)
    expected = other.up.to_local().clone()
    torch.nn.init.zeros_(other.up)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    return torch.equal(state["up"].to_local(), expected)


def test_experts_that_four_ranks_saved_are_loaded_by_two(ranks, tmp_path):
    assert all(ranks.run(saved_and_loaded, str(tmp_path / "checkpoint")))
