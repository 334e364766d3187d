"""FP8 with Hugging Face's Trainer: callbacks that convert or monitor, and an optimizer for codes.

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
from accelerate.utils import DistributedType
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fp8compile.integrations.accelerate import MasterWeights, converted, fsdp2_plugin
from fp8compile.integrations.conversion import Conversion
from fp8compile.integrations.loggers import finite
from fp8compile.integrations.transformers_quantizer import F8Config
from fp8compile.nn import Monitor, conversion_report
from fp8compile.nn.assign_recipes import Recipes
from fp8compile.nn.conversion_report import ConversionReport

__all__ = ["F8Callback", "F8Config", "MonitorCallback", "master_weights"]

OPTIMIZER_IS_MADE = (
    "F8Callback: the Trainer was given an optimizer, and the parameters that it updates are replaced: FSDP2 is told "
    "to gather codes, or weights become codes. Leave out optimizers=, and pass optimizer_cls_and_kwargs=, from which "
    "the Trainer makes an optimizer later; or take fsdp_float8_all_gather=False."
)
NOT_CONVERTED = (
    "F8Callback: the model that is trained has nothing in FP8. The callback converts when the Trainer is made: pass "
    "it as callbacks=[...], not by add_callback. With model_init= the Trainer makes another model when it trains: "
    "convert in model_init, by fp8compile.convert, and leave the callback out."
)
FELL_BACK = (
    "F8Callback: FSDP was asked for (args.fsdp), but accelerate runs {kind}: nothing is sharded, nothing travels as "
    "codes. On CPUs accelerate shards only if it is told to, as examples/accelerate_on_cpu.py does."
)
EXPERTS_ARE_LOST = (
    "F8Callback: {folder} has the experts under other names than the model ({name}), and the Trainer loads no such "
    "names when it resumes, converted or not. Unless you made the model by from_pretrained({folder!r}), its experts "
    "are those of before: do that, and resume again."
)

BEST_EXPERTS_ARE_LOST = (
    "F8Callback: load_best_model_at_end loaded {folder}, which has the experts under other names than the model "
    "({name}), and the Trainer loads no such names, converted or not: the model now has the experts of the last step "
    "beside the other weights of the best one. Take the best model by from_pretrained({folder!r})."
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
    """Converts the Trainer's model when the Trainer is made; prints a report when training begins.

    `fp8compile.convert` converts the model. If accelerate shards by FSDP2 (``fsdp=True``, ``fsdp_version`` 2), FP8
    weights are gathered as codes. Activation checkpointing by the training arguments or by ``fsdp_config`` is
    detected.

    Args:
        recipe: The recipe, as `fp8compile.convert` takes it.
        fsdp_float8_all_gather: Whether FSDP2 gathers FP8 weights as codes. Losses are bitwise equal either way.
        print_report: Whether the first process prints the report.
        options: Other arguments of `fp8compile.convert`.

    Raises:
        ValueError: The Trainer has an optimizer already and its parameters would be replaced; the run uses FSDP1 and
            weights are to be gathered as codes; parameters are to be quantized and FSDP2 loads with
            ``cpu_ram_efficient_loading``; training begins with a model that has nothing in FP8; or
            `fp8compile.convert` refuses the model.
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
        """Convert the model, before the Trainer makes an optimizer and accelerate shards the model."""
        run = AcceleratorState()
        replaces = self.conversion.replaces_parameters(sharded=fsdp2_plugin(run) is not None)
        if replaces and kwargs.get("optimizer") is not None:
            raise ValueError(OPTIMIZER_IS_MADE)
        if args.fsdp and run.num_processes > 1 and run.distributed_type != DistributedType.FSDP:
            warnings.warn(FELL_BACK.format(kind=run.distributed_type.value), stacklevel=2)
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
        """Warn if the Trainer has loaded the best checkpoint and some experts' names were not found in it."""
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
    """Wrap the optimizer class that ``args`` select, to keep master weights for quantized parameters.

    Pass the result to a Trainer as ``optimizer_cls_and_kwargs``.

    Args:
        args: Arguments of the Trainer. They name the optimizer (``args.optim``), its learning rate and its options.
        options: Options of `fp8compile.MasterWeights`, such as ``rounding``.

    Returns:
        The optimizer's class, and its keyword arguments.

    Raises:
        TypeError: ``args.optim`` selects no optimizer class, or a class that takes the model in place of parameters.
    """
    optimizer, arguments = Trainer.get_optimizer_cls_and_kwargs(args)
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)) or "params" in arguments:
        raise TypeError(
            f"master_weights: optim={args.optim!r} makes its optimizer of the model, and not of parameters. Take one "
            "of torch.optim, such as optim='adamw_torch'."
        )
    return TrainersMasterWeights, {**arguments, "optimizer": optimizer, **options}


class MonitorCallback(TrainerCallback):
    """Callback that logs readings of a `fp8compile.Monitor` with the Trainer's own loggers.

    Make the callback with the Trainer, and add it: ``trainer.add_callback(MonitorCallback(trainer, every=100))``.

    Args:
        trainer: The Trainer; its model must be converted already, for example by `F8Callback`.
        options: Arguments of `fp8compile.Monitor`, except the model.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._trainer, self._options = trainer, options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach a monitor to the model; its step count starts at the Trainer's current step.

        This callback's monitor of a training that was interrupted is removed first.
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
        """Remove the monitor; the model is then as it was without one."""
        if self.monitor is not None:
            self.monitor.remove()
