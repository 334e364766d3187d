"""Reset the delayed scaling of all layers of a model."""

from __future__ import annotations

from torch import Tensor, nn

from fp8compile import _compat
from fp8compile.nn.check_model import check_model
from fp8compile.nn.layer.delayed_state import DelayedState
from fp8compile.nn.layer.linear import Linear

__all__ = ["reset_delayed_scaling"]


def _states(model: nn.Module) -> list[DelayedState]:
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    return [state for layer in layers if (state := layer.delayed_state()) is not None]


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor for state in _states(model) for tensor in (state.amax_history, state.multiplier)]


def reset_delayed_scaling(model: nn.Module) -> nn.Module:
    """Reset delayed scaling in all layers of a model: amaxes to 0, and multipliers (1 / scale) to 1.

    Use this if the state comes from values that no longer apply, such as those before a change of the data or of the
    weights, or from uninitialized memory. The amax of a quantized weight is kept. To reset a single layer, use
    ``layer.delayed_state().reset()``.

    Args:
        model: A model with layers that use delayed scaling, compiled or not.

    Returns:
        The model.

    Raises:
        TypeError: The model is not a module.
        ValueError: No layer uses delayed scaling.
    """
    check_model("reset_delayed_scaling", model)
    states = _states(model)
    if not states:
        raise ValueError(
            "reset_delayed_scaling: no layer of the model uses delayed scaling, so there is no state to reset. "
            "Convert the model with fp8compile.recipes.delayed() first."
        )
    for state in states:
        state.reset()
    return model


_compat.when_imported("torch.distributed.pipelining.stage", lambda: _compat.keep_through_inference(_tensors))
