"""Async tensor parallelism: Inductor's pass fuses our gathers and scattered sums with the products beside them.

Graphs as for an H200, on ranks that are not there; no such kernel runs here. The fused operators are run on tensors
without data, so that they see dtypes and shapes of scales: the pass itself looks at neither.
"""

from __future__ import annotations

import itertools
from collections import Counter
from unittest import mock

import pytest
import torch
from processes import fake_rank
from test_tensor_parallel_graphs import mesh_of
from torch import nn

import fp8compile as f8
from fp8compile import _compat
from fp8compile.target import Target, pretend_target


@pytest.fixture(scope="module")
def elsewhere():
    """`fused_of` in a process with a fake group; another one where DTensor's caches would still have a traced mesh."""
    with fake_rank(0, 8) as shared:

        def found(recipe, dims, *, grouped=False, **options):
            if grouped or dims == 2:
                return shared.submit(fused_of, recipe, dims, grouped=grouped, **options).result()
            with fake_rank(0, 8) as own:
                return own.submit(fused_of, recipe, dims, **options).result()

        yield found


GATHER, SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
pytestmark = pytest.mark.skipif(
    _compat.TORCH_VERSION < (2, 13), reason="PyTorch before 2.13: its pass looks for other graphs"
)


class Pair(nn.Module):
    """Column parallel, then row parallel: all tokens of the sequence between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class PairOfGroup(Pair):
    """The same by functions that take a group."""

    def __init__(self, recipe, group, dim):
        super().__init__()
        self.up, self.down = nn.Linear(256, 128, bias=False), nn.Linear(128, 256, bias=False)
        self.options = {"recipe": recipe, "group": group, "sequence_dim": dim}

    def forward(self, x):
        hidden = torch.relu(f8.parallel.column_parallel_linear(x, self.up.weight, **self.options))
        return f8.parallel.row_parallel_linear(hidden, self.down.weight, **self.options)


def model_of(recipe, dim, *, grouped):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, recipe = mesh_of((4,)), f8.recipes.by_name(recipe)
    if grouped:
        return PairOfGroup(recipe, mesh.get_group(), dim).bfloat16()
    up = f8.parallel.ColwiseParallel(input_layouts=Shard(dim), use_local_output=False)
    down = f8.parallel.RowwiseParallel(output_layouts=Shard(dim))
    return parallelize_module(f8.convert(Pair().bfloat16(), recipe), mesh, {"up": up, "down": down})


def like_the_outputs_of(graph):
    """A function that returns what a graph would: arguments that it hands on, and tensors of no content."""
    inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    outputs = [(getattr(node, "name", None), getattr(node, "meta", {}).get("val")) for node in outputs_of(graph)]

    def call(*arguments):
        given = dict(zip(inputs, arguments, strict=True))
        return [
            given[name]
            if name in given
            else None
            if v is None
            else torch.empty_strided(v.size(), v.stride(), dtype=v.dtype)
            for name, v in outputs
        ]

    return call


def outputs_of(graph):
    return graph.graph.find_nodes(op="output")[0].args[0]


def fused_of(recipe, dims, *, grouped=False, capability=(9, 0), enabled=True):
    """How often each fused operator is in forward and backward, and how many gathers of codes are left alone."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import compile_fx, config
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.virtualized import V
    from torch.distributed import _symmetric_memory
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    found = []

    def compiler(graph, inputs):
        mode = torch._guards.detect_fake_mode(inputs)
        call = like_the_outputs_of(graph)
        post_grad.view_to_reshape(graph)
        with V.set_fake_mode(mode):
            post_grad.post_grad_passes(graph, is_inference=False)
        without_data = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*without_data)
        names = Counter(getattr(node.target, "_opname", "") for node in graph.graph.nodes)
        found.append((names[GATHER], names[SCATTER]))
        return make_boxed_func(call)

    dim = dims - 2
    model = model_of(recipe, dim, grouped=grouped)
    x = torch.randn(*(2,) * dim, 256, 256, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, decompositions=compile_fx.select_decomp_table())
    with (
        pretend_target(Target("cuda", capability)),
        config.patch(_micro_pipeline_tp=enabled),
        mock.patch.object(torch.distributed, "is_nccl_available", return_value=True),
        mock.patch.object(_symmetric_memory, "is_symm_mem_enabled_for_group", return_value=True),
    ):
        y = torch.compile(model, fullgraph=True, backend=backend)(x)
        y.sum().backward()
    return found


BOTH_WAYS = [(1, 1), (1, 1)]  # the gather of x, the sum of y; the gather of grad_output, the sum of grad_input


def cases(product, usual):
    """Of all cases, those that are left to the full run are marked: each takes seconds to trace."""
    return [case if case in usual else pytest.param(*case, marks=pytest.mark.slow) for case in product]


FUSED = itertools.product((("tensorwise", 2), ("tensorwise", 3), ("rowwise", 2)), (False, True))
USUAL = [("tensorwise", 2, False), ("tensorwise", 3, True), ("rowwise", 2, False), ("rowwise", 2, True)]


@pytest.mark.parametrize(("recipe", "dims", "grouped"), cases([(*each, way) for each, way in FUSED], USUAL))
def test_gathers_and_scattered_sums_are_fused_with_their_products(elsewhere, recipe, dims, grouped):
    assert elsewhere(recipe, dims, grouped=grouped) == BOTH_WAYS


@pytest.mark.slow
def test_rowwise_scattered_sums_of_more_dims_are_fused(elsewhere):
    assert elsewhere("rowwise", 3) == [(0, 1), (0, 1)]


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="PyTorch's fused gather takes the scales of rows of a matrix only"
)
def test_rowwise_gathers_of_more_dims_are_fused(elsewhere):
    assert elsewhere("rowwise", 3) == BOTH_WAYS


BLOCKS = {"blockwise": (9, 0), "mxfp8": (10, 0)}
LEFT_ALONE = cases(itertools.product(BLOCKS, (2, 3), (False, True)), [("blockwise", 2, False), ("mxfp8", 2, True)])


@pytest.mark.parametrize(("recipe", "dims", "grouped"), LEFT_ALONE)
def test_scales_of_blocks_are_left_alone(elsewhere, recipe, dims, grouped):
    """The fused operators would cut them as if they were rows."""
    assert elsewhere(recipe, dims, grouped=grouped, capability=BLOCKS[recipe]) == [(0, 0), (0, 0)]


def test_nothing_is_fused_unless_asked_for(elsewhere):
    assert elsewhere("rowwise", 2, enabled=False) == [(0, 0), (0, 0)]
