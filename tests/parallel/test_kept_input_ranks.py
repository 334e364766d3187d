"""What eager mode keeps of an input in four bits, wherever it lies: 0.56 bytes an element, and the same bits."""

from __future__ import annotations

from itertools import pairwise

import fsdp_models as models
import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from measured_layers import kept_bytes
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

import fp8compile as f8
from fp8compile import parallel
from fp8compile._compat import TORCH_VERSION
from fp8compile.ops.groups.padding import padded_length
from fp8compile.ops.layer import register_layer
from fp8compile.testing.bits import difference

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
RECIPES = {"nvfp4": f8.recipes.nvfp4(), "dequantized": f8.recipes.nvfp4(backward="dequantized")}
TOKENS, IN, OUT = 64, 96, 192  # of all ranks
A_CODE = 0.5 + 1 / 16  # bytes, with its share of a scale


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def codes_of(elements):
    """Bytes of so many codes, their scales and the outer scale."""
    return int(elements * A_CODE) + 4


def tensors(*shapes):
    generator = torch.Generator().manual_seed(len(shapes))
    return [
        (torch.randn(s, generator=generator) * torch.rand(s, generator=generator).exp2()).bfloat16() for s in shapes
    ]


def gradients_with_and_without(call, leaves):
    """The gradients, which are to be those of the input itself; in words where they differ."""
    found = []
    for keeps in (register_layer.keeps_codes, lambda *_: False):
        before, register_layer.keeps_codes = register_layer.keeps_codes, keeps
        try:
            y = call(*leaves)
            found.append(torch.autograd.grad(y.float().square().sum(), [x for x in leaves if x.requires_grad]))
        finally:
            register_layer.keeps_codes = before
    return [said for one, other in zip(*found, strict=True) if (said := difference(one, other)) is not None]


# ---------------------------------------------------------------------------------- in each rank


def part(tensor, dim, group):
    return tensor if dim is None else tensor.chunk(group.size(), dim)[group.rank()].clone()


WAYS = {  # the dims of x and of the weight that are cut
    "column": (None, 0),
    "row": (2, 1),
    "column, sequence": (1, 0),
}


