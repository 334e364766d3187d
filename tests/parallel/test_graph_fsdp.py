"""FSDP in the graph: the codes of the whole weight, the training of `fully_shard` bit for bit, in one graph.

On two ranks the mean of gradients is one rounded addition and an exact division, so one process computes the same
bits. Against `fully_shard` there is no tolerance but where three float32 gradients are added: in which order gloo adds
them depends on where they are in the message, and `fully_shard` sends a block's gradients in one.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import product

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, parallel
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fp8compile as f8
from fp8compile.ops import fsdp_amax, linear
from fp8compile.ops.layer.fsdp_rows import Rows
from fp8compile.ops.layer.known import Known
from fp8compile.ops.layer.layer_sharding import OverFsdp
from fp8compile.parallel import graph_fsdp
from fp8compile.testing.bits import bits, difference

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8")
MESHES = ("1-D", "three", "HSDP", "FSDP + TP")
EVERYTHING = [
    each
    for each in product(RECIPES, ("fp32", "pow2"), models.POLICIES, models.SIZES, MESHES)
    if each[:2] != ("mxfp8", "fp32") and (each[2], each[4]) != ("fp32", "three")
]
# each value of each with each of the others, but what mxfp8 doesn't have
PAIRWISE = [
    ("tensorwise", "fp32", "bf16", "uneven", "1-D"),
    ("tensorwise", "pow2", "fp32", "even", "three"),
    ("tensorwise", "fp32", "fp32", "even", "HSDP"),
    ("tensorwise", "pow2", "bf16", "uneven", "FSDP + TP"),
    ("rowwise", "pow2", "fp32", "even", "1-D"),
    ("rowwise", "fp32", "bf16", "uneven", "three"),
    ("rowwise", "pow2", "bf16", "uneven", "HSDP"),
    ("rowwise", "fp32", "fp32", "even", "FSDP + TP"),
    ("rowwise_bf16_wgrad", "fp32", "bf16", "even", "HSDP"),
    ("rowwise_bf16_wgrad", "pow2", "fp32", "uneven", "1-D"),
    ("blockwise", "fp32", "fp32", "uneven", "HSDP"),
    ("blockwise", "pow2", "bf16", "even", "FSDP + TP"),
    ("blockwise", "fp32", "bf16", "uneven", "three"),
    ("mxfp8", "pow2", "bf16", "even", "1-D"),
    ("mxfp8", "pow2", "fp32", "uneven", "FSDP + TP"),
    (models.SQUARES, "fp32", "bf16", "uneven", "1-D"),
    (models.SQUARES, "fp32", "fp32", "even", "FSDP + TP"),
]
# rows of each rank: even, as torch.chunk cuts, a rank with nothing, cuts within blocks of 128 and of 32
SIZES = {2: ((48, 48), (40, 39), (24, 0), (128, 72)), 3: ((32, 32, 32), (34, 34, 32), (20, 20, 0))}
PLAN = {"gate": parallel.ColwiseParallel, "up": parallel.ColwiseParallel, "down": parallel.RowwiseParallel}


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- the op, in each rank


def whole_tensors(rows, dtype, world):
    """x and grad_output of each rank, and the weight and bias that they share."""
    generator = torch.Generator().manual_seed(rows)

    def values(*shape):
        return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-4, 4, shape, generator=generator))

    xs, grads = ([values(2, 9, n).to(dtype) for _ in range(world)] for n in (72, rows))
    return xs, grads, values(rows, 72), values(rows).to(dtype)


def op_problems(name, sizes, dtype, known):
    """How output and gradients of the op differ from those of the layer on the whole weight, in words."""
    group = GROUPS.get({2: "pair", 3: "three"}[len(sizes)])
    if group is None:
        return []
    rank, recipe = group.rank(), models.recipe_of(name)
    xs, grads, weight, bias = whole_tensors(sum(sizes), dtype, len(sizes))
    shard = weight.split(sizes)[rank].contiguous()
    amaxes = []
    if known:
        quantizers = [recipe.weight, recipe.weight_for_grad_input]
        sets = (Known(amax=None if each is None else f8.ops.amax(weight.to(dtype), each)) for each in quantizers)
        amaxes = [part for each in sets for part in each]
    inputs = [each.clone().requires_grad_() for each in (xs[rank], shard, bias)]
    rows = Rows(sizes=tuple(sizes), rank=rank, group=group.group_name, replicas="", reduce_dtype="float32")
    y = linear(*inputs, None, amaxes, [], OverFsdp(rows), recipe)
    found = [y.detach(), *torch.autograd.grad(y, inputs, grads[rank])]

    of_ranks = []
    for x, grad in zip(xs, grads, strict=True):
        own = [each.clone().requires_grad_() for each in (x, weight.to(dtype), bias)]
        whole = f8.linear(*own, recipe=recipe)
        of_ranks.append([whole.detach(), *torch.autograd.grad(whole, own, grad)])
    expected = list(of_ranks[rank])
    mean = sum(each[2].float() for each in of_ranks) / len(sizes)
    expected[2] = mean.split(sizes)[rank]
    problems = []
    for what, actual, right in zip(("y", "grad_input", "grad_weight", "grad_bias"), found, expected, strict=True):
        if what == "grad_weight" and len(sizes) > 2:  # the order of a sum of three is gloo's
            torch.testing.assert_close(actual, right, rtol=3e-7, atol=float(mean.abs().max()) * 3e-7)
        elif text := difference(actual, right):
            problems.append(f"{what}: {text}; {name}, {sizes}, {dtype}, amaxes known: {known}")
    return problems


def check_op(name, size):
    cases = product(SIZES[size], (torch.bfloat16, torch.float32), (False, True))
    return [problem for case in cases for problem in op_problems(name, *case)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", [*RECIPES, models.SQUARES])
def test_the_op_has_the_bits_of_the_layer_on_the_whole_weight(ranks, recipe, size):
    for problems in ranks.run(check_op, recipe, size):
        assert problems == []


def check_amaxes(sizes):
    """What ranks know of the amaxes has the whole's as its maximum, NaN of one of them too."""
    group = GROUPS["pair"]
    weight = torch.randn(sum(sizes), 40, generator=torch.Generator().manual_seed(0))
    weight[-1, 3] = torch.nan
    rows = Rows(sizes=tuple(sizes), rank=0, group="", replicas="", reduce_dtype="float32")
    problems = []
    for name in RECIPES:
        recipe = f8.recipes.by_name(name)
        for role in ("weight", "weight_for_grad_input"):
            quantizer = getattr(recipe, role)
            if quantizer is None:
                continue
            right = f8.ops.amax(weight, quantizer)
            parts = [
                fsdp_amax(shard, torch.float32, replace(rows, rank=rank), list(right.shape), role, recipe)
                for rank, shard in enumerate(weight.split(sizes))
            ]
            if difference(torch.maximum(*parts), right):
                problems.append((name, role))
    return problems if group.rank() == 0 else []


