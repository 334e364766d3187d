"""What tensor and sequence parallel send, and that it is one graph: on meshes of ranks that are not there.

A fake process group traces what a real one would run, in a process of its own: PyTorch keeps meshes beyond their
group. The bfloat16 beside it is the same model under the stock styles.
"""

from __future__ import annotations

import pytest
import torch
from processes import fake_rank
from torch import nn

import fp8compile as f8
from fp8compile.testing import assert_fullgraph, assert_no_recompile, graph_report

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8")
MESHES = ((2,), (4,), (2, 4))
KEPT: dict[tuple, object] = {}  # what a function gave in the process with the group: each graph is traced once
DIM, HIDDEN, BATCH, SEQUENCE = 256, 1024, 2, 1024


class Block(nn.Module):
    """RMSNorm, SwiGLU, residual: gate and up read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


@pytest.fixture(scope="module")
def elsewhere():
    """Runs a function in the process with the group, once for each of its arguments."""
    with fake_rank(0, 8) as pool:

        def kept(function, *args):
            call = (function, args)
            if call not in KEPT:
                KEPT[call] = pool.submit(function, *args).result()
            return KEPT[call]

        yield kept


# ---------------------------------------------------------------------------------- there


def mesh_of(shape):
    """A mesh of the first ranks, of which the process is the first."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("data", "tensor")[-len(shape) :])


def model_of(recipe, mesh, *, placed=False):
    """The block, cut; ``placed``: what the norm gives gate and up is a DTensor."""
    from torch.distributed.tensor import Shard, parallel

    model, styles = Block().bfloat16(), parallel
    if recipe is not None:
        model, styles = f8.convert(model, f8.recipes.by_name(recipe)), f8.parallel
    colwise = styles.ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    rowwise = styles.RowwiseParallel(output_layouts=Shard(1))
    norm = parallel.SequenceParallel(use_local_output=not placed)
    plan = {"norm": norm, "gate": colwise, "up": colwise, "down": rowwise}
    return parallel.parallelize_module(model, mesh["tensor"], plan)


def local_input(mesh):
    return torch.randn(BATCH, SEQUENCE // mesh["tensor"].size(), DIM, dtype=torch.bfloat16, requires_grad=True)


def sums_of(recipe, placed):
    """Sums over ranks that are sent, of which a rank gets its part."""
    mesh = mesh_of((4,))
    sent = graph_report(model_of(recipe, mesh, placed=placed), local_input(mesh)).collectives
    return [(c.dtype, c.bytes, c.backward) for c in sent if "scatter" in c.op]


def report_of(recipe, shape):
    mesh = mesh_of(shape)
    return graph_report(model_of(recipe, mesh), local_input(mesh), calls=[local_input(mesh), local_input(mesh)])


# ---------------------------------------------------------------------------------- here


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph_without_breaks_or_recompiles(elsewhere, recipe):
    report = elsewhere(report_of, recipe, (4,))
    assert_fullgraph(report)
    assert_no_recompile(report)
    assert len(report.graphs) == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_meshes_of_any_size_send_the_same(elsewhere, recipe):
    sent = {}
    for shape in MESHES:
        sent[shape] = [(c.op, c.dtype, c.backward) for c in elsewhere(report_of, recipe, shape).collectives]
    assert all(each == sent[2,] for each in sent.values()), sent


WHOLE = BATCH * SEQUENCE * DIM  # elements of what is gathered: the input of gate and up, grad_output of down
# Of both, codes along rows and codes along columns; tensorwise, they are the same.
CODES_GATHERED = {"tensorwise": 2, "rowwise": 4, "blockwise": 4, "mxfp8": 4}


@pytest.mark.parametrize("recipe", CODES_GATHERED)
def test_codes_travel_and_at_most_0_55_of_bfloat16s_bytes(elsewhere, recipe):
    gathers = [c for c in elsewhere(report_of, recipe, (4,)).collectives if "all_gather" in c.op]
    norm = [c for c in gathers if c.dtype == "float32" and c.bytes == 4 * BATCH * SEQUENCE and c.backward]
    codes = [c for c in gathers if c.dtype == "uint8" and c.bytes == WHOLE]
    scales = [c for c in gathers if c not in codes]
    assert len(codes) == CODES_GATHERED[recipe], gathers
    assert "bfloat16" not in {c.dtype for c in gathers}
    assert sum(c.bytes for c in codes + scales) <= 0.55 * 2 * WHOLE * len(codes) + sum(c.bytes for c in norm), gathers


@pytest.mark.parametrize("placed", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_sums_over_ranks_are_as_many_and_as_wide_as_without_fp8(elsewhere, recipe, placed):
    """Of the output, and of the gradients of what gate and up read: no norm goes on with a sum that is not one yet."""
    sums = elsewhere(sums_of, recipe, placed)
    assert sums == elsewhere(sums_of, None, placed)
    assert [(dtype, size) for dtype, size, _ in sums] == [("bfloat16", 2 * WHOLE)] * 3


def test_stock_styles_gather_bfloat16(elsewhere):
    """What the bound above is held against: the same model, not converted."""
    gathers = [c for c in elsewhere(report_of, None, (4,)).collectives if "all_gather" in c.op]
    assert [c.bytes for c in gathers if c.dtype == "bfloat16"] == [2 * WHOLE] * 2, gathers


def test_gate_and_up_share_a_quantization_and_a_gather(elsewhere):
    report = elsewhere(report_of, "tensorwise", (4,))
    assert sum(c.bytes == WHOLE and not c.backward for c in report.collectives if "all_gather" in c.op) == 1
    forward_casts = sum("fp8compile.cast.default" in op for op in report.graphs[0].forward)
    # of x, of what down takes, and of three weights; and of what down takes, cast again for the backward
    assert forward_casts == 6, report
