"""Layers on DTensors compute what one process computes: bit for bit, but for sums that cross ranks.

Such a sum adds a bfloat16 number a rank. Each of its terms is rounded once, each addition, the addition of a bias, and
in one process the sum itself: the bound is that many roundings of the magnitudes of all terms together. What is a sum,
DTensor's own placements say.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import fsdp_models as models
import pytest
import torch
from gloo_ranks import shared_ranks

import fp8compile as f8
from fp8compile import ops
from fp8compile.layout.cuts import DimSharding
from fp8compile.layout.quantized import Plain, TensorLayout
from fp8compile.ops.layer.gather_operands import gather, narrow
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_sharding import UNSHARDED
from fp8compile.ops.layer.quantize_over_ranks import quantize_part
from fp8compile.parallel.dtensor_placements import part_of
from fp8compile.quantizers import GemmConfig
from fp8compile.testing.bits import bits

ROUNDING = 2.0**-8  # of bfloat16: half a unit in the last place, relative to the number
FLOAT32_SUMS = 1.05  # the products themselves are summed in float32, in an order that depends on their sizes
RECIPES = {
    "tensorwise": f8.recipes.tensorwise(),
    "tensorwise pow2": f8.recipes.tensorwise(scale="pow2"),
    "rowwise": f8.recipes.rowwise(),
    "rowwise pow2": f8.recipes.rowwise(scale="pow2"),
    "rowwise_bf16_wgrad": f8.recipes.rowwise_bf16_wgrad(),
    "blockwise": f8.recipes.blockwise(),
    "mxfp8": f8.recipes.mxfp8(),
    "delayed": f8.recipes.delayed(history=4),
}
# placements of x, weight, and the layer's output as the next one takes it; "tokens" is the dim before the last
LAYOUTS = {
    "colwise": ("replicate", 0, "features"),
    "rowwise": ("features", 1, "replicate"),
    "SP to colwise": ("tokens", 0, "features"),
    "rowwise to SP": ("features", 1, "tokens"),
    "data parallel": (0, "replicate", 0),
    "input alone cut along K": ("features", "replicate", "replicate"),
}
SHAPES = {
    "even": ((32, 64), 48),
    "batches of tokens": ((2, 30, 64), 48),
    "cut blocks": ((3, 50, 160), 144),
    "nothing divides": ((67, 129), 91),
    "more ranks than tokens": ((1, 32), 16),
    "no token": ((0, 32), 16),
}
WAYS = ((None, 2), (None, 3), ("aot_eager", 2))
# each recipe with each layout, with each shape, and in each way
PAIRWISE = [
    (recipe, layout, shape, *WAYS[(i + j + k) % len(WAYS)])
    for i, recipe in enumerate(RECIPES)
    for j, layout in enumerate(LAYOUTS)
    for k, shape in enumerate(SHAPES)
    if (i + j) % len(SHAPES) == k or (i + 2 * j) % len(SHAPES) == k
]
# Inductor takes half a minute each: where windows and a state are in the graph; gathers: test_explicit_groups.py
PAIRWISE += [
    ("blockwise", "rowwise to SP", "cut blocks", "inductor", 2),
    ("delayed", "rowwise", "nothing divides", "inductor", 2),
]
# blocks as those of "blockwise", whose scales are bytes
PAIRWISE += [
    (models.SQUARES, "colwise", "cut blocks", None, 2),
    (models.SQUARES, "rowwise to SP", "cut blocks", "aot_eager", 2),
    (models.SQUARES, "SP to colwise", "nothing divides", None, 3),
    (models.SQUARES, "rowwise", "batches of tokens", None, 2),
]
EVERY_WAY = (*WAYS, ("inductor", 2))
# any three of recipe, layout, shape and way meet once: a fourth of the full product
THREEWISE = [
    (recipe, layout, shape, *EVERY_WAY[(i + j + k) % len(EVERY_WAY)])
    for i, recipe in enumerate(RECIPES)
    for j, layout in enumerate(LAYOUTS)
    for k, shape in enumerate(SHAPES)
]


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank

MESHES: dict[int, object] = {}


def mesh_of(count):
    """A mesh of the first ranks; all ranks have to ask for it."""
    from torch.distributed.device_mesh import DeviceMesh

    if count not in MESHES:
        MESHES[count] = DeviceMesh("cpu", list(range(count)))
    return MESHES[count]


def placed(tensor, where, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dims = {"tokens": max(tensor.ndim - 2, 0), "features": tensor.ndim - 1}
    placement = Replicate() if where == "replicate" else Shard(dims.get(where, where))
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None).detach()


def tensors_of(shape, dtype=torch.bfloat16):
    (*leading, k), n = shape
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in ((*leading, k), (n, k), (*leading, n), (n,))]


def roundings(ranks):
    """Of a term, of the additions, of one process's sum, of the bias in both."""
    return 1 + (ranks - 1) + 1 + 2


