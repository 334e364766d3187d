"""Training loops that no one here wrote: Trainer, accelerate, PEFT. The losses prove that FP8 ran, to the bit."""

from __future__ import annotations

from functools import cache

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import TorchDynamoPlugin
from torch.utils.flop_counter import FlopCounterMode
from ways import behaviour
from zoo import ZOO, bf16_model, train

import fp8compile as f8
from fp8compile.testing import Recording, gemm_share

RECIPE = f8.recipes.rowwise()
LLAMA, STEPS, BATCH = ZOO["Llama"], 6, 8
FIRST = ("q_proj", "q_proj.base_layer", "k_proj", "v_proj", "v_proj.base_layer")  # of a layer, what reads its input
# peft asks transformers 5.23 by a name that it renamed
PEFT_WARNS = "ignore:.*is_gradient_checkpointing.*:FutureWarning"
# With attention in plain matmuls compiled equals eager to the bit, see test_models.py.
ATTENTION = "eager"


@pytest.fixture(autouse=True)
def clean_accelerate(monkeypatch):
    """What accelerate keeps for the process, and Trainer in the environment, ends with the test."""
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def llama(*, dtype=torch.float32, fp8=True):
    model = bf16_model(LLAMA, attn_implementation=ATTENTION)
    model = model.to(dtype)  # the weights of mixed precision: bfloat16 numbers, updated in float32
    return f8.convert(model, RECIPE) if fp8 else model


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)


@cache
def plain_losses(*, fp8):
    """Of a loop as PyTorch's documentation has it, under autocast: what the others have to give."""
    model = llama(fp8=fp8)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**LLAMA.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_fp8_ran(losses):
    """The losses are those of FP8, which are not those of bf16."""
    assert losses == plain_losses(fp8=True)
    assert losses != plain_losses(fp8=False)


def assert_one_graph():
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


