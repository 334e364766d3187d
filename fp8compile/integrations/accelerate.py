"""FP8 layers with accelerate: call `convert` before ``accelerator.prepare``.

```python
import torch
from accelerate import Accelerator

import fp8compile as f8
from fp8compile.integrations import accelerate as f8accelerate

accelerator = Accelerator(mixed_precision="bf16")
model = f8accelerate.convert(accelerator, model, f8.recipes.rowwise())
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
```
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8compile import MasterWeights as EagerMasterWeights
from fp8compile._compat import hooks_of
from fp8compile.integrations.conversion import Conversion
from fp8compile.nn.convertible.assign_recipes import Recipes
from fp8compile.quantizers import PARAMETER
from fp8compile.tensor import is_quantized_parameter

__all__ = ["MasterWeights", "convert", "converted", "fsdp2_plugin"]

VERSION_1 = (
    "this run has fsdp_version 1, whose flat parameters are all-gathered in a single dtype. Use fsdp_version 2, or "
    "fsdp_float8_all_gather=False."
)
RAM_EFFICIENT = (
    "accelerate's cpu_ram_efficient_loading sends each entry of the state dict as a DTensor, but the state dict of "
    "FP8 parameters has plain tensors. Set cpu_ram_efficient_loading=False, or use another weight_lifetime."
)
FELL_BACK = (
    "FSDP was requested by a plugin, training arguments or a configuration file, but accelerate runs {kind}: "
    "nothing is sharded, and no weights are all-gathered in FP8. On CPUs, accelerate shards only if FSDP is "
    "enabled as in examples/accelerate_on_cpu.py."
)


def fsdp2_plugin(state: AcceleratorState) -> Any:
    """Return accelerate's FSDP2 plugin; None if this run does not use FSDP2."""
    return state.fsdp_plugin if state.is_fsdp2 else None


def _shards_by_version_1(state: AcceleratorState) -> bool:
    return str(state.distributed_type).endswith("FSDP") and not state.is_fsdp2


def _warn_if_not_sharded(state: AcceleratorState) -> None:
    # accelerate sets the variable itself if it is given a plugin, as a Trainer does
    is_asked = parse_flag_from_env("ACCELERATE_USE_FSDP")
    if is_asked and not str(state.distributed_type).endswith("FSDP") and state.num_processes > 1:
        warnings.warn(FELL_BACK.format(kind=state.distributed_type.value), stacklevel=4)


