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


def shard_problems(quantizer, group, shape, dim, split, fill, dtype, quantize):
    """What is wrong with this rank's quantized shard: nothing, one hopes."""
    whole = whole_tensor(shape, dim, split, fill, dtype)
    start, length = sum(split[: group.rank()]), split[group.rank()]
    shard = whole.narrow(dim, start, length)
    with CountCollectives() as collectives:
        q = quantize(shard, quantizer, group, dim)
    expected = f8.quantize(whole, quantizer)
    spans = quantizer.block[1 if dim == len(shape) - 1 else 0] == -1
    checks = {
        "codes": same_bits(q.codes, expected.codes.narrow(dim, start, length)),
        "scale": same_bits(q.scale, expected_scale(expected, dim, start, length)),
        "values": same_bits(q.dequantize(), expected.dequantize().narrow(dim, start, length)),
        "group": q.group is group,
        "collectives": collectives.count == (1 if spans else 0),
    }
    return [f"{name}: {shape} along {dim} as {split}, {fill}, {dtype}" for name, ok in checks.items() if not ok]


def cases(size):
    for template, split in itertools.product(SHAPES, SPLITS[size]):
        shape = tuple(sum(split) if side is None else side for side in template)
        yield shape, template.index(None), split


def eager_quantize(x, quantizer, group, dim):
    return f8.quantize(x, quantizer, group=group, shard_dim=dim)


def check_shards(quantizer, group_name):
    """All shapes, splits, dtypes and odd values; the number of cases, and what was wrong."""
    group = GROUPS[group_name]
    count, problems = 0, []
    for shape, dim, split in cases(group.size()):
        if shard_cuts_blocks(shape, dim, split, quantizer.block):
            continue
        for fill, dtype in [("random", d) for d in f8.tensor.SOURCE_DTYPES] + [(f, torch.bfloat16) for f in FILLS[1:]]:
            problems += shard_problems(quantizer, group, shape, dim, split, fill, dtype, eager_quantize)
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
            found.append((shape, dim, split, "cuts blocks of" in str(error)))
        else:
            found.append((shape, dim, split, False))
    return found


def check_compiled_shards(quantizer, group_name, backend):
    """The same in one compiled graph, the group as an argument; eager mode has shown what is right."""
    group = GROUPS[group_name]
    problems = []
    for shape, dim, split in (((40, 32), 0, (20, 20)), ((32, 64), 1, (32, 32)), ((3, 32, 64), 2, (64, 0))):
        if group.size() != len(split) or shard_cuts_blocks(shape, dim, split, quantizer.block):
            continue
        recorder = AotEagerAndRecordGraphs()
        compiled = torch.compile(
            eager_quantize, fullgraph=True, backend=recorder if backend == "aot_eager" else backend
        )
        torch._dynamo.reset()
        for fill in ("random", "nan"):
            whole = whole_tensor(shape, dim, split, fill, torch.bfloat16)
            shard = whole.split(split, dim)[group.rank()].clone()
            q, expected = compiled(shard, quantizer, group, dim), eager_quantize(shard, quantizer, group, dim)
            if not (same_bits(q.codes, expected.codes) and same_bits(q.scale, expected.scale) and q.group is group):
                problems.append(f"{shape} along {dim}, {fill}")
        if backend == "aot_eager":
            nodes = [str(n.target) for n in recorder.fw_graphs[0].graph.nodes]
            spans = quantizer.block[1 if dim == len(shape) - 1 else 0] == -1
            if sum("_c10d_functional.all_reduce" in n for n in nodes) != spans:
                problems.append(f"collectives of {shape} along {dim}: {nodes}")
    return problems


# ---------------------------------------------------------------------------------- a shard


@needs_groups
@pytest.mark.parametrize("group", ["pair", "all"])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_quantized_shard_is_a_shard_of_the_quantized_tensor(ranks, quantizer, group):
    for count, problems in ranks.run(check_shards, quantizer, group):
        assert problems == []
        assert count >= 35, "most splits cut a block: this test shows little"


@needs_groups
@pytest.mark.parametrize("group", ["pair", "all"])
@pytest.mark.parametrize("block", [(16, 16), (1, 16), (16, 1)], ids=str)
def test_split_that_cuts_a_block_raises_on_a_rank(ranks, block, group):
    by_rank = ranks.run(check_cut_blocks_raise, f8.CurrentScaling(block=block), group)
    assert by_rank[0], "no split cuts a block: this test shows nothing"
    members = range(2 if group == "pair" else 4)
    for answers in zip(*(by_rank[rank] for rank in members), strict=True):
        assert any(raised for *_, raised in answers), answers[0][:3]


@needs_groups
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_compiled_shard_is_the_eager_one_with_the_same_collectives(ranks, quantizer):
    assert ranks.run(check_compiled_shards, quantizer, "pair", "aot_eager") == [[]] * 4


@needs_groups
@pytest.mark.slow
@pytest.mark.parametrize("quantizer", QUANTIZERS[:2], ids=str)
def test_inductor_shard_is_the_eager_one(ranks, quantizer):
    assert ranks.run(check_compiled_shards, quantizer, "pair", "inductor") == [[]] * 4
