"""Two groups of one size in one program, one compiled function: each call runs on its own. And groups refused."""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as funcol

import fp8compile as f8
from fp8compile import _compat
from fp8compile.tensor import allow_groups

HAS_GROUPS = _compat.TORCH_VERSION >= (2, 12)
needs_groups = pytest.mark.skipif(
    not HAS_GROUPS, reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)

ROWWISE = f8.CurrentScaling(block=(1, -1))
TENSORWISE = f8.CurrentScaling()
TURNS = ("pair", "cross", "pair", "all", "cross")
GRAPHS = [1, 2, 2, 3, 3]  # after each turn: coming back to a group compiles nothing


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


# ---------------------------------------------------------------------------------- in each rank


def gathered_product(q, weight):
    """All ranks' rows times weight, and the argument itself."""
    codes = funcol.wait_tensor(funcol.all_gather_tensor(q.codes, 0, q.group))
    scale = funcol.wait_tensor(funcol.all_gather_tensor(q.scale, 0, q.group))
    whole = f8.QuantizedTensor(codes, scale, q.quantizer, q.dtype)
    return whole.dequantize() @ weight, q.detach()


# An op that looks at the group below Dynamo, as ops on a QuantizedTensor do. The function above reads `q.group` where
# Dynamo sees it, which then guards on it by itself: there a graph would be right without any metadata.
LIBRARY = torch.library.Library("group_graphs_test", "DEF")
LIBRARY.define("gathered(Tensor q) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("gathered", lambda q: q.clone(), "CompositeExplicitAutograd")


def _gathered_codes(mode, func, types, args=(), kwargs=None):
    (q,) = args
    gather = torch.ops._c10d_functional.all_gather_into_tensor(q.codes, q.group.size(), q.group.group_name)
    return torch.ops._c10d_functional.wait_tensor(gather)


torch.library.register_torch_dispatch("group_graphs_test::gathered", f8.QuantizedTensor, _gathered_codes, lib=LIBRARY)
torch.library.register_fake(
    "group_graphs_test::gathered",
    lambda q: q.codes.new_empty(q.shape[0] * q.group.size(), q.shape[1]),
    lib=LIBRARY,
)


def gathered_by_an_op(q, weight):
    """Codes of all ranks, and the argument itself."""
    return torch.ops.group_graphs_test.gathered(q).float() @ weight, q.detach()


def quantized_in_group(x, group):
    q = f8.quantize(x, TENSORWISE, group=group, shard_dim=0)
    return q.dequantize() * 2, q


def own_rows(seed):
    generator = torch.Generator().manual_seed(100 * seed + torch.distributed.get_rank())
    return torch.randn(8, 16, generator=generator) * 2.0 ** torch.distributed.get_rank()


def take_turns(function, backend):
    """For each turn: (result and gradient right, group right, graphs so far)."""
    as_argument = function is quantized_in_group
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    answers = []
    for seed, name in enumerate(TURNS):
        group, x = GROUPS[name], own_rows(seed)
        weights = [torch.ones(16, 4).requires_grad_() for _ in range(2)]
        if as_argument:
            results = [f(x, group) for f in (compiled, function)]
            same = torch.equal(results[0][1].codes, results[1][1].codes)
        else:
            q = f8.quantize(x, ROWWISE, group=group, shard_dim=0)
            results = [f(q, weight) for f, weight in zip((compiled, function), weights, strict=True)]
            for y, _ in results:
                y.backward(torch.arange(y.numel(), dtype=y.dtype).view(y.shape))
            same = torch.equal(weights[0].grad, weights[1].grad)
        same = same and torch.equal(results[0][0], results[1][0]) and bool(results[0][0].ne(0).any())
        answers.append((same, results[0][1].group is group, counters["stats"]["unique_graphs"]))
    return answers


def backward_after_both_forwards(backend):
    """Forward on one group, forward on the other, then the backwards: each gradient is that of its own group."""
    compiled = torch.compile(gathered_product, fullgraph=True, backend=backend)
    weights = {name: [torch.ones(16, 4).requires_grad_() for _ in range(2)] for name in ("pair", "cross")}
    outputs = []
    for seed, (name, (mine, reference)) in enumerate(weights.items()):
        q = f8.quantize(own_rows(seed), ROWWISE, group=GROUPS[name], shard_dim=0)
        outputs += [compiled(q, mine)[0], gathered_product(q, reference)[0]]
    for y in outputs:
        y.square().sum().backward()
    return [torch.equal(mine.grad, reference.grad) for mine, reference in weights.values()]


def chained(backend):
    """The tensor that left one compiled graph goes into another, through a view."""
    make = torch.compile(quantized_in_group, fullgraph=True, backend=backend)
    half = torch.compile(lambda q: (q[:4].dequantize(), q[:4]), fullgraph=True, backend=backend)
    answers = []
    for seed, name in enumerate(TURNS):
        x, group = own_rows(seed), GROUPS[name]
        values, view = half(make(x, group)[1])
        expected = f8.quantize(x, TENSORWISE, group=group, shard_dim=0)[:4]
        answers.append(torch.equal(values, expected.dequantize()) and view.group is group)
    return answers


# ---------------------------------------------------------------------------------- two groups


@needs_groups
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    "function",
    [gathered_product, gathered_by_an_op, quantized_in_group],
    ids=["group of the tensor", "group seen by an op", "group as argument"],
)
def test_groups_of_one_size_never_share_a_graph(ranks, backend, function):
    for answers in ranks.run(take_turns, function, backend):
        assert [right for right, _, _ in answers] == [True] * len(TURNS)
        assert [group for _, group, _ in answers] == [True] * len(TURNS)
        assert [graphs for _, _, graphs in answers] == GRAPHS


