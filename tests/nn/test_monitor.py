"""Monitor: when it reads, and which planted faults it names; the numbers are in tests/ops/test_statistics.py."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import expert_models
import fsdp_models
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.integrations import loggers
from fp8compile.library import register_statistic
from fp8compile.monitor import definitions
from fp8compile.monitor.monitor import NonFiniteError
from fp8compile.quantizers.recipe import ROLES
from fp8compile.testing import Recording

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "delayed", "nvfp4")
ALL = tuple(definitions.STATISTICS)


class Block(nn.Module):
    """A linear, a ReLU, a linear, and the input added."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Two blocks, checkpointed if so told; the second is defined before the first."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.second, self.first, self.checkpointed = Block(), Block(), checkpointed

    def forward(self, x):
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def model(recipe="rowwise", **options):
    torch.manual_seed(0)
    return f8.convert(Model(**options).bfloat16(), f8.recipes.by_name(recipe), filter=lambda *_: True)


def batch(seed=1):
    return torch.randn(48, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()


def loss_of(y):
    return y.float().square().mean()


def backward(step, seed=1):
    loss_of(step(batch(seed))).backward()


# ---------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_a_reading_the_graph_is_that_of_a_model_without_a_monitor(recipe):
    graphs = []
    for is_monitored in (False, True):
        torch._dynamo.reset()
        layers, recording = model(recipe), Recording()
        if is_monitored:
            monitor = f8.Monitor(layers)
            monitor.step()  # the step after is not read
        backward(torch.compile(layers, fullgraph=True, backend=recording))
        graphs.append([graph.print_readable(print_output=False) for graph in recording.traced])
    assert len(graphs[0]) == 2
    assert graphs[0] == graphs[1]


def test_fifty_steps_are_two_graphs():
    torch._dynamo.reset()
    counters.clear()
    layers = model()
    step, monitor = torch.compile(layers, fullgraph=True, backend="aot_eager"), f8.Monitor(layers, every=10)
    readings = {}
    for index in range(50):
        assert monitor.is_reading == (index % 10 == 0)
        backward(step, index)
        if monitor.is_reading:
            readings[index] = monitor.read()
        monitor.step()
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert len({reading["first.up"]["input"]["amax"] for reading in readings.values()}) == 5
    monitor.remove()
    assert all("_observers" not in vars(module) for module in layers.modules())
    backward(step)
    assert counters["stats"]["unique_graphs"] == 2  # that of the model without a reading


def reading_of(layers, step, seeds=(1,), statistics=ALL):
    monitor = f8.Monitor(layers, statistics)
    for seed in seeds:
        backward(step, seed)
    found = monitor.read()
    monitor.remove()
    return found


def test_checkpointing_and_regions_read_what_a_plain_model_reads():
    torch._dynamo.reset()
    plain = reading_of(layers := model(), layers)
    assert all(len(roles) == 6 for roles in plain.values())
    again = model(checkpointed=True)
    assert reading_of(again, again) == plain
    assert reading_of(again, torch.compile(again, backend="aot_eager", fullgraph=True)) == plain
    blocks = model()
    assert reading_of(blocks, f8.compile(blocks, backend="aot_eager")) == plain


def test_micro_batches_are_read_together_and_weights_once():
    layers = model()
    parts = [reading_of(layers, layers, (seed,), ("amax", "underflow", "nonfinite", "exponents")) for seed in (1, 2)]
    both = reading_of(layers, layers, (1, 2), ("amax", "underflow", "nonfinite", "exponents"))
    for name, roles in both.items():
        for role, found in roles.items():
            first, second = (part[name][role] for part in parts)
            times = 1 if role.startswith("weight") else 2
            assert found["amax"] == max(first["amax"], second["amax"])
            assert found["underflow"] == (first["underflow"] + second["underflow"]) / 2
            assert sum(found["exponents"]) == times * sum(first["exponents"])


def test_parameters_that_are_codes_have_statistics_of_scales_and_codes():
    how = {"filter": lambda *_: True, "weight_lifetime": "parameter"}
    for recipe in ("tensorwise", "rowwise", "nvfp4"):
        layers = f8.convert(Model().bfloat16(), f8.recipes.by_name(recipe), **how)
        reading = reading_of(layers, layers)["first.up"]
        known = {"subnormal", "scale_min", "scale_max", "scale_std", "exponents"}
        assert set(reading["weight"]) == set(reading["weight_for_grad_input"]) == known
        assert set(reading["input"]) == set(ALL)
        if recipe != "nvfp4":
            assert reading["weight"]["scale_max"] == float(layers.first.up.weight_scale.max())
    torch._dynamo.reset()
    layers, read = f8.convert(Model().bfloat16(), f8.recipes.tensorwise(), **how), ("amax", "scale_max")
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    assert reading_of(layers, compiled, (1,), read) == reading_of(layers, layers, (1,), read)


def test_an_evaluation_is_not_read_and_has_one_graph():
    torch._dynamo.reset()
    counters.clear()
    layers = model()
    step, monitor = torch.compile(layers, fullgraph=True, backend="aot_eager"), f8.Monitor(layers, every=2)
    for _ in range(4):
        with torch.no_grad():
            step(batch())
        monitor.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert monitor.read()["first.up"] == {}


@pytest.mark.parametrize("kind", ["torchtitan", "gpt-oss"])
def test_converted_experts_are_read_one_by_one(kind):
    torch._dynamo.reset()
    mixture = expert_models.mixture_of(kind, 4, f8.recipes.rowwise(), dtype=torch.bfloat16)
    symbols = torch.randint(fsdp_models.NUM_SYMBOLS, (2, 9), generator=torch.Generator().manual_seed(0))
    monitor = f8.Monitor(mixture, ("amax", "underflow"))
    mixture(symbols).backward()
    eager = monitor.read()
    weights = {"torchtitan": ["gate_up", "down"], "gpt-oss": ["gate_up_proj", "down_proj"]}[kind]
    every = [
        f"blocks.{block}.experts.{weight}.{expert}" for block in (0, 1) for weight in weights for expert in range(4)
    ]
    assert list(eager) == every
    assert all(roles["weight"]["amax"] > 0 for roles in eager.values())
    assert any("input" in roles for roles in eager.values())
    monitor.steps = 0
    torch.compile(mixture, backend="aot_eager")(symbols).backward()
    assert monitor.read() == eager


# ---------------------------------------------------------------------------------- planted faults


def test_a_scale_that_is_too_small_is_named_by_saturation():
    layers = model("delayed")
    with torch.no_grad():
        for module in layers.modules():
            if isinstance(module, f8.Linear):
                module.multiplier.fill_(64.0)
        layers.second.down.multiplier[0] *= 16 * 16  # its input's scale is too small
    reading = reading_of(layers, layers)
    saturated = {(name, role) for name, roles in reading.items() for role in roles if roles[role]["saturation"] > 0}
    assert saturated == {("second.down", "input"), ("second.down", "input_for_grad_weight")}


def test_a_gradient_that_underflows_in_e4m3_does_not_in_e5m2():
    values = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[1:] *= 2.0**-20
    found = {}
    for name, recipe in {"e4m3": f8.recipes.tensorwise(), "e5m2": f8.recipes.tensorwise()}.items():
        grad = f8.CurrentScaling(format=name)
        changed = {"grad_output": grad, "grad_output_for_grad_weight": grad}
        how = f8.Recipe(**{role: getattr(recipe, role) for role in ROLES if role not in changed}, **changed)
        layer = f8.Linear(32, 64, bias=False, recipe=how, dtype=torch.bfloat16)
        monitor = f8.Monitor(layer, ("underflow",))
        layer(batch()).backward(values)
        found[name] = monitor.read()[""]["grad_output"]["underflow"]
    assert found["e4m3"] > 0.5
    assert found["e5m2"] < 0.1


def test_a_starved_expert_is_named():
    class Experts(f8.library.Observed, nn.Module):
        observed_weights = ("weight",)

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 32, 32).bfloat16())

        def forward(self, x, offsets):
            how = {"recipe": f8.recipes.rowwise(), "observer": self.observer("weight")}
            return f8.grouped_linear(x, self.weight, offsets, **how)

    experts = Experts()
    monitor = f8.Monitor(experts)
    experts(batch(), torch.tensor([16, 16, 48], dtype=torch.int32)).float().sum().backward()
    starved = [name for name, roles in monitor.read().items() if "input" not in roles]
    assert starved == ["weight.1"]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_nan_is_named_one_step_late_by_the_first_operand_that_has_it(backend):
    torch._dynamo.reset()
    layers = model("tensorwise")
    monitor = f8.Monitor(layers, every=2, stop_at_nonfinite=True)
    step = layers if backend is None else torch.compile(layers, fullgraph=True, backend=backend)
    for index in range(8):
        x = batch(index)
        if index >= 6:
            x[3, 5] = math.nan
        loss_of(step(x)).backward()
        if index < 7:
            monitor.step()
    with pytest.raises(NonFiniteError) as caught:
        monitor.step()
    # `second` is defined before `first`, and runs after it
    assert str(caught.value) == (
        "Monitor: step 6, rank 0: first.up, input: 1 of 1536 elements are NaN or infinite. No operand before it, in "
        "the order in which layers run, has any."
    )