def function_on_ranks(recipe, way, name):
    """Bytes, those that are to be, and what differs."""
    group = GROUPS[name]
    of_x, of_weight = WAYS[way]
    x, weight = tensors((2, TOKENS // 2, IN), (OUT, IN))
    leaves = [part(x, of_x, group).requires_grad_(), part(weight, of_weight, group).requires_grad_()]
    layer = parallel.row_parallel_linear if way == "row" else parallel.column_parallel_linear
    options = {"sequence_dim": 1} if "sequence" in way else {}

    def call(x, weight):
        return layer(x, weight, recipe=RECIPES[recipe], group=group, **options)

    return kept_bytes(call, leaves), codes_of(leaves[0].numel()), gradients_with_and_without(call, leaves)


def dtensors_on_ranks(recipe, way, name):
    """The same of DTensors."""
    mesh = models.mesh_1d(name)
    placements = [[Replicate() if dim is None else Shard(dim)] for dim in WAYS[way]]
    leaves = [
        DTensor.from_local(part(each, dim, GROUPS[name]), mesh, placement, run_check=False).requires_grad_()
        for each, dim, placement in zip(tensors((2, TOKENS // 2, IN), (OUT, IN)), WAYS[way], placements, strict=True)
    ]

    def call(x, weight):
        return f8.linear(x, weight, recipe=RECIPES[recipe])

    def local(*parts):
        given = (
            DTensor.from_local(*each, run_check=False) for each in zip(parts, [mesh] * 2, placements, strict=True)
        )
        return call(*given).redistribute(placements=[Replicate()]).to_local()

    own = [each.to_local().detach().requires_grad_() for each in leaves]
    return kept_bytes(call, leaves), codes_of(own[0].numel()), gradients_with_and_without(local, own)


def uneven_on_ranks():
    """Ranks of which one could keep codes and another could not: then none does, and they wait for nobody."""
    group = GROUPS["pair"]
    recipe, sizes = f8.recipes.nvfp4(hadamard=()), (32, 33)
    x, weight = tensors((sum(sizes), IN), (OUT, IN))
    leaves = [x.split(sizes)[group.rank()].clone().requires_grad_(), part(weight, 0, group).requires_grad_()]

    def call(x, weight):
        return parallel.column_parallel_linear(
            x, weight, recipe=recipe, group=group, sequence_dim=0, sequence_sizes=sizes
        )

    return kept_bytes(call, leaves) == 2 * leaves[0].numel(), gradients_with_and_without(call, leaves)


def graph_fsdp_on_ranks():
    """Bytes of a layer whose weight two ranks share."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(f8.Linear.from_linear(torch.nn.Linear(IN, OUT, bias=False), RECIPES["nvfp4"]))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = parallel.graph_fsdp(model, models.mesh_1d("pair"), mp_policy=policy)
    x = tensors((TOKENS, IN))[0].requires_grad_()
    return kept_bytes(lambda x, weight: model(x), [x, *model.parameters()]), codes_of(x.numel())


# ---------------------------------------------------------------------------------- what they answer


def assert_kept(answers):
    for kept, expected, differing in answers:
        assert not differing
        assert kept == expected


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_functions_on_ranks_keep_codes(ranks, recipe, way):
    assert_kept(ranks.run(function_on_ranks, recipe, way, "pair", within="pair"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_dtensors_keep_codes(ranks, recipe, way):
    assert_kept(ranks.run(dtensors_on_ranks, recipe, way, "pair", within="pair"))


def test_ranks_agree_that_none_is_kept(ranks):
    assert ranks.run(uneven_on_ranks, within="pair") == [(True, [])] * 2


def test_fsdp_in_the_graph_keeps_codes(ranks):
    for kept, expected in ranks.run(graph_fsdp_on_ranks, within="pair"):
        assert kept == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_keep_codes(recipe):
    ends = torch.tensor([16, 16, 60], dtype=torch.int32)
    x, weight = (each.requires_grad_() for each in tensors((TOKENS, IN), (len(ends), OUT, IN)))

    def call(x, weight, ends):
        return f8.grouped_linear(x, weight, ends, recipe=RECIPES[recipe])

    tokens = padded_length(TOKENS, len(ends), 16) if recipe == "nvfp4" else TOKENS
    beside = 4 * len(ends) + ends.nbytes  # outer scales, and ends that were checked
    assert kept_bytes(call, [x, weight, ends]) == int(tokens * IN * A_CODE) + beside
    assert not gradients_with_and_without(lambda x, weight: call(x, weight, ends), [x, weight])


def test_dequantized_gradients_of_experts_are_those_of_each_alone(assert_bits_equal):
    for recipe in (RECIPES["dequantized"], f8.recipes.tensorwise()):
        recipe = f8.Recipe(input=recipe.input, weight=recipe.weight, dequantized_gradients=True)
        ends = torch.tensor([16, 16, 57], dtype=torch.int32)
        x, weight = (each.requires_grad_() for each in tensors((TOKENS, IN), (len(ends), OUT, IN)))
        (grad,) = tensors((TOKENS, OUT))
        y = f8.grouped_linear(x, weight, ends, recipe=recipe)
        found = torch.autograd.grad(y, (x, weight), grad)
        for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            own = [each.detach().clone().requires_grad_() for each in (x[start:end], weight[expert])]
            alone = f8.linear(*own, recipe=recipe)
            assert_bits_equal(y[start:end], alone)
            of_x, of_weight = torch.autograd.grad(alone, own, grad[start:end])
            assert_bits_equal(found[0][start:end], of_x)
            assert_bits_equal(found[1][expert], of_weight)