def differs(found, expected, bias):
    """What is wrong with a DTensor, or None; ``bias`` is part of the first rank's term."""
    whole, ranks = found.full_tensor(), found.device_mesh.size()
    if not found.placements[0].is_partial():
        return None if torch.equal(bits(whole), bits(expected)) else f"{found.placements}: not the same bits"
    terms = [torch.empty_like(whole) for _ in range(ranks)]
    torch.distributed.all_gather(terms, found.to_local().contiguous(), group=found.device_mesh.get_group())
    bound = FLOAT32_SUMS * roundings(ranks) * ROUNDING * (sum(term.double().abs() for term in terms) + bias.abs())
    off = (whole.double() - expected.double()).abs() - bound
    return None if bool((off <= 0).all()) else f"{found.placements}: {off.max().item()} beyond the bound"


def terms_of_x(grad, weight, multiplier, recipe):
    """The gradient of x before ranks add what they have of it."""
    return f8.ops.grad_input(grad, weight, None, [*Known(multiplier=multiplier)], [], UNSHARDED, recipe)


def layer_on_ranks(*case):
    """What differs from one process, in words; None on a rank that is not in the mesh."""
    return outcome(*case)[0]


def outcome(recipe_name, layout, shape_name, backend, count):
    """What differs from one process, in words, and what of a layer is a sum over ranks."""
    mesh = mesh_of(count)
    if torch.distributed.get_rank() >= count:
        return None, []
    recipe = RECIPES.get(recipe_name) or models.recipe_of(recipe_name)
    x, weight, grad, bias = tensors_of(SHAPES[shape_name])

    def layer(x, weight, bias, state):
        return f8.linear(x, weight, bias, recipe=recipe, state=state)

    def state(wrap):
        if not recipe.history():
            return None
        initial = f8.DelayedState.initial(recipe)
        return f8.DelayedState(wrap(initial.amax_history), wrap(initial.multiplier * 16), None)

    own = [t.clone().requires_grad_() for t in (x, weight, bias)]
    own_state = state(lambda t: t)
    own_y = layer(*own, own_state)
    own_y.backward(grad)

    where_x, where_weight, where_y = LAYOUTS[layout]
    wheres = (where_x, where_weight, 0 if where_weight == 0 else "replicate")
    spread = [placed(t, where, mesh).requires_grad_() for t, where in zip((x, weight, bias), wheres, strict=True)]
    spread_state = state(lambda t: placed(t, "replicate", mesh))
    multiplier = None if spread_state is None else spread_state.multiplier.clone()
    run = layer if backend is None else torch.compile(layer, fullgraph=True, backend=backend)
    y = run(*spread, spread_state)
    y.redistribute(placements=placed(grad, where_y, mesh).placements).backward(placed(grad, where_y, mesh))

    found = {
        "y": (y, own_y),
        **{n: (s.grad, o.grad) for n, s, o in zip(("x", "weight", "bias"), spread, own, strict=True)},
    }
    no_bias = torch.zeros(())
    scattered = None
    if where_x == "tokens" and where_weight == 0:  # a sum that was scattered already: its terms tell what it may be
        terms = terms_of_x(placed(grad, where_y, mesh), spread[1].detach(), multiplier, recipe)
        scattered = differs(found["x"][0], terms.redistribute(placements=spread[0].placements).full_tensor(), no_bias)
        found["x"] = terms, own[0].grad
    wrong = {name: differs(*pair, bias if name == "y" else no_bias) for name, pair in found.items()}
    if own_state is not None:
        same = all(torch.equal(a.full_tensor(), b) for a, b in zip(spread_state[:2], own_state[:2], strict=True))
        wrong["state"] = None if same else "not that of one process"
    wrong["sum of x"] = scattered
    wrong["graphs"] = None
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if backend is not None and graphs != 1:
        wrong["graphs"] = f"{graphs} of them"
    sums = [name for name, (tensor, _) in found.items() if tensor.placements[0].is_partial()]
    return {name: text for name, text in wrong.items() if text}, sums


