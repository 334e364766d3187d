"""Training with tensor and sequence parallel: the losses of one process, by any plan, and by the command.

Where a sum crosses ranks, each rank's summand is rounded to the dtype of the activations, 2**-24 of a value in
float32; nothing else differs from one process, which tests/parallel/test_exact_sums.py shows to the bit.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from commands import finished_on_ranks
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, parallel
from train_runs import losses, rows_of, run_words

import fp8compile as f8
from examples.train.__main__ import main
from examples.train.config import TrainConfig, UsageError
from examples.train.layout import layout_of
from examples.train.model import ByteLlama, ModelShape
from examples.train.tensor_parallel import parallelize, place_gradients
from fp8compile.parallel import ColwiseParallel, RowwiseParallel

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "delayed")
NUM_SEQUENCES, SEQ, NUM_SYMBOLS = 4, 16, 64


# -------------------------------------------------------------------- what runs on each rank


def llama(recipe, *, qk_norm=False):
    shape = ModelShape(dim=32, layers=2, heads=4, kv_heads=2, hidden=64, seq=SEQ, qk_norm=qk_norm)
    model = ByteLlama(shape, seed=0)
    return f8.convert(model, f8.recipes.by_name(recipe), filter=lambda _, fqn: fqn != "head") if recipe else model


def pair():
    return DeviceMesh.from_group(GROUPS["pair"], "cpu")


def plan(model, *, local):
    """Sequence parallel by our styles, each of which returns a plain tensor, or all of them DTensors."""
    part = {"use_local_output": local}
    plan = {
        "embed": parallel.PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
            **part,
        ),
        "norm": parallel.SequenceParallel(**part),
        "head": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name in (name for name, _ in model.named_modules() if name.startswith("blocks.") and name.count(".") == 1):
        plan |= {
            f"{name}.{norm}": parallel.SequenceParallel(**part) for norm in ("attention_norm", "feed_forward_norm")
        }
        up, down = ColwiseParallel(input_layouts=Shard(1), **part), RowwiseParallel(output_layouts=Shard(1), **part)
        plan |= {f"{name}.attention.{linear}": up for linear in ("query", "key", "value")}
        plan |= {f"{name}.feed_forward.{linear}": up for linear in ("gate", "up")}
        plan |= {f"{name}.{linear}": down for linear in ("attention.output", "feed_forward.down")}
        qk = ("query_norm", "key_norm") if model.blocks[0].attention.query_norm else ()
        plan |= {
            f"{name}.attention.{norm}": parallel.SequenceParallel(sequence_dim=1, use_local_output=True) for norm in qk
        }
    return plan


def to_local(module, args, output):
    return output.to_local() if isinstance(output, DTensor) else output


def finish(model):
    distribute_module(model.embed, pair())  # whole on each rank
    for block in model.blocks:  # PyTorch has no rule for attention on DTensors on a CPU
        for linear in (block.attention.query, block.attention.key, block.attention.value):
            linear.register_forward_hook(to_local)


def by_plan(model, *, local):
    parallel.parallelize_module(model, pair(), plan(model, local=local))
    finish(model)
    return model


def batch(step):
    start = torch.randint(NUM_SYMBOLS, (NUM_SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    symbols = (start + 3 * torch.arange(SEQ + 1)) % NUM_SYMBOLS
    return symbols[:, :-1].contiguous(), symbols[:, 1:].contiguous()


def trained(model, *, steps, context=nullcontext):
    """Losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for step in range(steps):
        with context():
            loss = model(*batch(step))
            loss.backward()
        place_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses


def both(recipe, cut, *, steps, qk_norm=False):
    """Losses of one process, and of two that share the model."""
    if dist.get_rank() > 1:
        return None
    alone = trained(llama(recipe, qk_norm=qk_norm), steps=steps)
    model = llama(recipe, qk_norm=qk_norm)
    if cut in ("local", "dtensor"):
        by_plan(model, local=cut == "local")
    else:
        parallelize(model, pair(), sp=cut == "command, sp")
    return alone, trained(model, steps=steps)


def pair_agrees(results):
    first, second = results[:2]
    assert first == second, "the ranks do not agree"
    assert all(map(math.isfinite, (loss for losses in first for loss in losses)))
    return first


# -------------------------------------------------------------------- the losses of one process

CUTS = ("command", "command, sp", "local", "dtensor")


@pytest.mark.parametrize(
    ("recipe", "cut", "qk_norm"),
    [
        *((recipe, "command, sp", False) for recipe in RECIPES),
        *((recipe, "local", True) for recipe in ("rowwise", "delayed")),
        ("tensorwise", "dtensor", True),
        ("rowwise", "command", False),
        ("blockwise", "command, sp", True),
        *(
            pytest.param(recipe, cut, qk_norm, marks=pytest.mark.slow)
            for recipe in RECIPES
            for cut in CUTS
            for qk_norm in (False, True)
        ),
    ],
)
def test_first_steps_in_float32_have_the_losses_of_one_process(recipe, cut, qk_norm):
    alone, shared = pair_agrees(shared_ranks().run(partial(both, recipe, cut, steps=2, qk_norm=qk_norm)))
    # A summand is rounded by 2**-24 of itself. Measured: the same bits, for every recipe.
    assert shared[0] == pytest.approx(alone[0], rel=2**-21)
    # In the backward, a value so rounded may get the next code, which is an eighth of it away, and where AdamW
    # divides a gradient by itself its sign is all that counts. Measured: mostly the same bits, at most 8e-5.
    assert shared[1] == pytest.approx(alone[1], rel=2**-11)


