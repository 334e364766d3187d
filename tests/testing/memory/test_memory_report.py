"""memory_report: what it counts, what it says of kept tensors, equal blocks, and what it refuses."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8compile as f8
from benchmarks.blocks import SHAPES, Attention
from benchmarks.memory import saved_bytes
from benchmarks.mlp import Mlp, converted, mlp
from fp8compile.testing import KeptTensor, MemoryReport, Moment, gpu_kernels, memory_report
from fp8compile.testing.explain import equal_blocks

needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Inductor generates a GPU's kernels in Triton"
)
triton_warns = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:Overriding a previously registered",
)
M, D, H = 64, 32, 96


class Two(nn.Module):
    """A product and an activation, in float32: what is kept can be told by hand."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


def test_numbers_that_can_be_told_by_hand():
    model = Two()
    report = memory_report(model, torch.randn(M, D), arch="cpu")
    parameters = 4 * (D * H + H + H * D)
    assert (report.device, report.counted) == ("CPU", "")
    assert (report.parameters, report.gradients, report.optimizer) == (parameters, parameters, 2 * parameters)
    assert report.kept_bytes == 2 * 4 * M * H  # what up returns, and what silu makes of it
    assert report.forward == Moment(parameters=parameters, inputs=4 * M * D, kept=2 * 4 * M * H, results=4 * M * D)
    assert report.backward.parameters == parameters
    assert report.step_bytes == report.backward.bytes + report.optimizer
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_kept_tensor_has_maker_reader_and_codes():
    report = memory_report(Two(), torch.randn(M, D), arch="cpu")
    up, silu = sorted(report.kept, key=lambda each: each.module, reverse=True)
    assert (up.module, up.made_by) == ("up", "aten.addmm")
    assert "aten.silu_backward" in up.read_by
    assert (up.shape, up.dtype, up.bytes) == ((M, H), torch.float32, 4 * M * H)
    assert (up.block, up.code_bytes, up.moved) == ((1, 128), M * H + 2 * M, None)
    assert up.saved == f8.SavedTensor(
        kind="activation", shape=(M, H), dtype=torch.float32, module="up", made_by="addmm"
    )
    assert silu.saved is not None
    assert silu.saved.kind == "gemm"
    assert "aten.mm" in silu.read_by


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_kept_bytes_are_those_that_the_compiled_graph_keeps(recipe):
    model, x = mlp(recipe, M, D, H)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    expected = saved_bytes(compiled, model, x)
    report = memory_report(model, x, arch="cpu")
    assert report.kept_bytes == expected == report.forward.kept + sum(0 for _ in ()), (
        f"{report.kept_bytes} {expected} {report.forward}"
    )


def test_the_optimizer_is_counted_by_a_step_of_it():
    model, x = Two().bfloat16(), torch.randn(M, D, dtype=torch.bfloat16)
    numbers = sum(parameter.numel() for parameter in model.parameters())

    def state(optimizer):
        return memory_report(model, x, arch="cpu", optimizer=optimizer).optimizer

    assert state(torch.optim.AdamW) == 4 * numbers
    assert state(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) == 2 * numbers
    assert state(None) == 0


def test_codes_and_masters_of_quantized_parameters_are_counted():
    model = nn.Sequential(nn.Linear(D, H, bias=False)).bfloat16()
    f8.convert(model, f8.recipes.tensorwise(), filter="*", weight_lifetime="parameter")
    report = memory_report(
        model,
        torch.randn(M, D, dtype=torch.bfloat16),
        arch="cpu",
        optimizer=lambda parameters: f8.MasterWeights(torch.optim.AdamW, parameters),
    )
    assert report.parameters == D * H + 4  # codes and a scale
    assert report.gradients == 2 * D * H
    assert report.optimizer == 3 * 4 * D * H  # two moments and the master, in float32


