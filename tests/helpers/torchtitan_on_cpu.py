"""torchtitan's own Trainer and debug models on a CPU, unedited: what it has for GPUs only is given by its configs.

torchtitan asks PyTorch for the machine's accelerator, once, when it is imported, and takes CUDA where there is none.
`import_torchtitan` answers that the accelerator is the CPU, and gives its spmd_types a way to send by gloo. The rest
are configs of torchtitan's own kind: attention that PyTorch can train on a CPU, a tokenizer and a dataset without
files, and metrics that keep the losses.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from dataclasses import dataclass
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

__all__ = ["CASES", "MODELS", "Case", "debug_config", "import_torchtitan", "losses_of", "train"]

SEQUENCE, BATCH, LAYERS, EXPERTS, TOP_K = 64, 4, 2, 8, 2


class _CpuModule(types.ModuleType):
    """`torch.cpu` with the questions about a device that only modules of accelerators answer."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def current_device(self):
        return 0  # torch.cpu says "cpu", which no barrier takes

    def get_device_name(self, device=None):
        return "cpu"

    def get_device_properties(self, device=None):
        return types.SimpleNamespace(total_memory=1)

    def memory_stats(self, device=None):
        return {}

    def reset_peak_memory_stats(self, device=None):
        pass

    def empty_cache(self):
        pass


class _GlooModule(types.ModuleType):
    """`torch.distributed` whose all_to_all takes tensors of any sizes: gloo has that for parts of one tensor only."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_to_all(self, outputs, inputs, group=None):
        sizes = [[each.numel() for each in tensors] for tensors in (outputs, inputs)]
        sent = torch.cat([each.flatten() for each in inputs])
        received = sent.new_empty(sum(sizes[0]))
        dist.all_to_all_single(received, sent, *sizes, group=group)
        for output, part in zip(outputs, received.split(sizes[0]), strict=True):
            output.copy_(part.view_as(output))


@cache
def import_torchtitan() -> None:
    """Import torchtitan on a machine whose accelerator is the CPU."""
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=_CpuModule("cpu")),
    ):
        importlib.import_module("torchtitan.tools.utils")
    # torchtitan goes without torchao, and that takes long to import
    hidden = {} if "torchao" in sys.modules else {"torchao": None}
    sys.modules.update(hidden)
    importlib.import_module("torchtitan.trainer")
    for name in hidden:
        del sys.modules[name]
    importlib.import_module("spmd_types").set_dist(_GlooModule("torch.distributed"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is spread over ranks."""

    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.fsdp * self.tp

    def __str__(self) -> str:
        given = {"FSDP": self.fsdp, "TP": self.tp, "EP": self.ep}
        return ", ".join(f"{name} {degree}" for name, degree in given.items() if degree > 1) or "1 rank"


CASES = {
    "one": Case(),
    "fsdp2": Case(fsdp=2),
    "tp2": Case(tp=2),
    "ep2": Case(fsdp=2, ep=2),
    "fsdp2_tp2": Case(fsdp=2, tp=2),
}


def _llama3():
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return llama3_debugmodel()


def _qwen3_moe():
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    return qwen3_moe_debug()


def _deepseek_v3():
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    return deepseek_v3_debugmodel()


MODELS = {"llama3": _llama3, "qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3}


def _cut_down(decoder):
    """Fewer layers and experts, in place."""
    from torchtitan.models.common.moe import MoE

    decoder.layers = decoder.layers[:LAYERS]
    for _, moe, _, _ in decoder.traverse(MoE.Config):
        moe.router.gate.out_features = EXPERTS
        moe.router.top_k = moe.routed_experts.token_dispatcher.top_k = TOP_K
        for part in (moe, moe.router, moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher):
            part.num_experts = EXPERTS


def debug_config(
    model: str,
    case: Case,
    folder: str,
    *,
    steps: int = 10,
    backend: str | None = "inductor",
    spmd_backend: str = "partial_dtensor",
    typechecked: bool = False,
):
    """A debug model's config as torchtitan has it, cut down and fit for a CPU.

    Args:
        model: A name in `MODELS`.
        case: How it is spread over ranks.
        folder: Where torchtitan writes.
        steps: How many.
        backend: Of torch.compile, None for eager mode.
        spmd_backend: The mechanism of torchtitan by which it spreads tensors over ranks.
        typechecked: Whether spmd_types checks which ranks have which part of every tensor, in eager mode.
    """
    import_torchtitan()
    import torchtitan_parts as parts
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    config = MODELS[model]()
    decoder = config.model_spec.model
    _cut_down(decoder)
    for _, _, parent, name in list(decoder.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.tokenizer, config.dataloader = parts.NoTokenizer.Config(), parts.Walks.Config()
    config.metrics = parts.Losses.Config(log_freq=1, disable_color_printing=True)
    config.dump_folder = folder
    config.optimizer.implementation = "for-loop"
    config.validator.enable = False
    config.debug.seed = 0
    config.debug.spmd_typechecking = typechecked
    config.debug.enable_structured_logging = False
    config.comm.trace_buf_size = 0
    training, parallelism = config.training, config.parallelism
    training.steps, training.seq_len, training.local_batch_size = steps, SEQUENCE, BATCH // case.fsdp
    training.disable_cuda_graphs = True
    parallelism.data_parallel_shard_degree = case.fsdp
    parallelism.tensor_parallel_degree = case.tp
    parallelism.expert_parallel_degree = case.ep
    parallelism.spmd_backend = spmd_backend
    config.compile.enable = backend is not None
    config.compile.backend = backend or "inductor"
    return config


def train(config):
    """Train by torchtitan's Trainer on this process's rank, in the process group that there is, and return it.

    These are the steps of `Trainer.train`, which beside them sets timeouts by what PyTorch has from 2.15 on only.
    """
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can't multiply by 1 while it adds
    trainer.checkpointer.load(step=config.checkpoint.load_step)
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.should_continue_training():
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step, last_step=trainer.step == config.training.steps)
    return trainer


def losses_of(trainer) -> list[float]:
    """The losses of the steps that a trainer made."""
    return trainer.metrics_processor.losses
