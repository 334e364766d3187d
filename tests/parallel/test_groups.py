"""Process groups: a quantized shard is a shard of the quantized tensor, and graphs of two groups never mix."""

from __future__ import annotations

import itertools

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils._python_dispatch import TorchDispatchMode

import fp8compile as f8
from fp8compile import _compat
from fp8compile.testing.bits import bits

HAS_GROUPS = _compat.TORCH_VERSION >= (2, 12)
needs_groups = pytest.mark.skipif(
    not HAS_GROUPS, reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)

BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 16), (16, 1), (16, 16), (-1, 16), (16, -1))
QUANTIZERS = (
    *(f8.CurrentScaling(block=block) for block in BLOCKS),
    f8.CurrentScaling(format="e5m2", block=(-1, -1), scale="pow2"),
    f8.CurrentScaling(block=(1, 32), scale="e8m0_rceil"),
    f8.CurrentScaling(block=(-1, 32), scale="e8m0_floor"),
)
# (sizes of the other dims with None for the sharded one)
SHAPES = ((None, 48), (32, None), (None,), (None, 2, 48), (3, None, 48), (2, 16, None))
SPLITS = {2: ((32, 32), (64, 32), (32, 9), (32, 0), (5, 3), (0, 7)), 4: ((32,) * 4, (64, 32, 32, 3), (1, 2, 0, 5))}
FILLS = ("random", "nan", "inf", "zeros", "zero shard")


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


class CountCollectives(TorchDispatchMode):
    """How many collectives run below it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        helpers = ("wait_tensor", "_wrap_tensor_autograd")
        self.count += "c10d" in func.namespace and func._opname not in helpers
        return func(*args, **kwargs or {})


def whole_tensor(shape, dim, split, fill, dtype):
    """The same on every rank, magnitudes that differ everywhere; the odd value in the last shard that has any."""
    generator = torch.Generator().manual_seed(sum(split))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-8, 8, shape, generator=generator))
    last = max(rank for rank, length in enumerate(split) if length)
    part = x.split(split, dim)[last]
    if fill == "zeros":
        x.zero_()
    elif fill == "zero shard":
        part.zero_()
    elif fill != "random":
        part[(-1,) * part.ndim] = float(fill)
    return x.to(dtype)


def block_ids(shape, block):
    """For each element, in the shape of the (M, K) view, its block as a row and a column of the grid."""
    columns = shape[-1]
    rows = torch.Size(shape[:-1]).numel()
    row, column = torch.arange(rows), torch.arange(columns)
    row = row * 0 if block[0] == -1 else row // block[0]
    column = column * 0 if block[1] == -1 else column // block[1]
    return row, column


def shard_cuts_blocks(shape, dim, split, block):
    """Whether a block of limited length along the sharded dim has elements on two ranks: by looking at each."""
    side = block[1 if dim == len(shape) - 1 else 0]
    if side == -1:
        return False
    if 0 < dim < len(shape) - 1 and any(length * torch.Size(shape[dim + 1 : -1]).numel() % side for length in split):
        return True  # the next batch begins within a block: no rank can tell that no other one has a part of it
    owner = torch.arange(len(split)).repeat_interleave(torch.tensor(split))
    owner = owner.view(-1, *[1] * (len(shape) - dim - 1)).expand(shape).reshape(-1, shape[-1])
    row, column = block_ids(shape, block)
    grid = (row[:, None] * (int(column.max()) + 1) + column).reshape(-1)
    first = torch.full((int(grid.max()) + 1,), len(split)).scatter_reduce(0, grid, owner.reshape(-1), "amin")
    last = torch.full((int(grid.max()) + 1,), -1).scatter_reduce(0, grid, owner.reshape(-1), "amax")
    return bool((first != last).any())


def expected_scale(whole, dim, start, length):
    """Scales of the blocks that a shard of whole touches, by the rows and columns of its first and last element."""
    rows_of_index = torch.Size(whole.shape[dim + 1 : -1]).numel()
    scale = whole.scale
    last = dim == whole.ndim - 1
    block = whole.quantizer.block[1 if last else 0]
    if block == -1 or length == whole.shape[dim]:
        return scale
    if last:
        return scale.narrow(-1, start // block, -(-length // block))
    if block == 1:
        return scale.narrow(dim, start, length)
    if not length:
        return scale[:0]
    if dim:  # each batch is cut the same way, and holds whole blocks
        batches = torch.Size(whole.shape[:dim]).numel()
        scale = scale.view(batches, -1, scale.shape[-1])
        first, count = start * rows_of_index // block, -(-length * rows_of_index // block)
        return scale.narrow(1, first, count).reshape(-1, scale.shape[-1])
    return scale.narrow(0, start * rows_of_index // block, -(-length * rows_of_index // block))


def same_bits(actual, expected):
    return (
        actual.shape == expected.shape and actual.dtype == expected.dtype and torch.equal(bits(actual), bits(expected))
    )


def gathered_problems(q, expected, dim, split):
    """What is wrong with the whole that the ranks put together."""
    even, told = len(set(split)) == 1, q.sizes is not None
    whole = q.all_gather(dim - q.ndim) if even or told else q.all_gather(dim, split)
    checks = {
        "gathered codes": same_bits(whole.codes, expected.codes),
        "gathered scale": same_bits(whole.scale, expected.scale),
        "gathered group": whole.group is whole.shard_dim is whole.sizes is None,
    }
    return [name for name, ok in checks.items() if not ok]


def shard_problems(quantizer, group, shape, dim, split, fill, dtype, sizes=None):
    """What is wrong with this rank's quantized shard: nothing, one hopes."""
    whole = whole_tensor(shape, dim, split, fill, dtype)
    start, length = sum(split[: group.rank()]), split[group.rank()]
    shard = whole.narrow(dim, start, length)
    with CountCollectives() as collectives:
        q = eager_quantize(shard, quantizer, group, dim, sizes)
    expected = f8.quantize(whole, quantizer)
    spans = quantizer.block[1 if dim == len(shape) - 1 else 0] == -1
    cut = shard_cuts_blocks(shape, dim, split, quantizer.block)
    scale = expected.scale if cut else expected_scale(expected, dim, start, length)
    checks = {
        "codes": same_bits(q.codes, expected.codes.narrow(dim, start, length)),
        "scale": same_bits(q.scale, scale),
        "values": same_bits(q.dequantize(), expected.dequantize().narrow(dim, start, length)),
        "group": q.group is group and (q.shard_dim, q.sizes) == (dim, sizes) and q.cuts_blocks() == cut,
        "collectives": collectives.count == (1 if spans or cut else 0),
    }
    problems = [name for name, ok in checks.items() if not ok]
    if fill in ("random", "nan") and dtype == torch.bfloat16:
        problems += gathered_problems(q, expected, dim, split)
    return [f"{name}: {shape} along {dim} as {split}, {fill}, {dtype}" for name in problems]


