"""Lightning in FP8: precision plugins that convert, for one device, DDP, and FSDP2 by ``ModelParallelStrategy``.

```python
import lightning as L
import fp8compile as f8
from fp8compile.integrations import lightning as f8lightning

trainer = L.Trainer(plugins=[f8lightning.F8HalfPrecision(f8.recipes.rowwise(), precision="bf16-true")])
```

``ModelParallelStrategy`` converts after the module's ``configure_model``, which is where a module shards itself. So a
module that does calls the plugin there, before `fully_shard`: ``self.trainer.precision_plugin.convert_module(self)``.
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
from fp8compile.nn.assignment import Recipes

__all__ = ["F8FSDPPrecision", "F8HalfPrecision", "F8MixedPrecision", "F8Precision"]

TOO_LATE = (
    "went through fully_shard already, and this plugin has not converted it. In configure_model, before fully_shard, "
    "call self.trainer.precision_plugin.convert_module(self): ModelParallelStrategy itself converts after "
    "configure_model."
)
AUTOCAST = (
    "F8MixedPrecision: autocast would cast weights that FSDP2 has gathered as codes. Take F8Precision and "
    "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), or F8HalfPrecision, or "
    "fsdp_float8_all_gather=False."
)


class _Converts(Precision):
    """What all plugins here do in ``convert_module``, after what Lightning's own plugin does there."""

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
        """Convert a module in place, once: what it has converted already stays as it is.

        Args:
            module: Neither compiled nor sharded yet; in a Trainer, the LightningModule.

        Raises:
            ValueError: FSDP2 has sharded a part of it; or weights would be gathered as codes and cast by autocast.
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
    """Whether a module is that of a Trainer by whose strategy it shards itself over more than one rank."""
    if not isinstance(module, pl.LightningModule) or module._trainer is None:
        return False
    strategy = module.trainer.strategy
    return isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh["data_parallel"].size() > 1


class F8Precision(_Converts, Precision):
    """Lightning's ``Precision`` that converts: parameters stay in float32.

    With `fully_shard`, ``mp_policy`` says in which dtype layers compute.

    Args:
        recipe: As `fp8compile.convert` takes it.
        fsdp_float8_all_gather: Whether FSDP2, by ``ModelParallelStrategy``, gathers FP8 weights as codes. Losses are
            the same bits either way.
        checkpointed: Whether the backward repeats forwards, as ``fp8compile.parallel.fsdp_float8_all_gather`` asks.
        convert_options: Other arguments of `fp8compile.convert`, by name.
    """


class F8HalfPrecision(_Converts, HalfPrecision):
    """Lightning's ``HalfPrecision`` that converts: parameters in bfloat16, for ``precision="bf16-true"``.

    Args:
        recipe: As `F8Precision` has it, and so the others.
        precision: As ``HalfPrecision`` has it.
    """


class F8MixedPrecision(_Converts, MixedPrecision):
    """Lightning's ``MixedPrecision`` that converts: float32 parameters under autocast.

    Args:
        recipe: As `F8Precision` has it, and so the others.
        precision: ``"bf16-mixed"``.
        device: As ``MixedPrecision`` has it: ``"cuda"`` or ``"cpu"``.
    """

    casts_by_autocast = True


class F8FSDPPrecision(_Converts, FSDPPrecision):
    """Lightning's ``FSDPPrecision`` that converts, for ``FSDPStrategy``: FSDP1, which gathers weights in one dtype.

    Args:
        recipe: As `F8Precision` has it, and so ``convert_options``.
        precision: As ``FSDPPrecision`` has it.
    """
