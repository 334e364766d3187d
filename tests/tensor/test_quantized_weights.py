"""fp8compile.linear with a weight that is a QuantizedTensor: its own codes, once, in both directions."""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch._dynamo.utils import counters

import fp8compile as f8
from fp8compile import _compat
from fp8compile.ops.layer.layer_sharding import UNSHARDED
from fp8compile.testing.bits import difference

RECIPES = {
    "tensorwise": f8.recipes.tensorwise(),
    "tensorwise, powers of two": f8.recipes.tensorwise(scale="pow2"),
    "blockwise": f8.recipes.blockwise(),
    "mxfp8, 32 x 32": f8.recipes.mxfp8(weight_block=(32, 32)),
}
# those that cast a weight for each direction, or remember, or keep grad_input in high precision
OTHERS = {
    "rowwise": f8.recipes.rowwise(),
    "rowwise_bf16_wgrad": f8.recipes.rowwise_bf16_wgrad(),
    "mxfp8": f8.recipes.mxfp8(),
    "forward only": f8.Recipe(input=f8.CurrentScaling(), weight=f8.CurrentScaling()),
    "high precision": f8.Recipe(),
}
PLAIN = None, [], [], UNSHARDED  # arguments of an op: no groups, nothing known, full tensors
DTYPES = (torch.bfloat16, torch.float32)
needs_groups = pytest.mark.skipif(_compat.TORCH_VERSION < (2, 12), reason="a group on a tensor needs PyTorch 2.12")


def values(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(layer, weight, dtype, steps=3):
    """Output and gradients of x, weight, bias; in each step the same."""
    x, bias = values(2, 9, 160, seed=1, dtype=dtype), values(144, seed=2, dtype=dtype)
    found = []
    for _ in range(steps):
        leaves = [x.clone().requires_grad_(), nn.Parameter(weight), bias.clone().requires_grad_()]
        y = layer(*leaves)
        y.backward(values(*y.shape, seed=3, dtype=dtype))
        assert all(type(each.grad) is torch.Tensor for each in leaves)
        found.append([y.detach(), *(each.grad for each in leaves)])
    for other in found[1:]:
        assert all(difference(a, b) is None for a, b in zip(other, found[0], strict=True))
    return found[0]


def layer_of(recipe):
    # ReLU in place: what the layer returns is no view
    return lambda x, weight, bias: f8.linear(x, weight, bias, recipe=recipe).relu_()


# ---------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_eager_layer_has_the_bits_of_the_weight_that_was_quantized(recipe, dtype, assert_bits_equal):
    weight = values(144, 160, dtype=dtype)
    quantized = f8.quantize(weight, recipe.weight)
    expected = step(layer_of(recipe), weight, dtype)
    for what, a, b in zip("ywxb", step(layer_of(recipe), quantized, dtype), expected, strict=True):
        assert_bits_equal(a, b, what)


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [
        ("tensorwise", "aot_eager", torch.float32),
        ("tensorwise", "inductor", torch.bfloat16),
        ("blockwise", "aot_eager", torch.bfloat16),
        ("blockwise", "inductor", torch.float32),
        ("mxfp8, 32 x 32", "aot_eager", torch.bfloat16),
    ],
)
def test_compiled_layer_is_one_graph_with_the_bits_of_eager(name, backend, dtype, assert_bits_equal):
    recipe = RECIPES[name]
    weight, layer = values(144, 160, dtype=dtype), layer_of(recipe)
    quantized = f8.quantize(weight, recipe.weight)
    found = step(torch.compile(layer, fullgraph=True, backend=backend), quantized, dtype)
    assert counters["stats"]["unique_graphs"] == 1
    for what, a, b in zip("yxw", found, step(layer, quantized, dtype), strict=False):
        assert_bits_equal(a, b, what)
    # Inductor sums the tokens of a float32 bias in an order of its own, with a plain weight too
    plain = step(torch.compile(layer, fullgraph=True, backend=backend), weight, dtype)
    assert_bits_equal(found[3], plain[3], "bias")


