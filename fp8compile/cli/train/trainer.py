"""Train one arm: a model, its optimizer, and what a step and an evaluation are.

    batch(seed, step) --> compiled model --> loss --> backward --> clip --> AdamW, lr(step)

Nothing here writes files or prints; training.py does.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

import fp8compile as f8
from fp8compile.cli.errors import Failed, UserError
from fp8compile.cli.train.checkpoint import load_checkpoint, save_checkpoint, whole_state
from fp8compile.cli.train.config import BF16
from fp8compile.cli.train.expert_parallel import cut_experts, parameters_of_mixtures
from fp8compile.cli.train.fsdp import shard
from fp8compile.cli.train.gemms import expected_gemms, profiled_gemms
from fp8compile.cli.train.graphs import CountedModel
from fp8compile.cli.train.layout import layout_of
from fp8compile.cli.train.memory import peak_memory, reset_peak_memory
from fp8compile.cli.train.model import ByteLlama, ModelShape
from fp8compile.cli.train.ranks import Ranks
from fp8compile.cli.train.tensor_parallel import parallelize, place_gradients
from fp8compile.cli.train.text import held_out_batches, training_batch
from fp8compile.cli.train.wide_products import widen_products
from fp8compile.nn.candidates import is_layer, weight_names
from fp8compile.nn.experts import is_experts, routers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from fp8compile.cli.train.config import Arm, TrainConfig
    from fp8compile.cli.train.text import Text

__all__ = ["Trainer", "model_shape", "named_recipe", "reproducible"]

WARMUP_STEPS = 30  # a tenth of the default run
BETAS = (0.9, 0.95)  # with the weight decay: Touvron et al. 2023, arXiv:2302.13971
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0


@contextmanager
def reproducible(*, threads: int) -> Iterator[None]:
    """Make PyTorch compute the same bits each time, and undo it at the end.

    Args:
        threads: CPU threads; sums are split by them, so a resumed run needs the same number.
    """
    fill = torch.utils.deterministic.fill_uninitialized_memory
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=True)
    # A tool to find reads of memory that nobody wrote; it costs a pass over each new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(was_deterministic)
        torch.set_num_threads(threads_before)


def named_recipe(name: str) -> f8.Recipe | None:
    """Return the recipe of a name, None for "bf16".

    Args:
        name: As typed.

    Returns:
        The recipe.

    Raises:
        UserError: There is none of that name, or the package that offers it fails.
    """
    if name == BF16:
        return None
    try:
        return f8.recipes.by_name(name)
    except ValueError as error:
        raise UserError(f"{error} Or bf16, for no conversion.") from error
    except (ImportError, TypeError) as error:  # of the installed package that offers it
        raise UserError(str(error)) from error


def model_shape(config: TrainConfig) -> ModelShape:
    """Return the sizes of the model that a configuration asks for.

    Args:
        config: The run's configuration.

    Returns:
        The sizes.

    Raises:
        UserError: They do not go together.
    """
    names = ("dim", "layers", "heads", "kv_heads", "hidden", "seq", "qk_norm", "experts", "top_k")
    try:
        return ModelShape(**{name: getattr(config, name) for name in names})
    except ValueError as error:
        raise UserError(str(error)) from error


def _learning_rate(step: int, peak: float) -> float:
    # A function of the step alone, so that a run may be extended: rise, then 1 / sqrt(step).
    done = step + 1
    return peak * min(done / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / done))


def _optimizer(model: torch.nn.Module, *, has_masters: bool) -> torch.optim.Optimizer:
    experts = parameters_of_mixtures(model)
    parameters = [parameter for parameter in model.parameters() if parameter not in experts]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if experts:  # a group of their own: one update of the optimizer takes parameters of one mesh
        groups.append({"params": [p for p in model.parameters() if p in experts], "weight_decay": WEIGHT_DECAY})
    options = {"betas": BETAS, "fused": True}
    return (
        f8.MasterWeights(torch.optim.AdamW, groups, **options) if has_masters else torch.optim.AdamW(groups, **options)
    )


class Trainer:
    """State of one arm.

    Attributes:
        step: Updates done.
        counted: The model as called, and its graphs.
    """

    def __init__(
        self, config: TrainConfig, arm: Arm, text: Text, recipe: f8.Recipe | None, ranks: Ranks | None = None
    ) -> None:
        """Make the model, convert it, share it among the ranks, and prepare its compilation.

        Args:
            config: The run's configuration, with threads and device filled in.
            arm: Which of its trainings.
            text: Where batches come from.
            recipe: What to convert by; None for bf16.
            ranks: The processes of the run; None for this one alone.
        """
        self._ranks = Ranks() if ranks is None else ranks
        self._layout = layout = layout_of(config, self._ranks)
        self._config, self._arm, self._text = config, arm, text
        self._device = torch.device(config.device)
        self.model = ByteLlama(model_shape(config), seed=arm.seed)
        self._has_masters = config.quantized_parameters and recipe is not None
        if recipe is not None:
            self._convert(recipe)
        widen_products(self.model, self._device)
        self.model.to(self._device)
        tp_mesh = layout.tp_mesh(self._device.type) if layout.tp > 1 else None
        if config.ep > 1:
            cut_experts(self.model, layout.experts_mesh(self._device.type, config.ep), tp_mesh)
        if tp_mesh is not None:
            self._cut(tp_mesh)
        tokens = config.batch // layout.dp * config.seq
        self._expected = expected_gemms(self.model, recipe, tokens=tokens, device=self._device)
        self._gathered = None
        if layout.dp > 1:
            self._gathered = shard(self.model, layout.data_mesh(self._device.type), config, recipe)
        self._optimizer = _optimizer(self.model, has_masters=self._has_masters)
        self.counted = CountedModel(self.model, config)
        self.step = 0
        self._is_warm = False
        self._peak_is_of_steps = False
        self._started = 0.0
        self._step_seconds: list[float] = []

    def _convert(self, recipe: f8.Recipe) -> None:
        # The head stays in bf16, as is usual: its errors go straight into the loss.
        scoring = routers(self.model)
        layers = [
            module
            for name, module in self.model.named_modules()
            if is_layer(module) and name != "head" and module not in scoring
        ]
        drawn: dict[tuple[torch.nn.Module, str], Tensor] = {}
        if self._has_masters:
            # Codes are those of what autocast would round; FSDP2 takes one dtype for all parameters that it has.
            apart = [layer for layer in layers if self._layout.dp == 1 or (self._config.ep > 1 and is_experts(layer))]
            drawn = {(each, name): getattr(each, name).detach() for each in apart for name in weight_names(each)}
        for (layer, name), values in drawn.items():
            setattr(layer, name, torch.nn.Parameter(values.bfloat16()))
        # Delayed scales that ranks with other rows find on their own would not be one state.
        group = self._layout.data_group() if recipe.history() and self._layout.dp > 1 else None
        f8.convert(
            self.model,
            recipe,
            filter="!head",
            amax_group=group,
            quantized_parameters=self._has_masters,
            keep_initial=self._has_masters,
        )
        with torch.no_grad():
            for (layer, name), values in drawn.items():
                getattr(layer, name).copy_(values)  # rounded for the codes, as they are for the masters

    def _cut(self, mesh: DeviceMesh) -> None:
        try:
            parallelize(self.model, mesh, sp=self._config.sp)
        except ValueError as error:  # of weights whose blocks would be cut
            raise UserError(f"--tp {self._config.tp} --quantized-parameters: {error}") from error

    # ---------------------------------------------------------------- state

    def load(self, path: object) -> None:
        """Continue from a checkpoint, if there is one."""
        steps = self._config.steps
        self.step = load_checkpoint(path, model=self.model, optimizer=self._optimizer, steps=steps)

    def save(self, path: object) -> None:
        """Write a checkpoint: the first rank does, of what all have."""
        state = whole_state(step=self.step, model=self.model, optimizer=self._optimizer)
        if self._ranks.is_first:
            save_checkpoint(path, state)

    # ---------------------------------------------------------------- steps

    def _loss(self, kind: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens_BT, targets_BT = (part.to(self._device) for part in batch)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            return self.counted(kind, tokens_BT, targets_BT)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        sizes = {"batch": self._config.batch, "seq": self._config.seq}
        whole = training_batch(self._text, seed=self._arm.seed, step=step, **sizes)
        rows = self._layout.rows(self._config.batch)
        return whole[0][rows], whole[1][rows]

    def gradients(self) -> dict[str, object]:
        """Do forward and backward of the next step.

        Returns:
            The row of the step; the gradients are in the parameters.

        Raises:
            Failed: The loss is not finite.
        """
        self._started = time.perf_counter()
        loss = self._loss("train", self._batch(self.step))
        loss.backward()
        value = self._layout.mean(self._ranks.all(loss.item()))
        if not math.isfinite(value):
            raise Failed(f"the loss of {self._arm.name} became {value} at step {self.step + 1}; lower --lr")
        rate = _learning_rate(self.step, self._config.lr)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        place_gradients(self.model)
        if self._config.ep > 1:
            replicas = self._layout.experts_replicas(self._device.type, self._config.ep)
            f8.parallel.average_expert_gradients(self.model, self._layout.dp, replicas=replicas)
        f8.parallel.clip_grad_norm_(self.model, MAX_GRADIENT_NORM)
        return {"kind": "train", "arm": self._arm.name, "step": self.step + 1, "loss": value, "lr": rate}

    def update(self) -> None:
        """Finish the step that :meth:`gradients` began."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.perf_counter() - self._started
        if self._is_warm:
            self._step_seconds.append(seconds)
        else:
            # The first step of the process compiles: no part of its pace nor of its memory.
            self._is_warm = True
            self._peak_is_of_steps = reset_peak_memory(self._device)

    def evaluate(self) -> dict[str, object]:
        """Return the row with the held-out loss: the mean over the same sequences each time."""
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
        return {"kind": "eval", "arm": self._arm.name, "step": self.step, "loss": total / count}

    # ---------------------------------------------------------------- report

    @property
    def tokens_per_second(self) -> float | None:
        """Pace of the median step of this process after its first one; None before the second."""
        if not self._step_seconds:
            return None
        return self._config.batch * self._config.seq / statistics.median(self._step_seconds)

    def summary(self) -> dict[str, object]:
        """Return the row that closes the arm; runs one more forward and backward to profile it."""

        def step() -> None:
            self._loss("train", self._batch(self.step)).backward()
            self._optimizer.zero_grad(set_to_none=True)

        peak = peak_memory(self._device)
        if not self._is_warm:
            step()  # resumed after the last update: the compiler has yet to run
        return {
            "kind": "done",
            "arm": self._arm.name,
            "step": self.step,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": peak,
            "peak_memory_since": "first step" if self._peak_is_of_steps else "process start",
            "expected_gemms": vars(self._expected),
            "profiled_gemms": vars(profiled_gemms(step)),
            "graphs": dict(self.counted.graphs) if self.counted.is_compiled else None,
            "graph_breaks": self.counted.graph_breaks,
            "recompiles": self.counted.recompiles,
            "tp": self._config.tp,
            "ep": self._config.ep,
            "sp": self._config.sp,
            "replicas": self._layout.replicas,
            "shards": self._layout.shards,
            "quantized_parameters": self._has_masters,
            "weights_gathered_as": self._gathered,
        }