def test_a_nan_between_readings_starts_a_reading_of_the_same_batch():
    layers = model("delayed")
    monitor = f8.Monitor(layers, every=100, stop_at_nonfinite=True)
    backward(layers)
    monitor.step()
    with torch.no_grad():
        layers.second.up.weight[7, 3] = math.inf
    loss = loss_of(layers(batch(2)))
    loss.backward()
    with pytest.raises(
        NonFiniteError,
        match=r"step 1: the loss is not finite\. This step is not one that the "
        r"monitor reads, and no replay",
    ):
        monitor.check(loss)
    with pytest.raises(NonFiniteError, match=r"step 1, rank 0: second\.up, weight: 1 of 2048 elements are NaN or"):
        monitor.check(loss, lambda: backward(layers, 2))
    healthy = model()
    monitor = f8.Monitor(healthy, stop_at_nonfinite=True)
    backward(healthy)
    monitor.check(torch.tensor(1.0))
    with pytest.raises(NonFiniteError, match="all observed operands of FP8 layers are"):
        monitor.check(torch.tensor(math.nan))


# ---------------------------------------------------------------------------------- arguments


def test_as_if_reads_another_recipe_of_the_same_operands():
    layers, other = model("rowwise"), f8.recipes.nvfp4()
    plain = layers(batch()).detach()
    monitor = f8.Monitor(layers, ("sqnr", "underflow"), as_if=other)
    y = layers(batch())
    loss_of(y).backward()
    assert torch.equal(y, plain)
    found = monitor.read()["first.up"]
    monitor.remove()
    real = reading_of(layers := model("nvfp4"), layers, statistics=("sqnr", "underflow"))["first.up"]
    assert found["input"] == real["input"]
    assert found["weight"] == real["weight"]
    with pytest.raises(
        ValueError, match="`as_if` uses delayed scaling, whose scales come from previous steps; it must be"
    ):
        f8.Monitor(layers, as_if=f8.recipes.delayed())


