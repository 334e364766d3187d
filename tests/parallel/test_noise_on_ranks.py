"""Stochastic rounding, two levels of scales and transforms on shards: codes, and so bits, are those of the whole.

The noise of an element is a hash of its index in the whole tensor, the outer amax is the maximum of all ranks.
"""

from __future__ import annotations

import pytest
import test_graph_fsdp
import test_tensor_parallel as layers
import torch
from gloo_ranks import GROUPS, shared_ranks

import fp8compile as f8
from fp8compile import parallel
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.testing.bits import difference, sum_difference

LAYERS = {"column": parallel.column_parallel_linear, "row": parallel.row_parallel_linear}
GROUP_NAMES = {2: "pair", 3: "three"}
RECIPES = {
    "nvfp4": f8.recipes.nvfp4(),
    "nvfp4, weights 1x16, no transform": f8.recipes.nvfp4(weight_block=(1, 16), hadamard=(), seed=3),
    "tensorwise": f8.recipes.tensorwise(grad_rounding="stochastic"),
    "rowwise": f8.recipes.rowwise(grad_rounding="stochastic"),
    "blockwise": f8.recipes.blockwise(grad_rounding="stochastic"),
    "mxfp8": f8.recipes.mxfp8(grad_rounding="stochastic"),
}
# of each rank along the sequence, of two batches, and of features; a transform takes sixteen tokens at a time
TOKENS = {2: (32, 16), 3: (16, 16, 16)}
FEATURES = {2: ((48, 48), (56, 24)), 3: ((32, 32, 32), (40, 40, 16))}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def _tensors(n, k, tokens):
    generator = torch.Generator().manual_seed(n + k)
    shapes = ((2, tokens, k), (n, k), (2, tokens, n))
    return [
        (torch.randn(s, generator=generator) * torch.rand(s, generator=generator).exp2()).bfloat16() for s in shapes
    ]


def _run(layer, x, weight, grad, **options):
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    y = layer(x, weight, None, **options)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]


def problems(name, layer, features, sequence_dim, backend):
    """What differs from the whole: outputs and gradients that no rank sums, to the bit; sums within roundings."""
    torch._dynamo.reset()
    size = len(features)
    if GROUP_NAMES[size] not in GROUPS:
        return []
    group, recipe, tokens = GROUPS[GROUP_NAMES[size]], RECIPES[name], TOKENS[size]
    wide, column = sum(features), layer == "column"
    whole = _tensors(*((wide, 40) if column else (40, wide)), sum(tokens))

    def of_features(tensor, dim):
        return tensor.split(features, dim)[group.rank()]

    def of_tokens(tensor):
        return tensor if sequence_dim is None else tensor.split(tokens, sequence_dim)[group.rank()]

    x, weight, grad = whole
    if column:
        own = of_tokens(x), of_features(weight, 0), of_features(grad, -1)
    else:
        own = of_features(x, -1), of_features(weight, 1), of_tokens(grad)
    function = LAYERS[layer] if backend is None else torch.compile(LAYERS[layer], fullgraph=True, backend=backend)
    sizes = {} if sequence_dim is None else {"sequence_sizes": tokens}
    options = {"recipe": recipe, "group": group, "sequence_dim": sequence_dim, "feature_sizes": features, **sizes}
    found = _run(function, *own, **options)
    y, grad_x, grad_weight = _run(f8.linear, *whole, recipe=recipe)
    if column:
        checks = [(difference, of_features(y, -1)), (sum_difference, of_tokens(grad_x))]
        checks.append((difference, of_features(grad_weight, 0)))
    else:
        checks = [(sum_difference, of_tokens(y)), (difference, of_features(grad_x, -1))]
        checks.append((difference, of_features(grad_weight, 1)))
    texts = [check(got, want.contiguous()) for got, (check, want) in zip(found, checks, strict=True)]
    what = f"{name} {layer} {features} {sequence_dim} {backend}"
    return [f"{which}: {text}; {what}" for which, text in zip(("y", "dx", "dw"), texts, strict=True) if text]