def test_arguments_of_a_function_are_inputs():
    x, weight = torch.randn(M, D, requires_grad=True), torch.randn(H, D, requires_grad=True)
    report = memory_report(lambda x, weight: nn.functional.silu(x @ weight.t()), x, weight, arch="cpu")
    assert (report.parameters, report.gradients, report.optimizer) == (0, 0, 0)
    assert report.forward.inputs == 4 * (M * D + H * D)
    assert report.kept_bytes == 4 * M * H


@pytest.mark.parametrize("way", ["no_grad", "frozen"])
def test_a_call_without_backward_is_refused(way):
    model, x = Two(), torch.randn(M, D)
    if way == "frozen":
        model.requires_grad_(requires_grad=False)
    with torch.set_grad_enabled(way != "no_grad"), pytest.raises(ValueError, match="has no backward"):
        memory_report(model, x, arch="cpu")


def test_what_it_is_given_is_checked():
    model, x = Two(), torch.randn(M, D)
    with pytest.raises(ValueError, match=r"`arch` is 'h201'; it must be one of h200, .*, cpu, or a name such as sm_"):
        memory_report(model, x, arch="h201")
    with pytest.raises(TypeError, match=r"`model` is a int; it must be a torch\.nn\.Module"):
        memory_report(3, x)
    with pytest.raises(TypeError, match="already compiled"):
        memory_report(torch.compile(model), x)
    with pytest.raises(TypeError, match=r"`saved` is 'all'; it must be a fp8compile\.SavedAsCodes, or None"):
        memory_report(model, x, saved="all")


# ---------------------------------------------------------------------------------- equal blocks


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(SHAPES["tiny"]), Mlp(64, 128)

    def forward(self, x):
        return self.mlp(self.attention(x))


class Decoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(64, 50, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float(), tokens)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_counted_layers_hold_what_generated_ones_hold(recipe, monkeypatch):
    model, tokens = converted(recipe, Decoder(5).bfloat16()), torch.randint(0, 50, (128,))
    whole = memory_report(model, tokens, arch="cpu")
    monkeypatch.setattr(equal_blocks, "FEWEST", 5)
    counted = memory_report(model, tokens, arch="cpu")
    assert (whole.counted, counted.counted) == ("", "layers.{1..3}")
    assert (counted.forward, counted.backward) == (whole.forward, whole.backward)
    assert sorted(map(repr, counted.kept)) == sorted(map(repr, whole.kept))


# ---------------------------------------------------------------------------------- on a GPU


@needs_triton
def test_codes_move_at_least_what_the_report_says():
    model, x = mlp("rowwise", 256, 64, 512)
    report = memory_report(model, x)
    assert report.device == "NVIDIA H200"
    chosen = f8.SavedAsCodes.for_budget(report, int(0.6 * report.kept_bytes))
    rows = [each for each in report.kept if each.saved is not None and chosen.chooses(each.saved)]
    assert {each.module for each in rows} == {"gate", "up"}
    found = memory_report(model, x, saved=chosen)
    assert found.kept_bytes == report.kept_bytes - sum(each.bytes - each.code_bytes for each in rows)
    plain = sum(code.bytes for code in gpu_kernels(model, x))
    from fp8compile.saved_tensors import partitioner

    with torch._inductor.config.patch(custom_partitioner_fn=partitioner(chosen)):
        packed = sum(code.bytes for code in gpu_kernels(model, x))
    assert packed - plain >= sum(each.moved for each in rows)


# ---------------------------------------------------------------------------------- a budget