@pytest.mark.parametrize("sizes", SIZES[2])
def test_amaxes_of_shards_are_those_of_the_whole(ranks, sizes):
    assert ranks.run(check_amaxes, sizes) == [[]] * 4


# ---------------------------------------------------------------------------------- models, in each rank


def recipe_of(name, scale="fp32"):
    return models.recipe_of(name) if scale == "fp32" or name == "mxfp8" else getattr(f8.recipes, name)(scale=scale)


def prepared(sizes, recipe, mesh, **options):
    """The model, tensor parallel if so told, and the mesh to shard it over; None on a rank outside of it."""
    if mesh == "three" and dist.get_rank() == 3:
        return None, None
    model = models.model_of(sizes, recipe, **options)
    if mesh in ("1-D", "three"):
        return model, models.mesh_1d({"1-D": "pair", "three": "three"}[mesh])
    if mesh == "HSDP":
        return model, models.mesh_2d("replicate", "shard")
    both = models.mesh_2d("dp", "tp")
    for block in model.blocks:
        styles = {"use_local_output": False}
        plan = {f"inner.{name}": style(**(styles if name != "down" else {})) for name, style in PLAN.items()}
        parallel.parallelize_module(block, both["tp"], plan)
    return model, both["dp"]


def data_rank(mesh):
    """Whose batch a rank reads: ranks of one tensor parallel group read the same."""
    return dist.get_rank() // 2 if mesh == "FSDP + TP" else dist.get_rank()


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