class Batches(torch.utils.data.Dataset):
    """The rows of the zoo's batches, one after another."""

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, row):
        return {name: rows[row % BATCH] for name, rows in LLAMA.batch(row // BATCH).items()}


@behaviour("Trainers", "Hugging Face Trainer, bf16=True (compiled: torch_compile=True)")
def test_trainer(way, tmp_path, monkeypatch):
    if way.compiled:
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "1")  # Trainer has no argument for it
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path,
        bf16=True,
        torch_compile=way.compiled,
        torch_compile_backend="aot_eager" if way.compiled else None,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        # as in the plain loop
        train_sampling_strategy="sequential",
        optim="adamw_torch",
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model=llama(), args=arguments, train_dataset=Batches())
    # the mean over a batch, and not a sum by the number of tokens, which rounds in another way
    trainer.model_accepts_loss_kwargs = False
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert_fp8_ran([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    if way.compiled:
        assert_one_graph()


def accelerated(way, **options):
    plugin = TorchDynamoPlugin(backend="aot_eager", fullgraph=True) if way.compiled else None
    return accelerate.Accelerator(mixed_precision="bf16", cpu=True, dynamo_plugin=plugin, **options)


def accelerate_losses(accelerator, model, optimizer):
    losses = []
    for step in range(STEPS):
        loss = model(**LLAMA.batch(step)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@behaviour("Trainers", "accelerate, mixed_precision='bf16', converted before prepare")
def test_accelerate(way):
    accelerator, model = accelerated(way), llama()
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    assert_fp8_ran(accelerate_losses(accelerator, prepared, optimizer))
    if way.compiled:
        assert_one_graph()
    unwrapped = accelerator.unwrap_model(prepared)
    assert all(row.converted for row in f8.conversion_report(unwrapped).rows)


@behaviour("Trainers", "accelerate, converted after prepare")
def test_accelerate_converts_afterwards(way):
    accelerator, model = accelerated(way), llama(fp8=False)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    if way.compiled:
        with way.raises(ValueError, "is already compiled with torch.compile"):
            f8.convert(prepared, RECIPE)
        return
    f8.convert(prepared, RECIPE)
    assert_fp8_ran(accelerate_losses(accelerator, prepared, optimizer))


def flops(model):
    """Operations of our ops in an eager step, by op."""
    with FlopCounterMode(display=False) as counter:
        model(**LLAMA.batch(0)).loss.backward()
    model.zero_grad()
    counts = counter.get_flop_counts()["Global"]
    return {str(op).removeprefix("fp8compile."): n for op, n in counts.items() if str(op).startswith("fp8compile.")}


def layer_flops(model, *endings):
    """Operations of one product of the converted layers, or of those of these names."""
    rows = [row for row in f8.conversion_report(model).rows if row.converted and row.fqn.endswith(endings or ("",))]
    return sum(2 * LLAMA.tokens(row.fqn) * row.in_features * row.out_features for row in rows)


def lora_model(*, fp8=True):
    """Adapters on two projections of each layer, over a base that was converted before."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = llama(dtype=torch.bfloat16, fp8=fp8)
    torch.manual_seed(1)  # of the adapters
    return peft.get_peft_model(model, config)


@cache
def lora_losses(*, fp8):
    """Eager; the base is in bfloat16, the adapters in float32."""
    model = lora_model(fp8=fp8)
    return train(LLAMA, model, model, steps=STEPS)


@pytest.mark.filterwarnings(PEFT_WARNS)
@behaviour("Trainers", "PEFT LoRA over converted layers: the base stays FP8, without its grad_weight")
def test_lora(way):
    model = lora_model()
    rows = {row.fqn: row for row in f8.conversion_report(model).rows}
    adapters = {fqn for fqn in rows if "lora_" in fqn}
    assert len(adapters) == 8  # two matrices, two projections, two layers
    assert {fqn for fqn, row in rows.items() if not row.converted} == adapters
    recording = Recording()
    losses = train(LLAMA, model, way(model, backend=recording), steps=STEPS)
    assert losses == lora_losses(fp8=True)
    assert losses != lora_losses(fp8=False)
    # what comes before the first adapters needs no gradient: embeddings are frozen
    forward = layer_flops(model)
    backward = forward - layer_flops(model, *(f"layers.0.self_attn.{name}" for name in FIRST))
    if way.compiled:
        assert_one_graph()
        assert gemm_share(*recording.traced).fp8_flops == forward + backward
    else:
        assert flops(model) == {"linear": forward, "grad_input": backward}


@pytest.mark.filterwarnings(PEFT_WARNS)
@behaviour("Trainers", "PEFT LoRA, converted after get_peft_model")
def test_lora_converted_afterwards(way):
    model = f8.convert(lora_model(fp8=False), RECIPE)
    left_out = {row.fqn: row.reason for row in f8.conversion_report(model).rows if not row.converted}
    assert all("lora_" in fqn for fqn in left_out)
    assert set(left_out.values()) == {"tiny: a dim of 4 is less than 16"}
    assert train(LLAMA, model, way(model), steps=STEPS) == lora_losses(fp8=True)


@pytest.mark.filterwarnings(PEFT_WARNS)
@behaviour("Trainers", "PEFT merge_and_unload: back to converted layers, with the adapters in their weights")
def test_merge(way, assert_bits_equal):
    model = lora_model()
    train(LLAMA, model, model, steps=STEPS)
    layer = model.get_base_model().model.layers[1].self_attn.v_proj
    before = layer.base_layer.weight.detach().clone()
    added = layer.get_delta_weight("default").detach()
    assert added.dtype == torch.float32
    assert added.any()
    merged = model.merge_and_unload()
    assert all(row.converted for row in f8.conversion_report(merged).rows)
    assert_bits_equal(merged.model.layers[1].self_attn.v_proj.weight, (before + added).to(torch.bfloat16))
    plain = llama(dtype=torch.bfloat16, fp8=False)
    plain.load_state_dict(merged.state_dict())
    with torch.no_grad():
        expected = f8.convert(plain, RECIPE)(**LLAMA.batch(0)).logits
        assert_bits_equal(way(merged)(**LLAMA.batch(0)).logits, expected)


@behaviour("Trainers", "Hugging Face save_pretrained, from_pretrained, convert again")
def test_save_and_load(way, tmp_path, assert_bits_equal):
    def load(folder):
        return transformers.LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=ATTENTION, local_files_only=True
        )

    llama(fp8=False).save_pretrained(tmp_path / "unconverted")
    model = f8.convert(load(tmp_path / "unconverted"), RECIPE)
    train(LLAMA, model, model, steps=2)
    model.save_pretrained(tmp_path / "trained")
    assert (tmp_path / "trained" / "model.safetensors").exists()
    loaded = load(tmp_path / "trained")
    assert {row.reason for row in f8.conversion_report(loaded).rows} == {"convert() has not visited it"}
    with torch.no_grad():
        expected = model(**LLAMA.batch(9)).logits
        assert not torch.equal(loaded(**LLAMA.batch(9)).logits, expected)  # in bf16
        f8.convert(loaded, RECIPE)
        assert_bits_equal(way(loaded)(**LLAMA.batch(9)).logits, expected)
    for (fqn, weight), other in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert_bits_equal(other, weight, fqn)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")  # its name before 5.23
@behaviour("Trainers", "Hugging Face gradient_checkpointing_enable")
def test_gradient_checkpointing(way):
    model = llama(dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recording = Recording()
    losses = train(LLAMA, model, way(model, backend=recording), steps=STEPS)
    stored = llama(dtype=torch.bfloat16)
    assert losses == train(LLAMA, stored, stored, steps=STEPS)
    once = layer_flops(model)
    again = once - layer_flops(model, "lm_head")  # which is outside the checkpoints
    if way.compiled:
        assert_one_graph()
        # what the first layer ends with is kept as the input of the second
        again -= layer_flops(model, "layers.0.mlp.down_proj")
        assert gemm_share(*recording.traced).fp8_flops == 3 * once + again
    else:
        assert flops(model) == {"linear": once + again, "grad_input": once, "grad_weight": once}