def parametrized(cases):
    return pytest.mark.parametrize(
        ("recipe", "layout", "shape", "backend", "count"), cases, ids=["-".join(map(str, case)) for case in cases]
    )


@parametrized(PAIRWISE)
def test_a_layer_on_ranks_is_that_of_one_process(ranks, recipe, layout, shape, backend, count):
    answers = ranks.run(layer_on_ranks, recipe, layout, shape, backend, count)
    assert answers[:count] == [{}] * count


@pytest.mark.slow
@parametrized([case for case in THREEWISE if case not in PAIRWISE])
def test_every_layer_on_ranks_is_that_of_one_process(ranks, recipe, layout, shape, backend, count):
    answers = ranks.run(layer_on_ranks, recipe, layout, shape, backend, count)
    assert answers[:count] == [{}] * count


# ---------------------------------------------------------------------------------- quantizers of others

LIBRARY = Path(__file__).parents[2] / "examples" / "custom_quantizer"
# blocks of 64 inside a rank's part and cut by its end, tokens and features that nothing divides, and no token
LIBRARY_SHAPES = ("cut blocks", "nothing divides", "no token")


def codes_problems(quantizer, mesh):
    """Where codes and scales of a tensor that is cut are not those of the whole."""
    problems = []
    for shape_name, dim in ((name, dim) for name in LIBRARY_SHAPES for dim in ("tokens", "features")):
        x = tensors_of(SHAPES[shape_name])[0]
        expected = quantize_part(Plain(x, TensorLayout((None,))), quantizer)
        part = part_of("test", placed(x, dim, mesh))
        found = gather(quantize_part(part, quantizer), 0)
        scale = found.scale.reshape(expected.scale.shape)  # of cut blocks, it comes as that of the matrix
        same = torch.equal(found.codes, expected.codes) and torch.equal(bits(scale), bits(expected.scale))
        problems += [] if same else [f"codes of {shape_name}, cut along {dim}"]
    return problems


def library_on_ranks(backend, count):
    """What differs from one process with the example library's quantizers, and with one that watches one of them."""
    sys.path.insert(0, str(LIBRARY))
    import swiglu8

    if torch.distributed.get_rank() < count:
        swiglu8.clear()
    problems = []
    quantizers = {"ceil8": swiglu8.Ceil8(), "watched": swiglu8.watch(swiglu8.Ceil8(), "on ranks")}
    quantizers["int8"] = swiglu8.Int8()  # multiplied by a GEMM of that library
    shapes = LIBRARY_SHAPES
    if backend is not None:  # the one around it holds the other; compiling takes its time
        del quantizers["ceil8"]
        shapes = ("cut blocks",)
    for name, quantizer in quantizers.items():
        RECIPES[name] = f8.library.recipe(quantizer)
        for layout, shape in ((layout, shape) for layout in LAYOUTS for shape in shapes):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            if wrong := layer_on_ranks(name, layout, shape, backend, count):
                problems.append((name, layout, shape, wrong))
        if torch.distributed.get_rank() < count:
            problems += codes_problems(quantizer, mesh_of(count))
    return problems, torch.distributed.get_rank() >= count or swiglu8.seen()["on ranks"].elements > 0


@pytest.mark.parametrize(("backend", "count"), [(None, 2), (None, 3), ("aot_eager", 2)])
def test_the_example_librarys_quantizers_and_one_around_them_are_those_of_one_process(ranks, backend, count):
    assert ranks.run(library_on_ranks, backend, count, seconds=500) == [([], True)] * 4