def _as_accelerate_will_cast(model: nn.Module) -> None:
    """Cast trainable parameters to float32 in place, as ``prepare`` does for FSDP2 with mixed precision.

    Call this before conversion: ``prepare`` assigns to ``data``, which fails for quantized parameters.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)


def _address_of(codes: Tensor) -> Callable[[], int]:
    return codes.data_ptr


def _give_addresses(model: nn.Module) -> None:
    """Make ``data_ptr`` of each quantized parameter return the address of its codes.

    Accelerate identifies an optimizer's parameters by ``data_ptr``, and a quantized parameter has no storage.
    """
    for parameter in model.parameters():
        if is_quantized_parameter(parameter):
            parameter.data_ptr = _address_of(parameter.codes)  # type: ignore[method-assign]


def converted(conversion: Conversion, model: nn.Module, state: AcceleratorState, *, checkpointed: bool) -> nn.Module:
    """Convert a model in place and return it; with FSDP2, also prepare the parameters for accelerate.

    A warning is issued if FSDP is configured but accelerate does not use it, as on CPUs.

    ``checkpointed`` is whether the model's own code uses activation checkpointing. Checkpointing by accelerate's FSDP2
    plugin is detected automatically.

    Raises:
        ValueError: FP8 all-gather is requested with FSDP1, or FP8 parameters are combined with the plugin's
            ``cpu_ram_efficient_loading``.
    """
    if conversion.gather and _shards_by_version_1(state):
        raise ValueError(f"fsdp_float8_all_gather: {VERSION_1}")
    _warn_if_not_sharded(state)
    plugin = fsdp2_plugin(state)
    if plugin is not None and state.mixed_precision != "no":
        _as_accelerate_will_cast(model)
    if plugin is not None and plugin.cpu_ram_efficient_loading and conversion.makes_parameters():
        raise ValueError(f"weight_lifetime={PARAMETER!r}: {RAM_EFFICIENT}")
    checkpointed |= plugin is not None and plugin.activation_checkpointing
    conversion.apply(model, sharded=plugin is not None, checkpointed=checkpointed)
    if plugin is not None:
        _give_addresses(model)
    return model


def convert(
    accelerator: Accelerator,
    model: nn.Module,
    recipe: Recipes,
    *,
    fsdp_float8_all_gather: bool = True,
    checkpointed: bool = False,
    **options: Any,
) -> nn.Module:
    """Convert a model in place; with FSDP2, also make FSDP2 all-gather weights in FP8.

    Call this before ``accelerator.prepare`` and before you create the optimizer. With FSDP2 and mixed precision,
    trainable parameters become float32, as ``accelerator.prepare`` would do. A warning is issued if FSDP is configured
    but accelerate does not use it, as on CPUs.

    Args:
        accelerator: The accelerator of the run.
        model: A model that is neither compiled nor prepared yet.
        recipe: The recipe, as for `fp8compile.convert`.
        fsdp_float8_all_gather: Whether FSDP2 all-gathers weights in FP8. Losses are bit-identical either way.
        checkpointed: Whether the model's own code uses activation checkpointing. The FSDP plugin's
            ``activation_checkpointing`` is detected automatically.
        options: Other arguments of `fp8compile.convert`.

    Returns:
        The model.

    Raises:
        ValueError: The accelerator has already prepared an optimizer or a model; ``fsdp_float8_all_gather`` is True,
            but the accelerator uses FSDP1; FP8 parameters are combined with the plugin's
            ``cpu_ram_efficient_loading``; or `fp8compile.convert` or ``fp8compile.parallel.fsdp_float8_all_gather``
            raises it.
    """
    if accelerator._models or accelerator._optimizers:
        raise ValueError(
            "convert: this accelerator has already prepared a model or an optimizer. Call convert first, then "
            "create the optimizer from the converted model's parameters, then call accelerator.prepare with both."
        )
    conversion = Conversion(recipe=recipe, gather=fsdp_float8_all_gather, options=options)
    return converted(conversion, model, accelerator.state, checkpointed=checkpointed)


class MasterWeights(EagerMasterWeights):
    """`fp8compile.MasterWeights` that creates float32 master weights on the first step, save or load.

    With FSDP2, accelerate replaces the optimizer's parameters by shards in ``prepare``. Master weights created
    before ``prepare`` would belong to the replaced parameters.

    Args:
        optimizer: The optimizer class, as for `fp8compile.MasterWeights`.
        params: Parameters or parameter groups.
        options: Other arguments of `fp8compile.MasterWeights`, and options of the optimizer.
    """

    def __init__(self, optimizer: type[Optimizer], params: Iterable[Any], **options: Any) -> None:
        # schedulers read the learning rate from the groups
        Optimizer.__init__(self, params, {"lr": options["lr"]} if "lr" in options else {})
        self._to_make: tuple[type[Optimizer], dict[str, Any]] | None = (optimizer, options)
        self._is_prepared = False
        self._mode: str | None = None

    def make_masters(self) -> None:
        """Create masters for the current parameters of the groups, on the first call."""
        if self._to_make is not None:
            optimizer, options = self._to_make
            self._to_make = None
            hooks = hooks_of(self)
            super().__init__(optimizer, [dict(group) for group in self.param_groups], **options)
            vars(self).update(hooks)  # those that were registered before
            if self._mode is not None:
                getattr(self, self._mode)()

    def __getattr__(self, name: str) -> Any:
        """Return the optimizer's ``train`` or ``eval``; before masters are made, a call is noted for then."""
        to_make = vars(self).get("_to_make")
        if name in ("train", "eval") and to_make is not None and hasattr(to_make[0], name):
            return partial(setattr, self, "_mode", name)
        return super().__getattr__(name)

    def state_dict(self) -> dict[str, Any]:
        """Create masters and return the state dict of `fp8compile.MasterWeights`; empty before `prepare`.

        ``accelerator.prepare`` reads this dict before it replaces parameters, and loads it again.
        """
        if self._to_make is not None and not self._is_prepared:
            return Optimizer.state_dict(self)
        self.make_masters()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict and create masters, except for the empty state dict that ``accelerator.prepare`` loads."""
        if self._to_make is not None and not self._is_prepared and not state_dict["state"]:
            Optimizer.load_state_dict(self, state_dict)
            self._is_prepared = True
            return
        self.make_masters()
        super().load_state_dict(state_dict)
