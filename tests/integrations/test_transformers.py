"""Hugging Face's Trainer as a client of `fp8compile.integrations.transformers`, on one process and on FSDP2 ranks."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from accelerate_ranks import sharding_ranks, without_state
from gloo_ranks import shared_ranks

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.bits import difference

sys.path.append(str(Path(__file__).parents[1] / "behaviour"))

STEPS, ROWS, HALF = 4, 2, 2
LAYER = "LlamaDecoderLayer"
needs_groups = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups in a subclass need PyTorch 2.12")


class Batches(torch.utils.data.Dataset):
    """Text by the zoo's rule, a row at a time."""

    def __len__(self):
        return 64

    def __getitem__(self, row):
        from zoo import ZOO

        return {name: every[row % 8] for name, every in ZOO["Llama"].batch(row // 8).items()}


def llama(dtype=torch.float32, **options):
    from zoo import ZOO, bf16_model  # imports transformers, which takes seconds, in the process that has the model

    return bf16_model(ZOO["Llama"], attn_implementation="eager", **options).to(dtype)


def arguments_of(folder, *, sharded, config=None, **options):
    import transformers

    if sharded:
        # whole state dicts that accelerate collects on a CPU can't be written, see docs/upstream.md
        own = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": [LAYER], "state_dict_type": "SHARDED_STATE_DICT"}
        options |= {"fsdp": True, "fsdp_config": own | (config or {})}
    return transformers.TrainingArguments(
        output_dir=folder,
        bf16=True,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        train_sampling_strategy="sequential",
        learning_rate=3e-3,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_steps=HALF,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


def trainer_of(folder, callbacks, *, model=None, master=False, config=None, trainer=None, sharded=False, **options):
    import transformers

    from fp8compile.integrations import transformers as f8transformers

    arguments = arguments_of(folder, sharded=sharded, config=config, **options)
    made = {"optimizer_cls_and_kwargs": f8transformers.master_weights(arguments)} if master else {}
    found = transformers.Trainer(
        model=llama() if model is None else model,
        args=arguments,
        train_dataset=Batches(),
        callbacks=callbacks,
        **made,
        **(trainer or {}),
    )
    found.remove_callback(transformers.PrinterCallback)
    return found


def callback(recipe=None, *, print_report=False, **options):
    from fp8compile.integrations import transformers as f8transformers

    return f8transformers.F8Callback(recipe or f8.recipes.rowwise(), print_report=print_report, **options)


def losses_of(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# ------------------------------------------------------------------------------------------------- one process


@pytest.fixture(autouse=True)
def clean():
    with without_state():
        yield


def test_the_callback_converts_prints_and_trains_as_a_model_converted_before(tmp_path, capsys):
    trainer = trainer_of(str(tmp_path), [callback(print_report=True, filter="!lm_head")], save_strategy="no")
    assert [row.fqn for row in f8.conversion_report(trainer.model).rows if not row.converted] == ["lm_head"]
    losses = losses_of(trainer)
    printed = capsys.readouterr().out
    assert ".self_attn.{q," in printed
    before = f8.convert(llama(), f8.recipes.rowwise(), filter="!lm_head")
    assert losses == losses_of(trainer_of(str(tmp_path), [], model=before, save_strategy="no"))
    assert losses != losses_of(trainer_of(str(tmp_path), [], save_strategy="no"))


def test_an_export_has_the_data_of_the_trainers_forward(tmp_path, assert_bits_equal):
    """Parameters are float32, and bf16=True makes autocast quantize copies in bfloat16."""
    trainer = trainer_of(str(tmp_path), [callback(filter="!lm_head")], save_strategy="no")
    losses_of(trainer)
    name = "model.layers.0.mlp.down_proj"
    layer = trainer.model.get_submodule(name)
    assert layer.weight.dtype == torch.float32
    wanted = f8.quantize(layer.weight.detach().bfloat16(), layer.recipe.weight)
    found = dict(f8.export.tensors(trainer.model, "compressed-tensors"))
    assert_bits_equal(found[f"{name}.weight"].view(torch.uint8), wanted.codes)


def test_the_monitor_callback_logs_readings_by_the_trainer(tmp_path):
    from fp8compile.integrations import transformers as f8transformers

    trainer = trainer_of(str(tmp_path), [callback(filter="!lm_head")], save_strategy="no")
    trainer.add_callback(f8transformers.MonitorCallback(trainer, every=2, layers=("*.down_proj",)))
    losses = losses_of(trainer)
    read = [entry for entry in trainer.state.log_history if any(name.startswith("fp8/") for name in entry)]
    assert [entry["step"] for entry in read] == [1, 3]
    assert read[0]["fp8/model.layers.0.mlp.down_proj/input/amax"] > 0
    assert losses == losses_of(trainer_of(str(tmp_path), [callback(filter="!lm_head")], save_strategy="no"))


def test_the_monitor_callback_is_attached_anew_where_the_trainer_begins_again(tmp_path):
    import transformers

    from fp8compile.integrations import transformers as f8transformers

    class OutOfMemory(transformers.TrainerCallback):
        raised = False

        def on_step_end(self, args, state, control, **kwargs):
            if not self.raised:
                self.raised = True
                raise RuntimeError("CUDA out of memory.")

    trainer = trainer_of(
        str(tmp_path), [callback(filter="!lm_head"), OutOfMemory()], save_strategy="no", auto_find_batch_size=True
    )
    monitor = f8transformers.MonitorCallback(trainer, every=2, layers=("*.down_proj",))
    trainer.add_callback(monitor)
    assert len(losses_of(trainer)) == STEPS
    read = [entry for entry in trainer.state.log_history if any(name.startswith("fp8/") for name in entry)]
    assert [entry["step"] for entry in read] == [1, 3]
    others = f8.Monitor(trainer.model)
    with pytest.raises(RuntimeError, match="the model already has a monitor"):
        trainer.train()
    others.remove()


@pytest.mark.parametrize("codes", [False, True])
def test_a_trainer_resumes_to_the_digit(tmp_path, codes):
    # weights that are codes are quantized in the dtype that autocast computes in
    options = {"weight_lifetime": "parameter", "keep_initial": True} if codes else {}
    dtype = torch.bfloat16 if codes else torch.float32
    whole, resumed = (
        losses_of(trainer_of(str(tmp_path), [callback(**options)], model=llama(dtype), master=codes), resume)
        for resume in (None, str(tmp_path / f"checkpoint-{HALF}"))
    )
    assert len(whole) == STEPS
    assert resumed == whole


# ------------------------------------------------------------------------------------------------- misuse


def test_an_optimizer_of_parameters_that_are_replaced_is_refused(tmp_path):
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"was given an optimizer.*pass optimizer_cls_and_kwargs="):
        trainer_of(
            str(tmp_path),
            [callback(weight_lifetime="parameter")],
            model=model,
            trainer={"optimizers": (optimizer, None)},
        )


def test_a_model_that_was_compiled_is_refused(tmp_path):
    model = llama()
    model.model.layers[0].compile()
    with pytest.raises(ValueError, match=r"is already compiled with torch\.compile"):
        trainer_of(str(tmp_path), [callback()], model=model)


def test_a_callback_that_came_too_late_is_refused(tmp_path):
    trainer = trainer_of(str(tmp_path), [], save_strategy="no")
    trainer.add_callback(callback())
    with pytest.raises(ValueError, match=r"no FP8 layers.*callbacks=\[\.\.\.\] instead of calling add_callback"):
        trainer.train()


def test_a_model_that_is_made_when_training_begins_is_refused(tmp_path):
    import transformers

    arguments = arguments_of(str(tmp_path), sharded=False, save_strategy="no")
    trainer = transformers.Trainer(
        model_init=lambda: llama(), args=arguments, train_dataset=Batches(), callbacks=[callback()], model=None
    )
    assert any(row.converted for row in f8.conversion_report(trainer.model).rows)
    with pytest.raises(ValueError, match=r"With model_init=, the Trainer creates another.*convert in model_init"):
        trainer.train()


def test_codes_are_not_gathered_by_version_1_of_fsdp():
    from fp8compile.integrations import accelerate as f8accelerate
    from fp8compile.integrations.conversion import Conversion

    # what accelerate's state says of it; it makes such a state on GPUs only
    state = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False, mixed_precision="bf16")
    for gather in (True, False):
        conversion = Conversion(recipe=f8.recipes.rowwise(), gather=gather, options={})
        layer = torch.nn.Sequential(torch.nn.Linear(32, 32))
        if gather:
            with pytest.raises(ValueError, match=r"fsdp_version 1.*Use fsdp_version 2"):
                f8accelerate.converted(conversion, layer, state, checkpointed=False)
            assert type(layer[0]) is torch.nn.Linear
        else:
            f8accelerate.converted(conversion, layer, state, checkpointed=False)
            assert isinstance(layer[0], f8.Linear)


def test_an_optimizer_that_is_made_of_the_model_has_no_masters(tmp_path, monkeypatch):
    import transformers

    from fp8compile.integrations import transformers as f8transformers

    arguments = arguments_of(str(tmp_path), sharded=False, optim="sgd")
    monkeypatch.setattr(transformers.Trainer, "get_optimizer_cls_and_kwargs", lambda args: (lambda: None, {}))
    with pytest.raises(TypeError, match=r"optim=.*sgd.* creates its optimizer from the model"):
        f8transformers.master_weights(arguments)


# ------------------------------------------------------------------------------------------------- ranks


def on_ranks(folder, ways, **options):
    """Losses, weights, and what is gathered, for each of several ways to train."""
    found = []
    for own in ways:
        with sharding_ranks():
            own = {**options, **own}
            resume, callback_options = own.pop("resume", None), own.pop("callback", {})
            trainer = trainer_of(folder, [callback(**callback_options)], sharded=True, **own)
            losses = losses_of(trainer, resume and f"{folder}/{resume}")
            model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
            gathered = {row.gathered for row in f8.conversion_report(model).rows if row.converted}
            state = model.state_dict().items()
            found.append((losses, {name: getattr(v, "_local_tensor", v).clone() for name, v in state}, gathered))
    return found


def what_differs(first, second):
    problems = [name for name, value in first[1].items() if difference(value, second[1][name])]
    return problems + ([] if first[0] == second[0] and len(first[0]) == STEPS else [f"{first[0]}, {second[0]}"])


def gathers_and_resumes(folder, options):
    off, on, resumed = on_ranks(
        folder,
        [{"callback": {"fsdp_float8_all_gather": False}}, {}, {"resume": f"checkpoint-{HALF}"}],
        **options,
    )
    assert off[2] == {""}
    assert on[2]
    assert all(what.startswith("quantized data") for what in on[2]), on[2]
    return what_differs(off, on) + what_differs(on, resumed)


@needs_groups
@pytest.mark.parametrize("checkpointed", [False, True])
def test_codes_are_gathered_with_the_bits_of_values_and_a_run_resumes(tmp_path, checkpointed):
    options = {"activation_checkpointing": True} if checkpointed else {}
    assert shared_ranks().run(gathers_and_resumes, str(tmp_path), options) == [[]] * 4


def masters_resume(folder):
    options = {"weight_lifetime": "parameter", "keep_initial": True}
    whole, resumed, plain = on_ranks(
        folder,
        [{}, {"resume": f"checkpoint-{HALF}"}, {"callback": {}, "master": False, "save_strategy": "no"}],
        master=True,
        callback=options,
        config={"cpu_ram_efficient_loading": False},
    )
    # codes of float32 masters, and not of these in bfloat16: near, and no more
    assert all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(whole[0], plain[0], strict=True)), (whole, plain)
    return what_differs(whole, resumed)


@needs_groups
def test_masters_of_weights_that_are_codes_resume_on_ranks(tmp_path):
    assert shared_ranks().run(masters_resume, str(tmp_path)) == [[]] * 4


def refused_on_ranks(folder):
    def refused(text, **options):
        with sharding_ranks(), pytest.raises(ValueError, match=text):
            trainer_of(folder, [callback(**options.pop("callback", {}))], sharded=True, **options)

    refused(
        "cpu_ram_efficient_loading=False",
        callback={"weight_lifetime": "parameter"},
        config={"cpu_ram_efficient_loading": True},
    )


@needs_groups
def test_codes_can_not_be_sent_by_ram_efficient_loading(tmp_path):
    shared_ranks().run(refused_on_ranks, str(tmp_path))


# ---------------------------------------------------------------------------------- what would be lost without a word


@pytest.mark.parametrize("known", [False, True], ids=["hub names", "names of the model"])
def test_a_resume_without_experts_warns(tmp_path, known):
    import transformers
    from safetensors.torch import save_file

    from fp8compile.integrations.transformers import F8Callback

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2, "vocab_size": 32}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts))
    f8.convert(model, f8.recipes.rowwise())
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    hub = {"model.layers.0.block_sparse_moe.experts.0.w1.weight": torch.zeros(2)}
    save_file({name: each.contiguous() for name, each in model.state_dict().items()} if known else hub,
              folder / "model.safetensors")  # fmt: skip
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=2, is_world_process_zero=True)
    callback = F8Callback(f8.recipes.rowwise(), print_report=False)
    if not known:
        others = SimpleNamespace(global_step=2, is_world_process_zero=False)
        callback.on_train_begin(args, others, None, model=model)  # one process warns
    if known:
        callback.on_train_begin(args, state, None, model=model)
    else:
        with pytest.warns(UserWarning, match="experts under different names .* from_pretrained"):
            callback.on_train_begin(args, state, None, model=model)


