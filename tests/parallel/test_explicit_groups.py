"""Linear layers of a group, on plain tensors: the bits of one process, whatever is cut, and graphs that keep apart.

Output and grad_weight of a column-parallel layer, both gradients of a row-parallel one: bit for bit. What is a sum
over ranks (its grad_input, the other's output): bit for bit the sum of two parts that one process computed from codes
of the whole; of more parts, whose order gloo chooses, within one rounding an addition.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from unittest import mock

import fsdp_models as models
import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fp8compile as f8
from fp8compile import parallel
from fp8compile.testing import Recording
from fp8compile.testing.bits import difference, sum_difference

LIBRARY = Path(__file__).parents[2] / "examples" / "custom_quantizer"
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = f8.quantizers.GEMMS
RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8")
COLUMN, ROW = parallel.column_parallel_linear, parallel.row_parallel_linear
LAYERS = {"column": COLUMN, "row": ROW}
GROUP_NAMES = {2: "pair", 3: "three", 4: "all"}
# what each rank has: of tokens, and of features. 128 and 32 are the blocks of blockwise and mxfp8.
TOKENS = {
    2: ((12, 12), (20, 4), (0, 24), (128, 32)),
    3: ((8, 8, 8), (12, 7, 5), (12, 0, 12), (32, 32, 10)),
    4: ((6, 6, 6, 6), (3, 1, 16, 4), (0, 9, 0, 15), (32, 32, 32, 8)),
}
FEATURES = {
    2: ((48, 48), (72, 24), (128, 128)),
    3: ((32, 32, 32), (40, 40, 16), (128, 64, 8)),
    4: ((32, 32, 32, 32), (48, 16, 8, 24), (64, 64, 64, 64)),
}
FILLS = ("random", "nan in x", "inf in grad_output")


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- one process


def tensors(tokens_shape, n, k, fill="random", dtype=torch.bfloat16):
    """x, weight, bias, grad_output of the whole layer, the same on every rank; magnitudes differ everywhere."""
    generator = torch.Generator().manual_seed(n + k)

    def values(*shape):
        return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-4, 4, shape, generator=generator))

    x, weight, bias, grad = values(*tokens_shape, k), values(n, k), values(n), values(*tokens_shape, n)
    for tensor, name in ((x, "nan in x"), (grad, "inf in grad_output")):
        if fill == name:
            tensor[(-1,) * tensor.ndim] = float(name[:3])
    return [t.to(dtype) for t in (x, weight, bias, grad)]


def alone(x, weight, bias, grad, recipe):
    """y, grad_input, grad_weight, grad_bias of one process."""
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    y = f8.linear(x, weight, bias, recipe=recipe)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad)]


def summands(gemm, a, weight, sizes, recipe):
    """What each rank adds to a product that sums over features, cut as sizes say: from codes of the whole."""
    quantizers = recipe.quantizers(gemm)
    a_codes = f8.quantize(a.flatten(0, -2), quantizers[0])
    b_codes = f8.quantize(weight, quantizers[1])
    b_codes = b_codes.t() if gemm.b_transposed else b_codes
    found, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        if quantizers[0].block[1] == -1:
            summand = f8.scaled_mm(a_codes[:, part], b_codes[part], out_dtype=a.dtype)
        else:  # exact values, in float64 as a CPU multiplies blocks
            left, right = (q.quantizer.dequantize(q.codes, q.scale, torch.float64) for q in (a_codes, b_codes))
            summand = (left[:, part] @ right[part]).to(a.dtype)
        found.append(summand.unflatten(0, a.shape[:-1]))
        start += size
    return found


def sum_problem(actual, parts):
    """How a sum over ranks differs from that of its parts."""
    if len(parts) == 2:
        return difference(actual, parts[0] + parts[1])
    exact = sum(part.double() for part in parts)
    # one rounding an addition, of a sum that is at most that of the magnitudes; 1.01 for that of the bound itself
    roundings = (len(parts) - 1) * torch.finfo(actual.dtype).eps / 2 * 1.01
    bound = roundings * sum(part.double().abs() for part in parts)
    wrong = ~((actual.double() - exact).abs() <= bound) & ~(actual.isnan() & exact.isnan()) & (actual != exact)
    return f"{int(wrong.sum())} of {wrong.numel()} elements are more than roundings off" if wrong.any() else None


# ---------------------------------------------------------------------------------- in each rank


class Case:
    """A layer on a group: which, of what sizes, and what a rank has of it."""

    def __init__(self, layer, recipe, tokens, features, sequence_dim, fill="random", dtype=torch.bfloat16):
        self.group = GROUPS[GROUP_NAMES[len(features)]]
        self.rank = self.group.rank()
        self.layer, self.tokens, self.features, self.sequence_dim = layer, tokens, features, sequence_dim
        self.recipe = recipe if isinstance(recipe, f8.Recipe) else models.recipe_of(recipe)
        shape = [2, 2]
        shape[sequence_dim or 0] = sum(tokens)
        wide = sum(features)
        n, k = (wide, 40) if layer == "column" else (40, wide)
        self.whole = tensors(shape, n, k, fill, dtype)
        self.text = f"{layer} {recipe}, tokens {tokens} along {sequence_dim}, features {features}, {fill}, {dtype}"

    def of_tokens(self, tensor):
        if self.sequence_dim is None:
            return tensor
        return tensor.split(self.tokens, self.sequence_dim)[self.rank]

    def of_features(self, tensor, dim):
        return tensor.split(self.features, dim)[self.rank]

    def arguments(self):
        """x, weight, bias, grad_output of this rank."""
        x, weight, bias, grad = self.whole
        if self.layer == "column":
            own = (
                self.of_tokens(x),
                self.of_features(weight, 0),
                self.of_features(bias, 0),
                self.of_features(grad, -1),
            )
        else:
            own = (self.of_features(x, -1), self.of_features(weight, 1), bias, self.of_tokens(grad))
        return [tensor.clone() for tensor in own]

    def options(self):
        """Sizes only where they differ: the default is what users write."""
        sizes = {"feature_sizes": self.features} if len(set(self.features)) > 1 else {}
        if self.sequence_dim is not None and len(set(self.tokens)) > 1:
            sizes["sequence_sizes"] = self.tokens
        return {"recipe": self.recipe, "group": self.group, "sequence_dim": self.sequence_dim, **sizes}

    def run(self, function=None):
        x, weight, bias, grad = self.arguments()
        inputs = [t.requires_grad_() for t in (x, weight, bias)]
        y = (function or LAYERS[self.layer])(*inputs, **self.options())
        return [y.detach(), *torch.autograd.grad(y, inputs, grad)]

    def problems(self, found):
        y, grad_input, grad_weight, grad_bias = found
        x, weight, bias, grad = self.whole
        ref_y, ref_grad_input, ref_grad_weight, ref_grad_bias = alone(*self.whole, self.recipe)
        # Sizes decide in which order a CPU sums: of a product in high precision, of a plain sum, and of a float32
        # result with 8 columns, where it takes another loop than for 64. In bfloat16 that is never seen.
        exact = difference if x.dtype == torch.bfloat16 else sum_difference
        compare = exact if self.recipe.quantizers(GRAD_WEIGHT) else sum_difference
        if self.layer == "column":
            parts = summands(GRAD_INPUT, grad, weight, self.features, self.recipe)
            checks = {
                "y": exact(y, self.of_features(ref_y, -1)),
                "grad_input": sum_problem(grad_input, [self.of_tokens(part) for part in parts]),
                "grad_weight": compare(grad_weight, self.of_features(ref_grad_weight, 0)),
                "grad_bias": sum_difference(grad_bias, self.of_features(ref_grad_bias, 0)),
            }
        else:
            first, *others = summands(OUTPUT, x, weight, self.features, self.recipe)
            parts = [first + bias, *others]
            checks = {
                "y": sum_problem(y, [self.of_tokens(part) for part in parts]),
                "grad_input": exact(grad_input, self.of_features(ref_grad_input, -1)),
                "grad_weight": compare(grad_weight, self.of_features(ref_grad_weight, 1)),
                "grad_bias": sum_difference(grad_bias, ref_grad_bias),
            }
        return [f"{name}: {text}; {self.text}" for name, text in checks.items() if text is not None]


def cases(recipe, size, step):
    """Each ``step``-th of all layers, sequence dims, and cuts; odd values and float32 take turns."""
    product = itertools.product(LAYERS, (None, 0, 1), TOKENS[size], FEATURES[size])
    product = [each for each in product if each[1] is not None or each[2] == TOKENS[size][0]]
    for index, (layer, sequence_dim, tokens, features) in enumerate(product[::step]):
        dtype = torch.float32 if index % 5 == 4 else torch.bfloat16
        yield Case(layer, recipe, tokens, features, sequence_dim, FILLS[index % 3], dtype)


def check_eager(recipe, size, step):
    return [problem for case in cases(recipe, size, step) for problem in case.problems(case.run())]


def check_compiled(backend, pick):
    """Some cases in one graph each, with the bits of eager mode; a second call compiles nothing."""
    problems = []
    for arguments in pick:
        torch._dynamo.reset()
        counters.clear()
        case = Case(*arguments)
        compiled = torch.compile(LAYERS[case.layer], fullgraph=True, backend=backend)
        found = case.run(compiled)
        problems += case.problems(found)
        again, eager = case.run(compiled), case.run()
        for name, *three in zip(("y", "grad_input", "grad_weight", "grad_bias"), found, again, eager, strict=True):
            compare = sum_difference if name == "grad_bias" else difference  # a plain sum, in Inductor's order
            problems += [f"{name} {text}; {case.text}" for t in three[:2] if (text := compare(t, three[2]))]
        if counters["stats"]["unique_graphs"] != 1:
            problems.append(f"{counters['stats']['unique_graphs']} graphs; {case.text}")
    return problems


# ---------------------------------------------------------------------------------- the bits of one process


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("recipe", [*RECIPES, models.SQUARES])
def test_layers_of_a_group_have_the_bits_of_one_process(ranks, recipe, size):
    # each fifth: prime to the number of everything there is
    for problems in ranks.run(check_eager, recipe, size, 5, within=GROUP_NAMES[size]):
        assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_of_a_group_have_the_bits_of_one_process_in_every_combination(ranks, recipe, size):
    for problems in ranks.run(check_eager, recipe, size, 1, within=GROUP_NAMES[size]):
        assert problems == []


# each recipe, layer, sequence dim and way to cut in some pair
PAIRS = (
    ("column", "tensorwise", (12, 12), (48, 48), 0),
    ("row", "rowwise", (20, 4), (72, 24), 1),
    ("column", "rowwise_bf16_wgrad", (12, 12), (72, 24), None),
    ("row", "blockwise", (0, 24), (48, 48), 0),
    ("column", "mxfp8", (20, 4), (48, 48), 1),
    ("row", "tensorwise", (12, 12), (72, 24), None),
    ("column", "blockwise", (0, 24), (72, 24), 0),
    ("row", models.SQUARES, (20, 4), (72, 24), 1),
)


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, case[:2])))
def test_one_graph_with_the_bits_of_eager_mode(ranks, case):
    assert ranks.run(check_compiled, "aot_eager", [case], within="pair") == [[]] * 2


def check_inductor(*pick):
    """Problems, and whether a compiler that starts anew hits the cache and bypasses none."""
    problems = check_compiled("inductor", pick)
    torch._dynamo.reset()
    counters.clear()
    case = Case(*pick[-1])
    case.run(torch.compile(LAYERS[case.layer], fullgraph=True))
    cache = counters["aot_autograd"]
    return problems, cache["autograd_cache_hit"], cache["autograd_cache_bypass"]


INDUCTOR = (
    ("column", "mxfp8", (20, 4), (48, 48), 1),  # cuts blocks
    # PyTorch puts messages of the backward into the forward by their sizes: on one of these ranks, not on the other
    ("row", "blockwise", (0, 24), (48, 48), 0),
)


@pytest.mark.parametrize("case", INDUCTOR, ids=lambda case: "-".join(map(str, case[:2])))
def test_inductor_has_the_bits_of_eager_mode_and_a_cache_hit(ranks, case):
    for problems, hits, bypasses in ranks.run(check_inductor, case, within="pair"):
        assert problems == []
        assert (hits, bypasses) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, case[:2])))
def test_inductor_has_the_bits_of_eager_mode(ranks, case):
    assert ranks.run(check_inductor, case, seconds=600, within="pair")[0][0] == []


def check_library():
    """Blocks of 64 that are cut, of the example library's quantizer, which another one of it watches."""
    sys.path.insert(0, str(LIBRARY))
    import swiglu8

    recipe = f8.library.recipe(swiglu8.watch(swiglu8.Ceil8(), "explicit groups"))
    pick = [(layer, recipe, (20, 4), (72, 24), 1) for layer in LAYERS]
    eager = [problem for case in (Case(*each) for each in pick) for problem in case.problems(case.run())]
    return eager + check_compiled("aot_eager", pick), "explicit groups" in swiglu8.seen()


