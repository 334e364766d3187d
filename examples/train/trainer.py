"""Trains one arm: the model, its optimizer, a training step and an evaluation.

    batch(seed, step) --> compiled model --> loss --> backward --> clip --> AdamW, lr(step)

Nothing here writes metrics or prints; run.py does.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

import fp8compile as f8
from examples.train.checkpoint import load_checkpoint, save_checkpoint
from examples.train.config import BF16, Arm, TrainConfig, UsageError
from examples.train.data import Text, held_out_batches, training_batch
from examples.train.experts import mixtures, spread_over
from examples.train.gemms import asked_gemms, profiled_gemms
from examples.train.layout import all_values, layout_of
from examples.train.model import ByteLlama, ModelShape
from examples.train.sharding import shard
from examples.train.tensor_parallel import parallelize, place_gradients
from examples.train.wide_products import widen_products

WARMUP_STEPS = 30  # a tenth of the default run
BETAS = (0.9, 0.95)  # with the weight decay: Touvron et al. 2023, arXiv:2302.13971
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0


class Diverged(Exception):
    """Raised if a loss is not finite."""


def reproduce_bits(*, threads: int) -> None:
    """Make this process compute the same bits each time. Threads split sums, so their number is fixed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs a fixed workspace to reproduce bits
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=True)
    # Filling new memory only helps to find reads of uninitialized memory, and costs a pass over each new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False


def named_recipe(name: str) -> f8.Recipe | None:
    """The recipe called ``name``; None for "bf16". Raises a `UsageError` if there is none, or if its package fails."""
    if name == BF16:
        return None
    try:
        return f8.recipes.by_name(name)
    except (ValueError, ImportError, TypeError) as error:
        raise UsageError(f"{error} Or {BF16}, for no conversion.") from error


def _shape(config: TrainConfig) -> ModelShape:
    return ModelShape(**{each.name: getattr(config, each.name) for each in fields(ModelShape)})


def _learning_rate(step: int, peak: float) -> float:
    # Depends on the step alone, so that a run can be extended: a linear warmup, then 1 / sqrt(step).
    done = step + 1
    return peak * min(done / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / done))


def _optimizer(model: nn.Module, *, has_masters: bool) -> torch.optim.Optimizer:
    experts = {stack for layer in mixtures(model) for stack in layer.experts.parameters()}
    others = [parameter for parameter in model.parameters() if parameter not in experts]
    groups = [
        {"params": [each for each in others if each.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in others if each.ndim < 2], "weight_decay": 0.0},
    ]
    if experts:  # experts have a group of their own, because a fused update takes parameters of one mesh
        stacks = [each for each in model.parameters() if each in experts]
        groups.append({"params": stacks, "weight_decay": WEIGHT_DECAY})
    options = {"betas": BETAS, "fused": True}
    if has_masters:
        return f8.MasterWeights(torch.optim.AdamW, groups, **options)
    return torch.optim.AdamW(groups, **options)


def _counter(group: str) -> Counter[str]:
    return torch._dynamo.utils.counters[group]