# ---------------------------------------------------------------------------------- codes written transposed


def gathered_unlike_whole(cut_dim):
    """Whether gathered codes differ from the whole's, if one rank's kernel wrote them column-major, and others not.

    A rank whose rows end within a block takes no kernel, and of one row or none strides say nothing.
    """
    quantizer, sizes = f8.recipes.mxfp8().weight_for_grad_input, (64, 32, 1, 0)
    shape = (sum(sizes), 40) if cut_dim == 0 else (40, sum(sizes))
    x, rank = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.distributed.get_rank()
    cut = DimSharding(torch.distributed.group.WORLD, rank, cut_dim, sizes)
    part = quantize_part(Plain(x.split(sizes, cut_dim)[rank], TensorLayout((cut,))), quantizer)
    if rank == 0:
        part = replace(part, codes=part.codes.t().contiguous().t())
    found, whole = gather(part, 0), quantize_part(Plain(x, TensorLayout((None,))), quantizer)
    return not torch.equal(found.codes, whole.codes) or not torch.equal(bits(found.scale), bits(whole.scale))


@pytest.mark.parametrize("cut_dim", [0, 1])
def test_ranks_gather_codes_in_one_layout_however_each_wrote_them(ranks, cut_dim):
    assert ranks.run(gathered_unlike_whole, cut_dim) == [False] * 4


# ---------------------------------------------------------------------------------- meshes of two dims

R = None  # every rank of a group has all of it


def on_mesh(tensor, dims, shape):
    """A DTensor on a mesh of this shape, cut by each of its groups along a dim, or not."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if shape not in MESHES:
        MESHES[shape] = DeviceMesh("cpu", torch.arange(4).view(shape))
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return distribute_tensor(tensor, MESHES[shape], placements, src_data_rank=None).detach()


def op_on_ranks(op, tensors, dims, others, shape):
    """Whether an op on DTensors gives what it gives on whole tensors: bits, but for the order of a product's sums."""
    made, op = tensors(), getattr(ops, op)
    expected = op(*made, *others)
    found = op(*(on_mesh(t, where, shape) for t, where in zip(made, dims, strict=True)), *others)
    whole = found.full_tensor()
    assert found.to_local().is_contiguous()
    if op in (ops.amax, ops.cast):
        return torch.equal(bits(whole), bits(expected))
    return bool(((whole - expected).abs() <= 2.0**-18 * expected.abs().max()).all())


