"""graph_report and the assertions on it: planted faults are all found, each with its place."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from faulty import Broken, Recompiled, Uncached, line_of
from torch import nn

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing import (
    Call,
    assert_cacheable,
    assert_comm,
    assert_fullgraph,
    assert_no_recompile,
    assert_ops,
    graph_report,
    snapshot,
)

FAULTY = Path(__file__).with_name("faulty.py")
RECIPE = f8.recipes.rowwise()


def x(rows=4):
    return torch.randn(rows, 8)


def mlp():
    return f8.convert(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).bfloat16(), RECIPE)


def wide(rows=32):
    return torch.randn(rows, 64, dtype=torch.bfloat16)


# ------------------------------------------------------------------------------- planted faults


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_break_has_its_place_its_number_and_a_hint(backend):
    report = graph_report(Broken(), x(), backend=backend)
    assert {Path(found.file) for found in report.breaks} == {FAULTY}
    lines = [found.line for found in report.breaks]
    assert lines[:3] == [line_of("print"), line_of("branch"), line_of("item")]
    # PyTorch 2.11 names the look-up, later versions also the line of __hash__ that it can't run
    assert line_of("unhashable") in lines[3:]
    assert set(lines[3:]) <= {line_of("unhashable"), line_of("hash")}
    assert any(frame.startswith(f"{FAULTY}:{line_of('unhashable')} in ") for frame in report.breaks[3].stack)
    assert all(found.hints and found.explanation for found in report.breaks)
    assert all(found.url.endswith(f"{found.code}.html") for found in report.breaks)
    assert [found.gives_up for found in report.breaks] == [found is report.breaks[-1] for found in report.breaks]
    assert len(report.graphs) == 3


def test_fullgraph_names_the_first_break_only():
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(Broken(), fullgraph=True, backend="eager")(x())
    faults = ("print", "branch", "item", "unhashable")
    named = [fault for fault in faults if f"line {line_of(fault)}" in str(caught.value)]
    assert named == ["print"]


class Inner(nn.Module):
    def forward(self, x):
        for _ in range(2):
            print("in a loop")
            x = x.sin()
        return x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Inner(), Inner()])

    def forward(self, x):
        for inner in self.inner:
            x = inner(x)
        return x


def test_each_function_that_a_break_leaves_without_a_graph_is_named():
    report = graph_report(Outer(), x())
    (found,) = report.breaks  # of four at one place
    assert found.gives_up
    places = {f"`forward` at {__file__}:{cls.forward.__code__.co_firstlineno}" for cls in (Inner, Outer)}
    assert set(found.without_graph) == places
    assert all(f"  {place} runs without a graph\n" in str(report) for place in places)
    # the frames that first led to it, and of no other break
    functions = [frame.rpartition(":")[0] for frame in found.stack]
    assert functions.count(__file__) <= 3


def test_a_guard_has_its_place_and_no_cut_off_path():
    def branches(x, n):
        x = x * n
        return x + 1 if x.shape[0] > 5 else x

    calls = [(x(), 1.0), (x(), 2.0), (x(6), 2.0), (x(3), 2.0)]
    report = graph_report(branches, calls=calls)
    guards = [guard for found in report.recompiles for guard in found.guards]
    line = branches.__code__.co_firstlineno
    assert f"n == 1.0 [{__file__}:{line + 1}]" in guards
    assert "6 <= x.size()[0] [return x + 1 if x.shape[0] > 5 else x]" in guards
    assert str(report).count("  failed: ") == len(report.recompiles) == 3


def test_a_recompile_names_the_guard_that_failed():
    calls = [Call((x(rows),), train=train) for rows, train in ((4, True), (6, True), (6, False), (9, True))]
    report = graph_report(Recompiled(), calls=calls)
    assert [call.graphs for call in report.calls] == [1, 1, 1, 0]
    shape, mode = report.recompiles
    assert (shape.function, Path(shape.file), shape.call, mode.call) == ("forward", FAULTY, 1, 2)
    assert "size mismatch at index 0. expected 4, actual 6" in shape.guards[0]
    assert "training" in mode.guards[0]
    assert "mark_dynamic" in str(report)
    assert not report.breaks


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_autograd_function_that_bypasses_the_cache_is_named(backend):
    report = graph_report(Uncached(), x(), backend=backend)
    (bypass,) = report.bypasses
    assert (bypass.cache, Path(bypass.file), bypass.line) == ("AOTAutograd", FAULTY, line_of("autograd.Function"))
    assert "autograd_function_apply" in bypass.reason


def test_a_function_without_a_graph_is_no_success():
    report = graph_report(lambda x: x, x())
    assert "nothing was compiled" in str(report)
    with pytest.raises(AssertionError, match="nothing was compiled"):
        assert_fullgraph(report)


def test_a_break_at_the_edge_of_a_function_is_seen():
    """The last statement: one graph, and `frame_count == 1`."""

    def edge(x):
        y = x.sin()
        print("done")
        return y

    report = graph_report(edge, x())
    assert len(report.graphs) == 1
    assert [found.reason for found in report.breaks] == ["Failed to trace builtin operator"]


# ------------------------------------------------------------------------------- what a report has


def test_a_converted_model_is_one_graph_with_its_operators():
    model = mlp()
    report = graph_report(model, wide())
    assert (len(report.graphs), report.breaks, report.recompiles, report.bypasses) == (1, (), (), ())
    (graph,) = report.graphs
    assert graph.forward.count("fp8compile.linear.default") == 2
    assert graph.backward.count("fp8compile.grad_weight.default") == 2
    assert graph.backward.count("fp8compile.grad_input.default") == 1
    assert graph.saved_bytes == 2 * 32 * 96  # what ReLU returns, which its own backward reads too


def test_the_caller_keeps_gradients_modes_and_random_numbers():
    model = mlp().eval()
    model[1].train()
    before = [p.clone() for p in model.parameters()]
    graph_report(model, calls=[Call((wide(),), train=True)])
    assert [module.training for module in model.modules()] == [False, False, True, False]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_parameters_are_found_wherever_the_function_has_them_from():
    model = mlp()
    report = graph_report(lambda x: model(x).float().square().mean(), wide())
    assert report.graphs[0].backward.count("fp8compile.grad_weight.default") == 2
    assert all(p.grad is None for p in model.parameters())


def test_buffers_and_random_numbers_stay_as_they_were():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
    before, state = model[0].running_mean.clone(), torch.get_rng_state()
    graph_report(model, torch.randn(4, 8) + 3)
    assert torch.equal(model[0].running_mean, before)
    assert not torch.equal(torch.get_rng_state(), state)  # by the argument above, and nothing else
    torch.set_rng_state(state)
    torch.randn(4, 8)
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    graph_report(model, torch.randn(4, 8) + 3)
    assert torch.equal(torch.get_rng_state(), expected)


class Stateful(nn.Module):
    """Changes all there is to change of a module's state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("replaced", torch.zeros(8))
        self.register_buffer("changed", torch.zeros(8))
        self.register_buffer("expanded", torch.zeros(1).expand(8))
        with torch.inference_mode():
            self.register_buffer("inference", torch.ones(8))

    def forward(self, x):
        self.replaced = self.replaced + 1
        self.changed.add_(1)
        return self.layer(x) + self.expanded + self.inference.clone() * random.random()