def _peak_bytes(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on a GPU; on a CPU of the whole process, with PyTorch and its compiler."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Trainer:
    """The training of one arm: a model that is converted by a recipe (None for bf16) and shared among the ranks.

    Attributes:
        model: The model, before it is compiled.
        monitor: Reads statistics of FP8 operands; None without --monitor.
        graphs: Number of compiled graphs, by the kind of call that needed them.
        gathered: Words for how FSDP gathers weights of FP8 layers; None without FSDP.
        step: Number of updates done.
    """

    def __init__(self, config: TrainConfig, arm: Arm, text: Text, recipe: f8.Recipe | None) -> None:
        self._config, self._arm, self._text = config, arm, text
        self._layout = layout = layout_of(config)
        self._device = device = torch.device(config.device)
        self._has_masters = config.quantized_parameters and recipe is not None
        self.model = ByteLlama(_shape(config), seed=arm.seed)
        if recipe is not None:
            self._convert(recipe)
        widen_products(self.model, device)
        self.model.to(device)
        tp_mesh = layout.tp_mesh(device.type)
        if layout.ep > 1:
            spread_over(self.model, layout.experts_mesh(device.type), tp_mesh)
        if tp_mesh is not None:
            parallelize(self.model, tp_mesh, sp=config.sp)
        self._asked = asked_gemms(self.model, top_k=config.top_k)
        self.gathered = None
        if layout.dp > 1:
            self.gathered = shard(self.model, layout.data_mesh(device.type), config, is_fp8=recipe is not None)
        self._optimizer = _optimizer(self.model, has_masters=self._has_masters)
        self.graphs: Counter[str] = Counter()
        self._call = self._compiled()
        is_read, names = config.monitor and recipe is not None, f8.monitor.STATISTICS
        self.monitor = f8.Monitor(self.model, names, every=config.monitor) if is_read else None
        self.step = 0
        self._started = 0.0
        self._step_seconds: list[float] = []

    def _convert(self, recipe: f8.Recipe) -> None:
        # Ranks with other rows reduce amaxes over this group, so that they have the same state of delayed scaling.
        group = self._layout.data_group() if recipe.history() and self._layout.dp > 1 else None
        masters = self._drawn() if self._has_masters else {}
        for (module, name), values in masters.items():
            setattr(module, name, nn.Parameter(values.bfloat16()))  # autocast would quantize these rounded values
        # The head stays in bf16, as is usual, because its errors go directly into the loss.
        lifetime = "parameter" if self._has_masters else None
        options = {"weight_lifetime": lifetime, "keep_initial": self._has_masters}
        f8.convert(self.model, recipe, filter="!head", amax_group=group, **options)
        with torch.no_grad():
            for (module, name), values in masters.items():
                getattr(module, name).copy_(values)  # the float32 values, from which masters start

    def _drawn(self) -> dict[tuple[nn.Module, str], Tensor]:
        """Initial values of weights that become codes, except those that FSDP2 shards, which takes only one dtype."""
        experts = [layer.experts for layer in mixtures(self.model)]
        routers = [layer.router for layer in mixtures(self.model)]
        linears = [each for each in self.model.blocks.modules() if isinstance(each, nn.Linear) and each not in routers]
        if self._layout.dp > 1:
            linears, experts = [], experts if self._layout.ep > 1 else []
        return {
            (module, name): parameter.detach()
            for module in (*linears, *experts)
            for name, parameter in module.named_parameters(recurse=False)
        }

    def _compiled(self) -> nn.Module:
        if not self._config.compile:
            return self.model
        if self._config.backend not in torch._dynamo.list_backends(exclude_tags=()):
            raise UsageError(f"--backend {self._config.backend}: PyTorch has no such backend")
        # Dynamo keeps graphs by code, which all arms share; so graphs of earlier arms are dropped.
        torch._dynamo.reset()
        _counter("graph_break").clear()
        if self._layout.dp > 1 and not self._config.graph_fsdp:
            return self.model  # stock FSDP2 has compiled blocks
        # There are three shapes at most (train, eval, last eval batch); a graph for each is faster than one for all.
        return torch.compile(self.model, fullgraph=True, dynamic=False, backend=self._config.backend)

    def save(self, folder: Path) -> None:
        """Write a checkpoint. All ranks call this, and each writes its part."""
        save_checkpoint(folder, self.step, self.model, self._optimizer)

    def load(self, folder: Path) -> None:
        """Continue from the newest checkpoint, if there is one."""
        self.step = load_checkpoint(folder, self.model, self._optimizer)
        if self.monitor is not None:
            self.monitor.steps = self.step

    def _loss(self, kind: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens_BT, targets_BT = (part.to(self._device) for part in batch)
        before = _counter("stats")["unique_graphs"]
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = self._call(tokens_BT, targets_BT)
        if made := _counter("stats")["unique_graphs"] - before:
            self.graphs[kind] += made
        return loss

    def _batch(self) -> tuple[Tensor, Tensor]:
        sizes = {"batch": self._config.batch, "seq": self._config.seq}
        whole = training_batch(self._text, seed=self._arm.seed, step=self.step, **sizes)
        rows = self._layout.rows(self._config.batch)
        return whole[0][rows], whole[1][rows]

    def gradients(self) -> float:
        """Run forward and backward of the next step, and return the mean loss over the whole batch."""
        self._started = time.perf_counter()
        is_read = self.monitor is not None and self.monitor.is_reading  # a graph of its own
        loss = self._loss("read" if is_read else "train", self._batch())
        loss.backward()
        value = self._layout.mean(all_values(loss.item()))
        if not math.isfinite(value):
            raise Diverged(f"the loss of {self._arm.name} became {value} at step {self.step + 1}; lower --lr")
        place_gradients(self.model)
        if self._layout.ep > 1:
            replicas = self._layout.experts_replicas(self._device.type)
            f8.parallel.average_expert_gradients(self.model, self._layout.dp, replicas=replicas)
        f8.parallel.clip_grad_norm_(self.model, MAX_GRADIENT_NORM)
        return value

    def update(self) -> None:
        """Finish the step that :meth:`gradients` began."""
        for group in self._optimizer.param_groups:
            group["lr"] = _learning_rate(self.step, self._config.lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._step_seconds.append(time.perf_counter() - self._started)

    def evaluate(self) -> float:
        """The held-out loss in nats per byte: the mean over sequences that are the same each time."""
        self.model.eval()
        config, total, count = self._config, 0.0, 0
        sizes = {"batch": config.batch, "seq": config.seq, "sequences": config.eval_sequences}
        with torch.no_grad():
            for batch in held_out_batches(self._text, **sizes):
                length = len(batch[0])
                kind = "eval" if length == config.batch else "partial eval"
                total += self._loss(kind, batch).item() * length
                count += length
        self.model.train()
        return total / count

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of this process's median step after the first, which compiles; None before the second."""
        if len(self._step_seconds) < 2:
            return None
        return self._config.batch * self._config.seq / statistics.median(self._step_seconds[1:])

    def summary(self) -> dict[str, object]:
        """The numbers of the training for the table; runs one more forward and backward to profile it."""

        def step() -> None:
            self._loss("train", self._batch()).backward()
            self._optimizer.zero_grad(set_to_none=True)

        peak = _peak_bytes(self._device)
        if not self._step_seconds:
            step()  # the run was resumed after its last update, so nothing is compiled yet
        return {
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": peak,
            "asked_gemms": self._asked,
            "profiled_gemms": vars(profiled_gemms(step)),
            "graphs": dict(self.graphs) if self._config.compile else None,
            "graph_breaks": sum(_counter("graph_break").values()),
            "recompiles": sum(count - 1 for count in self.graphs.values()),
            "ranks": self._layout.size,
            "shared": self._shared(),
        }

    def _shared(self) -> dict[str, str]:
        """Lines of the table on how the ranks share the model: label and text."""
        layout, found = self._layout, {}
        if layout.tp > 1:
            found["tensor parallel"] = f"{layout.tp} ranks{', sequence parallel' if self._config.sp else ''}"
        if layout.ep > 1:
            found["expert parallel"] = f"{layout.ep} ranks"
        if self.gathered is not None:
            replicas = f", {layout.replicas} replicas" if layout.replicas > 1 else ""
            found["FSDP"] = f"{layout.shards} shards{replicas}"
            found["weights gathered as"] = self.gathered
        if self._has_masters:
            found["weights of FP8 layers"] = "FP8 parameters, float32 masters"
        return found
