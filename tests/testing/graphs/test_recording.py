"""A recording keeps each compilation's graph: one of a compilation that starts over, all of those before a reset."""

from __future__ import annotations

import torch

from fp8compile.testing.graphs.recording import Recording


def test_graphs_outlive_a_reset():
    """PyTorch numbers compilations from 0/0 again."""
    recording = Recording()
    for function in (torch.sin, torch.cos):
        torch._dynamo.reset()
        torch.compile(lambda x, function=function: function(x) + 1, backend=recording)(torch.ones(2))
    called = [next(node.target for node in kept.dynamo.graph.nodes if "call" in node.op) for kept in recording.graphs]
    assert called == [torch.sin, torch.cos]
    assert [kept.compile_id for kept in recording.graphs] == ["0/0", "0/0"]


def test_a_compilation_that_starts_over_is_kept_once(monkeypatch):
    """Dynamo starts a function over where its graph gives up after the backend had it."""
    from torch._dynamo import exc

    recording, starts = Recording(), []

    def backend(graph, inputs):
        compiled = recording(graph, inputs)
        starts.append(graph)
        if len(starts) == 1:
            raise exc.TensorifyScalarRestartAnalysis(restart_reason="a test asks for it")
        return compiled

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert len(starts) == 2
    assert [kept.dynamo for kept in recording.graphs] == starts[1:]


def test_graphs_given_outside_of_a_compilation_are_all_kept():
    recording = Recording()
    graph = torch.fx.symbolic_trace(lambda x: (torch.sin(x),))
    for _ in range(2):
        recording(graph, [torch.ones(2)])
    assert len(recording.graphs) == 2