def test_another_librarys_quantizer_in_a_debug_quantizer_has_the_bits_of_one_process(ranks):
    assert ranks.run(check_library, within="pair") == [([], True)] * 2


# ---------------------------------------------------------------------------------- two groups


class Block(nn.Module):
    """Up and down again, on whichever group it has at the time."""

    def __init__(self, recipe):
        super().__init__()
        self.recipe, self.group = recipe, None

    def forward(self, x, up, down):
        options = {"recipe": self.recipe, "group": self.group, "sequence_dim": 0}
        return ROW(torch.relu(COLUMN(x, up, **options)), down, **options)


def block_inputs(group, seed):
    """This rank's tokens, and its features of the weights; other groups have others."""
    first = torch.distributed.get_process_group_ranks(group)[0]
    generator = torch.Generator().manual_seed(10 * seed + first)
    x, up, down = (torch.randn(shape, generator=generator).bfloat16() for shape in ((16, 32), (64, 32), (32, 64)))
    rank = group.rank()
    own = (x.chunk(2, 0)[rank], up.chunk(2, 0)[rank], down.chunk(2, 1)[rank])
    return [t.clone().requires_grad_() for t in own]


def forward_forward_backward_backward(backend):
    """Gradients of a module whose group changes between two forwards; twice, then how many graphs there are."""
    torch._dynamo.reset()
    counters.clear()
    block = Block(f8.recipes.tensorwise())
    run = torch.compile(block, fullgraph=True, backend=backend)
    same = []
    for turn in range(2):
        pending, expected = [], []
        for seed, name in enumerate(("pair", "cross")):
            block.group = GROUPS[name]
            inputs = block_inputs(block.group, 2 * turn + seed)
            y = block(*inputs)
            expected.append([y, *torch.autograd.grad(y.float().square().sum(), inputs)])
            pending.append((run(*inputs), inputs))
        for (y, inputs), reference in zip(pending[::-1], expected[::-1], strict=True):
            found = [y, *torch.autograd.grad(y.float().square().sum(), inputs)]
            same += [torch.equal(a, b) for a, b in zip(found, reference, strict=True)]
    return all(same), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_two_groups_in_turn_keep_apart(ranks, backend):
    assert ranks.run(forward_forward_backward_backward, backend) == [(True, 2)] * 4