@needs_groups
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backward_runs_with_the_group_of_its_forward(ranks, backend):
    assert ranks.run(backward_after_both_forwards, backend) == [[True, True]] * 4


@needs_groups
def test_group_travels_from_graph_to_graph_through_a_view(ranks):
    assert ranks.run(chained, "aot_eager") == [[True] * len(TURNS)] * 4


# ---------------------------------------------------------------------------------- refused


class FakeGroup(torch.distributed.ProcessGroup):
    """A rank and a size, and nobody to talk to."""

    group_name = "g"


def fake_group(rank=0, size=2):
    return FakeGroup(rank, size)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"group": "tp"},
            "quantize: `group` is tp and `shard_dim` is None; pass both for a shard of a distributed tensor, or "
            "neither for a full tensor.",
        ),
        (
            {"shard_dim": 0},
            "quantize: `group` is None and `shard_dim` is 0; pass both for a shard of a distributed tensor, or "
            "neither for a full tensor.",
        ),
    ],
    ids=["group alone", "shard_dim alone"],
)
@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_group_and_shard_dim_go_together(arguments, text, backend):
    def function(x):
        return f8.quantize(x, ROWWISE, **arguments)

    if backend is None:
        with pytest.raises(ValueError, match="quantize") as caught:
            function(torch.ones(4, 4))
        assert str(caught.value) == text
    else:
        with pytest.raises(Exception, match="pass both for a shard"):
            torch.compile(function, fullgraph=True, backend=backend)(torch.ones(4, 4))


@needs_groups
@pytest.mark.parametrize(
    ("shape", "block", "shard_dim", "rank", "text"),
    [
        (
            (24, 8),
            (16, 16),
            0,
            0,
            "quantize: a shard of 24 elements along dim 0 on rank 0 of 2 splits blocks of 16. On all ranks, pass "
            "the size of each shard, sizes=(...); or shard in multiples of 16 (the last rank may have less).",
        ),
        (
            (4, 40),
            (1, 16),
            -1,
            0,
            "quantize: a shard of 40 elements along dim 1 on rank 0 of 2 splits blocks of 16. On all ranks, pass "
            "the size of each shard, sizes=(...); or shard in multiples of 16 (the last rank may have less).",
        ),
        ((4, 40), (1, 16), 2, 0, "quantize: `shard_dim` is 2, but x has 2 dims."),
        ((4, 40), (1, 16), -3, 0, "quantize: `shard_dim` is -3, but x has 2 dims."),
        ((), (1, 16), 0, 0, "quantize: `shard_dim` is 0, but x has 0 dims."),
    ],
    ids=["rows", "columns", "dim too large", "dim too small", "no dims"],
)
def test_shard_that_cuts_a_block_or_has_no_such_dim_raises(shape, block, shard_dim, rank, text):
    with pytest.raises(ValueError, match="quantize: ") as caught:
        f8.quantize(torch.ones(shape), f8.CurrentScaling(block=block), group=fake_group(rank), shard_dim=shard_dim)
    assert str(caught.value) == text


NO_GROUPS = (
    "a process group on a QuantizedTensor requires PyTorch 2.12 or later, this is {}. Upgrade PyTorch, or quantize"
)


@pytest.mark.skipif(HAS_GROUPS, reason=f"PyTorch {torch.__version__} takes a group; the text is for 2.11")
def test_group_raises_on_a_pytorch_that_can_not_hold_one():
    with pytest.raises(RuntimeError, match=r"requires PyTorch 2\.12 or later") as caught:
        f8.quantize(torch.ones(4, 4), ROWWISE, group=fake_group(), shard_dim=0)
    assert str(caught.value).startswith(NO_GROUPS.format(torch.__version__))


def test_the_version_decides_whether_a_group_is_taken(monkeypatch):
    monkeypatch.setattr(_compat.versions, "TORCH_VERSION", (2, 11))
    monkeypatch.setattr(_compat.versions, "GROUPS_ALLOWED", [])
    with pytest.raises(RuntimeError, match="or quantize without group=") as caught:
        allow_groups()
    assert str(caught.value).startswith(NO_GROUPS.format(torch.__version__))
