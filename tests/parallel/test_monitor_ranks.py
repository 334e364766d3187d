"""Statistics of layers on ranks: what one process reads for the same tokens, counts and extremes to the bit."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8compile as f8
from fp8compile import parallel
from fp8compile.monitor.definitions import STATISTICS
from fp8compile.nn import Observed

SUMS = ("square_error", "mse", "sqnr", "scale_std")  # added up in another order
IN, HIDDEN, TOKENS, EXPERTS = 64, 96, 32, 4
EVERYTHING = tuple(STATISTICS)
COMPILED = (
    "amax",
    "underflow",
    "saturation",
    "nonfinite",
    "scale_min",
    "sqnr",
)  # each costs DTensors seconds to trace


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def values(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-8, 6, shape, generator=generator))
    return (torch.randn(shape, generator=generator) * spread).bfloat16()


class Mlp(nn.Module):
    """Two linears, with a ReLU between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(IN, HIDDEN, bias=False), nn.Linear(HIDDEN, IN, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def mlp(recipe):
    model = Mlp().bfloat16()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(values(*parameter.shape, seed=seed))
    return f8.convert(model, recipe, filter=lambda *_: True)


def batch(part, planted=None):
    x, grad = values(TOKENS, IN, seed=10 + part), values(TOKENS, IN, seed=20 + part)
    if planted == part:
        x[3, 5] = math.nan
    return x, grad


def difference(one, other):
    """The readings that differ: sums by more than their rounding, others at all."""
    found = [] if one.keys() == other.keys() else [f"layers {sorted(one)} and {sorted(other)}"]
    for layer in one.keys() & other.keys():
        if one[layer].keys() != other[layer].keys():
            found.append(f"{layer}: {sorted(one[layer])} and {sorted(other[layer])}")
        for role in one[layer].keys() & other[layer].keys():
            for name, value in one[layer][role].items():
                own = other[layer][role].get(name)
                same = own == value or (own != own and value != value)
                if name in SUMS and own is not None:  # sums of float32 pieces of at most 128 numbers
                    same = same or math.isclose(own, value, rel_tol=2e-5, abs_tol=1e-12)
                if not same:
                    found.append(f"{layer} {role} {name}: {value} and {own}")
    return found


def read(model, monitor, parts, planted=None, backend=None, wrap=lambda tensor: tensor):
    step = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    for part in parts:
        x, grad = batch(part, planted)
        y = step(wrap(x.requires_grad_()))
        y.backward(grad if y.shape == grad.shape else grad[: y.shape[0]])
    return monitor.read()


def alone(recipe, parts, planted=None, statistics=EVERYTHING):
    """What one process reads, before any group of ranks is asked."""
    model = mlp(recipe)
    with mock.patch.object(dist, "is_initialized", return_value=False):
        return read(model, f8.Monitor(model, statistics), parts, planted)


# ---------------------------------------------------------------------------------- dense


def tensor_parallel(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def check_dense(place, name, backend, planted):
    recipe = f8.recipes.by_name(name)
    model, rank, statistics = mlp(recipe), dist.get_rank(), EVERYTHING if backend is None else COMPILED
    part, parts = rank, range(4)
    if place in ("TP 2 x replicas", "TP 2 x FSDP 2", "TP 2 x graph_fsdp"):
        mesh = models.mesh_2d("dp", "tp")
        tensor_parallel(model, mesh["tp"])
        part, parts = rank // 2, range(2)
        if place == "TP 2 x FSDP 2":
            fully_shard(model, mesh=mesh["dp"])
        elif place == "TP 2 x graph_fsdp":
            parallel.graph_fsdp(model, mesh["dp"])
    elif place == "FSDP 4":
        fully_shard(model)
    elif place == "graph_fsdp 4":
        parallel.graph_fsdp(model, models.mesh_1d("all"))
    if recipe.history():  # a second micro-batch would have other scales than the first
        statistics = tuple(each for each in statistics if each not in ("nonfinite", "square_error", "exponents"))
        part, parts = 0, [0]
    monitor = f8.Monitor(model, statistics)
    found = read(model, monitor, [part], planted, backend)
    monitor.remove()
    return difference(alone(recipe, parts, planted, statistics), found)


DENSE = ("replicas", "FSDP 4", "graph_fsdp 4", "TP 2 x replicas", "TP 2 x FSDP 2", "TP 2 x graph_fsdp")


RECIPES = ("rowwise", "blockwise", "tensorwise", "mxfp8", "delayed")
# the full run takes all of them
QUICK = {(place, RECIPES[index % 5], None) for index, place in enumerate(DENSE)}
QUICK |= {("graph_fsdp 4", "mxfp8", "aot_eager"), ("FSDP 4", "tensorwise", "aot_eager")}
# a group and a mesh take minutes to trace where two are; this one has both
QUICK |= {("TP 2 x graph_fsdp", "blockwise", "aot_eager")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(DENSE, RECIPES, (None, "aot_eager"))
]


@pytest.mark.parametrize(("place", "recipe", "backend"), CASES)
def test_a_dense_layer_on_ranks_reads_what_one_process_reads(ranks, place, recipe, backend):
    for problems in ranks.run(check_dense, place, recipe, backend, 1 if recipe == "rowwise" else None):
        assert problems == []


# ---------------------------------------------------------------------------------- explicit groups


class OwnLayers(Observed, nn.Module):
    """A column and a row of one group, on plain tensors."""

    observed_weights = ("up", "down")

    def __init__(self, weights, recipe, group):
        super().__init__()
        rank = group.rank()
        up, down = weights
        self.up = nn.Parameter(up.chunk(2)[rank].contiguous())
        self.down = nn.Parameter(down.chunk(2, 1)[rank].contiguous())
        self.how = {"recipe": recipe, "group": group}

    def forward(self, x):
        y = parallel.column_parallel_linear(x, self.up, **self.how, observer=self.observer("up")).relu()
        return parallel.row_parallel_linear(y, self.down, **self.how, observer=self.observer("down"))


def check_groups(name, backend):
    recipe, group = f8.recipes.by_name(name), GROUPS["pair"]
    whole = mlp(recipe)
    model = OwnLayers([whole.up.weight.detach(), whole.down.weight.detach()], recipe, group)
    statistics = EVERYTHING if backend is None else COMPILED
    monitor = f8.Monitor(model, statistics)
    part = dist.get_rank() // 2
    return difference(alone(recipe, range(2), None, statistics), read(model, monitor, [part], backend=backend))


@pytest.mark.parametrize(
    ("recipe", "backend"), [("tensorwise", None), ("blockwise", None), ("blockwise", "aot_eager")]
)
def test_layers_of_a_group_read_what_one_process_reads(ranks, recipe, backend):
    for problems in ranks.run(check_groups, recipe, backend):
        assert problems == []


# ---------------------------------------------------------------------------------- experts


class OwnExperts(Observed, nn.Module):
    """Experts whose rows are sorted by expert already, each rank with some of them."""

    observed_weights = ("weight",)

    def __init__(self, weight, recipe):
        super().__init__()
        self.weight, self.recipe = nn.Parameter(weight), recipe

    def forward(self, x, counts, group=None):
        stack = self.weight
        if group is None:
            offsets = counts.cumsum(0, dtype=torch.int32)
            return f8.grouped_linear(x, stack, offsets, recipe=self.recipe, observer=self.observer("weight"))
        routes = parallel.expert_routes(counts, group=group)
        rows, observer = routes.dispatch(x), self.observer("weight", stack)
        y = f8.grouped_linear(rows, stack.to_local(), routes.offsets, recipe=self.recipe, observer=observer)
        return routes.combine(y, x.shape[0])


def rows_of(part, count):
    x, grad = values(TOKENS, IN, seed=30 + part), values(TOKENS, HIDDEN, seed=40 + part)
    sizes = torch.tensor([8, 0, 20, 4] if part else [2, 0, 10, 20])
    return x, grad, sizes


def experts_alone(recipe):
    """One process: the rows of all parts, expert by expert, as ranks of experts receive them."""
    module = OwnExperts(values(EXPERTS, HIDDEN, IN, seed=3), recipe)
    parts = [rows_of(part, EXPERTS) for part in range(2)]
    pieces = [[each.split(sizes.tolist()) for each in (x, grad)] for x, grad, sizes in parts]
    x, grad = (torch.cat([pieces[p][i][e] for e in range(EXPERTS) for p in range(2)]) for i in range(2))
    monitor = f8.Monitor(module, EVERYTHING)
    module(x.requires_grad_(), parts[0][2] + parts[1][2]).backward(grad)
    with mock.patch.object(dist, "is_initialized", return_value=False):
        return monitor.read()


def check_experts(name):
    """Expert parallel over pairs, with two pairs that have the same rows: each expert is read as often."""
    recipe, group, rank = f8.recipes.by_name(name), GROUPS["pair"], dist.get_rank()
    module = OwnExperts(values(EXPERTS, HIDDEN, IN, seed=3), recipe)
    parallel.spread_experts(module, models.mesh_2d("replicas", "ep")["ep"])
    monitor = f8.Monitor(module, EVERYTHING)
    x, grad, sizes = rows_of(rank % 2, EXPERTS)
    module(x.requires_grad_(), sizes, group).backward(grad)
    found, right = monitor.read(), experts_alone(recipe)
    for roles in right.values():  # tokens of both pairs are counted, and what is no part of all, twice
        for role, own in roles.items():
            if "weight" not in role.removesuffix("_for_grad_weight"):
                own["nonfinite"], own["square_error"] = 2 * own["nonfinite"], 2 * own["square_error"]
                own["exponents"] = [2 * each for each in own["exponents"]]
    return difference(right, found)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_experts_on_ranks_read_what_one_process_reads(ranks, recipe):
    for problems in ranks.run(check_experts, recipe):
        assert problems == []


def check_experts_of_fsdp(name, how):
    recipe = f8.recipes.by_name(name)
    module = OwnExperts(values(EXPERTS, HIDDEN, IN, seed=3), recipe)
    part = dist.get_rank() % 2
    if how == "graph_fsdp":
        parallel.graph_fsdp(module, models.mesh_1d("pair"))
    else:
        fully_shard(module, mesh=models.mesh_1d("pair"))
    x, grad, sizes = rows_of(part, EXPERTS)
    monitor = f8.Monitor(module, EVERYTHING)
    module(x.requires_grad_(), sizes).backward(grad)
    found = monitor.read()

    whole = OwnExperts(values(EXPERTS, HIDDEN, IN, seed=3), recipe)
    with mock.patch.object(dist, "is_initialized", return_value=False):
        monitor = f8.Monitor(whole, EVERYTHING)
        for each in range(4):
            x, grad, sizes = rows_of(each % 2, EXPERTS)
            whole(x.requires_grad_(), sizes).backward(grad)
        return difference(monitor.read(), found)


@pytest.mark.parametrize("how", ["graph_fsdp", "fully_shard"])
def test_experts_that_fsdp_shards_read_what_one_process_reads(ranks, how):
    for problems in ranks.run(check_experts_of_fsdp, "blockwise", how):
        assert problems == []


# ---------------------------------------------------------------------------------- weights as codes


def check_codes(how):
    recipe = f8.recipes.tensorwise() if how != "two sets" else f8.recipes.rowwise()
    model = mlp(recipe)
    right = {name: layer["weight"] for name, layer in alone(recipe, range(4)).items()}
    parallel.fsdp_float8_all_gather(model)
    fully_shard(model.up)
    fully_shard(model.down)
    fully_shard(model)
    monitor = f8.Monitor(model, EVERYTHING)
    found = read(model, monitor, [dist.get_rank()])
    problems = []
    for name, layer in found.items():
        known = {"subnormal", "scale_min", "scale_max", "scale_std", "exponents"}
        problems += [] if layer["weight"].keys() == known else [f"{name}: {sorted(layer['weight'])}"]
        wanted = {each: value for each, value in right[name].items() if each in known}
        problems += difference({"": {"weight": wanted}}, {"": {"weight": layer["weight"]}})
        problems += [] if len(layer["input"]) == len(EVERYTHING) else [f"{name} input"]
    return problems


@pytest.mark.parametrize("how", ["one set", "two sets"])
def test_a_weight_gathered_as_codes_has_statistics_of_scales_and_codes(ranks, how):
    for problems in ranks.run(check_codes, how):
        assert problems == []


# ---------------------------------------------------------------------------------- NaN


def check_nan(planted):
    """One NaN in one token of rank 1, at step 7."""
    model = mlp(f8.recipes.tensorwise())
    monitor = f8.Monitor(model, every=1, stop_at_nonfinite=True)
    for step in range(9):
        x, grad = batch(dist.get_rank())
        if step == 7 and dist.get_rank() == 1 and planted == "input":
            x[3, 5] = math.nan
        if step == 7 and dist.get_rank() == 1 and planted == "grad_output":
            grad[3, 5] = math.inf
        model(x).backward(grad)
        try:
            monitor.step()
        except f8.monitor.NonFiniteError as error:
            return f"in step {step}: {error}"
    return "no error"


@pytest.mark.parametrize(("planted", "layer"), [("input", "up"), ("grad_output", "down")])
def test_a_nan_of_one_rank_is_named_on_all_ranks_one_step_late(ranks, planted, layer):
    for text in ranks.run(check_nan, planted):
        start = (
            f"in step 8: Monitor: step 7, rank 1: {layer}, {planted}: 1 of {TOKENS * IN} elements are NaN or infinite."
        )
        assert text.startswith(start), text


# ---------------------------------------------------------------------------------- ranks that disagree


def check_disagreement():
    model = mlp(f8.recipes.rowwise())
    monitor = f8.Monitor(model, every=1 + dist.get_rank())
    read_part = batch(0)
    model(read_part[0]).backward(read_part[1])
    try:
        monitor.read()
    except ValueError as error:
        return str(error)
    return "read"


def test_ranks_with_different_arguments_are_told_so(ranks):
    for text in ranks.run(check_disagreement):
        assert text.startswith("Monitor: arguments must be equal on all ranks, got ")
        assert " on rank 1." in text


def check_messages():
    """A reading sends one sum and one maximum, whatever the number of layers."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = mlp(f8.recipes.tensorwise())
    monitor = f8.Monitor(model)
    x, grad = batch(dist.get_rank())
    model(x).backward(grad)
    monitor.read()
    with CommDebugMode() as mode:
        monitor.read()
    return {str(op): count for op, count in mode.get_comm_counts().items()}


def test_a_reading_sends_two_messages(ranks):
    for counts in ranks.run(check_messages):
        assert sum(counts.values()) == 2, counts