def checkpointed(backend):
    """Whether a block with activation checkpointing has the output and the gradients of one without."""
    torch._dynamo.reset()
    block = Block(f8.recipes.rowwise())
    block.group = GROUPS["pair"]

    def recomputed(*inputs):
        return checkpoint(block, *inputs, use_reentrant=False)

    run = recomputed if backend is None else torch.compile(recomputed, fullgraph=True, backend=backend)
    results = []
    for function in (block, run):
        inputs = block_inputs(block.group, 0)
        y = function(*inputs)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), inputs)])
    return all(itertools.starmap(torch.equal, zip(*results, strict=True)))


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=str)
def test_checkpointing_changes_no_bit(ranks, backend):
    assert ranks.run(checkpointed, backend, within="pair") == [True] * 2


def eager_turns():
    """As above without a compiler, against one process that has the whole of each group."""
    same = []
    block, recipe = Block(f8.recipes.tensorwise()), f8.recipes.tensorwise()
    pending = []
    for seed, name in enumerate(("pair", "cross")):
        block.group = GROUPS[name]
        inputs = block_inputs(block.group, seed)
        pending.append((block(*inputs), inputs, block.group, seed))
    for y, inputs, group, seed in pending[::-1]:
        first = torch.distributed.get_process_group_ranks(group)[0]
        generator = torch.Generator().manual_seed(10 * seed + first)
        x, up, down = (torch.randn(s, generator=generator).bfloat16() for s in ((16, 32), (64, 32), (32, 64)))
        whole = [t.requires_grad_() for t in (x, up, down)]
        hidden = torch.relu(f8.linear(whole[0], whole[1], recipe=recipe))
        parts = summands(OUTPUT, hidden.detach(), down.detach(), (32, 32), recipe)
        same.append(torch.equal(y, (parts[0] + parts[1]).chunk(2, 0)[group.rank()]))
        # the gradient of the output at hand: the sum rounds otherwise than one process
        grad = torch.ones_like(y)
        found = torch.autograd.grad(y, inputs, grad)
        reference = f8.linear(hidden, whole[2], recipe=recipe)
        _, grad_up, grad_down = torch.autograd.grad(reference, whole, torch.ones_like(reference))
        same += [torch.equal(found[1], grad_up.chunk(2, 0)[group.rank()])]
        same += [torch.equal(found[2], grad_down.chunk(2, 1)[group.rank()])]
    return same