def cases(size):
    for template, split in itertools.product(SHAPES, SPLITS[size]):
        shape = tuple(sum(split) if side is None else side for side in template)
        yield shape, template.index(None), split


def eager_quantize(x, quantizer, group, dim, sizes=None):
    return f8.quantize(x, quantizer, group=group, shard_dim=dim, sizes=sizes)


def check_shards(quantizer, group_name):
    """All shapes, splits, dtypes and odd values; the number of cases, and what was wrong."""
    group = GROUPS[group_name]
    count, problems = 0, []
    for shape, dim, split in cases(group.size()):
        if shard_cuts_blocks(shape, dim, split, quantizer.block):
            continue
        for fill, dtype in [("random", d) for d in f8.tensor.SOURCE_DTYPES] + [(f, torch.bfloat16) for f in FILLS[1:]]:
            # ranks that are told of each other do what they would have done
            sizes = split if fill in ("random", "nan") and dtype == torch.bfloat16 else None
            problems += shard_problems(quantizer, group, shape, dim, split, fill, dtype, sizes)
            count += 1
    return count, problems


def check_cut_shards(quantizer, group_name):
    """Splits that cut a block, with every odd value: the number of cases, and what was wrong."""
    group = GROUPS[group_name]
    count, problems = 0, []
    for shape, dim, split in cases(group.size()):
        if shard_cuts_blocks(shape, dim, split, quantizer.block):
            for fill in FILLS:
                problems += shard_problems(quantizer, group, shape, dim, split, fill, torch.bfloat16, split)
                count += 1
    return count, problems