def graph_and_stock(recipe, scale, policy, sizes, mesh, steps, backend=None):
    """What differs between training here and with `fully_shard`, in words."""
    losses, weights = {}, {}
    for function in (models.shard, graph_fsdp):
        model, where = prepared(sizes, recipe_of(recipe, scale), mesh)
        if model is None:
            return []
        options = {"mp_policy": models.POLICIES[policy]} if function is graph_fsdp else {}
        model = function(model, where, **options) if options else function(model, where, models.POLICIES[policy])
        run = torch.compile(model, fullgraph=True, backend=backend) if backend and function is graph_fsdp else model
        losses[function.__name__] = models.trained(run, steps, data_rank(mesh), optimizer=models.adamw(model))
        weights[function.__name__] = models.weights_of(model)
    found = differing(*weights.values())
    one, other = losses.values()
    return found if one == other else [*found, f"losses {losses}"]


@pytest.mark.parametrize("case", PAIRWISE, ids=" ".join)
def test_trains_as_fully_shard_does(ranks, case):
    assert not any(ranks.run(graph_and_stock, *case, 5, within=models.WITHIN[case[-1]]))


def gradients_of_three(recipe, sizes):
    """What of the first gradients is further from `fully_shard`'s than three float32 in another order, in words."""
    made = []
    for function in (models.shard, graph_fsdp):
        model, where = prepared(sizes, recipe_of(recipe), "three")
        model = function(model, where, models.POLICIES["fp32"]) if function is models.shard else function(model, where)
        loss = model(models.batch(0, dist.get_rank()))
        loss.backward()
        made.append((loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}))
    (loss, expected), (own_loss, found) = made
    # two roundings of 2**-24 of a sum, and room for three summands that cancel in part; measured: 0.3 of 2**-24
    far = [name for name, g in expected.items() if (found[name] - g).abs().max() > 2 * 2**-24 * 3 * g.abs().max()]
    return far if loss == own_loss else [*far, "loss"]


@pytest.mark.parametrize("sizes", models.SIZES)
def test_gradients_in_float32_on_three_ranks_are_those_of_fully_shard_in_another_order(ranks, sizes):
    assert ranks.run(gradients_of_three, "tensorwise", sizes, within="three") == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["HSDP", "FSDP + TP"])
def test_trains_as_fully_shard_does_in_one_graph_on_two_dims(ranks, mesh):
    assert ranks.run(graph_and_stock, "rowwise", "fp32", "bf16", "uneven", mesh, 3, "aot_eager") == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYTHING, ids=" ".join)
def test_trains_as_fully_shard_does_everywhere(ranks, case):
    assert not any(ranks.run(graph_and_stock, *case, 10, within=models.WITHIN[case[-1]]))


def sharded(recipe="tensorwise", sizes="uneven", policy="bf16", mesh="1-D"):
    model, where = prepared(sizes, recipe_of(recipe), mesh)
    return graph_fsdp(model, where, mp_policy=models.POLICIES[policy])


# ---------------------------------------------------------------------------------- what users do with it


def state_problems():
    """Keys, values, and that nothing but shards is kept."""
    plain, model = models.model_of("uneven", recipe_of("rowwise")), sharded("rowwise")
    state = model.state_dict()
    found = [] if list(state) == list(plain.state_dict()) else ["keys"]
    found += differing(plain.state_dict(), {name: each.full_tensor() for name, each in state.items()})
    found += [name for name, each in state.items() if not isinstance(each, DTensor)]
    found += differing(
        plain.state_dict(), {name: each.full_tensor() for name, each in get_model_state_dict(model).items()}
    )
    kept = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    whole = sum(p.untyped_storage().nbytes() for p in plain.parameters())
    if kept > 0.53 * whole:  # half, and what uneven rows add
        found.append(f"{kept} of {whole} bytes are kept")
    model.load_state_dict({name: each + 1 for name, each in state.items()})
    return found + differing({name: each + 1 for name, each in plain.state_dict().items()}, models.weights_of(model))


def test_state_dicts_are_those_of_the_unconverted_model(ranks):
    assert ranks.run(state_problems, within="pair") == [[]] * 2