def problems_of_dtensors(name, count):
    """As `problems`, of f8.linear on DTensors: tokens cut and features whole, tokens whole and features cut."""
    mesh = layers.mesh_of(count)
    if torch.distributed.get_rank() >= count:
        return []
    x, weight, grad = whole = _tensors(96, 48, 96)
    wanted = _run(f8.linear, *whole, recipe=RECIPES[name])
    found = []
    for where in (("tokens", "replicate", "tokens"), ("replicate", 0, "features"), ("features", 1, "replicate")):
        own = [layers.placed(tensor, place, mesh) for tensor, place in zip((x, weight, grad), where, strict=True)]
        x_own, weight_own = (tensor.requires_grad_() for tensor in own[:2])
        y = f8.linear(x_own, weight_own, None, recipe=RECIPES[name])
        y.redistribute(placements=own[2].placements).backward(own[2])
        for which, got, want in zip(("y", "dx", "dw"), (y.detach(), x_own.grad, weight_own.grad), wanted, strict=True):
            compare = sum_difference if got.placements[0].is_partial() else difference
            if text := compare(got.full_tensor(), want):
                found.append(f"{which} {text}; {name} {where} on {count}")
    return found


def every_problem(name, size, backends):
    return [
        problem
        for layer in LAYERS
        for features in FEATURES[size]
        for sequence_dim in (None, 1)
        for backend in backends
        for problem in problems(name, layer, features, sequence_dim, backend)
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_layers_on_ranks_have_the_codes_of_the_whole(ranks, name, size):
    backends = (None, "aot_eager") if "nvfp4" in name else (None,)
    for found in ranks.run(every_problem, name, size, backends, within=GROUP_NAMES[size]):
        assert found == []


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["nvfp4", "rowwise"])
def test_dtensors_have_the_codes_of_the_whole(ranks, name, count):
    for found in ranks.run(problems_of_dtensors, name, count):
        assert found == []


@pytest.mark.parametrize("size", [2, 3])
def test_weights_that_fsdp_gathers_in_a_graph_have_the_codes_of_the_whole(ranks, size):
    for found in ranks.run(test_graph_fsdp.check_op, "nvfp4", size, within=GROUP_NAMES[size]):
        assert found == []


def refusal_of_tokens():
    group = GROUPS["pair"]
    x, weight = torch.randn(2, 9, 32), torch.randn(16, 32)
    options = {"recipe": RECIPES["nvfp4"], "group": group, "sequence_dim": 1}
    y = parallel.column_parallel_linear(x.requires_grad_(), weight.requires_grad_(), None, **options)
    try:
        y.sum().backward()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_tokens_that_cannot_be_transformed_on_ranks_are_refused(ranks):
    for said in ranks.run(refusal_of_tokens):
        assert "applies to groups of 16 tokens, but this rank has a shard of 36 of 36" in said
        assert "nvfp4(hadamard=())" in said


def shard_and_whole(sizes):
    """A shard that is quantized with its sizes has the whole's codes; without sizes none can know them."""
    group = GROUPS["pair"]
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    quantizer = f8.CurrentScaling(block=(1, -1), rounding="stochastic")
    part = x.split(sizes)[group.rank()]
    found = f8.quantize(part, quantizer, group=group, shard_dim=0, sizes=sizes)
    whole = f8.quantize(x, quantizer).codes.split(sizes)[group.rank()]
    try:
        f8.quantize(part, quantizer, group=group, shard_dim=0)
    except ValueError as error:
        return difference(found.codes, whole), str(error)
    return difference(found.codes, whole), "nothing"


def test_a_quantized_shard_has_the_noise_of_the_whole(ranks):
    for differs, said in ranks.run(shard_and_whole, (25, 15)):
        assert differs is None
        assert "pass the size of each shard: sizes=" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_refuse_together_what_one_of_them_cannot_transform(rank):
    """If only the rank with 17 tokens raised, the other one would wait for its amaxes."""
    cut = DimSharding(None, rank, 0, (32, 17))
    part = Plain(torch.ones(cut.length, 8), TensorLayout((cut,)))
    with pytest.raises(ValueError, match=f"groups of 16 tokens, but this rank has a shard of {cut.length} of 49"):
        quantize_part(part, RECIPES["nvfp4"].input_for_grad_weight)


def packed_shard_and_whole(sizes):
    x, quantizer = torch.randn(64, 24, generator=torch.Generator().manual_seed(0)), f8.recipes.nvfp4(hadamard=())
    quantizer, group = quantizer.input_for_grad_weight, GROUPS["pair"]
    found = f8.quantize(x.split(sizes)[group.rank()], quantizer, group=group, shard_dim=0, sizes=sizes)
    return difference(found.all_gather(0).dequantize(), f8.quantize(x, quantizer).dequantize())


@pytest.mark.parametrize("sizes", [(31, 33), (40, 24)], ids=str)
def test_a_shard_of_any_size_has_the_codes_of_a_whole_that_is_packed(ranks, sizes):
    assert ranks.run(packed_shard_and_whole, sizes, within="pair") == [None] * 2