def test_each_group_has_its_own_scales_and_sums(ranks):
    assert ranks.run(eager_turns) == [[True] * 6] * 4


# ---------------------------------------------------------------------------------- what is sent


def traced_step(case):
    """Forward and backward in terms of PyTorch's operators."""

    def step(x, weight, grad):
        y = LAYERS[case.layer](x, weight, **case.options())
        return y, torch.autograd.grad(y, (x, weight), grad)

    x, weight, _, grad = case.arguments()
    trace = make_fx(step, decomposition_table=f8.ops.decompositions(), tracing_mode="fake")
    return trace(x.requires_grad_(), weight.requires_grad_(), grad), (x, grad)


def wire(layer, recipe, sequence_dim):
    """(dtype, bytes that a rank sends to gather), a bf16 gather of the same operands, and other collectives' names."""
    graph, (x, grad) = traced_step(Case(layer, recipe, (128, 128), (256, 256), sequence_dim))
    nodes = [node for node in graph.graph.nodes if "_c10d_functional" in str(node.target)]
    gathered = [node.args[0].meta["val"] for node in nodes if "all_gather" in str(node.target)]
    summed = [node.target._opname for node in nodes if "reduce" in str(node.target) and "sum" in node.args]
    operand = x if layer == "column" else grad  # gathered twice: for y or grad_input, and for grad_weight
    return (
        sorted({str(t.dtype) for t in gathered if t.numel() > t.shape[0]} - {"torch.float32"}),
        sum(t.nbytes for t in gathered),
        2 * 2 * operand.numel(),
        summed,
    )


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_codes_are_gathered_and_one_sum_is_made(ranks, recipe, layer):
    for dtypes, sent, in_bf16, summed in ranks.run(wire, layer, recipe, 0, within="pair"):
        assert dtypes == ["torch.uint8"]
        # tensorwise, the codes that the output has gathered are those of grad_weight
        times = 1 if (recipe, layer) == ("tensorwise", "column") else 2
        assert 0.25 * times * in_bf16 <= sent <= 0.275 * times * in_bf16
        assert summed == ["reduce_scatter_tensor"]


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_gathered_where_every_rank_has_all_tokens(ranks, layer):
    for _, sent, _, summed in ranks.run(wire, layer, "rowwise", None, within="pair"):
        assert (sent, summed) == (0, ["all_reduce"])


