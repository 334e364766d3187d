"""Lightning's Trainer as a client of `fp8compile.integrations.lightning`: one process, and FSDP2 on ranks."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.bits import difference

pytest.importorskip("lightning", reason="needs lightning 2.6 or later (the extra fp8compile[test] has it)")

STEPS, ROWS, WIDTH = 4, 4, 64
MASTERS = {"weight_lifetime": "parameter", "keep_initial": True}
needs_groups = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups in a subclass need PyTorch 2.12")
# what Lightning says of a run as small as these, and of what it loads
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*dataloader is not resumable.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*LeafSpec.*:FutureWarning",
)


def net():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH)) for _ in range(2)]
    return nn.Sequential(*blocks)


def loss_of(model, x):
    return (model(x) - x).float().square().mean()


def batch(step, rank=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float32)  # whatever Lightning has as default


def dist_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def module_of(*, shards=False, asks=False, masters=False, policy=None):
    """A LightningModule; defined here, for an import of Lightning takes seconds."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net(), []

        def configure_model(self):
            if asks:
                self.trainer.precision_plugin.convert_module(self)
            if shards:
                mesh = self.device_mesh["data_parallel"]
                for block in self.net:
                    fully_shard(block, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
                fully_shard(self.net, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())

        def training_step(self, _, index):
            # by the number of the step, for a resumed epoch starts its loader anew
            x = batch(self.global_step, self.global_rank)
            loss = loss_of(self.net, x.to(next(self.parameters()).dtype))
            self.losses.append(loss.item())
            return loss

        def train_dataloader(self):
            return torch.utils.data.DataLoader(range(STEPS * dist_size()), batch_size=1)

        def configure_optimizers(self):
            if masters:
                return f8.MasterWeights(torch.optim.AdamW, self.parameters(), lr=1e-2)
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def plugin_of(kind, recipe=None, **options):
    from fp8compile.integrations import lightning as f8lightning

    own = {"F8HalfPrecision": {"precision": "bf16-true"}, "F8MixedPrecision": {"precision": "bf16-mixed"}}.get(
        kind, {}
    )
    own |= {"device": "cpu"} if kind == "F8MixedPrecision" else {}
    return getattr(f8lightning, kind)(recipe or f8.recipes.rowwise(), **own, **options)


def fit(module, plugin, folder, *, steps=STEPS, resume=None, save=False, **options):
    import lightning as L

    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        plugins=[plugin] if plugin is not None else None,
        **({"devices": 1} | options),
    )
    trainer.fit(module, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(f"{folder}/saved.ckpt")
    return module.losses


# ------------------------------------------------------------------------------------------------- one process


def monitored(module, monitor, folder, **options):
    """Train with a monitor; return the steps and amaxes that Lightning's logger was given for the first layer."""
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder)
    L.Trainer(
        accelerator="cpu",
        devices=1,
        log_every_n_steps=STEPS,
        logger=logger,
        callbacks=[monitor],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **options,
    ).fit(module)
    amax = "fp8/net.0.0/input/amax"
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row[amax])) for row in csv.DictReader(file) if row[amax]]


def test_the_monitor_logs_readings_by_lightnings_loggers(tmp_path):
    from fp8compile.integrations import lightning as f8lightning

    module = module_of()
    logged = monitored(
        module, f8lightning.F8Monitor(every=2), tmp_path, max_steps=STEPS, plugins=[plugin_of("F8HalfPrecision")]
    )
    assert [step for step, _ in logged] == [1, 3]
    assert all(value > 0 for _, value in logged)
    assert module.losses == by_hand("F8HalfPrecision")