def gradients(cut):
    if dist.get_rank() > 1:
        return None
    alone, model = llama(None, qk_norm=True), llama(None, qk_norm=True)
    parallelize(model, pair(), sp=cut == "command, sp")
    for each in (alone, model):
        each(*batch(0)).backward()
    place_gradients(model)
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return [((a.grad - b.grad.full_tensor()).abs().max() / a.grad.abs().max()).item() for a, b in pairs]


@pytest.mark.parametrize("cut", ["command", "command, sp"])
def test_gradients_in_float32_are_those_of_one_process(cut):
    first, second = shared_ranks().run(gradients, cut)[:2]
    assert first == second
    assert max(first) < 1e-5  # sums of 64 tokens and 64 features in another order, 2**-24 each


# -------------------------------------------------------------------- with what else people use


def with_loss_parallel(recipe):
    if dist.get_rank() > 1:
        return None
    alone, model = llama(recipe), llama(recipe)
    styles = {
        **plan(model, local=False),
        "head": parallel.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallel.parallelize_module(model, pair(), styles)
    finish(model)
    return trained(alone, steps=2), trained(model, steps=2, context=parallel.loss_parallel)


def test_loss_parallel():
    alone, shared = pair_agrees(shared_ranks().run(with_loss_parallel, "rowwise"))
    assert shared == pytest.approx(alone, rel=2**-21)  # as above; the sum of exponentials crosses ranks, too


# -------------------------------------------------------------------- the command

SIZES = {
    "dim": 64, "layers": 1, "heads": 4, "kv_heads": 2, "hidden": 64, "seq": 32, "batch": 4, "eval_sequences": 4,
    "threads": 1, "eval_every": 4, "checkpoint_every": 2,
}  # fmt: skip


def words(text_file, out, *more, **changes):
    return run_words({**SIZES, "steps": 8}, text_file, out, *more, **changes)


def test_ranks_print_the_losses_of_one_process_and_each_line_once(text_file, tmp_path):
    flags = ("--recipe", "rowwise", "--qk-norm")
    arguments = words(text_file, tmp_path / "two", *flags, "--tp", 2, "--sp", "--backend", "aot_eager")
    output = finished_on_ranks(main, arguments, tmp_path / "ranks")
    assert main(words(text_file, tmp_path / "one", *flags, "--no-compile")) == 0
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert [row[:3] for row in two] == [row[:3] for row in one]
    # 2**-8 for a rounding of the stream, and what 8 steps make of it: 0.4% in docs/results/training-on-ranks.md
    assert [row[3] for row in two] == pytest.approx([row[3] for row in one], rel=0.01)
    assert output.count("rowwise: step 8/8  loss") == output.count("run folder:") == 1
    assert "2 ranks, sequence parallel" in output
    (whole,), (part,) = (rows_of(tmp_path / folder, "done") for folder in ("one", "two"))
    assert part["profiled_gemms"]["fp8"] == part["asked_gemms"][0]
    assert 2 * part["profiled_gemms"]["flops"] == whole["profiled_gemms"]["flops"]
    assert part["graphs"] == {"train": 1, "eval": 1}


def test_torchrun_without_a_way_to_share_is_refused():
    with pytest.raises(UsageError) as caught:
        layout_of(TrainConfig(), size=2)
    assert str(caught.value) == (
        "these options take 1 processes; --fsdp takes more, and there are 2; start by torchrun --nproc-per-node 1 -m "
        "examples.train"
    )


def test_tp_without_torchrun_is_refused():
    with pytest.raises(
        UsageError, match=r"take 2 processes; .*, and there is 1; start by torchrun --nproc-per-node 2"
    ):
        layout_of(TrainConfig(tp=2))
    with pytest.raises(UsageError, match=r"take 4 processes; .*, and there are 2"):
        layout_of(TrainConfig(tp=4, kv_heads=4), size=2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 120, "heads": 3, "kv_heads": 3}, "--heads 3 has to be a multiple of 6"),
        ({"kv_heads": 1}, "--kv-heads 1 has to be a multiple of 2"),
        ({"hidden": 383}, "--hidden 383 has to be a multiple of 2"),
        ({"seq": 127, "sp": True}, "--seq 127 has to be a multiple of 2"),
        ({"tp": 1, "sp": True}, "--sp needs --tp 2 or more"),
        ({"tp": 0}, "--tp 0 has to be at least 1"),
    ],
)
def test_sizes_that_ranks_cannot_share_are_refused(sizes, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(**{"tp": 2, **sizes})
