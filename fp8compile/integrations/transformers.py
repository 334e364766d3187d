"""FP8 with the Hugging Face Trainer: callbacks to convert and monitor, and an optimizer for FP8 parameters.

```python
import transformers

import fp8compile as f8
from fp8compile.integrations import transformers as f8transformers

trainer = transformers.Trainer(
    model, args, train_dataset=dataset, callbacks=[f8transformers.F8Callback(f8.recipes.rowwise())]
)
trainer.train()
```
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fp8compile.integrations.accelerate import MasterWeights, converted, fsdp2_plugin
from fp8compile.integrations.conversion import Conversion
from fp8compile.integrations.loggers import finite
from fp8compile.integrations.transformers_quantizer import F8Config
from fp8compile.monitor import Monitor
from fp8compile.nn import conversion_report
from fp8compile.nn.convertible.assign_recipes import Recipes
from fp8compile.nn.report.conversion_report import ConversionReport

__all__ = ["F8Callback", "F8Config", "MonitorCallback", "master_weights"]

OPTIMIZER_IS_MADE = (
    "F8Callback: the Trainer was given an optimizer, but its parameters are replaced, because FSDP2 all-gathers "
    "FP8 weights or weights become FP8 parameters. Omit optimizers=, and pass optimizer_cls_and_kwargs=, from "
    "which the Trainer creates an optimizer later; or use fsdp_float8_all_gather=False."
)
NOT_CONVERTED = (
    "F8Callback: the model that is trained has no FP8 layers. The callback converts the model when the Trainer is "
    "created, so pass it as callbacks=[...] instead of calling add_callback. With model_init=, the Trainer creates "
    "another model when training starts: call fp8compile.convert in model_init, and omit the callback."
)
EXPERTS_ARE_LOST = (
    "F8Callback: {folder} stores the experts under different names than the model ({name}), and the Trainer does not "
    "load these names when it resumes, whether the model is converted or not. Unless the model was created by "
    "from_pretrained({folder!r}), its experts are still the initial ones. Create it that way and resume again."
)

BEST_EXPERTS_ARE_LOST = (
    "F8Callback: load_best_model_at_end loaded {folder}, which stores the experts under different names than the "
    "model ({name}), and the Trainer does not load these names, whether the model is converted or not. The model "
    "now has the experts of the last step and the other weights of the best one. Load the best model with "
    "from_pretrained({folder!r})."
)


def _names_in(folder: Path) -> Iterator[str]:
    """Yield the names of tensors in a checkpoint's safetensors files."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as found:
            yield from found.keys()


def _lost_expert(model: nn.Module, report: ConversionReport, folder: Path) -> str | None:
    """Return the name of the first parameter of converted experts that a checkpoint lacks; None if all are there.

    A folder without safetensors files counts as complete.
    """
    experts = [row.fqn for row in report.rows if row.converted and row.experts]
    saved = set(_names_in(folder)) if experts else set()
    names = (f"{fqn}.{name}" for fqn in experts for name, _ in model.get_submodule(fqn).named_parameters())
    return next((name for name in names if name not in saved), None) if saved else None