def test_a_best_model_without_its_experts_warns(tmp_path):
    import transformers
    from zoo import ZOO, bf16_model

    from fp8compile.integrations.transformers import F8Callback

    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, eval_steps=1, eval_strategy="steps", load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True, report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=1, per_device_eval_batch_size=1,
    )  # fmt: skip
    rows = [{name: each[0] for name, each in ZOO["Mixtral"].batch(0).items()}]
    callbacks = [F8Callback(f8.recipes.rowwise(), print_report=False)]
    model = bf16_model(ZOO["Mixtral"])
    trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    with pytest.warns(
        UserWarning, match=r"load_best_model_at_end loaded .* experts of the last step .* from_pretrain"
    ):
        trainer.train()
    best = type(model).from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.bfloat16).state_dict()
    differs = {name for name, each in model.state_dict().items() if not torch.equal(each, best[name])}
    assert any("experts" in name for name in differs), "the Trainer loads experts now: the warning may go"
    assert not any("self_attn" in name for name in differs)


def test_files_are_not_read_without_converted_experts(tmp_path):
    from fp8compile.integrations.transformers import F8Callback

    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"what no one can read")
    model = f8.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), f8.recipes.rowwise())
    state = SimpleNamespace(global_step=2, is_world_process_zero=True)
    callback = F8Callback(f8.recipes.rowwise(), print_report=False)
    callback.on_train_begin(SimpleNamespace(output_dir=str(tmp_path)), state, None, model=model)


