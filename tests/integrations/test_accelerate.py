"""`fp8compile.integrations.accelerate`, with a loop of one's own, on one process and on FSDP2 ranks."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import schedulefree
import torch
from accelerate_ranks import sharding_ranks, without_state
from gloo_ranks import shared_ranks

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.bits import difference

sys.path.append(str(Path(__file__).parents[1] / "behaviour"))

STEPS = 3
MASTERS = {"weight_lifetime": "parameter", "keep_initial": True}
needs_groups = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups in a subclass need PyTorch 2.12")


def llama():
    from zoo import ZOO, bf16_model  # imports transformers, which takes seconds, in the process that has the model

    return bf16_model(ZOO["Llama"], attn_implementation="eager").float()


def accelerator_of(*, sharded=False, mixed_precision="bf16", **plugin):
    import accelerate
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    if not sharded:
        return accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
        **plugin,
    )
    return accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision, fsdp_plugin=plugin)


def steps(accelerator, model, optimizer, first, last):
    from zoo import ZOO

    rank, losses = accelerator.process_index, []
    for step in range(first, last):
        batch = {name: every[2 * rank : 2 * rank + 2] for name, every in ZOO["Llama"].batch(step).items()}
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(*, recipe="rowwise", masters=False, sharded=False, plugin=None, **options):
    from fp8compile.integrations import accelerate as f8accelerate

    accelerator = accelerator_of(sharded=sharded, **(plugin or {}))
    model = f8accelerate.convert(accelerator, llama(), f8.recipes.by_name(recipe), **options)
    if masters:
        optimizer = f8accelerate.MasterWeights(torch.optim.AdamW, model.parameters(), lr=3e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return accelerator, *accelerator.prepare(model, optimizer)


# ------------------------------------------------------------------------------------------------- one process


@pytest.fixture(autouse=True)
def clean():
    with without_state():
        yield


def test_losses_are_those_of_a_model_converted_by_hand():
    losses = steps(*prepared(filter="!lm_head"), 0, STEPS)
    accelerator, model = accelerator_of(), f8.convert(llama(), f8.recipes.rowwise(), filter="!lm_head")
    prepared_by_hand = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    assert losses == steps(accelerator, *prepared_by_hand, 0, STEPS)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_export_has_the_data_of_accelerates_forward(compiled, assert_bits_equal):
    """Parameters are float32, and mixed_precision="bf16" makes autocast quantize copies in bfloat16."""
    accelerator, model, optimizer = prepared()
    if compiled:
        model.compile(backend="aot_eager")
    steps(accelerator, model, optimizer, 0, 1)
    name = "model.layers.0.mlp.down_proj"
    layer = model.get_submodule(name)
    assert layer.weight.dtype == torch.float32
    wanted = f8.quantize(layer.weight.detach().bfloat16(), layer.recipe.weight)
    found = dict(f8.export.tensors(accelerator.unwrap_model(model), "compressed-tensors"))
    assert_bits_equal(found[f"{name}.weight"].view(torch.uint8), wanted.codes)


def test_a_model_that_was_prepared_before_is_refused():
    from fp8compile.integrations import accelerate as f8accelerate

    accelerator, model = accelerator_of(), llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"has already prepared a model or an optimizer\. Call convert first"):
        f8accelerate.convert(accelerator, model, f8.recipes.rowwise())


def test_masters_are_those_of_fp8compile(assert_bits_equal):
    from fp8compile.integrations import accelerate as f8accelerate

    found = []
    for kind in (f8.MasterWeights, f8accelerate.MasterWeights):
        model = f8.convert(llama().bfloat16(), f8.recipes.rowwise(), **MASTERS)
        optimizer = kind(torch.optim.AdamW, model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        for step in range(2):
            from zoo import ZOO

            model(**ZOO["Llama"].batch(step)).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append((model.state_dict(), optimizer.state_dict()["param_groups"]))
    (state, groups), (other, others) = found
    assert groups == others
    for name, value in state.items():
        assert_bits_equal(other[name], value, name)


# ------------------------------------------------------------------------------------------------- ranks


def on_and_off(options):
    """What differs between gathers of codes and of values, in words; and between a run and one that was resumed."""
    found = []
    for gather in (False, True):
        with sharding_ranks():
            accelerator, model, optimizer = prepared(sharded=True, fsdp_float8_all_gather=gather, **options)
            losses = steps(accelerator, model, optimizer, 0, STEPS)
            report = f8.conversion_report(accelerator.unwrap_model(model)).rows
            found.append((losses, model.state_dict(), {row.gathered for row in report if row.converted}))
    (losses, state, plain), (own, others, gathered) = found
    problems = [name for name, v in state.items() if difference(others[name].to_local(), v.to_local())]
    problems += [] if losses == own and len(losses) == STEPS else [f"losses {losses}, {own}"]
    problems += [f"gathered {what!r}" for what in gathered if not what.startswith("quantized data")]
    return problems + ([] if plain == {""} else [f"gathered {plain}"])


def small_of(seed, optimizer=torch.optim.AdamW):
    """A small model of quantized parameters, and its masters, behind `prepare`."""
    from fp8compile.integrations import accelerate as f8accelerate

    accelerator = accelerator_of(mixed_precision="no")
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 64)).bfloat16()
    f8accelerate.convert(accelerator, model, f8.recipes.rowwise(), filter="*", **MASTERS)
    return accelerator.prepare(model, f8accelerate.MasterWeights(optimizer, model.parameters(), lr=0.01))


def trained(model, optimizer, count):
    optimizer.train()
    for seed in range(count):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@without_state()
def test_masters_that_were_saved_before_the_first_step_are_loaded():
    model, optimizer = small_of(0)
    files = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = trained(model, optimizer, 2)
    for each, state in zip(others := small_of(1), files, strict=True):
        each.load_state_dict(state)
    found = trained(*others, 2)
    assert {name: difference(found[name], value) for name, value in expected.items()} == dict.fromkeys(expected)
    with pytest.raises(ValueError, match="the state has no master for a quantized weight"):
        small_of(1)[1].load_state_dict({**files[1], "state": {}})


@without_state()
def test_a_schedule_free_optimizer_is_told_to_train_when_masters_are_made():
    model, optimizer = small_of(0, schedulefree.AdamWScheduleFree)
    assert callable(optimizer.optimizer.eval)
    trained(model, optimizer, 2)
    assert optimizer.param_groups[0]["k"] == 2


def test_hooks_stay_when_masters_are_made():
    from fp8compile.integrations.accelerate import MasterWeights

    model = f8.convert(
        torch.nn.Sequential(torch.nn.Linear(64, 64)), f8.recipes.tensorwise(), weight_lifetime="parameter"
    )
    optimizer, calls = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("behind"))
    for _ in range(2):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    assert calls == ["before", "behind"] * 2


@needs_groups
def test_codes_are_gathered_with_the_bits_of_values():
    assert shared_ranks().run(on_and_off, {}) == [[]] * 4


@needs_groups
def test_activation_checkpointing_of_the_plugin_is_known():
    assert shared_ranks().run(on_and_off, {"plugin": {"activation_checkpointing": True}}) == [[]] * 4


def resumed(recipe, folder):
    with sharding_ranks():
        accelerator, model, optimizer = prepared(recipe=recipe, sharded=True, masters=True, **MASTERS)
        gathered = {
            row.gathered for row in f8.conversion_report(accelerator.unwrap_model(model)).rows if row.converted
        }
        steps(accelerator, model, optimizer, 0, 2)
        accelerator.save_state(folder)
        expected = steps(accelerator, model, optimizer, 2, 4)
    with sharding_ranks():
        accelerator, model, optimizer = prepared(recipe=recipe, sharded=True, masters=True, **MASTERS)
        accelerator.load_state(folder)
        return expected, steps(accelerator, model, optimizer, 2, 4), gathered


@needs_groups
@pytest.mark.parametrize(
    "recipe",
    [
        "rowwise",
        "blockwise",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tensorwise", "delayed", "nvfp4")),
    ],
)
def test_masters_resume_from_what_accelerate_saved(tmp_path, recipe):
    for expected, found, gathered in shared_ranks().run(resumed, recipe, str(tmp_path)):
        assert found == expected
        assert all(what.startswith("quantized data") for what in gathered), gathered


def confused(whole):
    """accelerate exchanges the parameters that masters were made of, and finds them by their address."""
    from fp8compile.integrations import accelerate as f8accelerate

    accelerator = accelerator_of(sharded=True)
    if whole:
        model = f8.convert(llama(), f8.recipes.rowwise(), **MASTERS)
    else:
        model = f8accelerate.convert(accelerator, llama(), f8.recipes.rowwise(), **MASTERS)
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    steps(accelerator, model, optimizer, 0, 1)


def without_the_integration(whole):
    text = r"data_ptr of a QuantizedParameter.*convert the model with fp8compile\.integrations\.accelerate\.convert"
    if not whole:
        text = r"were replaced after the optimizer was created.*fp8compile\.integrations\.accelerate\.MasterWeights"
    with sharding_ranks(), pytest.raises(RuntimeError, match=text):
        confused(whole)


@needs_groups
@pytest.mark.parametrize("whole", [True, False])
def test_what_accelerate_would_confuse_without_the_integration_is_refused(whole):
    shared_ranks().run(without_the_integration, whole)