def normal(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def layer_operands():
    return normal((8, 32), (16, 32), (16,))


def gradient_operands():
    return normal((4, 128, 16), (4, 128, 32))


def gradients_of_one_batch():
    return normal((1, 100, 16), (1, 100, 32))


def cast_operands():
    (x,) = normal((8, 16))
    return [x, ops.scale(ops.amax(x, ROWWISE), ROWWISE)[0]]


def codes_to_multiply():
    a, b = (f8.quantize(t, ROWWISE) for t in normal((9, 16), (12, 16)))
    return [a.codes, b.codes.t(), a.scale, b.scale.t()]


def one_row():
    return normal((1, 16))


def wide_layer_operands():
    return normal((6, 128), (200, 128))


ROWWISE = f8.CurrentScaling(block=(1, -1))
TWICE = {  # x, weight and bias of a layer, where two groups cut one dim of one of them
    "tokens, where only the first meets a cut weight": ((0, 0), (0, R), (0, R)),
    "a bias, of which only the second cuts the weight": ((0, R), (R, 0), (0, 0)),
    "in_features, by one group of x and by the other of the weight": ((1, R), (R, 1), (R, R)),
    "in_features of x": ((1, 1), (R, 1), (R, R)),
    "in_features of the weight": ((R, 1), (1, 1), (R, R)),
    "tokens and out_features": ((0, 0), (0, 0), (0, 0)),
}


@pytest.mark.parametrize("dims", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_two_groups_that_cut_one_dim(ranks, recipe, dims):
    others = None, [], [], UNSHARDED, f8.recipes.by_name(recipe)
    arguments = "linear", layer_operands, dims, others, (2, 2)
    assert ranks.run(op_on_ranks, *arguments) == [True] * 4


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("dims", [((0, 1), (0, R)), ((0, 1), (1, 0)), ((0, R), (R, 0)), ((1, 0), (R, 0))])
def test_gradients_whose_tokens_are_cut_by_two_groups(ranks, recipe, dims):
    others = torch.float32, None, [], [], UNSHARDED, f8.recipes.by_name(recipe)
    arguments = "grad_weight", gradient_operands, dims, others, (2, 2)
    assert ranks.run(op_on_ranks, *arguments) == [True] * 4


@pytest.mark.parametrize("dims", [((0, 1), (0, R)), ((0, R), (0, 1))])
def test_gradients_of_tokens_that_are_cut_again_where_a_group_has_none(ranks, dims):
    others = torch.float32, None, [], [], UNSHARDED, f8.recipes.blockwise()
    arguments = "grad_weight", gradients_of_one_batch, dims, others, (2, 2)
    assert ranks.run(op_on_ranks, *arguments) == [True] * 4


@pytest.mark.parametrize("dims", [((0, R), (R, 0)), ((0, 0), (0, R)), ((R, 0), (0, 0))])
def test_an_op_by_its_rule_whose_arguments_two_groups_cut(ranks, dims):
    assert ranks.run(op_on_ranks, "cast", cast_operands, dims, (ROWWISE,), (2, 2)) == [True] * 4


def test_ranks_agree_what_to_gather_where_some_have_less(ranks):
    """Counted by their own parts, a rank with nothing gathers for free, and one with less of a gathers that."""
    for quantizer in (f8.CurrentScaling(), ROWWISE):
        assert ranks.run(op_on_ranks, "amax", one_row, [(0,)], (quantizer,), (4,), seconds=60) == [True] * 4
    quantizers = ROWWISE, ROWWISE.transposed(), torch.float32, GemmConfig()
    dims = [(0,), (1,), (0,), (1,)]
    assert ranks.run(op_on_ranks, "scaled_mm", codes_to_multiply, dims, quantizers, (4,), seconds=60) == [True] * 4


def test_columns_taken_of_a_window_are_contiguous(ranks):
    others = None, None, [], [], UNSHARDED, f8.recipes.blockwise()
    arguments = "linear", wide_layer_operands, [(R,), (0,)], others, (4,)
    assert ranks.run(op_on_ranks, *arguments) == [True] * 4


# ---------------------------------------------------------------------------------- packed codes


@dataclass(frozen=True, repr=False)
class Halves(f8.CurrentScaling):
    """Two codes in a byte, as of 4-bit numbers; what they stand for is of no interest."""

    block: tuple[int, int] = (1, -1)

    def codes_shape(self, shape):
        return (*shape[:-1], shape[-1] // 2)

    def values_shape(self, codes_shape):
        return (*codes_shape[:-1], 2 * codes_shape[-1])

    def transposed(self):
        return super().transposed()

    def cast(self, x, multiplier):
        return super().cast(x, multiplier)[..., ::2].contiguous()

    def dequantize(self, codes, scale, dtype=torch.float32):
        return super().dequantize(codes.repeat_interleave(2, -1), scale, dtype)


def refusals_of_packed_codes():
    """What a cut operand, and a whole one that is to be gathered or cut, say."""
    quantizer = Halves()
    codes = quantize_part(Plain(torch.randn(4, 16), TensorLayout((None,))), quantizer)  # a whole tensor may be packed
    cut = DimSharding(torch.distributed.group.WORLD, torch.distributed.get_rank(), 0, (1,) * 4)
    said = []
    for attempt in (
        lambda: quantize_part(Plain(torch.randn(1, 16), TensorLayout((cut,))), quantizer),
        lambda: narrow(codes, 0, cut),
        lambda: gather(codes.with_cuts((cut,)), 0),
    ):
        try:
            attempt()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_packed_codes_are_refused_wherever_ranks_would_cut_or_gather_them(ranks):
    for said in ranks.run(refusals_of_packed_codes):
        assert len(said) == 3
        assert len(set(said)) == 1, said
        assert "stores several values per byte" in said[0]
        assert "Use another recipe, or override unpacked() in the quantizer's class" in said[0]