class F8Callback(TrainerCallback):
    """Converts the model when the Trainer is created, and prints a report when training begins.

    The model is converted with `fp8compile.convert`. If accelerate uses FSDP2 (``fsdp=True``, ``fsdp_version`` 2),
    weights are all-gathered in FP8. Activation checkpointing set in the training arguments or in ``fsdp_config`` is
    detected automatically.

    Args:
        recipe: The recipe, as for `fp8compile.convert`.
        fsdp_float8_all_gather: Whether FSDP2 all-gathers weights in FP8. Losses are bit-identical either way.
        print_report: Whether rank 0 prints the report.
        options: Other arguments of `fp8compile.convert`.

    Raises:
        ValueError: The Trainer already has an optimizer whose parameters would be replaced; FP8 all-gather is
            requested with FSDP1; FP8 parameters are combined with ``cpu_ram_efficient_loading`` of FSDP2; the
            model has no FP8 layers when training begins; or `fp8compile.convert` raises it.
    """

    def __init__(
        self,
        recipe: Recipes,
        *,
        fsdp_float8_all_gather: bool = True,
        print_report: bool = True,
        **options: Any,
    ) -> None:
        self.conversion: Conversion = Conversion(recipe=recipe, gather=fsdp_float8_all_gather, options=options)
        self.print_report: bool = print_report

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert the model, before the Trainer creates an optimizer and accelerate shards the model."""
        run = AcceleratorState()
        replaces = self.conversion.replaces_parameters(sharded=fsdp2_plugin(run) is not None)
        if replaces and kwargs.get("optimizer") is not None:
            raise ValueError(OPTIMIZER_IS_MADE)
        converted(self.conversion, kwargs["model"], run, checkpointed=bool(args.activation_checkpointing))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the model is converted, warn if the resumed checkpoint lacks experts, and print the report."""
        model: nn.Module = kwargs["model"]
        report = conversion_report(model)
        if not any(row.converted for row in report.rows):
            raise ValueError(NOT_CONVERTED)
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        if state.global_step and (lost := _lost_expert(model, report, folder)):
            warnings.warn(EXPERTS_ARE_LOST.format(folder=str(folder), name=lost), stacklevel=2)
        if self.print_report:
            print(report)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warn if the Trainer loaded the best checkpoint and it lacks some experts."""
        best = state.best_model_checkpoint
        if not (args.load_best_model_at_end and best and state.is_world_process_zero):
            return
        model: nn.Module = kwargs["model"]
        if lost := _lost_expert(model, conversion_report(model), Path(best)):
            warnings.warn(BEST_EXPERTS_ARE_LOST.format(folder=best, name=lost), stacklevel=2)


class TrainersMasterWeights(MasterWeights):
    """`fp8compile.integrations.accelerate.MasterWeights` with ``params`` first, as a Trainer passes arguments.

    Args:
        params: Groups of parameters.
        optimizer: A class of ``torch.optim``.
        options: Options of `fp8compile.MasterWeights` and of the optimizer.
    """

    def __init__(self, params: Iterable[Any], *, optimizer: type[Optimizer], **options: Any) -> None:
        super().__init__(optimizer, params, **options)


def master_weights(args: TrainingArguments, **options: Any) -> tuple[type[Optimizer], dict[str, Any]]:
    """Wrap the optimizer class selected by ``args`` to keep master weights for FP8 parameters.

    Pass the result to a Trainer as ``optimizer_cls_and_kwargs``.

    Args:
        args: The training arguments, which select the optimizer (``args.optim``), its learning rate and its options.
        options: Options of `fp8compile.MasterWeights`, such as ``rounding``.

    Returns:
        The optimizer class and its keyword arguments.

    Raises:
        TypeError: ``args.optim`` does not select an optimizer class, or selects a class that is created from the model
            instead of its parameters.
    """
    optimizer, arguments = Trainer.get_optimizer_cls_and_kwargs(args)
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)) or "params" in arguments:
        raise TypeError(
            f"master_weights: optim={args.optim!r} creates its optimizer from the model instead of parameters. Use "
            "an optimizer of torch.optim, such as optim='adamw_torch'."
        )
    return TrainersMasterWeights, {**arguments, "optimizer": optimizer, **options}


class MonitorCallback(TrainerCallback):
    """Callback that logs the statistics of an `fp8compile.Monitor` with the Trainer's loggers.

    Create the callback with the Trainer, then add it: ``trainer.add_callback(MonitorCallback(trainer, every=100))``.

    Args:
        trainer: The Trainer. Its model must already be converted, for example by `F8Callback`.
        options: Arguments of `fp8compile.Monitor`, except the model.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._trainer, self._options = trainer, options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach a monitor to the model; its step count starts at the Trainer's current step.

        A monitor that this callback left from an interrupted training is removed first.
        """
        if self.monitor is not None:
            self.monitor.remove()
        self.monitor = Monitor(kwargs["model"], **self._options)
        self.monitor.steps = state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the monitor's statistics if this step was recorded, and advance the monitor's step count."""
        monitor: Any = self.monitor  # made when training began
        if monitor.is_reading:
            logs_loss = control.should_log
            self._trainer.log(finite(monitor.read()))
            control.should_log = logs_loss  # every log clears it, and the Trainer has not logged its loss yet
        monitor.step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the monitor and restore the model."""
        if self.monitor is not None:
            self.monitor.remove()