def init_problems():
    """Made without memory, then initialized: shards change, and what the forward uses with them."""
    plain = models.model_of("uneven", recipe_of("tensorwise"))
    with torch.device("meta"):
        model, where = prepared("uneven", recipe_of("tensorwise"), "1-D")
    model = graph_fsdp(model, where, mp_policy=models.BF16).to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    untouched = [name for name, p in model.named_parameters() if not p.to_local().isfinite().all()]
    with torch.no_grad():
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            own.copy_(dist.tensor.distribute_tensor(other.detach(), own.device_mesh, own.placements))
    nn.init.constant_(model.head.weight, 0.5)
    nn.init.constant_(plain.head.weight, 0.5)
    found = [*untouched, *differing(models.weights_of(plain), models.weights_of(model))]
    reference = sharded()
    nn.init.constant_(reference.head.weight, 0.5)
    rank = dist.get_rank()
    return found if models.trained(model, 2, rank) == models.trained(reference, 2, rank) else [*found, "losses"]


def test_initialization_after_sharding_changes_the_shards(ranks):
    assert ranks.run(init_problems, within="pair") == [[]] * 2


class Tied(nn.Module):
    """An embedding that is the head too, one frozen layer, and a weight that is read beside its own module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(33, 32)
        self.frozen, self.free = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.frozen.requires_grad_(requires_grad=False)
        self.head = nn.Linear(32, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, symbols):
        x = self.free(torch.relu(self.frozen(self.embed(symbols[:, :-1]))))
        logits = self.head(x) + torch.nn.functional.linear(x, self.embed.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), symbols[:, 1:].flatten())


def tied_problems(backend, recipe, head_in_fp8):
    losses, weights = {}, {}
    for function in (models.fully_shard, graph_fsdp):
        torch.manual_seed(0)
        model = f8.convert(Tied(), f8.recipes.by_name(recipe), filter=lambda _, fqn: head_in_fp8 or fqn != "head")
        model = function(model, mesh=models.mesh_1d("pair"), mp_policy=models.BF16)
        run = torch.compile(model, fullgraph=True, backend=backend) if backend and function is graph_fsdp else model
        losses[function] = models.trained(run, 5, dist.get_rank(), optimizer=models.adamw(model))
        weights[function] = models.weights_of(model)
        if model.head.weight is not model.embed.weight:
            return ["no longer tied"]
    one, other = losses.values()
    found = differing(*weights.values())
    return found if one == other else [*found, f"losses {losses}"]


@pytest.mark.parametrize(
    ("backend", "recipe", "head_in_fp8"),
    [
        (None, "rowwise", False),
        ("aot_eager", "rowwise", False),
        (None, "rowwise", True),
        (None, "delayed", True),
        ("aot_eager", "tensorwise", True),
    ],
)
def test_tied_frozen_and_shared_parameters(ranks, backend, recipe, head_in_fp8):
    assert ranks.run(tied_problems, backend, recipe, head_in_fp8, within="pair") == [[]] * 2


def repeated_problems(backend):
    """Checkpointed blocks, accumulated gradients and clipped ones: as without, or as `fully_shard`."""
    found, losses = [], {}
    for kind in ("plain", "checkpointed"):
        model = sharded("rowwise")
        if kind == "checkpointed":
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
        losses[kind] = models.trained(run, 3, dist.get_rank(), optimizer=models.adamw(model))
    if losses["plain"] != losses["checkpointed"]:
        found.append(f"checkpointed: {losses}")
    norms, grads = [], []
    for function in (models.shard, graph_fsdp):
        model, where = prepared("uneven", recipe_of("rowwise"), "1-D")
        model = (
            function(model, where, models.BF16)
            if function is models.shard
            else function(model, where, mp_policy=models.BF16)
        )
        run = torch.compile(model, fullgraph=True, backend=backend) if backend and function is graph_fsdp else model
        for step in range(2):
            run(models.batch(step, dist.get_rank())).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
        grads.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    return found + (["norm"] if difference(*norms) else []) + differing(*grads)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_checkpointing_accumulation_and_clipping(ranks, backend):
    assert ranks.run(repeated_problems, backend, within="pair") == [[]] * 2


def autocast_problems():
    """Under autocast float32 weights are used in bfloat16, with its bits."""
    one = sharded("tensorwise", policy="fp32")
    plain, mesh = prepared("uneven", recipe_of("tensorwise"), "1-D")
    other = models.shard(plain, mesh, MixedPrecisionPolicy())
    context = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    rank = dist.get_rank()
    same = models.trained(one, 3, rank, context=context) == models.trained(other, 3, rank, context=context)
    return differing(models.weights_of(other), models.weights_of(one)) if same else ["losses"]


def test_autocast(ranks):
    assert ranks.run(autocast_problems, within="pair") == [[]] * 2


def dtype_problems(reduce_dtype):
    """Other dtypes of the reduction, and of inputs and outputs, as `fully_shard` has them."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, output_dtype=torch.float32, cast_forward_inputs=True)
    grads = []
    for function in (models.fully_shard, graph_fsdp):
        torch.manual_seed(0)
        model = f8.convert(nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 7)), f8.recipes.tensorwise())
        model = function(model, mesh=models.mesh_2d("replicate", "shard"), mp_policy=policy)
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(dist.get_rank()))
        y = model(x)
        if y.dtype != torch.float32:
            return [f"output in {y.dtype}"]
        y.square().mean().backward()
        grads.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    return differing(*grads)


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float16])
def test_dtypes_of_the_reduction(ranks, reduce_dtype):
    assert ranks.run(dtype_problems, reduce_dtype) == [[]] * 4