def test_nothing_is_quantized_again(monkeypatch):
    recipe = f8.recipes.tensorwise()
    quantized = f8.quantize(values(32, 48), recipe.weight)
    quantized.codes.copy_(quantized.codes.roll(1, 0))  # other codes than any quantizer would make of the values
    x = values(4, 48, seed=1)
    expected = f8.linear(x, quantized.dequantize(), recipe=recipe)
    assert difference(f8.linear(x, quantized, recipe=recipe), expected) is None
    quantized.scale.mul_(2)  # one that a quantizer would not choose
    assert difference(f8.linear(x, quantized, recipe=recipe), expected * 2) is None


def test_transposed_view_of_codes_serves_too(assert_bits_equal):
    recipe = f8.recipes.blockwise()
    weight = values(160, 144)
    found = step(layer_of(recipe), f8.quantize(weight, recipe.weight).t(), torch.bfloat16, steps=1)
    for a, b in zip(found, step(layer_of(recipe), weight.t(), torch.bfloat16, steps=1), strict=True):
        assert_bits_equal(a, b)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("recipe", OTHERS.values(), ids=OTHERS)
def test_recipe_that_one_set_of_codes_does_not_serve_raises(recipe):
    assert not recipe.shares_weight_codes()
    quantized = f8.quantize(values(64, 64), recipe.weight or f8.CurrentScaling())
    with pytest.raises(
        ValueError, match=r"linear: `weight` is a QuantizedTensor of CurrentScaling.*same quantizer for both"
    ):
        f8.linear(values(4, 64), quantized, recipe=recipe)
    with pytest.raises(ValueError, match=r"linear: `weight` is a QuantizedTensor"):
        f8.ops.linear(values(4, 64), quantized, None, *PLAIN, recipe)


def test_codes_by_their_own_amax_for_a_recipe_with_delayed_scaling_raise():
    recipe = f8.recipes.delayed()
    quantized, state = f8.quantize(values(64, 64), f8.CurrentScaling()), f8.DelayedState.initial(recipe)
    for call in (
        lambda: f8.linear(values(4, 64), quantized, recipe=recipe, state=state),
        lambda: f8.ops.delayed_linear(values(4, 64), quantized, None, None, None, *state, *PLAIN, recipe),
    ):
        with pytest.raises(ValueError, match=r"linear: `weight` is a QuantizedTensor of .* by DelayedScaling"):
            call()


def test_codes_of_another_format_raise():
    recipe, quantized = f8.recipes.tensorwise(), f8.quantize(values(64, 64), f8.CurrentScaling(format="e5m2"))
    for function in (f8.linear, torch.compile(f8.linear, backend="aot_eager")):
        with pytest.raises(ValueError, match=r"format='e5m2'.*the recipe quantizes weights by"):
            function(values(4, 64), quantized, recipe=recipe)


def test_operand_other_than_the_weight_raises():
    recipe = f8.recipes.tensorwise()
    quantized = f8.quantize(values(64, 64), recipe.weight)
    with pytest.raises(TypeError, match="linear: `x` is a QuantizedTensor, but linear quantizes its operands itself"):
        f8.linear(quantized, values(64, 64), recipe=recipe)
    for x, weight in ((quantized, values(64, 64)), (quantized, quantized)):
        with pytest.raises(TypeError, match="linear: only `weight` can be a QuantizedTensor"):
            f8.ops.linear(x, weight, None, *PLAIN, recipe)