def test_a_registered_statistic_is_read(monkeypatch):
    for table in ("TOTALS", "STATISTICS"):
        monkeypatch.setattr(definitions, table, dict(getattr(definitions, table)))
    for where in ("fp8compile.monitor.monitor", "fp8compile.testing.contracts.statistic_contracts"):
        monkeypatch.setattr(f"{where}.STATISTICS", definitions.STATISTICS)
    monkeypatch.setattr("fp8compile.testing.contracts.statistic_contracts.TOTALS", definitions.TOTALS)
    definitions.columns_of.cache_clear()
    register_statistic("negative", lambda seen: seen.values < 0, "sum", lambda totals: totals["negative"])
    register_statistic("largest_code", lambda seen: seen.decoded(), "max")
    layers = model()
    found = reading_of(layers, layers, statistics=("negative", "largest_code"))["first.up"]["input"]
    assert found == {"negative": int((batch() < 0).sum()), "largest_code": 448.0}
    f8.testing.check_statistic("negative")
    register_statistic("share", lambda seen: seen.values / seen.values.sum(), "sum")
    register_statistic("whole", lambda seen: seen.values.sum(), "sum")
    register_statistic("host", lambda seen: seen.values * seen.values[0, 0].item(), "sum")
    for name, contract in {
        "share": "a_part_has_the_numbers_of_the_whole",
        "whole": "returns_a_number_of_each_element",
        "host": "reads_no_value_on_the_host",
    }.items():
        with pytest.raises(AssertionError, match=contract):
            f8.testing.check_statistic(name)
    with pytest.raises(ValueError, match="no statistic 'mean'"):
        f8.testing.check_statistic("mean")
    with pytest.raises(ValueError, match=r"negative is already registered. Choose"):
        register_statistic("negative", lambda seen: seen.values, "sum")
    with pytest.raises(ValueError, match="`combine` is 'mean'; it must be 'sum' or 'max'"):
        register_statistic("other", lambda seen: seen.values, "mean")
    with pytest.raises(ValueError, match="the name of a statistic must be an identifier, got 'a b'"):
        register_statistic("a b", lambda seen: seen.values, "sum")
    with pytest.raises(TypeError, match="`compute` is 3; it must be a function"):
        register_statistic("other", 3, "sum")
    definitions.columns_of.cache_clear()