def kept(module, kind, size, *, codes=None):
    saved = f8.SavedTensor(kind=kind, shape=(size // 2,), dtype=torch.bfloat16, module=module)
    return KeptTensor(
        module=module, made_by="aten.mm", read_in=(), read_by=(), shape=(size // 2,), dtype=torch.bfloat16, bytes=size,
        saved=saved, block=(1, -1), code_bytes=size // 2 if codes is None else codes, moved=0,
    )  # fmt: skip


def report_of(*rows):
    nothing = {"parameters": 0, "gradients": 0, "optimizer": 0}
    return MemoryReport(device="it", kept=rows, forward=Moment(), backward=Moment(), **nothing)


ROWS = (
    kept("layers.0.attention", "attention", 4000),
    kept("layers.0.gate", "activation", 1000),
    kept("layers.1.gate", "activation", 1000),
    kept("layers.0.up", "activation", 600),
    kept("norm", "norm", 200),
    replace(kept("statistics", "other", 100), saved=None, block=None, code_bytes=None),
)


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (6900, []),
        (6800, ["norm"]),
        (6799, ["norm", "layers.0.gate"]),  # of both layers
        (5799, ["norm", "layers.0.gate", "layers.0.up"]),
        (3500, ["norm", "layers.0.gate", "layers.0.up", "layers.0.attention"]),
    ],
)
def test_a_budget_takes_the_kinds_that_move_gradients_least_first(budget, chosen):
    value = f8.SavedAsCodes.for_budget(report_of(*ROWS), budget)
    assert [each.module for each in value.filter] == chosen
    if "layers.0.gate" in chosen:
        assert value.chooses(ROWS[2].saved)


def test_a_budget_that_codes_can_not_reach_is_refused():
    with pytest.raises(
        ValueError,
        match="the budget is 3,499 bytes, but 3,500 bytes are saved even with 4 kinds of tensors compressed",
    ):
        f8.SavedAsCodes.for_budget(report_of(*ROWS), 3499)


def test_codes_that_save_nothing_are_not_chosen():
    row = kept("narrow", "norm", 200, codes=300)
    with pytest.raises(ValueError, match="with 0 kinds"):
        f8.SavedAsCodes.for_budget(report_of(row), 100)


# ---------------------------------------------------------------------------------- its text


def test_its_text_has_80_columns_where_the_terminal_has(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    moment = Moment(parameters=2_000_000, inputs=1_000_000, kept=3_000_000, temporaries=250_000)
    rows = [kept(f"layers.{at}.{name}", "activation", 1_000_000) for at in range(3) for name in ("gate", "up")]
    report = replace(
        report_of(*rows, replace(kept("layers.0.norm", "other", 4000), saved=None, code_bytes=None, moved=None)),
        parameters=2_000_000, gradients=2_000_000, optimizer=4_000_000, forward=moment, backward=moment,
        counted="layers.{1..1}",
    )  # fmt: skip
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    cells = [line.split() for line in lines]
    assert ["saved", "for", "the", "backward", "6.0"] in cells
    assert ["temporaries", "0.2"] in cells
    assert any(line.startswith("layers.{0..2}.{gate,up}") for line in lines)
    assert lines[-1].split() == ["1", "smaller", "ones", "0.0", "-", "-"]
    assert report.to_dict()["kept_bytes"] == 6_004_000
    assert report.to_dict()["kept"][0]["dtype"] == "torch.bfloat16"


def distributed_reports():
    """Reports on a part of two tensor parallel ranks and on the whole model, and what FSDP2's model is refused by."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    x = torch.randn(M, D)
    whole, part = (f8.convert(Two(), f8.recipes.rowwise(), filter="*") for _ in range(2))
    plan = {"up": f8.parallel.ColwiseParallel(), "down": f8.parallel.RowwiseParallel()}
    parallelize_module(part, mesh, plan)
    reports = [memory_report(model, x, arch="cpu") for model in (whole, part)]
    with pytest.raises(NotImplementedError) as error:
        memory_report(fully_shard(Two(), mesh=mesh), x, arch="cpu")
    return [(each.parameters, each.gradients, each.optimizer) for each in reports], str(error.value)


def test_tensor_parallel_parameters_are_those_of_the_rank_and_fsdp_is_refused():
    for (whole, part), text in shared_ranks().run(distributed_reports, within="pair"):
        assert [2 * each for each in part] == list(whole)
        assert "fully_shard was called for the model, which communicates outside of graphs" in text