def test_autocast_to_another_dtype_raises_and_to_its_own_runs(assert_bits_equal):
    recipe, x = f8.recipes.tensorwise(), values(4, 64, dtype=torch.float32)
    weight = values(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = f8.linear(x, f8.quantize(weight, recipe.weight), recipe=recipe)
        assert_bits_equal(found, f8.linear(x, weight, recipe=recipe))
        with pytest.raises(TypeError, match=r"from torch.float32, but autocast is to torch.bfloat16"):
            f8.linear(x, f8.quantize(weight.float(), recipe.weight), recipe=recipe)


# ---------------------------------------------------------------------------------- the key of the compile cache


def test_key_of_the_compile_cache_tells_quantizers_apart():
    kinds = [f8.CurrentScaling(), f8.CurrentScaling(format="e5m2"), f8.CurrentScaling(eps=1.0)]
    keys = [f8.quantize(values(32, 32), kind)._stable_hash_for_caching() for kind in kinds]
    assert len(set(keys)) == 3
    assert keys[0] == f8.quantize(values(32, 32, seed=1), f8.CurrentScaling())._stable_hash_for_caching()


# ---------------------------------------------------------------------------------- on ranks


def with_a_group(backend):
    """A rank's rows of a weight whose scale all ranks share, as its layer's weight: graphs, and what differs."""
    recipe, weight = f8.recipes.tensorwise(), values(144 * 4, 160)
    rank = torch.distributed.get_rank()
    mine = weight.chunk(4)[rank] * (rank + 1)
    q = f8.quantize(mine, recipe.weight, group=GROUPS["all"], shard_dim=0)
    whole = f8.quantize(torch.cat([part * (r + 1) for r, part in enumerate(weight.chunk(4))]), recipe.weight)
    assert difference(q.scale, whole.scale) is None
    found = step(torch.compile(layer_of(recipe), fullgraph=True, backend=backend), q, torch.bfloat16)
    graphs = counters["stats"]["unique_graphs"]
    expected = step(layer_of(recipe), whole[rank * 144 : rank * 144 + 144], torch.bfloat16)
    return graphs, [difference(a, b) for a, b in zip(found, expected, strict=True)]


def shard_that_cuts_blocks():
    recipe, rank = f8.recipes.blockwise(), GROUPS["pair"].rank()
    shard = values(200, 128).chunk(2)[rank]
    q = f8.quantize(shard, recipe.weight, group=GROUPS["pair"], shard_dim=0, sizes=(100, 100))
    try:
        f8.linear(values(4, 128), q, recipe=recipe)
    except ValueError as error:
        return str(error)


def dtensor_weights(name):
    """Layers on a mesh whose weights were quantized before: what differs from what the layer makes of plain ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    recipe, mesh = RECIPES[name], init_device_mesh("cpu", (4,))
    found = []
    for placement, rows, x_placement in ((Shard(0), 300, Replicate()), (Shard(1), 300, Shard(2))):
        weight = distribute_tensor(values(rows, 160), mesh, [placement])
        local = weight.to_local()
        sizes = tuple(each.shape[placement.dim] for each in values(rows, 160).chunk(4, placement.dim))
        codes = f8.quantize(local, recipe.weight, group=mesh.get_group(), shard_dim=placement.dim, sizes=sizes)
        quantized = torch.distributed.tensor.DTensor.from_local(
            codes, mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride()
        )
        results = []
        for each in (weight, quantized):
            x = distribute_tensor(values(2, 9, 160, seed=1), mesh, [x_placement]).requires_grad_()
            each = nn.Parameter(each)
            y = f8.linear(x, each, recipe=recipe)
            y.redistribute(placements=[Replicate()]).to_local().square().sum().backward()
            results.append([t.to_local() for t in (y.detach(), x.grad, each.grad)])
        found += [difference(a, b) for a, b in zip(*results, strict=True)]
    return found


@needs_groups
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_shard_with_a_group_is_a_weight(backend):
    assert shared_ranks().run(with_a_group, backend) == [(1, [None] * 4)] * 4


@needs_groups
def test_shard_that_cuts_blocks_raises():
    for text in shared_ranks().run(shard_that_cuts_blocks):
        assert text.startswith("linear: `weight` is a shard of sizes (100, 100) along dim 0, which splits blocks")


@needs_groups
@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_dtensor_of_codes_is_a_weight(name):
    assert shared_ranks().run(dtensor_weights, name) == [[None] * 6] * 4