@pytest.mark.parametrize("by", ["callback", "accelerate"])
@pytest.mark.parametrize(("asked", "ranks"), [("true", 2), ("True", 2), ("true", 1), (None, 2)])
def test_ranks_that_fell_back_from_fsdp_warn(asked, ranks, by, monkeypatch):
    """`accelerate launch` with an FSDP yaml asks by the environment alone, and so does a plugin."""
    from fp8compile.integrations import accelerate as f8accelerate
    from fp8compile.integrations import transformers as f8transformers

    kind, model = DistributedType.MULTI_CPU, torch.nn.Sequential(torch.nn.Linear(32, 32))
    run = SimpleNamespace(num_processes=ranks, distributed_type=kind, is_fsdp2=False, mixed_precision="no")
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    if asked:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", asked)
    monkeypatch.setattr(f8transformers, "AcceleratorState", lambda: run)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if by == "callback":
            args = SimpleNamespace(fsdp=None, activation_checkpointing=False)
            f8transformers.F8Callback(f8.recipes.rowwise()).on_init_end(args, None, None, model=model)
        else:
            accelerator = SimpleNamespace(_models=[], _optimizers=[], state=run)
            f8accelerate.convert(accelerator, model, f8.recipes.rowwise())
    assert type(model[0]) is f8.Linear
    texts = [str(each.message) for each in said]
    assert len(texts) == (1 if asked and ranks > 1 else 0)
    assert all("but accelerate runs MULTI_CPU: nothing is sharded" in text for text in texts)