def test_buffers_that_are_replaced_expanded_or_of_inference_mode_stay_as_they_were():
    model = Stateful()
    buffers, state = dict(model.named_buffers()), random.getstate()
    graph_report(model, x())
    assert all(getattr(model, name) is buffer for name, buffer in buffers.items())
    assert not model.replaced.any()
    assert not model.changed.any()
    assert random.getstate() == state


def test_gradients_of_a_model_that_asks_for_them_itself_stay_as_they_were():
    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            loss = self.layer(x).square().sum()
            loss.backward()
            return loss.detach()

    model, given = Trains(), x().requires_grad_()
    before = model.layer.weight.grad = torch.ones(8, 8)
    graph_report(model, given)
    assert model.layer.weight.grad is before
    assert torch.equal(before, torch.ones(8, 8))
    assert model.layer.bias.grad is None
    assert given.grad is None


def test_the_backward_of_what_is_returned_in_an_object_is_reported():
    class Loss:
        def __init__(self, loss):
            self.loss = loss

    model = mlp()
    (graph,) = graph_report(lambda x: Loss(model(x)), wide()).graphs
    assert graph.backward is not None
    assert graph.saved_bytes == 2 * 32 * 96


def test_the_callers_grad_mode_is_kept():
    with torch.no_grad():
        assert [graph.backward for graph in graph_report(mlp(), wide()).graphs] == [None]
        assert graph_report(mlp(), calls=[Call((wide(),), grad=True)]).graphs[0].backward is not None


def test_without_a_backward_none_is_made():
    assert [graph.backward for graph in graph_report(mlp(), wide(), backward=False).graphs] == [None]


