"""Every recipe in every way of training: one graph, no break, no compile that is not expected, all of it cacheable."""

from __future__ import annotations

import pytest
import torch
from eight_bits import EIGHT_BITS
from graphs import layer_op
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.testing import Call, assert_cacheable, assert_fullgraph, assert_no_recompile, assert_ops, graph_report

pytestmark = pytest.mark.parametrize("recipe", EIGHT_BITS)


class Block(nn.Module):
    """A norm, two layers, a residual; dropout makes train and eval two graphs."""

    def __init__(self, recipe, *, recompute=False):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)
        self.dropout = nn.Dropout(0.1)
        self.recompute = recompute
        f8.convert(self.bfloat16(), f8.recipes.by_name(recipe))

    def inner(self, x):
        return self.dropout(self.down(self.up(self.norm(x)).relu()))

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x))


def x(rows=32):
    return torch.randn(rows, 64, dtype=torch.bfloat16)


def assert_clean(report, recipe, graphs):
    """No break, that many graphs, each in the cache, products only by our ops."""
    assert_fullgraph(report)
    assert_cacheable(report)
    assert len(report.graphs) == graphs, str(report)
    assert_ops(report, contains=[layer_op(recipe)], absent=["aten.mm", "aten.addmm", "aten.bmm"])


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_forward_and_backward_twice(recipe, recompute):
    report = assert_no_recompile(Block(recipe, recompute=recompute), [(x(),), (x(),)])
    assert_clean(report, recipe, 1)
    (graph,) = report.graphs
    counts = {name: graph.backward.count(layer_op(recipe, name)) for name in ("linear", "grad_input", "grad_weight")}
    assert graph.forward.count(layer_op(recipe)) == 2
    # recomputed up to the dropout, which makes its mask of the last layer's output
    assert counts == {"linear": 2 * recompute, "grad_input": 2, "grad_weight": 2}


def test_dynamic_m(recipe):
    """One graph for all M from 2 on, one each for 0 and 1."""
    report = graph_report(Block(recipe), calls=[(x(rows),) for rows in (32, 5, 64, 1, 0, 7)], dynamic=True)
    assert [call.graphs for call in report.calls] == [1, 0, 0, 1, 1, 0], str(report)
    assert_clean(report, recipe, 3)


def test_dynamic_m_found_out_by_pytorch(recipe):
    report = graph_report(Block(recipe), calls=[(x(rows),) for rows in (32, 5, 64, 9)])
    assert [call.graphs for call in report.calls] == [1, 1, 0, 0], str(report)
    assert_clean(report, recipe, 2)


def test_train_and_eval(recipe):
    calls = [Call((x(),), train=train) for train in (True, False, True, False)]
    report = graph_report(Block(recipe), calls=calls)
    assert [call.graphs for call in report.calls] == [1, 1, 0, 0], str(report)
    assert_clean(report, recipe, 2)


def test_no_grad_and_back(recipe):
    calls = [Call((x(),), grad=grad) for grad in (True, False, True, False)]
    report = graph_report(Block(recipe), calls=calls)
    assert [call.graphs for call in report.calls] == [1, 1, 0, 0], str(report)
    assert_clean(report, recipe, 2)
    assert [graph.backward is None for graph in report.graphs] == [False, True]
