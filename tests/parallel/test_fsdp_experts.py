"""Experts' weights that FSDP gathers as codes train as those that it gathers as they are, and as one process does.

Ranks' gradients are summed in float32: of two ranks that is one addition and a division by two, which one process
does as well, so all of these are equal bit for bit.
"""

from __future__ import annotations

from unittest.mock import patch

import expert_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from torch.distributed.tensor import Shard

from fp8compile._compat import TORCH_VERSION
from fp8compile.parallel import fsdp_float8_all_gather, graph_fsdp
from fp8compile.testing.bits import bits

needs_groups = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def along(dim):
    """What `fully_shard` takes to cut stacks along another dim."""
    return {"shard_placement_fn": lambda parameter: Shard(dim) if parameter.ndim == 3 else None} if dim else {}


def sharded(model, way, policy, dim=0, arguments=(), **options):
    """The model as the user shards it over two ranks; ``arguments`` are those of a gather of codes."""
    mesh = models.mesh_1d("pair")
    if way == "graph":
        return graph_fsdp(model, mesh, mp_policy=models.POLICIES[policy])
    if way == "codes":
        fsdp_float8_all_gather(model, **dict(arguments))
    return models.shard(model, mesh, models.POLICIES[policy], **along(dim), **options)


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


def ways_of_training(kind, count, recipe, policy, dim, steps):
    """What differs from one process, in words, of each way."""

    def made():
        return expert_models.mixture_of(kind, count, models.recipe_of(recipe))

    losses, weights = models.one_process(made(), policy, steps)
    assert len(set(losses)) == steps
    ways = ["codes"] * (TORCH_VERSION >= (2, 12)) + ["stock"] + ["graph"] * (dim == 0)
    found = []
    for way in ways:
        model = sharded(made(), way, policy, dim)
        own = models.trained(model, steps, dist.get_rank() % 2)
        found += [f"{way}: {name}" for name in differing(weights, models.weights_of(model))]
        found += [f"{way}: losses {own}, not {losses}"] * (own != losses)
    return found


CASES = [
    ("torchtitan", 4, "tensorwise", "bf16", 0),
    ("torchtitan", 3, "blockwise", "bf16", 0),  # the second rank has one expert
    ("torchtitan", 1, "tensorwise", "fp32", 0),  # and here none
    ("torchtitan", 1, "blockwise", "bf16", 1),  # cut within blocks
    ("gpt-oss", 3, "tensorwise", "bf16", 1),
    ("gpt-oss", 3, "blockwise", "fp32", 2),
    ("gpt-oss", 1, "blockwise", "bf16", 0),
    ("torchtitan", 3, "rowwise", "bf16", 0),
    ("gpt-oss", 3, "rowwise_bf16_wgrad", "bf16", 0),
    ("torchtitan", 1, "mxfp8", "fp32", 0),
    ("gpt-oss", 3, "mxfp8", "bf16", 1),
    ("torchtitan", 1, "rowwise", "bf16", 2),
    ("Qwen3-MoE", 4, "tensorwise", "bf16", 0),
    ("Qwen3-MoE", 3, "blockwise", "bf16", 1),
    ("Qwen3-MoE", 3, "rowwise", "bf16", 0),
    ("torchtitan", 1, "nvfp4", "bf16", 1),
    ("torchtitan", 4, models.FOUR_BITS, "bf16", 0),
    ("gpt-oss", 3, models.FOUR_BITS, "bf16", 0),
    ("torchtitan", 1, models.FOUR_BITS, "bf16", 2),  # within blocks, and outer scales are of both ranks
    ("torchtitan", 1, models.SQUARES, "bf16", 1),
]