def test_the_monitor_counts_a_step_of_two_optimizers_once(tmp_path):
    from fp8compile.integrations import lightning as f8lightning

    class Manual(type(module_of())):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.amaxes = False, []

        def training_step(self, _, index):
            x = batch(index)
            self.amaxes.append(x.abs().max().item())
            self.manual_backward(loss_of(self.net, x))
            for optimizer in self.optimizers() if index % 2 else ():  # of every two batches
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(block.parameters(), lr=1e-2) for block in self.net]

    module, monitor = Manual(), f8lightning.F8Monitor(every=1)
    logged = monitored(module, monitor, tmp_path, max_epochs=1, plugins=[plugin_of("F8Precision")])
    assert len(module.amaxes) == STEPS
    assert logged == [(2, max(module.amaxes[:2])), (4, max(module.amaxes[2:]))]
    assert monitor.monitor.steps == 2


def test_the_monitor_is_attached_anew_behind_an_interrupted_fit(tmp_path):
    from fp8compile.integrations import lightning as f8lightning

    class Interrupted(type(module_of())):
        def on_before_zero_grad(self, optimizer):
            raise RuntimeError("CUDA out of memory.")

    monitor = f8lightning.F8Monitor(every=2)
    options = {"max_steps": STEPS, "plugins": [plugin_of("F8Precision")]}
    module = Interrupted()
    with pytest.raises(RuntimeError, match="out of memory"):
        monitored(module, monitor, tmp_path, **options)
    del Interrupted.on_before_zero_grad
    with pytest.raises(RuntimeError, match="the model already has a monitor"):
        monitored(module, f8lightning.F8Monitor(every=2), tmp_path, **options)  # the monitor is another's
    assert [step for step, _ in monitored(module, monitor, tmp_path, **options)] == [1, 3]