def check_cut_blocks_raise(quantizer, group_name):
    """Splits that cut a block: (which, ranks of the group that raised)."""
    group, found = GROUPS[group_name], []
    for shape, dim, split in cases(group.size()):
        if not shard_cuts_blocks(shape, dim, split, quantizer.block):
            continue
        shard = whole_tensor(shape, dim, split, "random", torch.bfloat16).split(split, dim)[group.rank()]
        try:
            f8.quantize(shard, quantizer, group=group, shard_dim=dim)
        except ValueError as error:
            found.append((shape, dim, split, "splits blocks of" in str(error) and "sizes=(...)" in str(error)))
        else:
            found.append((shape, dim, split, False))
    return found


COMPILED_SPLITS = (
    ((40, 32), 0, (20, 20)),
    ((32, 64), 1, (32, 32)),
    ((3, 32, 64), 2, (64, 0)),
    ((2, 40, 48), 1, (24, 16)),
)


def quantized_and_gathered(x, quantizer, group, dim, sizes):
    q = f8.quantize(x, quantizer, group=group, shard_dim=dim, sizes=sizes)
    return q, q.all_gather(dim), q.dequantize()


def check_compiled_shards(quantizer, group_name, backend, splits=COMPILED_SPLITS):
    """The same in one compiled graph, the group as an argument; eager mode has shown what is right."""
    group = GROUPS[group_name]
    problems = []
    for shape, dim, split in splits:
        recorder = AotEagerAndRecordGraphs()
        compiled = torch.compile(
            quantized_and_gathered, fullgraph=True, backend=recorder if backend == "aot_eager" else backend
        )
        torch._dynamo.reset()
        for fill in ("random", "nan"):
            whole = whole_tensor(shape, dim, split, fill, torch.bfloat16)
            arguments = (whole.split(split, dim)[group.rank()].clone(), quantizer, group, dim, split)
            for found, expected in zip(compiled(*arguments), quantized_and_gathered(*arguments), strict=True):
                same = found.group is expected.group if isinstance(found, f8.QuantizedTensor) else True
                pairs = [(found, expected)]
                if isinstance(found, f8.QuantizedTensor):
                    same = same and (found.shard_dim, found.sizes) == (expected.shard_dim, expected.sizes)
                    pairs = [(found.codes, expected.codes), (found.scale, expected.scale)]
                if not same or not all(same_bits(*pair) for pair in pairs):
                    problems.append(f"{shape} along {dim}, {fill}: {found}")
        if backend == "aot_eager":
            nodes = [node for node in recorder.fw_graphs[0].graph.nodes if "_c10d_functional" in str(node.target)]
            reduced = sum("all_reduce" in str(node.target) for node in nodes)
            gathered = {node.args[0].meta["val"].dtype for node in nodes if "all_gather" in str(node.target)}
            spans = quantizer.block[1 if dim == len(shape) - 1 else 0] == -1
            if reduced != (spans or shard_cuts_blocks(shape, dim, split, quantizer.block)):
                problems.append(f"collectives of {shape} along {dim}: {nodes}")
            if not gathered <= {torch.uint8, quantizer.scale_dtype()}:
                problems.append(f"dtypes gathered of {shape} along {dim}: {gathered}")
    return problems


# ---------------------------------------------------------------------------------- a shard


@needs_groups
@pytest.mark.parametrize("group", ["pair", "all"])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_quantized_shard_is_a_shard_of_the_quantized_tensor(ranks, quantizer, group):
    for count, problems in ranks.run(check_shards, quantizer, group, within=group):
        assert problems == []
        assert count >= 35, "most splits cut a block: this test shows little"


CUT = (
    *(f8.CurrentScaling(block=block) for block in ((1, 16), (16, 1), (16, 16), (16, -1))),
    f8.CurrentScaling(block=(1, 32), scale="e8m0_rceil"),
    f8.CurrentScaling(format="e5m2", block=(-1, 32), scale="pow2"),
)


@needs_groups
@pytest.mark.parametrize("group", ["pair", "all"])
@pytest.mark.parametrize("quantizer", CUT, ids=str)
def test_a_shard_that_cuts_blocks_is_a_shard_of_the_quantized_tensor(ranks, quantizer, group):
    for count, problems in ranks.run(check_cut_shards, quantizer, group, within=group):
        assert problems == []
        assert count >= 5, "no split cuts a block: this test shows little"


