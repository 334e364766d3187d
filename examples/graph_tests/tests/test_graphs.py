"""What torch.compile makes of the model. Numbers are kept in ``graphs/``; a change for the worse fails."""

from __future__ import annotations

import pytest
import torch
from tinybf16 import Model

from fp8compile.testing import assert_no_recompile

BACKEND = "aot_eager"  # graphs are the same as Inductor's, and take a second


def tokens(rows=4, length=16):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    torch.compiler.reset()
    return Model()


@pytest.mark.fullgraph(max_breaks=0, max_recompiles=0, own="tinybf16")
def test_a_training_step_is_one_graph(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(model, backend=BACKEND)
    for _ in range(3):
        step(tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_model_keeps_no_more_for_its_backward(model, graph_report):
    report = graph_report(model, tokens())
    assert not report.breaks
    assert len(report.graphs) == 1


def test_another_batch_size_compiles_once_more_and_no_further(model):
    assert_no_recompile(model, [(tokens(4),), (tokens(6),), (tokens(9),)], allowed=1)
