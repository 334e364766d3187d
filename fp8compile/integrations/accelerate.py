"""accelerate with FP8 layers: `convert` before ``accelerator.prepare``, since accelerate has no hook for it.

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

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8compile import MasterWeights as EagerMasterWeights
from fp8compile.integrations.conversion import Conversion
from fp8compile.nn.assignment import Recipes
from fp8compile.tensor import is_quantized_parameter

__all__ = ["MasterWeights", "convert", "converted", "fsdp2_plugin"]

VERSION_1 = (
    "this run has fsdp_version 1, whose flat parameters are gathered in one dtype. Take fsdp_version 2, or "
    "fsdp_float8_all_gather=False."
)
RAM_EFFICIENT = (
    "accelerate's cpu_ram_efficient_loading sends each entry of the state dict as a DTensor, and weights that are "
    "codes have entries that are plain tensors. Set cpu_ram_efficient_loading=False, or leave out "
    "quantized_parameters."
)


def fsdp2_plugin(state: AcceleratorState) -> Any:
    """The plugin by which accelerate shards models with FSDP2, or None where it shards none so."""
    return state.fsdp_plugin if state.is_fsdp2 else None


def _shards_by_version_1(state: AcceleratorState) -> bool:
    return str(state.distributed_type).endswith("FSDP") and not state.is_fsdp2


def _as_accelerate_will_cast(model: nn.Module) -> None:
    """Cast trainable parameters to float32, as ``accelerator.prepare`` does with FSDP2 under mixed precision.

    It assigns to ``data``, which parameters that are codes do not have.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)


def _address_of(codes: Tensor) -> Callable[[], int]:
    return codes.data_ptr


def _give_addresses(model: nn.Module) -> None:
    """Give each parameter that is codes the address of these.

    accelerate finds an optimizer's parameters again after `fully_shard` by ``data_ptr``, and a tensor without values
    has none.
    """
    for parameter in model.parameters():
        if is_quantized_parameter(parameter):
            parameter.data_ptr = _address_of(parameter.codes)  # type: ignore[method-assign]


def converted(conversion: Conversion, model: nn.Module, state: AcceleratorState, *, checkpointed: bool) -> nn.Module:
    """Convert a model for what accelerate, by its state, will do with it.

    Args:
        conversion: What is asked for.
        model: Not prepared yet.
        state: That of the accelerator.
        checkpointed: Whether something else than accelerate's plugin has the backward repeat forwards.
    """
    if conversion.gather and _shards_by_version_1(state):
        raise ValueError(f"fsdp_float8_all_gather: {VERSION_1}")
    plugin = fsdp2_plugin(state)
    if plugin is not None and state.mixed_precision != "no":
        _as_accelerate_will_cast(model)
    if plugin is not None and plugin.cpu_ram_efficient_loading and conversion.options.get("quantized_parameters"):
        raise ValueError(f"quantized_parameters: {RAM_EFFICIENT}")
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
    """Convert a model in place, and mark what FSDP2 gathers, where this accelerator shards by FSDP2.

    Call it before ``accelerator.prepare`` and before the optimizer is made. accelerate's FSDP2 under mixed precision
    has float32 parameters; the model has them from here on.

    Args:
        accelerator: That of the run.
        model: Neither compiled nor prepared.
        recipe: As `fp8compile.convert` takes it.
        fsdp_float8_all_gather: Whether FSDP2 gathers FP8 weights as codes. Losses are the same bits either way.
        checkpointed: Whether the model repeats forwards in the backward by itself; what the FSDP plugin's
            ``activation_checkpointing`` does is known.
        options: Other arguments of `fp8compile.convert`.

    Returns:
        The model.

    Raises:
        ValueError: The accelerator has prepared an optimizer or a model already, it shards by FSDP1 and
            ``fsdp_float8_all_gather`` is True, or what `fp8compile.convert` and
            ``fp8compile.parallel.fsdp_float8_all_gather`` refuse.
    """
    if accelerator._models or accelerator._optimizers:
        raise ValueError(
            "convert: this accelerator has prepared a model or an optimizer already. Convert first, then make the "
            "optimizer of the converted model's parameters, then call accelerator.prepare with both."
        )
    conversion = Conversion(recipe=recipe, gather=fsdp_float8_all_gather, options=options)
    return converted(conversion, model, accelerator.state, checkpointed=checkpointed)


class MasterWeights(EagerMasterWeights):
    """`fp8compile.MasterWeights` whose masters are made when they are first needed.

    accelerate's FSDP2 takes an optimizer of the whole parameters and puts shards in their place: masters that were
    made before would be those of parameters that are gone.

    Args:
        optimizer: As `fp8compile.MasterWeights` takes it.
        params: Parameters or groups of them.
        options: Other arguments of `fp8compile.MasterWeights`, and options of the optimizer.
    """

    def __init__(self, optimizer: type[Optimizer], params: Iterable[Any], **options: Any) -> None:
        # for schedulers, which read the learning rate off the groups
        Optimizer.__init__(self, params, {"lr": options["lr"]} if "lr" in options else {})
        self._to_make: tuple[type[Optimizer], dict[str, Any]] | None = (optimizer, options)

    def _make(self) -> None:
        if self._to_make is not None:
            optimizer, options = self._to_make
            self._to_make = None
            super().__init__(optimizer, [dict(group) for group in self.param_groups], **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, as `fp8compile.MasterWeights` has it."""
        self._make()
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The state, as `fp8compile.MasterWeights` has it; that of an optimizer without masters before they are made.

        ``accelerator.prepare`` asks for it before parameters are exchanged, and loads it again.
        """
        return Optimizer.state_dict(self) if self._to_make is not None else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as `fp8compile.MasterWeights` does."""
        if self._to_make is not None and not state_dict["state"]:
            Optimizer.load_state_dict(self, state_dict)
            return
        self._make()
        super().load_state_dict(state_dict)