@needs_groups
@pytest.mark.parametrize("group", ["pair", "all"])
@pytest.mark.parametrize("block", [(16, 16), (1, 16), (16, 1)], ids=str)
def test_split_that_cuts_a_block_raises_on_a_rank_that_is_not_told_sizes(ranks, block, group):
    by_rank = ranks.run(check_cut_blocks_raise, f8.CurrentScaling(block=block), group)
    assert by_rank[0], "no split cuts a block: this test shows nothing"
    members = range(2 if group == "pair" else 4)
    for answers in zip(*(by_rank[rank] for rank in members), strict=True):
        assert any(raised for *_, raised in answers), answers[0][:3]


@needs_groups
@pytest.mark.parametrize("index", range(len(QUANTIZERS)), ids=lambda index: str(QUANTIZERS[index]))
def test_compiled_shard_is_the_eager_one_with_the_same_collectives(ranks, index):
    splits = [COMPILED_SPLITS[(index + k) % len(COMPILED_SPLITS)] for k in range(2)]  # two of four, in turn
    found = ranks.run(check_compiled_shards, QUANTIZERS[index], "pair", "aot_eager", splits, within="pair")
    assert found == [[]] * 2


@needs_groups
@pytest.mark.slow
@pytest.mark.parametrize("quantizer", [*QUANTIZERS[:2], *CUT[2:4]], ids=str)
def test_inductor_shard_is_the_eager_one(ranks, quantizer):
    assert ranks.run(check_compiled_shards, quantizer, "pair", "inductor", within="pair") == [[]] * 2


# ---------------------------------------------------------------------------------- what a shard can and can't


def behind_the_end(block, sizes, shape):
    """Collectives of quantizing, and whether shard and gathered whole are right, where the last ranks have nothing."""
    quantizer, group = f8.CurrentScaling(block=block), GROUPS["all"]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    own = whole.split(sizes)[group.rank()]
    with CountCollectives() as collectives:
        shard = f8.quantize(own, quantizer, group=group, shard_dim=0, sizes=sizes)
    expected, gathered = f8.quantize(whole, quantizer), shard.all_gather(0)
    right = torch.equal(shard.codes, expected.codes.split(sizes)[group.rank()])
    right &= torch.equal(gathered.codes, expected.codes) and torch.equal(gathered.scale, expected.scale)
    return collectives.count, right


@needs_groups
@pytest.mark.parametrize("sizes", [(64, 3, 0, 0), (5, 0, 0, 0), (32, 32, 32, 0)])
@pytest.mark.parametrize(("block", "shape"), [((32, 32), (40,)), ((32, 1), (2,)), ((32, 32), (1, 40))])
def test_ranks_behind_the_end_of_a_tensor_cut_no_block(ranks, block, shape, sizes):
    assert ranks.run(behind_the_end, block, sizes, (sum(sizes), *shape)) == [(0, True)] * 4


@needs_groups
def test_a_block_that_two_ranks_share_is_a_message_where_others_have_nothing(ranks):
    assert ranks.run(behind_the_end, (32, 32), (5, 3, 0, 0), (8, 40)) == [(1, True)] * 4


def message_of(function, *errors):
    try:
        function()
    except errors as error:
        return str(error)
    return "no error"


def refusals():
    """Messages of what a shard of (8, 24), which cuts blocks of (16, 16), and one that cuts none are asked in vain."""
    group, x = GROUPS["pair"], torch.randn(24, 32)
    q = f8.quantize(x, f8.CurrentScaling(block=(16, 16)), group=group, shard_dim=0, sizes=(24, 24))
    whole = f8.quantize(x[:16], f8.CurrentScaling(block=(16, 16)), group=group, shard_dim=0)
    short = f8.QuantizedTensor(whole.codes[:8], whole.scale, whole.quantizer, whole.dtype, group, 0)
    flat = f8.quantize(torch.randn(2, 16, 32), f8.CurrentScaling(), group=group, shard_dim=1).view(32, 32)
    calls = {
        "slice": lambda: q[:8],
        "view": lambda: q.view(4, 6, 32),
        "scaled_mm": lambda: f8.scaled_mm(q.t(), q, out_dtype=torch.float32),
        "no group": lambda: f8.quantize(x, f8.CurrentScaling()).all_gather(0),
        "other dim": lambda: whole.all_gather(1),
        "other sizes": lambda: q.all_gather(0, (24, 8)),
        "sizes told otherwise": lambda: q.all_gather(0, (24, 40)),
        "own size": lambda: whole.all_gather(0, (8, 24)),
        "cut": lambda: short.all_gather(0, (8, 8)),
        "lost dim": lambda: flat.all_gather(0),
        "sizes without group": lambda: f8.quantize(x, f8.CurrentScaling(), sizes=(24, 24)),
        "no ints": lambda: f8.quantize(x, f8.CurrentScaling(), group=group, shard_dim=0, sizes=(24.0, 24)),
        "too few": lambda: f8.quantize(x, f8.CurrentScaling(), group=group, shard_dim=0, sizes=(24,)),
        "own entry": lambda: f8.quantize(x, f8.CurrentScaling(), group=group, shard_dim=0, sizes=(8, 8)),
    }
    return {name: message_of(call, TypeError, ValueError) for name, call in calls.items()}