def test_a_hundred_recompiles_are_all_reported():
    report = graph_report(lambda x, n: x * n, calls=[(x(), float(n)) for n in range(100)], dynamic=False)
    assert (len(report.graphs), len(report.recompiles)) == (100, 99)


def test_without_gradients_there_is_no_backward_graph():
    report = graph_report(mlp(), calls=[Call((wide(),), grad=False)])
    assert [graph.backward for graph in report.graphs] == [None]
    assert [call.name for call in report.calls] == ["32x64, no_grad"]


def test_json_has_everything():
    report = graph_report(Broken(), x())
    restored = json.loads(report.to_json())
    assert [found["line"] for found in restored["breaks"]] == [found.line for found in report.breaks]
    assert restored["graphs"][0]["forward"] == list(report.graphs[0].forward)
    assert restored.keys() == report.to_dict().keys()


def test_a_snapshot_is_short_and_without_places():
    assert_expected_inline(
        snapshot(graph_report(mlp(), wide())),
        """\
calls: 1 new
graph 0: Sequential
  forward:
    aten.relu.default
    fp8compile.linear.default x2
  backward:
    aten.sum.dim_IntList x2
    aten.threshold_backward.default
    fp8compile.grad_input.default
    fp8compile.grad_weight.default x2""",
    )


def test_the_text_of_a_report_reads_well():
    report = graph_report(Broken(), x())
    text = str(report)
    assert f"graph break at compile_tests/faulty.py:{line_of('item')}: Unsupported Tensor.item()" in text
    assert text.startswith(f"3 graphs, {len(report.breaks)} breaks, 0 recompiles, 0 cache bypasses (aot_eager)\n")
    assert "call 0 (4x8): 3 new graphs" in text
    (rest,) = report.breaks[-1].without_graph
    assert rest.startswith(f"the rest of `forward` after line {line_of('item')} at {FAULTY}:")
    assert f"  {rest} runs without a graph\n" in text


# ------------------------------------------------------------------------------- assertions


def test_assert_fullgraph_says_where_and_what_mends_it():
    with pytest.raises(AssertionError) as caught:
        assert_fullgraph(Broken(), x())
    text = str(caught.value)
    assert re.match(r"compile_tests/faulty\.py:\d+: the first of 5 graph breaks:\n", text)
    assert all(f"faulty.py:{line_of(fault)}" in text for fault in ("print", "branch", "item", "unhashable"))
    assert "hint: " in text
    assert len(assert_fullgraph(mlp(), wide()).graphs) == 1


def test_assert_no_recompile_over_shapes_modes_and_steps():
    assert_no_recompile(mlp(), [(wide(),), (wide(),)])
    with pytest.raises(AssertionError, match="size mismatch"):
        assert_no_recompile(mlp(), [(wide(),), (wide(5),)])
    assert_no_recompile(mlp(), [(wide(),), (wide(5),), (wide(7),)], dynamic=True)
    assert_no_recompile(mlp(), [(wide(),), (wide(5),)], allowed=1)
    with pytest.raises(AssertionError, match="compile both during"):
        assert_no_recompile(Recompiled(), [Call((x(),), train=True), Call((x(),), train=False)])
    with pytest.raises(ValueError, match="a recompile requires two"):
        assert_no_recompile(mlp(), [(wide(),)])


def test_assert_cacheable():
    assert_cacheable(mlp(), wide())
    with pytest.raises(AssertionError, match=r"faulty\.py:\d+.*\n.*custom op"):
        assert_cacheable(Uncached(), x())


def test_assert_ops():
    report = graph_report(mlp(), wide())
    assert_ops(report, contains=["fp8compile::linear", "fp8compile.grad_weight"], absent=["aten.mm", "aten.addmm"])
    with pytest.raises(AssertionError, match=r"aten\.mm is missing"):
        assert_ops(report, contains=["aten.mm"])
    with pytest.raises(AssertionError, match=r"fp8compile::linear was found: fp8compile\.linear\.default"):
        assert_ops(report, absent="fp8compile::linear")
    with pytest.raises(AssertionError, match="is missing"):
        assert_ops(report, contains=["fp8compile::lin"])  # a part of a name is none