def copies():
    """A copy of the model trains as the model does, and a model is printed with its shards."""
    model = sharded()
    other = copy.deepcopy(model)
    rank = dist.get_rank()
    return models.trained(model, 2, rank) == models.trained(other, 2, rank), "GraphFSDPLinear" in repr(model)


def test_deepcopy(ranks):
    assert ranks.run(copies, within="pair") == [(True, True)] * 2


# ---------------------------------------------------------------------------------- graphs


def traced_step():
    """Forward, loss and backward by make_fx: one graph, which computes what eager mode does."""
    model = sharded("rowwise")
    symbols = models.batch(0, dist.get_rank())
    names = [name for name, _ in model.named_parameters()]

    def step(symbols, *shards):
        loss = torch.func.functional_call(model, dict(zip(names, shards, strict=True)), (symbols,))
        return loss, *torch.autograd.grad(loss, shards)

    shards = [p.detach().clone().requires_grad_() for p in model.parameters()]
    loss, *grads = make_fx(step)(symbols, *shards)(symbols, *shards)
    expected, *right = step(symbols, *shards)
    found = [] if torch.equal(loss, expected) else ["loss"]
    return found + [
        n for n, a, b in zip(names, grads, right, strict=True) if difference(a.full_tensor(), b.full_tensor())
    ]


def test_make_fx_traces_a_whole_step(ranks):
    assert ranks.run(traced_step, within="pair") == [[]] * 2


def counted_flops():
    """Products are counted of the whole weight, as without sharding."""
    symbols, counts = models.batch(0, 0), []
    for model in (models.model_of("uneven", recipe_of("tensorwise")).bfloat16(), sharded()):
        with FlopCounterMode(display=False) as counter:
            model(symbols).backward()
        counts.append(counter.get_total_flops())
    return counts[0] == counts[1]


def test_flops_are_those_of_the_whole_model(ranks):
    assert ranks.run(counted_flops, within="pair") == [True] * 2


def inductor_problems(mesh):
    """Inductor's bits, of a model whose other operators round nothing that Inductor fuses."""
    if mesh == "pair" and dist.get_rank() > 1:
        return []
    results = []
    for backend in (None, "inductor"):
        torch.manual_seed(0)
        layers = (nn.Linear(24, 72), nn.ReLU(), nn.Linear(72, 39, bias=False))
        model = f8.convert(nn.Sequential(*layers), f8.recipes.tensorwise())
        graph_fsdp(model, models.mesh_1d(mesh), mp_policy=models.BF16)
        run = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(dist.get_rank()))
        y = run(x)
        # a bias' gradient is a plain sum, in Inductor's order
        grads = torch.autograd.grad(y, [model[0].weight, model[2].weight], torch.ones_like(y))
        results.append([y.detach(), *(grad.full_tensor() for grad in grads)])
    return [text for one, other in zip(*results, strict=True) if (text := difference(other, one))]


@pytest.mark.slow
def test_inductor_has_the_bits_of_eager_mode(ranks):
    assert ranks.run(inductor_problems, "pair", seconds=400) == [[]] * 4


# ---------------------------------------------------------------------------------- errors