@needs_groups
def test_what_a_shard_can_not_raises_and_says_what_can(ranks):
    cut = "of sizes (24, 24) along dim 0"
    for rank, messages in enumerate(ranks.run(refusals)):
        for name, parts in {
            "slice": (cut, "aten.slice", ".all_gather() or .dequantize() first"),
            "view": (cut, "aten.view", ".all_gather() or .dequantize() first"),
            "scaled_mm": ("scaled_mm: `a` is a shard of sizes (24, 24) along dim 1", "Call .all_gather(1) first"),
            "no group": ("all_gather: this QuantizedTensor has no group", "group=..., shard_dim=..."),
            "other dim": ("all_gather: `dim` is 1, but the tensor is sharded along dim 0.",),
            "other sizes": ("all_gather: `sizes` is (24, 8)",),
            "sizes told otherwise": ("all_gather: `sizes` is (24, 40)",),
            "own size": ("all_gather: `sizes` is (8, 24)",),
            "cut": (
                "all_gather: shards of sizes (8, 8) along dim 0 split blocks (16, 16)",
                "fp8compile.quantize(..., sizes=...)",
            ),
            "lost dim": (
                "all_gather: this QuantizedTensor is a view without the sharded dim",
                "on the original tensor",
            ),
            "sizes without group": ("quantize: `sizes` is (24, 24), but group is None",),
            "no ints": ("quantize: `sizes` must be a tuple of an int of at least 0 per rank, got (24.0, 24)",),
            "too few": ("quantize: `sizes` must have an entry for each of 2 ranks, got (24,)",),
            "own entry": (
                f"`sizes` is (8, 8), but the entries of x along dim 0 on rank {rank % 2} are 24",
                "the same on all",
            ),
        }.items():
            for part in parts:
                assert part in messages[name], (name, messages[name])


def views():
    """(shard_dim, sizes, whether it is what the same view of the whole is) of views that keep their dim."""
    group, found = GROUPS["pair"], []
    rank = group.rank()
    whole = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    rows = f8.CurrentScaling(block=(1, -1))
    shard = f8.quantize(whole.split((24, 8), 1)[rank], rows, group=group, shard_dim=1, sizes=(24, 8))
    expected = f8.quantize(whole, rows)
    flat = f8.quantize(
        whole[0].split((24, 8))[rank], f8.CurrentScaling(block=(16, 16)), group=group, shard_dim=0, sizes=(24, 8)
    )
    flat_whole = f8.quantize(whole[0], f8.CurrentScaling(block=(16, 16)))
    for view, of_whole in (
        (shard[0], expected[0]),
        (shard[1:], expected[1:]),
        (shard[None], expected[None]),
        (shard[0].t(), expected[0].t()),
        (shard.clone(), expected),
        (flat.t(), flat_whole.t()),
        (flat.detach().t().t(), flat_whole),
    ):
        gathered = view.all_gather(view.shard_dim)
        same = same_bits(gathered.codes, of_whole.codes) and same_bits(gathered.scale, of_whole.scale)
        part = of_whole.dequantize().split((24, 8), view.shard_dim)[rank]
        found.append((view.shard_dim, view.sizes, same and same_bits(view.dequantize(), part)))
    return found


@needs_groups
def test_a_view_knows_where_its_ranks_have_parts(ranks):
    for found in ranks.run(views):
        assert [dim for dim, _, _ in found] == [0, 1, 2, 1, 1, 1, 0]
        assert {sizes for _, sizes, _ in found} == {(24, 8)}
        assert all(same for _, _, same in found)