def test_what_a_monitor_does_not_take_is_said():
    layers = model()
    with pytest.raises(ValueError, match=r"`statistics` has 'mean'; allowed are amax, underflow, "):
        f8.Monitor(layers, ("mean",))
    with pytest.raises(
        TypeError,
        match=r"`statistics` is 'amax'; it must be a sequence of names, such as "
        r"\('amax',\)",
    ):
        f8.Monitor(layers, "amax")
    with pytest.raises(ValueError, match=r"`every` must be .*, at least 1, not 0"):
        f8.Monitor(layers, every=0)
    with pytest.raises(ValueError, match=r"no layer matches 'third\*'; the FP8 layers are second.up, second.down, "):
        f8.Monitor(layers, layers=("third*",))
    with pytest.raises(ValueError, match="the model has no FP8 layers"):
        f8.Monitor(nn.Linear(3, 3))
    monitor = f8.Monitor(layers, layers=("*.up",), operands=("input",))
    with pytest.raises(RuntimeError, match="the model already has a monitor"):
        f8.Monitor(layers)
    with pytest.raises(ValueError, match="Create the Monitor with stop_at_nonfinite=True"):
        monitor.check(torch.tensor(1.0))
    backward(layers)
    found = monitor.read()
    monitor.remove()
    every = reading_of(layers, layers, statistics=("amax", "saturation", "underflow"))
    assert found == {name: {"input": every[name]["input"]} for name in ("second.up", "first.up")}


# ---------------------------------------------------------------------------------- where it goes


def test_a_reading_is_a_line_of_json_and_names_are_those_of_transformer_engine(tmp_path):
    layers = model()
    monitor = f8.Monitor(layers, ("amax", "underflow", "exponents"), every=2)
    for loss in (3.0, 2.0, 1.0):
        backward(layers)
        if monitor.is_reading:
            monitor.write(tmp_path / "fp8.jsonl", loss=loss)
        monitor.step()
    rows = [json.loads(line) for line in (tmp_path / "fp8.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 3.0), (2, 1.0)]
    amax = float(batch().abs().max())
    assert rows[0]["fp8/first.up/input/amax"] == amax
    assert sum(rows[0]["fp8/first.up/input/exponents"]) == batch().numel()
    reading = {"a": {"input": {"amax": 1.0, "underflow": 0.25, "scale_max": 2.0, "exponents": [1] * 32}}}
    assert f8.monitor.flat(reading, f8.monitor.TE_NAMES) == {
        "fp8/a/input/amax": 1.0,
        "fp8/a/input/underflows%": 25.0,
        "fp8/a/input/scale_inv_max": 2.0,
        "fp8/a/input/exponents": [1] * 32,
    }


def test_tensorboard_reads_scalars_and_exponents(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    layers = model()
    reading = reading_of(layers, layers, statistics=("amax", "exponents"))
    with SummaryWriter(tmp_path) as writer:
        loggers.to_tensorboard(writer, reading, 7)
    events = EventAccumulator(str(tmp_path)).Reload()
    (scalar,) = events.Scalars("fp8/first.up/input/amax")
    assert (scalar.step, scalar.value) == (7, reading["first.up"]["input"]["amax"])
    (histogram,) = events.Histograms("fp8/first.up/input/exponents")
    assert histogram.histogram_value.num == batch().numel()


def test_weights_and_biases_gets_the_numbers_that_are_finite():
    logged = []
    run = SimpleNamespace(log=lambda numbers, step: logged.append((numbers, step)))
    loggers.to_wandb(run, {"a": {"input": {"amax": 1.0, "sqnr": math.inf, "exponents": [0] * 32}}}, 3)
    assert logged == [({"fp8/a/input/amax": 1.0}, 3)]


def test_any_statistic_of_experts_in_four_bits_is_read_on_a_gpu():
    pytest.importorskip("triton")  # Inductor prints a GPU's kernels with it
    from benchmarks.experts import Experts, experts_arguments
    from fp8compile.testing import gpu_kernels

    x, gate_up, down, *others = experts_arguments(64, 64, 64, 2)
    experts = Experts(gate_up, down, f8.recipes.nvfp4())
    f8.Monitor(experts, ("sqnr", "saturation"))
    assert gpu_kernels(experts, x, *others, arch="b200")