def message(function):
    """Type and text of what is raised."""
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is raised"


def errors():
    mesh, recipe = models.mesh_1d("pair"), f8.recipes.tensorwise()
    layer = f8.Linear(8, 8, recipe=recipe)
    once = graph_fsdp(f8.Linear(8, 8, recipe=recipe), mesh)
    compiled = f8.Linear(8, 8, recipe=recipe)
    compiled.compile()
    three = torch.distributed.device_mesh.DeviceMesh("cpu", [[[0, 1], [2, 3]]])
    quantized, scalar = nn.Module(), nn.Module()
    quantized.weight = nn.Parameter(f8.quantize(torch.ones(8, 8), f8.CurrentScaling()), requires_grad=False)
    scalar.scale = nn.Parameter(torch.ones(()))
    bf16 = graph_fsdp(
        f8.Linear(8, 8, recipe=recipe), mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    )
    wrapped = models.fully_shard(nn.Linear(8, 8), mesh=mesh)
    tensor_parallel = nn.Linear(8, 8)
    parallel.parallelize_module(tensor_parallel, mesh, parallel.ColwiseParallel())

    def autocast():
        with torch.autocast("cpu", dtype=torch.float16):
            bf16(torch.ones(2, 8))

    return {
        "model": message(lambda: graph_fsdp(3, mesh)),
        "mesh": message(lambda: graph_fsdp(layer, GROUPS["pair"])),
        "dims": message(lambda: graph_fsdp(layer, three)),
        "policy": message(lambda: graph_fsdp(layer, mesh, mp_policy=torch.bfloat16)),
        "twice": message(lambda: graph_fsdp(once, mesh)),
        "compiled": message(lambda: graph_fsdp(compiled, mesh)),
        "stock": message(lambda: graph_fsdp(wrapped, mesh)),
        "quantized": message(lambda: graph_fsdp(quantized, mesh)),
        "scalar": message(lambda: graph_fsdp(scalar, mesh)),
        "one mesh": message(lambda: graph_fsdp(tensor_parallel, mesh)),
        "device": message(lambda: graph_fsdp(layer, torch.distributed.device_mesh.DeviceMesh("meta", [0, 1, 2, 3]))),
        "dtype": message(lambda: bf16(torch.ones(2, 8))),
        "no tensor": message(lambda: once("x")),
        "shape": message(lambda: once(torch.ones(2, 9))),
        "autocast": message(autocast),
        "reverted": message(once.to_linear),
    }


ERRORS = {
    "model": "TypeError: graph_fsdp: `model` is 3; it must be a torch.nn.Module.",
    "mesh": "be a DeviceMesh, such as init_device_mesh",
    "dims": "ValueError: graph_fsdp: `mesh` has 3 dims",
    "policy": "be a MixedPrecisionPolicy",
    "twice": "is already sharded. Call graph_fsdp once",
    "compiled": "Call graph_fsdp first, then torch.compile.",
    "stock": "is already sharded by fully_shard",
    "quantized": "TypeError: graph_fsdp: weight is a QuantizedTensor, but graph_fsdp requires plain tensors.",
    "scalar": "scale has no dims, but graph_fsdp shards dim 0. Give it the shape (1,).",
    "one mesh": "different named dims of one mesh",
    "device": "Move the model to the device of the mesh.",
    "dtype": "TypeError: Linear: `x` is torch.float32, but the weight is used in torch.bfloat16",
    "no tensor": "TypeError: Linear: `x` is str",
    "shape": "ValueError: Linear: the last dim of x must be in_features, 8; got (2, 9).",
    "autocast": "autocast casts to torch.float16, but param_dtype of mp_policy is torch.bfloat16",
    "reverted": "this is a GraphFSDPLinear",
}


def test_errors_say_what_was_given_and_what_to_do(ranks):
    for found in ranks.run(errors):
        for name, text in ERRORS.items():
            assert text in found[name], (name, found[name])


def test_the_op_without_state_takes_no_delayed_scaling():
    recipe, weight = f8.recipes.delayed(), torch.randn(8, 8)
    with pytest.raises(ValueError, match="linear: this op does not support delayed scaling of FSDP's shards"):
        linear(weight, weight, None, None, [], [], OverFsdp(Rows.alone(8)), recipe)
