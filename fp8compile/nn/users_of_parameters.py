"""Find the modules that have each parameter; a tied parameter has several."""

from __future__ import annotations

from torch import nn

__all__ = ["users_of_parameters"]


def users_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """For each parameter of a model, the modules that have it, in the order of ``model.modules()``."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, []).append(module)
    return users