def operators(layer, recipe, ranks):
    """What a step calls on a group of so many ranks."""
    graph, _ = traced_step(Case(layer, recipe, (128,) * ranks, (256,) * ranks, 0))
    return [str(node.target) for node in graph.graph.nodes]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_more_ranks_call_the_same_operators(ranks, recipe, layer):
    two, four = (ranks.run(operators, layer, recipe, size, within=GROUP_NAMES[size]) for size in (2, 4))
    assert two * 2 == four


def opaque_graph(layer):
    """Names of our ops in a traced step, and what the flop counter says of one."""
    case, recording = Case(layer, "rowwise", (12, 12), (48, 48), 0), Recording("aot_eager")
    case.run(torch.compile(LAYERS[layer], fullgraph=True, backend=recording))
    names = [n.target._opname for g in recording.traced for n in g.graph.nodes if "fp8compile" in str(n.target)]
    with FlopCounterMode(display=False) as counter:
        case.run()
    return names, counter.get_total_flops()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_graph_has_one_op_a_product(ranks, layer):
    for names, flops in ranks.run(opaque_graph, layer, within="pair"):
        assert names == ["linear", "grad_input", "grad_weight"]
        assert flops == 3 * 2 * (24 * 2) * 40 * 48


def changing_lengths():
    """Graphs after calls with 8, 12 and 16 tokens on each rank, and whether they are right."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(COLUMN, fullgraph=True, backend="aot_eager")
    problems = []
    for tokens in (8, 12, 16):
        case = Case("column", "rowwise", (tokens, tokens), (48, 48), 0)
        problems += case.problems(case.run(compiled))
    return problems, counters["stats"]["unique_graphs"]


def test_another_number_of_tokens_compiles_once_more_at_most(ranks):
    assert ranks.run(changing_lengths, within="pair") == [([], 2)] * 2


# ---------------------------------------------------------------------------------- refused


class FakeGroup(torch.distributed.ProcessGroup):
    """A rank and a size, and nobody to talk to."""

    group_name = "g"


X, WEIGHT = torch.ones(4, 6, 32), torch.ones(16, 32)


def call(function=COLUMN, x=X, weight=WEIGHT, bias=None, **options):
    options = {"recipe": f8.recipes.rowwise(), "group": FakeGroup(0, 2), **options}
    return function(x, weight, bias, **options)


REFUSED = {
    "group is None": (
        {"group": None},
        TypeError,
        "`group` is None; it must be a process group. On one rank use fp8compile.linear",
    ),
    "group is a name": ({"group": "tp"}, TypeError, "a group must be a ProcessGroup, .* got 'tp'"),
    "no recipe": ({"recipe": "rowwise"}, TypeError, "column_parallel_linear: `recipe` is 'rowwise'"),
    "delayed": (
        {"recipe": f8.recipes.delayed(), "group": FakeGroup(0, 1)},
        ValueError,
        " delayed scaling is not supported.*current scaling",
    ),
    "features": ({"weight": torch.ones(16, 24)}, ValueError, "column_parallel_linear: `x` has shape"),
    "dim of features": ({"sequence_dim": 2}, ValueError, "`sequence_dim` is 2, and x has shape.*before the last"),
    "no such dim": ({"sequence_dim": -4}, ValueError, "`sequence_dim` is -4, and x has shape"),
    "dim is no int": ({"sequence_dim": 1.0}, TypeError, "`sequence_dim` is 1.0; it must be an int, or None"),
    "sizes without dim": ({"sequence_sizes": (4, 4)}, ValueError, "sequence_dim is None. Pass the dim"),
    "own tokens": ({"sequence_dim": 0, "sequence_sizes": (3, 4)}, ValueError, "dim 0 on rank 0 are 4. Pass the sizes"),
    "own rows": ({"feature_sizes": (8, 16)}, ValueError, "the rows of weight on rank 0 are 16. Pass the sizes"),
    "entries": (
        {"feature_sizes": (16,)},
        ValueError,
        r"`feature_sizes` must have an entry for each of 2 ranks, got \(16,\)",
    ),
    "no ints": (
        {"feature_sizes": (16.0, 16)},
        TypeError,
        "`feature_sizes` must .*be a tuple of an int of at least 0 per rank",
    ),
    "odd tokens": (
        {"function": ROW, "sequence_dim": 1, "group": FakeGroup(0, 4)},
        ValueError,
        r"dim 1 are 6, which is not a multiple of the 4 ranks. Pass the number for each rank: sequence_sizes=\(...\)",
    ),
    "sum of tokens": (
        {"function": ROW, "sequence_dim": 1, "sequence_sizes": (4, 4)},
        ValueError,
        r"`sequence_sizes` is \(4, 4\), which sums to 8, but the entries of x along dim 1 are 6",
    ),
}


@pytest.mark.parametrize(("options", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_raises_and_says_what_does(options, error, text):
    with pytest.raises(error, match=text):
        call(**options)


def new_pair():
    """A group whose ranks have not told each other anything yet."""
    groups = [torch.distributed.new_group(members) for members in ([0, 1], [2, 3])]
    return groups[torch.distributed.get_rank() // 2]


def gathered(x, weight, *, group, sequence_dim=0, **_):
    """An eager call that gathers what ranks have."""
    return f8.quantize(x, f8.CurrentScaling(block=(1, -1)), group=group, shard_dim=sequence_dim).all_gather(0)


ASKING = {**LAYERS, "all_gather": gathered}


def other_sizes(name, backend):
    """What a call says whose ranks have 4 and 6 tokens, and left out to say so."""
    group, function = new_pair(), ASKING[name]
    if backend is not None:
        function = torch.compile(function, fullgraph=True, backend=backend)
    tokens = 4 + 2 * group.rank()
    try:
        function(torch.ones(tokens, 32), WEIGHT, recipe=f8.recipes.rowwise(), group=group, sequence_dim=0)
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", ASKING)
def test_ranks_with_other_sizes_than_they_say_are_told(ranks, name, backend):
    said = {"column": "(4, 4) on rank 0, (6, 6) on rank 1", "row": "(2, 2) on rank 0, (3, 3) on rank 1"}
    for answer in ranks.run(other_sizes, name, backend):
        argument = "sizes" if name == "all_gather" else "sequence_sizes"
        assert f"disagree on {argument}: {said.get(name, said['column'])}" in answer
        assert f"{argument}=(...)" in answer


def messages_of_comparisons(name, backend):
    """How many numbers were compared in each of three calls of equal sizes, the last one with more tokens."""
    group, function = new_pair(), ASKING[name]
    sent, original = [], torch.distributed.all_gather

    def counted(every, own, **options):
        sent.append(own.numel())
        return original(every, own, **options)

    if backend is not None:
        function = torch.compile(function, fullgraph=True, backend=backend)
    counts = []
    with mock.patch.object(torch.distributed, "all_gather", counted):
        for tokens in (4, 4, 8):
            function(torch.ones(tokens, 32), WEIGHT, recipe=f8.recipes.rowwise(), group=group, sequence_dim=0)
            counts.append(sum(sent))
            sent.clear()
    return counts


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", ASKING)
def test_sizes_are_compared_once(ranks, name, backend):
    """Each rank sends a number for each rank and argument."""
    assert ranks.run(messages_of_comparisons, name, backend) == [[2 if name == "all_gather" else 4, 0, 0]] * 4


def test_a_group_of_one_sends_nothing():
    for function in LAYERS.values():
        y = call(function, group=FakeGroup(0, 1), sequence_dim=1)
        assert torch.equal(y, f8.linear(X, WEIGHT, recipe=f8.recipes.rowwise()))


def with_dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    x = DTensor.from_local(X, init_device_mesh("cpu", (4,)), [Replicate()])
    try:
        COLUMN(x, WEIGHT, recipe=f8.recipes.rowwise(), group=GROUPS["all"])
    except TypeError as error:
        return str(error)
    return "no error"


def test_dtensors_are_for_the_plain_function(ranks):
    for message in ranks.run(with_dtensors):
        assert message.startswith("column_parallel_linear: a tensor is a DTensor")
        assert message.endswith("Pass .to_local(), or pass the DTensors to fp8compile.linear.")