SLOW = [
    ("gpt-oss", 2, "nvfp4", "bf16", 0),  # two codes to a byte, of matrices that lie transposed
    ("torchtitan", 4, "nvfp4", "bf16", 0),
    ("gpt-oss", 3, "nvfp4", "fp32", 0),  # the second rank has one expert
    ("torchtitan", 1, models.FOUR_BITS, "fp32", 0),
    ("gpt-oss", 2, models.FOUR_BITS, "bf16", 1),
    ("Qwen3-MoE", 3, models.FOUR_BITS, "bf16", 0),
    ("gpt-oss", 3, models.SQUARES, "fp32", 0),
]
EVERY = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: " ".join(map(str, case)))
def test_trains_as_one_process_does(ranks, case):
    assert ranks.run(ways_of_training, *case, 4, within="pair") == [[]] * 2


def of_an_odd_size(*case):
    with patch.object(expert_models, "INNER", 201):
        return ways_of_training(*case)


@pytest.mark.parametrize(("count", "dim"), [(2, 0), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_codes_of_four_bits_of_matrices_of_an_odd_size(ranks, count, dim):
    """Down has 201 columns, of which the codes for the output share no bytes, nor then do those for grad_input."""
    case = "torchtitan", count, models.FOUR_BITS, "bf16", dim, 3
    assert ranks.run(of_an_odd_size, *case, within="pair") == [[]] * 2


# ---------------------------------------------------------------------------------- compiled


def compiled(way, kind, count, recipe, backend, steps):
    """Losses and weights of a model whose blocks, or with `graph_fsdp` all of it, are one graph."""
    model = expert_models.mixture_of(kind, count, models.recipe_of(recipe))
    if way == "graph":
        model = sharded(model, way, "bf16")
        run = torch.compile(model, fullgraph=True, backend=backend)
    else:
        run = model = sharded(model, way, "bf16", backend=backend)
    losses = models.trained(run, steps, dist.get_rank() % 2, optimizer=models.adamw(model))
    return losses, models.weights_of(model)


def compiled_ways(kind, count, recipe, backend, steps):
    """What differs in graphs: with `graph_fsdp` from one process, where blocks are compiled from stock FSDP2.

    From 2.15 on eager mode leaves the gradient of a norm in float32, which compiled blocks round.
    """
    model = expert_models.mixture_of(kind, count, models.recipe_of(recipe))
    # Inductor rounds a norm and a gate once, eager mode each of their steps: it is held against itself
    pairs = {} if backend == "inductor" else {"graph": lambda: models.one_process(model, "bf16", steps)}
    if TORCH_VERSION >= (2, 12):
        pairs["codes"] = lambda: compiled("stock", kind, count, recipe, backend, steps)
    found = []
    for way, expected in pairs.items():
        (losses, weights), (own, own_weights) = expected(), compiled(way, kind, count, recipe, backend, steps)
        found += [f"{way}: {name}" for name in differing(weights, own_weights)]
        found += [f"{way}: losses {own}, not {losses}"] * (own != losses)
    return found


GRAPHS = [
    pytest.param(("torchtitan", 2, "nvfp4", "aot_eager"), marks=pytest.mark.slow),
    ("torchtitan", 1, "blockwise", "aot_eager"),  # the second rank has no expert
    ("gpt-oss", 3, "rowwise", "aot_eager"),
    ("gpt-oss", 3, models.FOUR_BITS, "aot_eager"),
    pytest.param(("torchtitan", 2, models.FOUR_BITS, "aot_eager"), marks=pytest.mark.slow),
    pytest.param(("torchtitan", 1, "tensorwise", "inductor"), marks=pytest.mark.slow),
    pytest.param(("torchtitan", 3, "rowwise", "inductor"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: " ".join(map(str, case)))
def test_graphs_train_as_eager_mode_does(ranks, case):
    # Inductor has g++ compile some twenty files a graph for a CPU, of each way on each rank: minutes on two cores
    seconds = 1800 if case[-1] == "inductor" else 240
    assert ranks.run(compiled_ways, *case, 3, within="pair", seconds=seconds) == [[]] * 2