def test_wrong_use_is_refused():
    with pytest.raises(TypeError, match="it must be a module or function"):
        graph_report(3)
    with pytest.raises(TypeError, match="already compiled"):
        graph_report(torch.compile(mlp()), wide())
    in_place = mlp()
    in_place.compile()
    with pytest.raises(TypeError, match=r"graph_report: `fn` is already compiled. Pass"):
        graph_report(in_place, wide())
    with pytest.raises(ValueError, match="one of aot_eager, inductor"):
        graph_report(mlp(), wide(), backend="eager")
    with pytest.raises(TypeError, match=r"is not a torch\.nn\.Module"):
        graph_report(torch.sin, calls=[Call((x(),), train=True)])
    for calls in (wide(), Call((wide(),)), {"input": wide()}):
        with pytest.raises(TypeError, match=f"`calls` is a {type(calls).__name__}; it must be a list of calls"):
            assert_no_recompile(mlp(), calls)
    with pytest.raises(TypeError, match=r"a call is a dict. Write Call\(kwargs="):
        graph_report(mlp(), calls=[{"input": wide()}])
    for check in (assert_ops, assert_comm, snapshot):
        with pytest.raises(TypeError, match=rf"{check.__name__} expects a GraphReport, got a Sequential\. Call gr"):
            check(mlp())
    with pytest.raises(TypeError, match="so no other arguments are allowed"):
        assert_fullgraph(graph_report(mlp(), wide()), wide())


# ------------------------------------------------------------------------------- messages between ranks


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group(
        "fake", rank=0, world_size=2, store=torch.testing._internal.distributed.fake_pg.FakeStore()
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_have_dtype_bytes_and_place(one_rank):
    import torch.distributed._functional_collectives as collectives

    def gather(x):
        return collectives.all_gather_tensor(x.view(torch.uint8), 0, one_rank).sum()

    report = graph_report(gather, torch.zeros(4, 8))
    (found,) = report.collectives
    assert found.op.startswith("_c10d_functional.all_gather_into_tensor")
    assert (found.dtype, found.bytes, Path(found.file)) == ("uint8", 2 * 4 * 8 * 4, Path(__file__))
    assert_comm(report, dtype=torch.uint8, max_bytes=256)
    with pytest.raises(AssertionError, match="256 bytes of uint8 by _c10d_functional"):
        assert_comm(report, max_bytes=255)
    with pytest.raises(AssertionError, match="not bfloat16"):
        assert_comm(report, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"no collective _c10d_functional\.all_reduce"):
        assert_comm(report, op="_c10d_functional.all_reduce")


def test_each_dtype_of_a_coalesced_message_counts(one_rank):
    import torch.distributed._functional_collectives as collectives

    def gather(x):
        parts = collectives.all_gather_into_tensor_coalesced([x, x.to(torch.uint8)], one_rank)
        return sum(part.float().sum() for part in parts)

    report = graph_report(gather, torch.zeros(4, 8))
    assert [(c.dtype, c.bytes) for c in report.collectives] == [("float32", 2 * 4 * 32), ("uint8", 2 * 32)]
    with pytest.raises(AssertionError, match="64 bytes of uint8"):
        assert_comm(report, dtype=torch.float32)
    assert_comm(report, dtype=[torch.float32, torch.uint8], max_bytes=320)


def test_a_dtype_by_name_is_refused(one_rank):
    report = graph_report(torch.sin, x())
    with pytest.raises(
        TypeError, match=r"`dtype` is 'uint8'; it must be a torch.dtype, such as torch.uint8, or a list"
    ):
        assert_comm(report, dtype="uint8")
    with pytest.raises(AssertionError, match="no collective in the graphs; found: none"):
        assert_comm(report)


def test_pytorchs_own_trace_is_written_while_we_listen(tmp_path):
    program = "import torch; from fp8compile.testing import graph_report; graph_report(torch.sin, torch.ones(3))"
    environment = os.environ | {"TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(Path(f8.__file__).parents[1])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, check=True)
    (log,) = tmp_path.iterdir()
    assert "dynamo_output_graph" in log.read_text()


def test_handlers_of_others_hear_nothing_and_are_back_afterwards():
    heard = []

    class Others(logging.Handler):
        def emit(self, record):
            heard.append(record)

    logger, handler = logging.getLogger("torch.__trace"), Others()
    logger.addHandler(handler)
    try:
        graph_report(torch.sin, x())
        assert handler in logger.handlers
    finally:
        logger.removeHandler(handler)
    assert not heard


def test_version_of_the_log_is_known():
    """The format of the log is PyTorch's own: every version that we hold on is one that this file ran on."""
    assert (2, 11) <= TORCH_VERSION <= (2, 15), "run compile_tests/test_graph_report.py on it, then extend the range"
