"""Precision plugins for Lightning that convert models to FP8, for one device, DDP, FSDP1 and FSDP2.

```python
import lightning as L
import fp8compile as f8
from fp8compile.integrations import lightning as f8lightning

trainer = L.Trainer(plugins=[f8lightning.F8HalfPrecision(f8.recipes.rowwise(), precision="bf16-true")])
```

With FSDP2 (``ModelParallelStrategy``), a module shards itself in ``configure_model``, before Lightning calls the
plugin. In ``configure_model``, call ``self.trainer.precision_plugin.convert_module(self)`` before `fully_shard`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from fp8compile._compat import is_fsdp
from fp8compile.integrations.conversion import Conversion
from fp8compile.integrations.loggers import finite
from fp8compile.monitor import Monitor
from fp8compile.nn.convertible.assign_recipes import Recipes

__all__ = ["F8FSDPPrecision", "F8HalfPrecision", "F8MixedPrecision", "F8Monitor", "F8Precision"]

TOO_LATE = (
    "was already sharded by fully_shard, but this plugin has not converted it. In configure_model, call "
    "self.trainer.precision_plugin.convert_module(self) before fully_shard, because ModelParallelStrategy converts "
    "only after configure_model."
)
AUTOCAST = (
    "F8MixedPrecision: autocast would cast weights that FSDP2 has all-gathered in FP8. Use F8Precision with "
    "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), or F8HalfPrecision, or "
    "fsdp_float8_all_gather=False."
)


class _Converts(Precision):
    """Base of the plugins here: its ``convert_module`` runs Lightning's plugin, then converts to FP8."""

    casts_by_autocast = False

    def __init__(
        self,
        recipe: Recipes,
        *,
        fsdp_float8_all_gather: bool = True,
        checkpointed: bool = False,
        convert_options: dict[str, Any] | None = None,
        **plugin: Any,
    ) -> None:
        super().__init__(**plugin)
        self._conversion = Conversion(recipe=recipe, gather=fsdp_float8_all_gather, options=convert_options or {})
        self._checkpointed = checkpointed
        self._done: WeakSet[nn.Module] = WeakSet()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module in place and return it; does nothing if this plugin has converted it already.

        Args:
            module: A module that is neither compiled nor sharded yet; in a Trainer, the LightningModule.

        Raises:
            ValueError: FSDP2 has sharded a part of the module, or FSDP2 would gather weights as codes although the
                plugin uses autocast.
        """
        if module in self._done:
            return module
        sharded = [fqn for fqn, each in module.named_modules() if is_fsdp(each)]
        if sharded:
            raise ValueError(f"{type(self).__name__}: {', '.join(sharded)} {TOO_LATE}")
        module = super().convert_module(module)
        will_be_sharded = _strategy_shards(module)
        if will_be_sharded and self._conversion.gather and self.casts_by_autocast:
            raise ValueError(AUTOCAST)
        self._conversion.apply(module, sharded=will_be_sharded, checkpointed=self._checkpointed)
        self._done.add(module)
        return module


def _strategy_shards(module: nn.Module) -> bool:
    if not isinstance(module, pl.LightningModule) or module._trainer is None:
        return False
    strategy = module.trainer.strategy
    return isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh["data_parallel"].size() > 1


class F8Precision(_Converts, Precision):
    """Lightning's ``Precision`` plugin that also converts the model to FP8. Parameters keep their dtype.

    With `fully_shard`, its ``mp_policy`` determines the compute dtype.

    Args:
        recipe: The recipe, as for `fp8compile.convert`.
        fsdp_float8_all_gather: Whether FSDP2 all-gathers weights in FP8 with ``ModelParallelStrategy``. Losses are
            bit-identical either way.
        checkpointed: Whether the model uses activation checkpointing, as for
            ``fp8compile.parallel.fsdp_float8_all_gather``.
        convert_options: Other arguments of `fp8compile.convert`, by name.
    """


class F8HalfPrecision(_Converts, HalfPrecision):
    """Lightning's ``HalfPrecision`` plugin that also converts the model to FP8. Parameters are bfloat16.

    Args:
        recipe: The recipe, as for `F8Precision`; the other arguments of `F8Precision` are also supported.
        precision: ``"bf16-true"``, as for ``HalfPrecision``.
    """


class F8MixedPrecision(_Converts, MixedPrecision):
    """Lightning's ``MixedPrecision`` plugin that also converts the model to FP8. Parameters keep their dtype.

    Args:
        recipe: The recipe, as for `F8Precision`; the other arguments of `F8Precision` are also supported.
        precision: ``"bf16-mixed"``.
        device: ``"cuda"`` or ``"cpu"``, as for ``MixedPrecision``.
    """

    casts_by_autocast = True


class F8FSDPPrecision(_Converts, FSDPPrecision):
    """Lightning's ``FSDPPrecision`` plugin that also converts the model to FP8, for ``FSDPStrategy``.

    ``FSDPStrategy`` uses FSDP1, which all-gathers weights in high precision, not in FP8.

    Args:
        recipe: The recipe, as for `F8Precision`; ``convert_options`` is also supported.
        precision: The precision, as for ``FSDPPrecision``.
    """


class F8Monitor(pl.Callback):
    """Lightning callback that logs the statistics of an `fp8compile.Monitor` with the Trainer's loggers.

    Args:
        options: Arguments of `fp8compile.Monitor`, except the model.
    """

    def __init__(self, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._options = options
        self._last_step = 0  # the Trainer's, which counts the steps of all optimizers

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach a monitor to the module; its step count starts at the Trainer's current step.

        A monitor that this callback left from an interrupted training is removed first.
        """
        if self.monitor is not None:
            self.monitor.remove()
        self.monitor = Monitor(pl_module, **self._options)
        self.monitor.steps = self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the last batch of a step, log statistics if the step is monitored, and advance the step count.

        If several optimizers step after a batch, this counts as one step.
        """
        monitor: Any = self.monitor  # made when training began
        if trainer.global_step == self._last_step:
            return  # further batches are accumulated
        self._last_step = trainer.global_step
        if monitor.is_reading:
            numbers = finite(monitor.read())
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
        monitor.step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the monitor and restore the module."""
        if self.monitor is not None:
            self.monitor.remove()