def by_hand(kind):
    """Losses of a loop without Lightning."""
    dtype = torch.bfloat16 if kind == "F8HalfPrecision" else torch.float32
    model = f8.convert(net().to(dtype), f8.recipes.rowwise())
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "F8MixedPrecision"):
            loss = loss_of(model, batch(step).to(dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["F8Precision", "F8HalfPrecision", "F8MixedPrecision"])
def test_a_plugin_converts_and_trains_as_a_loop_by_hand(kind, tmp_path):
    module = module_of()
    assert fit(module, plugin_of(kind), str(tmp_path)) == by_hand(kind)
    assert all(row.converted for row in f8.conversion_report(module).rows)


@pytest.mark.parametrize("kind", ["F8Precision", "F8MixedPrecision"])
def test_an_export_has_the_data_of_lightnings_forward(kind, tmp_path, assert_bits_equal):
    module = module_of()
    fit(module, plugin_of(kind), str(tmp_path), steps=1)
    layer, dtype = module.net[0][0], torch.bfloat16 if kind == "F8MixedPrecision" else torch.float32
    assert layer.weight.dtype == torch.float32
    wanted = f8.quantize(layer.weight.detach().to(dtype), layer.recipe.weight)
    found = dict(f8.export.tensors(module.net, "compressed-tensors"))
    assert_bits_equal(found["0.0.weight"].view(torch.uint8), wanted.codes)


def test_a_plugin_takes_the_arguments_of_convert(tmp_path):
    module = module_of()
    fit(module, plugin_of("F8Precision", convert_options={"filter": "!net.1.2"}), str(tmp_path), steps=1)
    assert [row.fqn for row in f8.conversion_report(module).rows if not row.converted] == ["net.1.2"]


def test_masters_train_and_resume_to_the_digit(tmp_path):
    options = {"convert_options": MASTERS}

    def trained(**run):
        # asks in configure_model: a Trainer on one device loads before it converts
        return fit(module_of(masters=True, asks=True), plugin_of("F8HalfPrecision", **options), str(tmp_path), **run)

    whole = trained()
    trained(steps=2, save=True)
    assert len(whole) == STEPS
    assert trained(resume=str(tmp_path / "saved.ckpt")) == whole[2:]


def test_a_module_that_was_compiled_is_refused(tmp_path):
    module = module_of()
    module.net[0].compile()
    with pytest.raises(ValueError, match=r"net\.0 is already compiled with torch\.compile"):
        fit(module, plugin_of("F8Precision"), str(tmp_path))


# ------------------------------------------------------------------------------------------------- ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(plugin, folder, *, asks=True, masters=False, policy=None, **options):
    """A module that FSDP2 sharded over the ranks of this group and that was trained there."""
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    size = dist.get_world_size()
    before = dict(os.environ)
    os.environ |= {"LOCAL_RANK": f"{dist.get_rank()}", "MASTER_PORT": "1"}  # which nobody asks: the group is there
    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    strategy.cluster_environment = LightningEnvironment()
    module = module_of(shards=True, asks=asks, masters=masters, policy=policy)
    try:
        fit(module, plugin, folder, strategy=strategy, devices=size, **options)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return module


def masters_resume(folder):
    def trained(**run):
        own = plugin_of("F8HalfPrecision", fsdp_float8_all_gather=False, convert_options=MASTERS)
        return sharded(own, folder, masters=True, **run).losses

    whole = trained()
    trained(steps=2, save=True)
    return whole, trained(resume=f"{folder}/saved.ckpt")


@needs_groups
def test_masters_of_shards_resume_to_the_digit(tmp_path):
    for whole, resumed in shared_ranks().run(masters_resume, str(tmp_path)):
        assert len(whole) == STEPS
        assert resumed == whole[2:]


def on_and_off(kind, folder, policy):
    """What differs between gathers of codes and of values, in words; and between a run and one that was resumed."""
    off = sharded(plugin_of(kind, fsdp_float8_all_gather=False), folder, policy=policy)
    on = sharded(plugin_of(kind), folder, policy=policy)
    sharded(plugin_of(kind), folder, policy=policy, steps=2, save=True)
    resumed = sharded(plugin_of(kind), folder, policy=policy, resume=f"{folder}/saved.ckpt")
    problems = [] if off.losses == on.losses and len(on.losses) == STEPS else [f"{off.losses}, {on.losses}"]
    problems += [] if resumed.losses == on.losses[2:] else [f"resumed {resumed.losses}, {on.losses}"]
    for name, parameter in off.named_parameters():
        for other in (on, resumed):
            own = dict(other.named_parameters())[name]
            problems += [name] if difference(own.full_tensor().detach(), parameter.full_tensor().detach()) else []
    gathered = {row.gathered for row in f8.conversion_report(on).rows}
    return problems + [f"gathered {what!r}" for what in gathered if not what.startswith("quantized data")]


@needs_groups
@pytest.mark.parametrize(("kind", "policy"), [("F8Precision", BF16), ("F8HalfPrecision", None)])
def test_codes_are_gathered_with_the_bits_of_values_and_a_run_resumes(kind, policy, tmp_path):
    assert shared_ranks().run(on_and_off, kind, str(tmp_path), policy) == [[]] * 4


def refused(folder):
    with pytest.raises(ValueError, match=r"net\.0.* was already sharded by fully_shard.*configure_model"):
        sharded(plugin_of("F8Precision"), folder, asks=False)
    with pytest.raises(ValueError, match=r"autocast would cast weights.*Use F8Precision"):
        sharded(plugin_of("F8MixedPrecision"), folder)


@needs_groups
def test_what_comes_too_late_and_what_autocast_would_cast_is_refused(tmp_path):
    shared_ranks().run(refused, str(tmp_path))


def by_fsdp1():
    """Losses under FSDP1, by the plugin for ``FSDPStrategy``, which Lightning itself runs on GPUs only."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    own, losses = plugin_of("F8FSDPPrecision", precision="32-true"), []
    for module in (own.convert_module(net()), net()):
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(
            module, use_orig_params=True, mixed_precision=policy, device_id=torch.device("cpu")
        )
        losses.append([loss_of(model, batch(step)).item() for step in range(2)])
    return losses


@needs_groups
def test_the_plugin_for_fsdp1_converts_what_fsdp1_shards():
    for in_float8, plain in shared_ranks().run(by_fsdp1):
        assert in_float8 != plain
        assert in_float8 == pytest.approx(plain, rel=0.02)  # one product in FP8 is within a few percent of one in bf16
